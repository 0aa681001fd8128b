"""What server and sites say to each other: requests, replies, and their bytes.

A message is a JSON header (small facts and the layout of the tensors) plus one flat float32
vector with all tensors in sorted name order. One vector instead of one object per tensor
because Flower moves every array as its own object over several hops, and because norms, means
and noise act on the vector as a whole. This module imports neither torch nor Flower: the thin
ClientApp loads it in every message's process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from blend_core import __version__
from blend_core.errors import BlendError, RunError, described, one_line

FloatArray = npt.NDArray[np.float32]
Tensors = dict[str, FloatArray]
Kind = Literal["join", "train", "evaluate"]

# Characters; a class list of thousands of names fits.
MAX_HEADER = 4_000_000
# Tensors are float32; the others are told apart so that the guard can name a wrong one.
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")

# In front of the names of a request's payload, in its layout.
_PAYLOAD = "payload/"

# numpy's own file header in front of the vector, as Flower ships it (np.save, format 1.0).
ARRAY_HEADER_BYTES = 128


class MessageError(RunError):
    """A message whose header and vector do not belong together. Exit code 1."""


@dataclass
class Request:
    """What the server asks of one client.

    Attributes:
        kind: "join" (show what you have), "train" (one local update) or "evaluate".
        federation: names the federation, and with it the folder of the private state.
        round: number of the round, from 1; "evaluate" after round R carries R + 1; "join" 0.
        experiment: the resolved experiment as plain JSON data.
        version: the package version of the server.
        evaluate: evaluate the received model before training.
        last_round: newest round of this client that the server has accepted; 0 if none.
        shared: the current shared tensors by name.
        payload: tensors for this client alone, of methods that send such (pFedMoAP).
    """

    kind: Kind
    federation: str
    round: int
    experiment: dict[str, Any]
    evaluate: bool = False
    last_round: int = 0
    shared: Tensors = field(default_factory=dict)
    payload: Tensors = field(default_factory=dict)
    version: str = __version__

    @property
    def tensors(self) -> Tensors:
        """All tensors that travel, by name; those of the payload start with "payload/"."""
        return {**self.shared, **{f"{_PAYLOAD}{n}": v for n, v in self.payload.items()}}

    def pack(self) -> tuple[str, FloatArray]:
        """Return (JSON header, flat float32 vector)."""
        return _pack(self)

    @classmethod
    def unpack(cls, header: str, vector: FloatArray) -> Request:
        """Inverse of `pack`. Raises `MessageError`."""
        fields, tensors = _unpack(header, vector, _REQUEST_TYPES)
        payload = {n: tensors.pop(n) for n in sorted(tensors) if n.startswith(_PAYLOAD)}
        payload = {n.removeprefix(_PAYLOAD): v for n, v in payload.items()}
        return cls(**fields, shared=tensors, payload=payload)


@dataclass
class Reply:
    """What one client answers.

    Attributes:
        kind, round: of the request.
        client: the client's name.
        version: the package version the site runs.
        train_images: number of training images (the client's weight in the mean).
        statistics: JSON data: counts of right answers, losses, seconds.
        error: None, or what went wrong at the site in one line, with `exit_code`.
        shared: the trained shared tensors by name; empty unless `kind` is "train".
    """

    kind: Kind
    round: int
    client: str
    version: str = ""
    train_images: int = 0
    statistics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    exit_code: int = 1
    shared: Tensors = field(default_factory=dict)

    @property
    def tensors(self) -> Tensors:
        """All tensors that travel, by name."""
        return self.shared

    def pack(self) -> tuple[str, FloatArray]:
        """Return (JSON header, flat float32 vector)."""
        return _pack(self)

    @classmethod
    def unpack(cls, header: str, vector: FloatArray) -> Reply:
        """Inverse of `pack`. Raises `MessageError`."""
        fields, tensors = _unpack(header, vector, _REPLY_TYPES)
        return cls(**fields, shared=tensors)


def failure(request_kind: Kind, round: int, client: str, error: Exception) -> Reply:
    """A reply that says what went wrong at the site in one line."""
    code = error.exit_code if isinstance(error, BlendError) else RunError.exit_code
    text = one_line(described(error))
    return Reply(request_kind, round, client, __version__, error=text, exit_code=code)


def tensor_bytes(tensors: Mapping[str, npt.NDArray[Any]]) -> int:
    """Bytes that the tensors of one message take: 4 per value plus one array header.

    An empty set of tensors is sent as no array at all and costs 0 bytes.
    """
    if not tensors:
        return 0
    return 4 * sum(int(value.size) for value in tensors.values()) + ARRAY_HEADER_BYTES


def flatten(tensors: Mapping[str, npt.NDArray[Any]]) -> FloatArray:
    """All tensors in sorted name order as one float32 vector [P]."""
    parts = [np.asarray(tensors[name], dtype="<f4").reshape(-1) for name in sorted(tensors)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype="<f4")


def shaped(vector: npt.NDArray[Any], like: Mapping[str, npt.NDArray[Any]]) -> Tensors:
    """Inverse of `flatten`: a vector [P] as tensors with the names and shapes of `like`."""
    tensors: Tensors = {}
    start = 0
    for name in sorted(like):
        end = start + like[name].size
        tensors[name] = vector[start:end].reshape(like[name].shape).astype(np.float32)
        start = end
    return tensors


def _pack(message: Request | Reply) -> tuple[str, FloatArray]:
    return header_of(message), flatten(message.tensors)


def header_of(message: Request | Reply) -> str:
    """The JSON header of a message: everything but the values of its tensors."""
    tensors = message.tensors
    fields = {k: v for k, v in vars(message).items() if k not in ("shared", "payload")}
    # The dtype travels as it is, so that the guard sees a wrong one instead of a silent cast.
    layout = {n: [str(tensors[n].dtype), list(tensors[n].shape)] for n in sorted(tensors)}
    return json.dumps({**fields, "layout": layout})


_REQUEST_TYPES: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "federation": str,
    "round": int,
    "experiment": dict,
    "version": str,
    "evaluate": bool,
    "last_round": int,
}
# train_images is judged by the guard, which names the value in its refusal.
_REPLY_TYPES: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "round": int,
    "client": str,
    "version": str,
    "train_images": object,
    "statistics": dict,
    "error": (str, type(None)),
    "exit_code": int,
}


def _unpack(
    header: str, vector: FloatArray, types: Mapping[str, type | tuple[type, ...]]
) -> tuple[dict[str, Any], Tensors]:
    """Fields and tensors of a message; nothing that came over the wire is believed unchecked."""
    try:
        if len(header) > MAX_HEADER:
            raise ValueError(f"its header has {len(header)} characters, allowed are {MAX_HEADER}")
        # Strict JSON that can be written again: no NaN, no lone halves of surrogate pairs.
        fields = json.loads(header, parse_constant=_no_constant)
        json.dumps(fields, ensure_ascii=False).encode()
        layout = fields.pop("layout")
        if set(fields) != set(types):
            version = str(fields.get("version"))[:40]
            raise ValueError(
                f"its fields are not those of version {__version__}; its sender runs {version}"
            )
        for name, expected in types.items():
            value = fields[name]
            flag = isinstance(value, bool) and expected not in (bool, object)
            if not isinstance(value, expected) or flag:
                raise ValueError(f"{name} is {str(value)[:80]!r}")
        if fields["kind"] not in get_args(Kind):
            raise ValueError(f"kind is {fields['kind'][:80]!r}")
        if fields.get("error") is not None and not one_line(fields["error"]):
            raise ValueError("its error has no text")
        return fields, _unflatten(layout, vector)
    except Exception as error:  # Whatever the bytes were, they are no message of ours.
        raise MessageError(f"malformed message: {one_line(str(error), 300)}") from error


def _no_constant(text: str) -> None:
    raise ValueError(f"it holds {text}")


def _unflatten(layout: Mapping[str, Any], vector: FloatArray) -> Tensors:
    if vector.dtype != np.float32 or vector.ndim != 1:
        raise ValueError(f"its vector is {vector.dtype} with {vector.ndim} dimensions")
    tensors: Tensors = {}
    start = 0
    for name in sorted(layout):
        kind, shape = layout[name]
        if kind not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name[:80]} is described as {str(layout[name])[:80]}")
        size = math.prod(shape)
        if start + size > vector.size:
            raise ValueError(f"its vector ends within {name[:80]}")
        tensors[name] = vector[start : start + size].reshape(shape).astype(kind, copy=False)
        start += size
    if start != vector.size:
        raise ValueError(f"layout describes {start} values, the vector holds {vector.size}")
    return tensors
