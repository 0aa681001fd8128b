"""Reads `results.json` and believes nothing: the parts that others read have the right types.

What is checked here may be used without a check; everything else in the file is plain JSON data
that can be written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from blend_core.errors import RunError, one_line

# Far above what a run can need, and small enough that sums and means stay finite.
Count = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Percent = Annotated[float, Field(ge=0, le=100)]
Points = Annotated[float, Field(ge=-100, le=100)]


class _Part(BaseModel):
    """No casts, no NaN; keys that nobody reads may be there."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


def _right_of_all(counts: list[int]) -> list[int]:
    if counts[0] > counts[1]:
        raise ValueError("more images are right than there are")
    return counts


_RightOfAll = Annotated[
    list[Count], Field(min_length=2, max_length=2), AfterValidator(_right_of_all)
]


class _Counts(_Part):
    local: _RightOfAll
    base: _RightOfAll
    novel: _RightOfAll


class _Metrics(_Part):
    per: Percent | None
    gen: Percent | None
    hmean: Percent | None
    local: Percent | None
    base: Percent | None
    novel: Percent | None
    hm: Percent | None


class _Means(_Metrics):
    weighted: _Metrics | None = None
    std: _Metrics | None = None


class _Published(_Part):
    per: Percent | None
    gen: Percent | None
    hmean: Percent | None


class _LastFive(_Metrics):
    after_rounds: list[Count]
    reason: str | None


class _Optimism(_Part):
    per: Points | None
    gen: Points | None
    hmean: Points | None
    local: Points | None
    base: Points | None
    novel: Points | None
    hm: Points | None


class _BestOnTest(_Metrics):
    model_after_round: Count | None
    chosen_from: Count
    optimism: _Optimism


class _Summary(_Means):
    counts: dict[str, _Counts]
    as_published: _Published | None = None
    model_after_round: Count | None = None
    mean_last_five: _LastFive | None = None
    domains: dict[str, _Means] = {}


class _Method(_Part):
    # Labels begin with it, so there must be something to see.
    name: str = Field(pattern=r"\w")


class _Config(_Part):
    seed: Count
    rounds: Count
    method: _Method

    @model_validator(mode="before")
    @classmethod
    def _no_dots(cls, data: Any) -> Any:
        if isinstance(data, dict) and any("." in key for key in data):
            raise ValueError("a key with a dot, which would be taken for one of a group")
        return data


class _Client(_Part):
    name: str
    domain: str | None = None
    private_sha256: str | None = None


class _Reply(_Part):
    status: str
    bytes_up: Count | None = None


class _Round(_Part):
    seconds: Seconds
    clients: list[_Reply]


class _Parameters(_Part):
    private: Count


class _Seconds(_Part):
    total: Seconds


class _Results(_Part):
    seed: Count
    config: _Config
    zero_shot: _Summary
    final: _Summary
    clients: list[_Client]
    rounds: list[_Round]
    seconds: _Seconds
    parameters: _Parameters | None = None
    clients_not_evaluated: dict[str, str] = {}
    version: str | None = None
    note: str | None = None
    comparable: bool | None = None
    manifest_sha256: str | None = None
    backbone_sha256: str | None = None
    shared_sha256: str | None = None
    best_on_test: _BestOnTest | None = None
    privacy: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> _Results:
        if self.seed != self.config.seed:
            raise ValueError(f"seed {self.seed}, but config.seed {self.config.seed}")
        # Training ends early where it would cost more privacy than was set.
        stopped = bool(self.privacy and self.privacy.get("stopped"))
        if len(self.rounds) != self.config.rounds and not (
            stopped and len(self.rounds) < self.config.rounds
        ):
            raise ValueError(f"{len(self.rounds)} rounds, but config.rounds {self.config.rounds}")
        return self


def read_results(file: Path) -> dict[str, Any]:
    """The parsed `results.json` of a finished run.

    Raises:
        FileNotFoundError: there is none.
        RunError: one line; it cannot be read, or is not what a finished run writes.
    """
    try:
        if file.exists() and not file.is_file():
            raise RunError(f"{file}: cannot be read: not a file")  # A pipe would be waited for.
        results = from_json(file.read_bytes(), allow_inf_nan=False)
        json.dumps(results, allow_nan=False)  # 1e999 is read as infinity.
        _Results.model_validate(results)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise RunError(f"{file}: not the results of a finished run: {_first(error)}") from None
    except ValueError as error:
        raise RunError(f"{file}: cannot be read: {one_line(str(error))}") from None
    found: dict[str, Any] = results
    return found


def _first(error: ValidationError) -> str:
    item = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in item["loc"])
    text = item["msg"].removeprefix("Value error, ")
    return one_line(f"{place}: {text[:1].lower()}{text[1:]}" if place else text)
