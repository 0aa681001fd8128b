"""`blend reproduce`: lists, plans, refuses, and makes a table on the built-in benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blend_core.report.reproductions import plan, read_reproductions
from deploy.grid import read_grid, resolve
from deploy.reproduce import expand

TABLES = read_reproductions()
TINY = ("rounds=1", "clients=2", "data.shots=2", "data.test_per_class=1")


@pytest.fixture
def blend(blend):
    """`blend reproduce` in an empty folder: (arguments) -> exit code, output, errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code, output, errors = blend("reproduce", *arguments)
        assert all(len(line) <= 80 for line in output.splitlines() if "/" not in line)
        return code, output, errors

    return run


def test_without_a_name_every_table_is_listed_with_the_runs_that_it_takes(blend):
    code, output, _ = blend()
    assert code == 0
    lines = output.splitlines()
    assert [line.partition(":")[0] for line in lines[::2]] == list(TABLES)
    runs = dict(zip(TABLES, lines[1::2], strict=True))
    # Five methods, three seeds; and ten datasets.
    first = "  3 seeds: 15 runs on shapes, 150 on the papers' datasets"
    assert runs["blend-table1"] == first
    # Three methods; DomainNet and Office-Caltech10.
    assert runs["pfedmma-shift"] == "  3 seeds: 9 runs on shapes, 18 on the papers' datasets"


@pytest.mark.parametrize(
    ("name", "rows", "datasets", "runs"),
    [
        # Zero-shot stands in the first table twice: with the paper's Per. and with ours.
        ("blend-table1", 5 + 1, 10, 5 * 10 * 3),
        # And as a reference in those of BLEND alone, measured by its runs.
        ("blend-ablation-aggregation", 5 + 1, 10, 5 * 10 * 3),
        # Global none, 4, 16, 64, full; projection 4, 32, full, and 256, which is global 16.
        ("blend-ablation-rank", 5 + 4 + 1, 10, (5 + 3) * 10 * 3),
        # The grid, and the points of paper and code, which lie on it.
        ("blend-gamma-lambda", 7 * 5 + 2 + 1, 10, 7 * 5 * 10 * 3),
        ("pfedmma-table1", 6, 7, 6 * 7 * 3),
        ("pfedmma-shift", 3 + 1, 2, 3 * 2 * 3),
    ],
)
def test_a_dry_run_counts_the_runs_and_starts_none(blend, tmp_path, name, rows, datasets, runs):
    code, output, _ = blend(name, "--dry-run")
    assert code == 0
    counts = f"{rows} rows x {datasets} datasets x 3 seeds, equal runs once: {runs} runs"
    assert counts in output.splitlines()
    text = " ".join(output.split())
    for row in TABLES[name].rows:
        assert f"- {row.label}: method.name {row.method}" in text
    for dataset in TABLES[name].datasets:
        assert dataset in text
    assert "(stated in the paper)" in text
    assert "(from the released code, the paper is silent)" in text
    assert not list(tmp_path.iterdir())


def test_datasets_and_seeds_restrict_a_table(blend):
    options = ("--datasets", "dtd,eurosat", "--seeds", "3,4", "--dry-run")
    assert ", equal runs once: 20 runs\n" in blend("blend-table1", *options)[1]


def test_a_dry_run_begins_with_what_the_command_itself_would_refuse(blend):
    options = ("blend-table1", "--datasets", "dtd", "--seeds", "0")
    code, output, errors = blend(*options, "--dry-run")
    assert (code, errors) == (0, "")
    said, _, rest = " ".join(output.split()).partition(f" {TABLES['blend-table1'].title} - ")
    begin, _, reason = said.partition("cannot run: ")
    assert (begin, "cannot run" in rest) == ("", False)
    refused = blend(*options)
    assert refused == (2, "", f"error: {reason}\n")
    assert "--set data.root=DIR" in reason


def test_a_dry_run_of_what_can_run_ends_with_the_number_of_runs(blend):
    code, output, _ = blend("pfedmma-table1", "--on", "shapes", "--dry-run")
    assert code == 0
    last = output.splitlines()[-1]
    assert last == "6 rows x 1 dataset x 3 seeds, equal runs once: 18 runs"
    options = ("--on", "shapes", "--seeds", "7", "--dry-run")
    assert "6 rows x 1 dataset x 1 seed, equal" in blend("pfedmma-table1", *options)[1]


def test_on_shapes_a_method_has_the_settings_of_the_sweep_over_all_methods():
    """Of method and training; the learning rates of that sweep were chosen with care."""
    experiments = resolve(read_grid("methods-shapes")).values()
    in_sweep = {experiment.method.name: experiment.to_json() for experiment in experiments}
    compared = set()
    for table in TABLES.values():
        whole = plan(table, None, [0], True, {})
        kept = [work for work in whole.planned if not work.row.set]
        for experiment in resolve(expand(replace(whole, planned=kept))[0]).values():
            name = experiment.method.name
            compared.add(name)
            for group in ("method", "train"):
                assert experiment.to_json()[group] == in_sweep[name][group], (table.name, name)
    baselines = {"promptfl", "fedotp", "fedpgp", "pfedmoap", "mma-fedavg", "pfedmma"}
    assert compared == {"zero-shot", "blend"} | baselines


