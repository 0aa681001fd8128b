"""Paper, ours, difference, n and spread, worked out by hand on made-up results."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from blend_core.metrics import harmonic_mean
from blend_core.report.paper_report import Report, notes, write_report
from blend_core.report.papers import read_paper_tables
from blend_core.report.reproduced import MEAN, STD, Outcome, join
from blend_core.report.reproductions import plan, read_reproductions
from blend_core.report.runs import Run, load_runs

TABLES = read_reproductions()
PAPERS = read_paper_tables()


def summary(local: float, base: float, novel: float) -> dict[str, Any]:
    return {
        **{"per": local, "local": local, "base": base, "gen": novel, "novel": novel},
        "hmean": harmonic_mean([local, novel]),
        "hm": harmonic_mean([local, base, novel]),
        "counts": {},
    }


@pytest.fixture
def report(tmp_path: Path):
    """A report on made-up results: {(dataset, row): {seed: (local, base, novel) or a reason}}."""

    def build(
        name: str,
        made: dict[tuple[str, str], dict[int, Any]],
        datasets: list[str] | None = None,
        on_shapes: bool = False,
        **given: Any,
    ) -> Report:
        table = TABLES[name]
        made_up = plan(table, datasets, [0, 1], on_shapes, given)
        outcomes = []
        for work in made_up.planned:
            runs, failed = {}, {}
            for seed, values in made.get((work.dataset, work.row.name), {}).items():
                if isinstance(values, str):
                    failed[seed] = values
                    continue
                config: dict[str, Any] = {"seed": seed, "rounds": 1}
                for key, value in work.settings.items():
                    group, _, last = key.rpartition(".")
                    (config.setdefault(group, {}) if group else config)[last] = value
                config.setdefault("backbone", {"weights": "builtin"})
                folder = tmp_path / f"{work.dataset}-{work.row.name}-{seed}"
                folder.mkdir()
                found = summary(*values)
                results: dict[str, Any] = {
                    "seed": seed,
                    "config": config,
                    "final": found,
                    "zero_shot": found,
                }
                rounds = [{"seconds": 1.0, "clients": []}] * config["rounds"]
                results |= {"rounds": rounds, "clients": [], "seconds": {"total": 1.0}}
                (folder / "results.json").write_text(json.dumps(results))
                runs[seed] = load_runs([folder])[0]
            outcomes.append(Outcome(runs, failed))
        return Report(made_up, outcomes, join(made_up, PAPERS, outcomes))

    return build


def entry(report: Report, dataset: str, row: str, metric: str):
    wanted = (dataset, row, metric)
    found = [e for e in report.entries if (e.dataset, e.row.name, e.metric) == wanted]
    assert len(found) == 1
    return found[0]


ABLATIONS = ("blend-ablation-aggregation", "blend-ablation-rank")
BLEND_ON_TWO = {
    ("dtd", "blend"): {0: (90.0, 80.0, 60.0), 1: (92.0, 80.0, 70.0)},
    ("eurosat", "blend"): {0: (100.0, 80.0, 50.0), 1: (100.0, 80.0, 50.0)},
}
TWO = ["dtd", "eurosat"]


def test_a_cell_is_the_mean_over_seeds_beside_the_papers_with_difference_and_spread(report):
    found = report("blend-table1", BLEND_ON_TWO, TWO)
    per = entry(found, "dtd", "blend", "per")
    assert (per.paper, per.ours, per.n) == (91.64, 91.0, 2)
    assert per.difference == pytest.approx(-0.64)
    assert per.spread == pytest.approx(math.sqrt(2))
    assert per.reasons == per.missing == ()
    # 2 x 90 x 60 / 150 = 72 and 2 x 92 x 70 / 162 = 79.506; of the means it would be 75.833.
    hmean = entry(found, "dtd", "blend", "hmean")
    assert hmean.ours == pytest.approx((72 + 12880 / 162) / 2)
    assert hmean.difference == pytest.approx(75.753 - 75.59, abs=0.001)


def test_over_datasets_means_of_harmonic_means_and_population_spread(report):
    found = report("blend-table1", BLEND_ON_TWO, TWO)
    mean = entry(found, MEAN, "blend", "hmean")
    # Dataset means 75.753 and 66.667; seeds (72 + 66.667)/2 = 69.333, (79.506 + 66.667)/2 = 73.086.
    assert mean.ours == pytest.approx(71.210, abs=0.001)
    assert (mean.paper, mean.n) == (82.15, 2)
    assert mean.spread == pytest.approx((73.0864 - 69.3333) / math.sqrt(2), abs=0.001)
    assert mean.reasons == ("2 of the paper's 10 datasets",)
    std = entry(found, STD, "blend", "per")
    assert std.ours == pytest.approx(4.5)  # 91 and 100.
    assert std.paper == 8.40


def test_zero_shot_is_compared_over_the_whole_base_test_set_and_shown_per_client(report):
    numbers = {0: (40.0, 50.0, 60.0)}
    made = {("dtd", "zero_shot_clip"): numbers, ("dtd", "zero_shot_per_client"): numbers}
    found = report("blend-table1", made, ["dtd"])
    whole = entry(found, "dtd", "zero_shot_clip", "per")
    assert (whole.paper, whole.ours) == (54.75, 50.0)
    # 2 x 50 x 60 / 110.
    assert entry(found, "dtd", "zero_shot_clip", "hmean").ours == pytest.approx(54.545, abs=0.001)
    per_client = entry(found, "dtd", "zero_shot_per_client", "per")
    assert (per_client.paper, per_client.ours, per_client.difference) == (None, 40.0, None)
    assert entry(found, "dtd", "zero_shot_per_client", "hmean").ours == pytest.approx(48.0)


def test_the_three_way_mean_is_taken_per_seed_and_dataset(report):
    made = {
        (dataset, "promptfl"): {0: (75.0, 80.0, 65.0)}
        for dataset in TABLES["pfedmma-table1"].datasets
    }
    mean = entry(report("pfedmma-table1", made), MEAN, "promptfl", "hm")
    assert mean.ours == pytest.approx(72.78, abs=0.005)  # 3 / (1/75 + 1/80 + 1/65)
    assert mean.difference == pytest.approx(72.78 - 83.09, abs=0.005)
    assert mean.spread is None
    assert any("best on the test images" in reason for reason in mean.reasons)


def test_numbers_that_must_not_be_compared_are_shown_without_a_difference(report):
    made = {("domainnet", "pfedmma"): {0: (90.0, 90.0, 90.0)}}
    found = entry(report("pfedmma-shift", made), "domainnet", "pfedmma", "local")
    assert (found.paper, found.ours, found.difference) == (47.17, 90.0, None)
    assert any("unordered set" in reason for reason in found.reasons)


def test_what_ran_with_other_settings_than_the_papers_is_marked_with_them(report, tmp_path):
    given = {"rounds": 5, "data.shots": 4, "train.threads": 2}
    found = report("blend-table1", BLEND_ON_TWO, TWO, **given)
    cell = entry(found, "dtd", "blend", "per")
    assert cell.reasons == ("data.shots 4 (paper: 16)", "rounds 5 (paper: 50)")
    assert cell.difference == pytest.approx(-0.64)
    write_report(found, PAPERS, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| BLEND | Per. | 91.64 | 91.00 | (-0.64) | 2 | 1.41 | 1,2 |" in text
    assert text.count("data.shots 4 (paper: 16)") == 1


def test_a_quick_trial_on_few_test_images_is_marked(report, tmp_path):
    made = {("dtd", "blend"): {0: (90.0, 80.0, 60.0)}}
    whole = report("blend-table1", made, ["dtd"])
    (run,) = (run for outcome in whole.outcomes for run in outcome.runs.values())
    note = "at most 3 test images per class: a quick trial"
    quick = Run(run.folder, {**run.results, "comparable": False, "note": note})
    outcomes = [Outcome({s: quick for s in o.runs}, o.failed) for o in whole.outcomes]
    found = Report(whole.plan, outcomes, join(whole.plan, PAPERS, outcomes))
    assert entry(whole, "dtd", "blend", "per").reasons == ()
    assert entry(found, "dtd", "blend", "per").reasons == (note,)


def test_the_round_that_is_best_on_test_images_is_never_compared(report):
    made = {("dtd", "blend"): {0: (90.0, 80.0, 60.0)}}
    whole = report("blend-table1", made, ["dtd"])
    (run,) = (run for outcome in whole.outcomes for run in outcome.runs.values())
    chosen = Run(run.folder, {**run.results, "best_on_test": {"per": 99.0, "gen": 99.0}})
    outcomes = [Outcome({s: chosen for s in o.runs}, o.failed) for o in whole.outcomes]
    for cell in join(whole.plan, PAPERS, outcomes):
        assert 99.0 not in cell.values.values()


def test_weights_from_a_file_are_pointed_out_but_not_judged(report):
    found = report("blend-table1", BLEND_ON_TWO, TWO, **{"backbone.weights": "/clip/openai.pt"})
    assert entry(found, "dtd", "blend", "per").reasons == ()
    assert any("/clip/openai.pt" in note for note in notes(found))


def test_missing_runs_are_shown_with_their_reason_and_leave_the_rest_standing(report):
    made = {
        **BLEND_ON_TWO,
        ("dtd", "blend"): {0: (90.0, 80.0, 60.0), 1: "out of memory"},
        ("eurosat", "pfedmoap"): {0: "out of memory", 1: "out of memory"},
    }
    found = report("blend-table1", made, TWO)
    one = entry(found, "dtd", "blend", "per")
    assert (one.ours, one.n, one.spread, one.missing) == (
        90.0,
        1,
        None,
        ("no seed 1: out of memory",),
    )
    none = entry(found, "eurosat", "pfedmoap", "per")
    assert (none.ours, none.difference, none.n) == (None, None, 0)
    assert len(none.missing) == 2
    assert entry(found, MEAN, "pfedmoap", "per").ours is None
    assert entry(found, MEAN, "blend", "per").n == 1


def test_on_shapes_nothing_is_compared_with_the_papers_means_beside(report):
    made = {("shapes", "no_agg"): {0: (90.0, 80.0, 60.0)}}
    found = report("blend-ablation-aggregation", made, None, True)
    cell = entry(found, "shapes", "no_agg", "per")
    assert (cell.paper, cell.ours, cell.difference) == (89.12, 90.0, None)
    assert all(e.reasons[0] == "rendered shapes, tiny model" for e in found.entries)
    assert {e.dataset for e in found.entries} == {"shapes"}


def test_on_shapes_the_report_has_no_column_of_differences_and_no_brackets(report, tmp_path):
    made = {("shapes", "full"): {0: (90.0, 80.0, 60.0), 1: (92.0, 80.0, 60.0)}}
    write_report(report("blend-ablation-aggregation", made, None, True), PAPERS, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "### built-in shapes; the paper's numbers are its means over datasets" in text
    assert "|  |  | paper | ours | n | spread |  |\n|---|---|---:|---:|---:|---:|---|" in text
    assert "| Full | Per. | 83.35 | 91.00 | 2 | 1.41 | 1 |" in text
    assert "bracket" not in text
    assert "paper and ours are not comparable, the last column says why" in text


def test_on_shapes_it_is_said_which_values_could_not_be_scaled(report):
    on_shapes = " ".join(notes(report("blend-gamma-lambda", {}, None, True)))
    # 0.09 x 100 = 0.45 x 20, but 0.90 x 100 = 4.5 x 20.
    for words in ("0.45", "4.5, beyond the largest gamma, 1, so its row keeps 0.90"):
        assert words in on_shapes
        assert words not in " ".join(notes(report("blend-gamma-lambda", {})))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blend-table1", ["96.43", "opposite mixes", "AdamW", "released code: 128 / 128"]),
        ("blend-ablation-aggregation", ["implausibly low Per.", "Do not take the two rows"]),
        ("blend-ablation-rank", ["is not a target", "full rank"]),
        ("blend-gamma-lambda", ["paper column is empty", "the grid has both"]),
        ("pfedmma-table1", ["50 rounds x 2 epochs", "never refreshed", "rest to the last client"]),
        (
            "pfedmma-shift",
            ["beta of the domain sets: paper: 0.5; released code: 0.3", "no targets"],
        ),
    ],
)
def test_conflicts_between_paper_and_code_are_said_at_the_tables_they_concern(report, name, words):
    text = " ".join(notes(report(name, {})))
    for word in words:
        assert word in text
    assert ("gamma" in text) == name.startswith("blend")
    assert text.count("128 / 128") == (name in ("blend-table1", *ABLATIONS))  # Once is enough.
    assert "document" not in text


def test_the_three_files_hold_the_same_numbers(report, tmp_path):
    found = report("blend-table1", BLEND_ON_TWO, TWO)
    paths = write_report(found, PAPERS, tmp_path / "new")
    assert [path.name for path in paths] == ["report.md", "report.csv", "report.json"]
    with paths[1].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found.entries) == 4 * 6 * 3
    row = next(r for r in rows if (r["dataset"], r["row"], r["metric"]) == ("dtd", "BLEND", "gen"))
    # Ours (60 + 70)/2, spread 10/sqrt(2).
    assert (row["paper"], row["ours"], row["difference"]) == ("64.32", "65.00", "0.68")
    assert (row["n"], row["spread"], row["comparable"]) == ("2", "7.07", "True")
    data = json.loads(paths[2].read_text())
    cell = next(
        e
        for e in data["entries"]
        if (e["dataset"], e["row"], e["metric"]) == ("dtd", "blend", "gen")
    )
    assert cell["values"] == {"0": 60.0, "1": 70.0}
    assert cell["difference"] == pytest.approx(0.68)
    run = next(r for r in data["runs"] if (r["dataset"], r["row"]) == ("dtd", "blend"))
    assert run["settings"]["method.gamma"] == 0.09
    assert sorted(run["folders"]) == ["0", "1"]
    assert "| BLEND | Gen. | 64.32 | 65.00 | +0.68 | 2 | 7.07 |  |" in paths[0].read_text()
