"""`results.json`: nothing that a reader would trip over gets past the check."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from blend_core.errors import RunError
from blend_core.metrics import METRICS
from blend_core.report.results_file import read_results

COUNTS = {"local": [3, 4], "base": [1, 4], "novel": [2, 4]}
SUMMARY = {
    **{"per": 75.0, "gen": 50.0, "hmean": 60.0, "local": 75.0, "base": 25.0, "novel": 50.0},
    "hm": 100 * 3 / (4 / 3 + 4 + 2),
    "counts": {"client-00": COUNTS},
}
METRICS_ALONE = {name: SUMMARY[name] for name in METRICS}
MEANS = {**METRICS_ALONE, "weighted": METRICS_ALONE, "std": dict.fromkeys(METRICS, 0.0)}
FINAL = {
    **SUMMARY,
    **MEANS,
    "model_after_round": 1,
    "mean_last_five": {
        **dict.fromkeys(METRICS),
        "after_rounds": [1],
        "reason": "1 of 5 evaluations of all clients",
    },
    "domains": {"dslr": MEANS},
}
CLIENT = {"name": "client-00", "domain": "dslr", "private_sha256": None}
REPLY = {"client": "client-00", "status": "accepted", "bytes_up": 4000}
GOOD: dict[str, Any] = {
    "seed": 1,
    "version": "0.1.0",
    "note": None,
    "config": {"seed": 1, "rounds": 1, "method": {"name": "blend"}},
    "comparable": True,
    "manifest_sha256": "ab",
    "backbone_sha256": "cd",
    "zero_shot": {**SUMMARY, "as_published": {"per": 25.0, "gen": 50.0, "hmean": 100 / 3}},
    "final": FINAL,
    "best_on_test": {
        **METRICS_ALONE,
        "model_after_round": 1,
        "chosen_from": 1,
        "optimism": dict.fromkeys(METRICS, -0.5),
    },
    "clients": [CLIENT],
    "rounds": [{"seconds": 2, "clients": [REPLY]}],
    "seconds": {"total": 3.5},
    "parameters": {"private": 10},
    "clients_not_evaluated": {},
    "shared_sha256": "00",
}


def changed(place: str, value: Any) -> dict[str, Any]:
    """The good results with another value at a dotted place; without it for `...`."""
    results: dict[str, Any] = json.loads(json.dumps(GOOD))
    *groups, last = (int(part) if part.isdigit() else part for part in place.split("."))
    there: Any = results
    for group in groups:
        there = there[group]
    if value is ...:
        del there[last]
    else:
        there[last] = value
    return results


def read(folder: Path, text: str) -> dict[str, Any]:
    (folder / "results.json").write_text(text)
    return read_results(folder / "results.json")


def test_good_results_are_returned_as_they_are(tmp_path):
    assert read(tmp_path, json.dumps(GOOD)) == GOOD


def test_what_need_not_be_measured_or_recorded_may_be_missing(tmp_path):
    for metric in METRICS:
        read(tmp_path, json.dumps(changed(f"final.{metric}", None)))
    for metric in ("per", "gen", "hmean"):
        read(tmp_path, json.dumps(changed(f"zero_shot.as_published.{metric}", None)))
    facts = ("comparable", "manifest_sha256", "backbone_sha256", "best_on_test")
    for key in ("parameters", "clients_not_evaluated", "version", "note", "shared_sha256", *facts):
        read(tmp_path, json.dumps(changed(key, ...)))
    for per in (0, 100.0, 33):
        read(tmp_path, json.dumps(changed("final.per", per)))


NO_PERCENTAGE = ["x", "75.0", [75.0], {}, True, -0.1, 100.1, 10**400, ...]
NO_COUNT = ["x", 1.5, True, -1, 2**53, [1], 10**400]
CASES = [
    *((f"final.{metric}", value) for metric in METRICS for value in NO_PERCENTAGE),
    *((f"zero_shot.{metric}", "x") for metric in METRICS),
    *((place, value) for place in ("zero_shot", "final") for value in ("x", [], {}, None, ...)),
    *(("final.counts", value) for value in ("x", [], None, {"client-00": [3, 4]})),
    *(("final.counts.client-00.local", value) for value in ([3], [5, 4], [1, 2, 3], ["1", 2], ...)),
    *(("seed", value) for value in (*NO_COUNT, None, ...)),
    *(("config.seed", value) for value in (*NO_COUNT, None, ...)),
    *(("config", value) for value in ("x", [], {}, None, ...)),
    *(("config.method", value) for value in ("x", [], {}, None, ...)),
    *(("config.method.name", value) for value in (3, "", " ", "\u202e", None, ["blend"])),
    ("config.method.name", {"a": "b"}),
    ("config.rounds", "x"),
    *(("rounds", value) for value in ("x", {}, None, [], [3], ...)),
    *(("rounds.0.seconds", value) for value in ("x", True, -1, None, 10**400, 1e308, ...)),
    *(("rounds.0.clients", value) for value in ("x", {}, None, [3], ...)),
    *(("rounds.0.clients.0.status", value) for value in (3, None, [], ...)),
    *(("rounds.0.clients.0.bytes_up", value) for value in NO_COUNT),
    *(("clients", value) for value in ("x", {}, None, [3], ...)),
    *(("clients.0.name", value) for value in (3, None, [], ...)),
    ("clients.0.private_sha256", 3),
    *(("seconds", value) for value in ("x", [], {}, None, 3, ...)),
    *(("seconds.total", value) for value in ("x", True, -1, None, 10**400)),
    *(("parameters", value) for value in ("x", [], {}, 3)),
    *(("parameters.private", value) for value in NO_COUNT),
    *(("clients_not_evaluated", value) for value in ("x", ["client-00"], None, {"a": 3})),
    *(("version", value) for value in (3, [], {})),
    *(("note", value) for value in (3, [], {})),
    *(("shared_sha256", value) for value in (3, [], {})),
    *((f"{key}_sha256", value) for key in ("manifest", "backbone") for value in (3, [], {})),
    *(("comparable", value) for value in (3, "yes", [])),
    *(("clients.0.domain", value) for value in (3, [], {})),
    *(
        (f"final.{part}.{metric}", value)
        for part in ("weighted", "std", "domains.dslr", "domains.dslr.std", "mean_last_five")
        for metric in METRICS
        for value in NO_PERCENTAGE
    ),
    *((f"zero_shot.as_published.{metric}", "x") for metric in ("per", "gen", "hmean")),
    *(("final.domains", value) for value in ("x", [], None, {"dslr": 3})),
    *(("final.mean_last_five.after_rounds", value) for value in ("x", [1.5], None, ...)),
    *(("final.mean_last_five.reason", value) for value in (3, [], ...)),
    *(("best_on_test.model_after_round", value) for value in (*NO_COUNT, ...)),
    *(("best_on_test.chosen_from", value) for value in (*NO_COUNT, None, ...)),
    *(
        (f"best_on_test.optimism.{metric}", value)
        for metric in METRICS
        for value in (101, "x", ...)
    ),
]


def test_a_part_of_a_wrong_type_or_out_of_range_is_one_line_that_names_it(tmp_path):
    file = tmp_path / "results.json"
    for place, value in CASES:
        with pytest.raises(RunError) as caught:
            read(tmp_path, json.dumps(changed(place, value)))
        message = str(caught.value)
        assert message.startswith(f"{file}: not the results of a finished run: "), (place, value)
        # A group is named, or what is missing in it; the rest is a contradiction of two parts.
        said = message.partition("finished run: ")[2]
        assert said.startswith(place) or said.startswith(("0 rounds, but", "1 rounds, but"))
        assert "\n" not in message


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("final.hmean", "x", "final.hmean: input should be a valid number"),
        ("final.per", 101, "final.per: input should be less than or equal to 100"),
        ("final", ..., "final: field required"),
        ("seed", 2, "seed 2, but config.seed 1"),
        ("rounds", [], "0 rounds, but config.rounds 1"),
        (
            "final.counts.client-00.novel",
            [5, 4],
            "final.counts.client-00.novel: more images are right than there are",
        ),
        (
            "config.method.name",
            "",
            r"config.method.name: string should match pattern '\w'",
        ),
    ],
)
def test_the_line_says_what_is_wrong(tmp_path, place, value, said):
    with pytest.raises(RunError) as caught:
        read(tmp_path, json.dumps(changed(place, value)))
    assert str(caught.value).endswith(f"not the results of a finished run: {said}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 200_000,
        '{"a":' * 200_000,
        json.dumps({**GOOD, "extra": float("nan")}),
        json.dumps(GOOD).replace("75.0", "1e999"),
        json.dumps({**GOOD, "config": {**GOOD["config"], "extra": 5}}).replace("5}", "-1e999}"),
        json.dumps({**GOOD, "note": "\ud800"}),
        json.dumps({**GOOD, "config": {**GOOD["config"], "\udfff": 1}}),
        json.dumps(GOOD).replace("4000", "9" * 5000),
    ],
)
def test_what_is_no_plain_json_is_one_line(tmp_path, text):
    with pytest.raises(RunError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'results.json'}: cannot be read: ")
    assert "\n" not in str(caught.value)


def test_a_setting_whose_name_hides_another_is_refused(tmp_path):
    config = {**GOOD["config"], "method.name": "promptfl"}
    with pytest.raises(RunError, match="config: a key with a dot"):
        read(tmp_path, json.dumps({**GOOD, "config": config}))


def test_bytes_folders_and_pipes_are_no_results(tmp_path):
    (tmp_path / "bytes").write_bytes(b'{"seed": "\xff"}')
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")  # Nobody will ever write into it.
    for name in ("bytes", "folder", "pipe"):
        with pytest.raises(RunError, match=f"{name}: cannot be read: "):
            read_results(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_results(tmp_path / "nothing")