@pytest.mark.parametrize("name", list(TABLES))
def test_on_shapes_the_rows_of_every_table_fit_the_tiny_model(name):
    whole = plan(TABLES[name], None, [0], True, {})
    planned = whole.planned
    assert len(planned) == len(TABLES[name].rows)
    # The rows of the grid of gamma and lambda differ in nothing that could fit or not.
    experiments = resolve(expand(replace(whole, planned=planned[:10]))[0])
    assert {experiment.data.kind for experiment in experiments.values()} == {"shapes"}
    ranks = ("method.vision_rank", "method.text_rank", "method.projection_rank")
    numbers = [work.settings.get(key) for work in planned for key in ranks]
    assert all(number <= 128 for number in numbers if isinstance(number, int))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["table9"], f"error: table9: unknown table; known: {', '.join(TABLES)}"),
        (
            ["pfedmma-shift", "--datasets", "dtd"],
            "error: --datasets dtd: not in pfedmma-shift; known: domainnet, office_caltech10",
        ),
        (
            ["blend-table1", "--datasets", ""],
            "error: --datasets: empty list; name at least one, or leave the option out",
        ),
        (
            ["blend-table1", "--seeds", " ,"],
            "error: --seeds: empty list; name at least one, or leave the option out",
        ),
        (
            ["blend-table1", "--seeds", "0,one"],
            "error: --seeds 0,one: expected whole numbers from 0, e.g. 0,1,2",
        ),
        (
            ["blend-ablation-rank", "--on", "shapes", "--set", "method.vision_rank=2"],
            "error: --set method.vision_rank: varied by blend-ablation-rank",
        ),
        (
            ["blend-table1", "--set", "rounds"],
            "error: --set rounds: expected key=value, e.g. --set rounds=3",
        ),
    ],
)
def test_a_mistake_is_one_line(blend, arguments, error):
    assert blend(*arguments) == (2, "", f"{error}\n")


def test_what_the_schema_does_not_know_is_refused_before_anything_starts(blend, tmp_path):
    options = ("--on", "shapes", "--set", "train.rate=1")
    code, output, errors = blend("blend-ablation-aggregation", *options)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert "train.rate: unknown key" in errors
    assert not list(tmp_path.iterdir())


def test_without_a_folder_of_data_sets_nothing_starts_and_it_is_said_how_to_name_it(
    blend, tmp_path
):
    code, output, errors = blend("blend-table1", "--datasets", "dtd", "--seeds", "0")
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors == (
        "error: blend-table1: needs the papers' datasets: --set data.root=DIR, the folder that "
        "holds them (docs/data.md); --on shapes runs the same rows on the built-in benchmark\n"
    )
    assert not list(tmp_path.iterdir())


def test_data_that_is_not_there_is_named_before_anything_starts(blend, tmp_path):
    (tmp_path / "data").mkdir()
    options = ("--datasets", "dtd", "--seeds", "0", "--set", "data.root=data")
    code, output, errors = blend("pfedmma-table1", *options)
    assert (code, output, errors.count("\n")) == (3, "", 1)
    assert f"dtd: no folder {tmp_path / 'data' / 'dtd'}" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("name", "number", "metric"),
    [
        pytest.param("blend-ablation-aggregation", 5, "hmean", marks=pytest.mark.slow),
        # Its zero-shot row takes what the runs of pFedMMA measured before training.
        ("pfedmma-shift", 3, "local"),
    ],
)
def test_a_table_on_shapes_runs_and_reports_and_a_second_time_only_reports(
    blend, tmp_path, name, number, metric
):
    settings = [word for text in TINY for word in ("--set", text)]
    command = (name, "--on", "shapes", "--seeds", "0", *settings)
    code, output, _ = blend(*command)
    assert code == 0
    assert "1: rendered shapes, tiny model" in output
    assert "diff." not in output
    folder = tmp_path / "runs" / f"reproduce-{name}-on-shapes"
    runs = sorted(folder.glob("*/seed-0/results.json"))
    assert len(runs) == number
    data = json.loads((folder / "report.json").read_text())
    assert {entry["n"] for entry in data["entries"]} == {1}
    assert not any(entry["comparable"] for entry in data["entries"])
    shown = {e["row"]: e["ours"] for e in data["entries"] if e["metric"] == metric}
    assert len(shown) == len(data["runs"]) == number + 1
    for run in data["runs"]:
        results = json.loads((Path(run["folders"]["0"]) / "results.json").read_text())
        moment = "zero_shot" if run["row"] == "zero_shot" else "final"
        assert shown[run["row"]] == pytest.approx(results[moment][metric])
        assert results["config"]["method"]["name"] == run["settings"]["method.name"]
    files = {path.name for path in folder.iterdir()}
    assert {"report.md", "report.csv", "report.json", "sweep.json"} <= files
    before = [path.stat().st_mtime_ns for path in runs]
    assert blend(*command)[0] == 0
    assert [path.stat().st_mtime_ns for path in runs] == before
