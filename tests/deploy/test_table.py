"""The table at the end of a run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from blend_core.metrics import METRICS, federation_metrics
from deploy.table import print_results

NOTE = "rendered shapes, tiny model: not comparable with the papers' numbers"
ZERO_SHOT = {
    "client-00": {"local": [1, 4], "base": [1, 4], "novel": [1, 2]},
    "client-01": {"local": [0, 0], "base": [0, 0], "novel": [1, 2]},
}
FINAL = {
    "client-00": {"local": [3, 4], "base": [1, 4], "novel": [1, 2]},
    "client-01": {"local": [0, 0], "base": [0, 0], "novel": [2, 2]},
}


def results(**changes: Any) -> dict[str, Any]:
    blocks = {
        key: {**federation_metrics(counts), "counts": counts}
        for key, counts in (("zero_shot", ZERO_SHOT), ("final", FINAL))
    }
    clients = [{"name": name, "train_images": 12345} for name in FINAL]
    return {
        "method": "blend",
        "seed": 3,
        "note": NOTE,
        **blocks,
        "clients": clients,
        "clients_without_test": ["client-01"],
        "clients_not_evaluated": {},
        "bytes_per_round": {"up": {"client-00": 3317888}, "down": {"client-00": 3317888}},
        "seconds": {"total": 61.2, "start_up": 9.6, "training": 40.0, "waiting": 11.6},
        **changes,
    }


def printed(found: dict[str, Any], width: int = 80) -> list[str]:
    output = io.StringIO()
    path = Path("/a/long/folder/" + "x" * 80) / "results.json"
    print_results(found, path, Console(file=output, width=width, color_system=None))
    return output.getvalue().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def row(lines: list[str], name: str, occurrence: int = 0) -> list[str]:
    return [cells(line) for line in lines if name in line and "│" in line][occurrence][1:]


def test_the_table_shows_zero_shot_and_the_method_per_client_and_on_average():
    lines = printed(results())
    head = next(line for line in lines if "Per." in line)
    order = ("Per.", "Gen.", "H-Mean", "Local", "Base", "Novel", "HM")
    assert [word for word in head.split() if word in order] == list(order)
    # By hand: 3/4, 1/2 and their harmonic mean 2/(1/.75 + 1/.5) = .6; HM 3/(1/.75 + 4 + 2).
    assert row(lines, "client-00", 1) == ["75.0", "50.0", "60.0", "75.0", "25.0", "50.0", "40.9"]
    # Means: local of client-00 alone, novel (50 + 100)/2 = 75, H-Mean 75.
    assert row(lines, "mean", 1) == ["75.0", "75.0", "75.0", "75.0", "25.0", "75.0", "45.0"]
    assert row(lines, "mean", 0)[:3] == ["25.0", "50.0", "33.3"]


def test_image_weighted_means_and_published_zero_shot_stand_below_the_mean():
    zero = {**results()["zero_shot"], "as_published": {"per": 25.0, "gen": 50.0, "hmean": 100 / 3}}
    lines = printed(results(zero_shot=zero))
    # By hand: local 3 of 4, novel 3 of 4 images, base 1 of 4.
    assert row(lines, "image-weighted", 1) == [
        "75.0",
        "75.0",
        "75.0",
        "75.0",
        "25.0",
        "75.0",
        "45.0",
    ]
    assert row(lines, "as published") == ["25.0", "50.0", "33.3", "-", "-", "-", "-"]
    assert "as published: over all test images" in " ".join(lines)
    assert not any("as published" in line for line in printed(results()))


def test_every_domain_has_the_mean_and_deviation_of_its_clients():
    counts = {
        name: {"local": [right, 10], "base": [right, 10], "novel": [0, 0]}
        for name, right in (("client-00", 9), ("client-01", 6))
    }
    final = {**results()["final"], "domains": {"Real [World]": federation_metrics(counts)}}
    lines = printed(results(final=final))
    assert row(lines, "Real [World]")[:3] == ["75.0", "-", "-"]
    assert row(lines, "std")[:4] == ["15.0", "-", "-", "15.0"]


def test_the_last_five_are_shown_where_there_are_five():
    last = {**dict.fromkeys(METRICS, 61.0), "after_rounds": [1, 2, 3, 4, 5], "reason": None}
    final = results()["final"]
    lines = printed(results(final={**final, "mean_last_five": last}))
    assert row(lines, "mean of last 5")[0] == "61.0"
    few = {**dict.fromkeys(METRICS), "after_rounds": [1], "reason": "1 of 5"}
    lines = printed(results(final={**final, "mean_last_five": few}))
    assert not any("last 5" in line for line in lines)


def test_the_round_that_is_best_on_test_images_is_marked_and_no_headline():
    best = {
        **dict.fromkeys(METRICS, 80.0),
        "model_after_round": 7,
        "chosen_from": 9,
        "optimism": dict.fromkeys(METRICS, 5.0),
    }
    lines = printed(results(best_on_test=best))
    assert row(lines, "best on test")[0] == "80.0"
    assert row(lines, "above last")[0] == "+5.0"
    assert row(lines, "mean", 1)[0] == "75.0"
    text = " ".join(lines)
    assert "best on test: round 7 of 9 evaluated, chosen on test images: no result" in text
    assert max(len(line) for line in lines if "results.json" not in line) <= 80
    none = {**best, "model_after_round": None, "chosen_from": 0}
    lines = printed(results(best_on_test=none))
    assert "best on test: no evaluation covered all clients" in lines
    assert not any("best on test" in line and "│" in line for line in lines)


def test_what_is_not_known_is_a_dash():
    lines = printed(results())
    assert row(lines, "client-01", 1) == ["-", "100.0", "-", "-", "-", "100.0", "-"]
    assert row(lines, "client-01", 2) == ["12,345", "-", "-"]


def test_a_mean_gen_over_some_of_the_sites_says_over_how_many():
    said = "Gen. and Novel: means over 1 of 2 clients, those with images of new classes"
    assert said not in printed(results())
    counts = {**FINAL, "client-01": {"local": [1, 4], "base": [1, 4], "novel": [0, 0]}}
    lines = printed(results(final={**federation_metrics(counts), "counts": counts}))
    assert said in lines
    assert row(lines, "mean", 1)[1] == "50.0"  # 1 of 2 images of client-00


def test_costs_are_listed_per_client():
    assert row(printed(results()), "client-00", 2) == ["12,345", "3,317,888", "3,317,888"]


@pytest.mark.parametrize("name", ["client-00", "a-site-with-a-name-of-64-letters" * 2])
def test_nothing_but_the_path_is_wider_than_80_columns(name):
    counts = {name: FINAL["client-00"]}
    block = {**federation_metrics(counts), "counts": counts}
    found = results(final=block, clients=[{"name": name, "train_images": 1}])
    lines = printed(found)
    assert max(len(line) for line in lines if "results.json" not in line) <= 80
    for heading in ("H-Mean", "Novel", "bytes down/round"):
        assert any(heading in line for line in lines)


def test_the_title_says_that_shapes_are_not_the_papers_benchmark():
    text = " ".join(" ".join(printed(results())).split())
    assert NOTE in text
    assert "not comparable" not in " ".join(printed(results(note=None)))


def test_zero_shot_alone_has_one_block():
    lines = printed(results(method="zero-shot"))
    assert sum("mean" in line and "│" in line for line in lines) == 1


def test_who_is_missing_and_where_the_results_are_is_said():
    failed = {"client-01": "no reply in time"}
    lines = printed(results(clients_not_evaluated=failed))
    text = " ".join(" ".join(lines).split())
    assert "without base test images, left out of means: client-01" in text
    assert "not evaluated: client-01: no reply in time" in text
    assert lines[-1] == f"results: {Path('/a/long/folder/' + 'x' * 80) / 'results.json'}"
    assert "61 s in all: start-up 10 s, training 40 s, waiting 12 s" in text


SPENT = {
    "kind": "central",
    "epsilon": 16.123,
    "epsilon_per_round": 4.377,
    "delta": 1e-05,
    "clipping": "adaptive",
    "clipping_norm": 0.31234,
    "noise_multiplier": 1.5,
    "noise_from": "secret",
    "sampling": {"fraction": 0.5, "most_rounds_of_a_client": 8},
    "covers": "the shared tensors only",
    "stopped": None,
}


def test_noise_is_told_with_all_its_numbers_or_not_at_all():
    found = results(privacy=SPENT, rounds=[{}] * 8, config={"rounds": 9})
    text = "\n".join(printed(found))
    assert (
        "central differential privacy: epsilon 16.1 at delta 1e-05 (4.38 a round), clipping norm "
        "0.312 (adaptive), noise multiplier 1.5, sampling fraction 0.5, at most 8 rounds of a "
        "client\nepsilon covers the shared tensors only\n"
    ) in text
    assert "nobody" not in text
    assert "stopped" not in text
    for plain in (results(), results(privacy=None)):
        assert "priva" not in "\n".join(printed(plain))


def test_noise_that_protects_nobody_and_an_early_end_are_told():
    spent = {**SPENT, "noise_from": "seed", "stopped": "another round would cost too much"}
    text = "\n".join(printed(results(privacy=spent, rounds=[{}] * 3, config={"rounds": 9})))
    assert "the noise follows from the run's seed (privacy.noise_from): nobody is safe" in text
    assert "stopped after 3 of 9 rounds: another round would cost too much" in text


def test_refused_and_absent_clients_are_told_with_their_rounds():
    refusals = {
        "client-01": {
            "refused": [1, 2, 3, 4, 5, 6],
            "absent": [7],
            "reasons": {"no reply within 5 s": 1, "w holds values that are not finite": 6},
        }
    }
    found = results(refusals=refusals, rounds=[{}] * 8, aggregation="krum")
    lines = printed(found)
    assert (
        "client-01: refused in 6 of 8 rounds (1, 2, 3, 4, 5, ...), absent in 1 of 8 rounds (7): "
        "w holds values that are not finite"
    ) in lines
    assert "aggregation: krum, every client alike" in lines
    node = {"after": 0, "client": "mallory", "reason": "its key is registered for eve"}
    lines = printed(results(refused_nodes=[node]))
    assert "not let in: mallory: its key is registered for eve" in lines
    assert "aggregation" not in "\n".join(printed(results(aggregation="mean", refusals={})))


def test_a_table_says_where_the_run_was_stopped_and_who_had_lost_its_state() -> None:
    cold = [
        {"round": 4, "client": "client-00", "lost": 3, "used": 1},
        {"round": 5, "client": "client-01", "lost": 4, "used": 0},
    ]
    lines = printed(results(resumed_after_rounds=[2, 3], cold_starts=cold))
    assert "resumed after round 2, 3" in lines
    lost = "had lost its private state of round"
    assert f"cold start: client-00 {lost} 3 in round 4 and went on from that of round 1" in lines
    assert f"cold start: client-01 {lost} 4 in round 5 and went on from the initial values" in lines
    assert not any("resumed" in line or "cold" in line for line in printed(results()))
