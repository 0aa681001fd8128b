"""`blend compare`: rows of runs, the table, its statistics and its files."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from blend_core.errors import ConfigError, RunError
from blend_core.metrics import federation_metrics
from blend_core.report.comparison import Comparison, Line, compare, costs
from blend_core.report.rows import group_rows
from blend_core.report.runs import load_runs
from blend_core.report.tables import as_csv, remarks
from deploy import cli

NOTE = "rendered shapes, tiny model: not comparable with the papers' numbers"
PRIVATE_VALUES = 1000


def write_run(
    folder: Path,
    seed: int,
    per: int,
    gen: int,
    method: str = "blend",
    zero_shot: int = 50,
    **settings: Any,
) -> Path:
    """A finished run of one client with 100 images of each kind, so counts are percentages."""
    config: dict[str, Any] = {
        "seed": seed,
        "rounds": 2,
        "clients": 1,
        "method": {"name": method},
        "backbone": {"name": "blend-tiny"},
        "data": {"kind": "shapes", "partition_seed": None, "fewshot_seed": None},
        "train": {"lr": 0.001, "threads": 1, "device": "cpu"},
        "evaluation": {"every": 1},
        "server": {"fraction": 1.0, "round_timeout": 60.0},
    }
    for key, value in settings.items():
        *groups, last = key.split("__")
        section = config
        for group in groups:
            section = section[group]
        section[last] = value

    def summary(local: int, novel: int) -> dict[str, Any]:
        counts = {"client-00": {"local": [local, 100], "base": [40, 100], "novel": [novel, 100]}}
        return {**federation_metrics(counts), "counts": counts}

    trained = method != "zero-shot"
    rounds = [
        {
            "round": number,
            "seconds": 2.0 * number,
            "clients": [
                {"client": "client-00", "status": "accepted", "bytes_up": 4000 if trained else 0}
            ],
        }
        for number in (1, 2)
    ]
    results = {
        "method": method,
        "seed": seed,
        "note": NOTE,
        "config": config,
        "zero_shot": summary(zero_shot, zero_shot),
        "final": summary(per, gen),
        "shared_sha256": f"{method}-{seed}",
        "clients": [{"name": "client-00", "train_images": 5, "private_sha256": None}],
        "rounds": rounds,
        "seconds": {"total": 7.0, "training": 6.0},
        "parameters": {"shared": 1000, "private": PRIVATE_VALUES, "trainable": 2000},
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def change(folder: Path, **changes: Any) -> None:
    path = folder / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def compared(folder: Path, **options: Any) -> Comparison:
    return compare(load_runs([folder]), **options)


def lines(comparison: Comparison) -> dict[str, Line]:
    return {line.row.label: line for line in comparison.lines}


@pytest.fixture
def blend(blend):
    """`blend compare`: arguments -> exit code, output, errors."""
    return partial(blend, "compare")


@pytest.fixture
def three_seeds(tmp_path: Path) -> Path:
    """Per. = Gen. = H-Mean: blend 51, 52, 54, another method 48, 49, 53, zero-shot 50."""
    for seed, (ours, theirs) in enumerate(((51, 48), (52, 49), (54, 53))):
        write_run(tmp_path / "sweep" / "a" / f"seed-{seed}", seed, ours, ours)
        write_run(tmp_path / "sweep" / "b" / f"seed-{seed}", seed, theirs, theirs, "mma-fedavg")
    return tmp_path / "sweep"


def test_seeds_of_one_setting_are_one_row_wherever_and_however_fast_they_ran(tmp_path):
    write_run(tmp_path / "x" / "seed-1", 1, 80, 70)
    write_run(tmp_path / "y" / "deep" / "seed-0", 0, 70, 70, train__threads=4)
    write_run(tmp_path / "z", 2, 90, 70, train__device="cuda", evaluation__every=0)
    (row,) = group_rows(load_runs([tmp_path]))
    assert row.label == "blend"
    assert list(row.runs) == [0, 1, 2]
    assert row.values("per") == {0: 70.0, 1: 80.0, 2: 90.0}
    assert (row.n, row.mean("per"), row.std("per")) == (3, 80.0, 10.0)  # 200/2 = 10^2


def test_rows_are_named_by_the_settings_in_which_their_method_differs(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70, method__gamma=0.2, method__layers=[5, 6])
    write_run(tmp_path / "b", 0, 70, 70, method__gamma=0.45, method__layers=[5, 6])
    write_run(tmp_path / "c", 0, 70, 70, method__gamma=0.45, method__layers=[5, 6], train__lr=0.1)
    write_run(tmp_path / "d", 0, 70, 70, "promptfl", train__lr=0.3)
    labels = [row.label for row in group_rows(load_runs([tmp_path]))]
    assert labels == [
        "blend gamma=0.2 lr=0.001",
        "blend gamma=0.45 lr=0.001",
        "blend gamma=0.45 lr=0.1",
        "promptfl",
    ]


def test_a_setting_that_is_not_set_is_not_in_a_label(tmp_path):
    for number, value in enumerate((None, 7, 8)):
        write_run(tmp_path / str(number), 0, 70, 70, train__local_steps=value)
    write_run(tmp_path / "3", 0, 70, 70, data__partition_seed=1)
    write_run(tmp_path / "4", 0, 70, 70, data__partition_seed=1, train__local_steps=7)
    labels = [row.label for row in group_rows(load_runs([tmp_path]))]
    assert labels == [
        "blend",
        "blend local_steps=7",
        "blend local_steps=8",
        "blend partition_seed=1",
        "blend local_steps=7 partition_seed=1",
    ]


def test_labels_differ_even_where_long_values_look_alike(tmp_path):
    for number, start in enumerate("pq"):
        write_run(tmp_path / str(number), 0, 70, 70, method__file=f"/{start}/" + "x" * 30)
    first, second = (row.label for row in group_rows(load_runs([tmp_path])))
    assert first != second
    assert len(first) < 40


def test_a_run_named_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "a" / "seed-0", 0, 70, 70)
    assert len(load_runs([run, run / "results.json", tmp_path])) == 1


def test_a_repeated_run_with_the_same_result_is_used_once_and_said(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70)
    write_run(tmp_path / "b", 0, 70, 70)
    comparison = compared(tmp_path)
    assert lines(comparison)["blend"].row.n == 1
    assert f"{tmp_path / 'b'}: the same as {tmp_path / 'a'}, used once" in comparison.notes


def test_two_results_of_one_seed_are_told_apart_by_the_settings_in_which_they_differ(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70)
    settings = {"train__threads": 4, "train__device": "cuda", "evaluation__every": 1}
    write_run(tmp_path / "b", 0, 71, 70, **settings)
    with pytest.raises(RunError) as caught:
        group_rows(load_runs([tmp_path]))
    assert str(caught.value) == (
        f"{tmp_path}/a and {tmp_path}/b are the same experiment with seed 0 (blend), but their "
        "results differ; they differ in train.device (cpu, cuda), train.threads (1, 4): leave one "
        "out"
    )


def test_batches_of_the_evaluation_are_part_of_the_setup(tmp_path):
    """FedOTP's scores of an image depend on the batch it is in."""
    write_run(tmp_path / "a", 0, 70, 70, "fedotp", evaluation__batch_size=100)
    write_run(tmp_path / "b", 0, 71, 70, "fedotp", evaluation__batch_size=50)
    comparison = compared(tmp_path)
    assert list(lines(comparison)) == [
        "zero-shot batch_size=100",
        "fedotp batch_size=100",
        "zero-shot batch_size=50",
        "fedotp batch_size=50",
    ]
    (warning,) = comparison.warnings
    assert warning.startswith("not comparable: rows differ in evaluation.batch_size;")


def test_runs_of_different_package_versions_are_warned_about(tmp_path):
    for seed, version in enumerate(("0.1.0", "0.2.0", "0.1.0")):
        change(write_run(tmp_path / str(seed), seed, 70, 70), version=version)
    assert compared(tmp_path).warnings == (
        "the runs come from different package versions: 0.1.0 (2), 0.2.0 (1)",
    )
    change(tmp_path / "1", version="0.1.0")
    assert compared(tmp_path).warnings == ()


def test_a_traceback_is_shown_only_with_debug(tmp_path, blend):
    assert blend(tmp_path / "nothing")[2].count("\n") == 1
    assert "Traceback" in blend(tmp_path / "nothing", "--debug")[2]


@pytest.mark.parametrize("what", ["counts", "shared", "private"])
def test_two_results_of_one_seed_are_an_error_that_names_both_folders(tmp_path, what):
    write_run(tmp_path / "a", 0, 70, 70)
    other = write_run(tmp_path / "b", 0, 71 if what == "counts" else 70, 70)
    if what == "shared":
        change(other, shared_sha256="another")
    if what == "private":
        change(other, clients=[{"name": "client-00", "private_sha256": "another"}])
    with pytest.raises(RunError) as caught:
        group_rows(load_runs([tmp_path]))
    assert str(tmp_path / "a") in str(caught.value)
    assert str(tmp_path / "b") in str(caught.value)


def test_hmean_is_taken_per_seed_and_then_averaged(tmp_path, blend):
    # Seed 0: 2 x 50 x 100 / 150 = 66.67, seed 1 the same; of the means 75 and 75 it is 75.
    write_run(tmp_path / "runs" / "0", 0, 50, 100)
    write_run(tmp_path / "runs" / "1", 1, 100, 50)
    assert blend(tmp_path / "runs", "--out", tmp_path / "out")[0] == 0
    row = json.loads((tmp_path / "out" / "compare.json").read_text())["rows"][1]
    assert row["metrics"]["hmean"]["mean"] == pytest.approx(200 / 3)
    assert row["hmean_of_means"] == 75.0


def test_zero_shot_is_always_a_row_measured_by_the_runs_themselves(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70, zero_shot=40)
    write_run(tmp_path / "b", 1, 70, 70, zero_shot=60)
    first = compared(tmp_path).lines[0]
    assert first.row.label == "zero-shot"
    assert first.row.values("hmean") == {0: pytest.approx(40), 1: pytest.approx(60)}
    assert any("Base over the whole base test set" in note for note in compared(tmp_path).notes)


def test_runs_of_the_method_zero_shot_join_the_zero_shot_row(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70)
    write_run(tmp_path / "b", 0, 50, 50, "zero-shot", train__lr=0.1)
    write_run(tmp_path / "c", 1, 50, 50, "zero-shot")
    found = lines(compared(tmp_path))
    assert list(found) == ["zero-shot", "blend"]
    assert found["zero-shot"].row.n == 2


def test_zero_shot_alone_is_a_table_without_a_test(tmp_path, blend):
    write_run(tmp_path / "a", 0, 50, 50, "zero-shot")
    assert [line.test for line in compared(tmp_path).lines] == [None]
    assert blend(tmp_path)[0] == 0


def test_runs_that_disagree_about_zero_shot_are_named(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70, zero_shot=50)
    write_run(tmp_path / "b", 0, 70, 70, "promptfl", zero_shot=51)
    (warning,) = compared(tmp_path).warnings
    assert "zero-shot of seed 0 differs" in warning
    assert str(tmp_path / "a") in warning
    assert str(tmp_path / "b") in warning


def test_runs_of_other_partitions_are_named(tmp_path):
    change(write_run(tmp_path / "a", 0, 70, 70), manifest_sha256="aa")
    change(write_run(tmp_path / "b", 0, 70, 70, "promptfl"), manifest_sha256="bb")
    (warning,) = compared(tmp_path).warnings
    assert f"partition of seed 0 differs between {tmp_path / 'a'} and {tmp_path / 'b'}" in warning


def test_where_a_data_set_lies_makes_no_other_experiment(tmp_path):
    for seed, kind in ((0, "dtd"), (1, "folders")):
        for root in ("/one", "/two"):
            folder = tmp_path / f"{kind}{root}"
            write_run(folder, seed, 70, 70, data__kind=kind, data__root=root)
    rows = group_rows(load_runs([tmp_path]))
    assert sorted(row.config["data.kind"] for row in rows) == ["dtd", "folders", "folders"]


def test_without_a_baseline_rows_are_tested_against_zero_shot(three_seeds):
    found = lines(compared(three_seeds))
    test = found["blend"].test
    # Differences 1, 2, 4: the worked example of PROTOCOL 4.3.
    assert test is not None
    assert (test.n, test.mean) == (3, pytest.approx(7 / 3))
    assert test.p == pytest.approx(0.118, abs=5e-4)
    # -2, -1, 3: mean 0, so t = 0 and p = 1. Holm over two: 2 x 0.118 and 1.
    assert found["mma-fedavg"].test is not None
    assert found["mma-fedavg"].test.p == pytest.approx(1)
    assert found["blend"].holm == pytest.approx(2 * 0.118, abs=1e-3)
    assert found["zero-shot"].test is None


def test_a_baseline_can_be_named_by_its_method_or_its_label(three_seeds):
    found = lines(compared(three_seeds, baseline="mma-fedavg"))
    # 3, 3, 1: mean 7/3.
    assert found["blend"].baseline == "mma-fedavg"
    assert found["blend"].test is not None
    assert found["blend"].test.mean == pytest.approx(7 / 3)
    assert found["mma-fedavg"].test is None
    write_run(three_seeds / "c", 0, 60, 60, method__gamma=0.9)
    found = lines(compared(three_seeds, baseline="blend gamma=0.9"))
    assert found["blend"].baseline == "blend gamma=0.9"


def test_a_baseline_that_is_no_row_is_an_error_with_the_rows(three_seeds, blend):
    code, _, error = blend(three_seeds, "--baseline", "fedavg")
    assert code == 2
    assert error.count("\n") == 1
    for label in ("zero-shot", "blend", "mma-fedavg"):
        assert f"'{label}'" in error


def test_a_baseline_of_several_rows_is_an_error_with_these(tmp_path):
    write_run(tmp_path / "a", 0, 70, 70, method__gamma=0.2)
    write_run(tmp_path / "b", 0, 70, 70, method__gamma=0.9)
    with pytest.raises(ConfigError, match=r"'blend gamma=0\.2', 'blend gamma=0\.9'"):
        compared(tmp_path, baseline="blend")


def test_another_metric_can_be_tested(tmp_path):
    for seed, per in enumerate((51, 52, 54)):
        write_run(tmp_path / str(seed), seed, per, 10)
    test = lines(compared(tmp_path, metric="per"))["blend"].test
    assert test is not None
    assert test.mean == pytest.approx(7 / 3)
    with pytest.raises(ConfigError, match="per, gen, hmean, local, base, novel, hm"):
        compared(tmp_path, metric="accuracy")


def test_one_seed_or_equal_differences_have_no_p_but_a_reason(tmp_path, blend):
    write_run(tmp_path / "a" / "0", 0, 70, 70)
    code, output, _ = blend(tmp_path / "a")
    assert code == 0
    assert "needs two" in output
    write_run(tmp_path / "a" / "1", 1, 70, 70)
    line = lines(compared(tmp_path / "a"))["blend"]
    assert line.test is not None
    assert (line.test.p, line.holm, line.test.reason) == (None, None, "differences do not vary")


def test_only_equal_seeds_are_paired(three_seeds):
    write_run(three_seeds / "b" / "seed-9", 9, 90, 90, "mma-fedavg")
    found = lines(compared(three_seeds, baseline="mma-fedavg"))
    assert found["mma-fedavg"].row.n == 4
    assert found["blend"].test is not None
    assert found["blend"].test.n == 3


def test_below_five_seeds_it_stands_first_under_the_test_that_nothing_is_significant(
    three_seeds, blend
):
    caution = "fewer than five seeds: no basis for a claim of significance"
    assert remarks(compared(three_seeds))[0] == caution
    lines = blend(three_seeds)[1].splitlines()
    after_test = max(number for number, line in enumerate(lines) if line.startswith("└")) + 1
    assert lines[after_test] == f"- {caution}"
    for seed in (3, 4):
        write_run(three_seeds / "a" / f"seed-{seed}", seed, 60, 60)
        write_run(three_seeds / "b" / f"seed-{seed}", seed, 60, 60, "mma-fedavg")
    assert caution not in remarks(compared(three_seeds))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "seeds vary the partition and the few-shot draw"),
        (
            {"data__partition_seed": 1},
            "seeds vary the few-shot draw; the partition is fixed (seed 1); "
            "a test speaks about that one partition only",
        ),
        (
            {"data__fewshot_seed": 0},
            "seeds vary the partition; the few-shot draw is fixed (seed 0)",
        ),
        (
            {"data__kind": "folders"},
            "seeds vary the training only: images and clients are the sites' own",
        ),
    ],
)
def test_it_is_said_whether_seeds_vary_the_partition(tmp_path, settings, said):
    write_run(tmp_path / "a", 0, 70, 70, **settings)
    assert said in compared(tmp_path).notes


def test_rows_of_another_setup_are_warned_about_and_never_paired(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "a" / str(seed), seed, 70 + seed, 70)
        write_run(tmp_path / "b" / str(seed), seed, 80 + seed, 80, clients=2, zero_shot=60)
        write_run(tmp_path / "c" / str(seed), seed, 60, 60, "promptfl", clients=2, zero_shot=60)
    comparison = compared(tmp_path)
    (warning,) = comparison.warnings
    assert warning.startswith("not comparable: rows differ in clients;")
    found = lines(comparison)
    assert list(found) == [
        "zero-shot clients=1",
        "blend clients=1",
        "zero-shot clients=2",
        "blend clients=2",
        "promptfl clients=2",
    ]
    assert found["blend clients=2"].baseline == "zero-shot clients=2"
    found = lines(compared(tmp_path, baseline="promptfl"))
    assert found["blend clients=2"].baseline == "promptfl clients=2"
    alone = found["blend clients=1"]
    assert alone.baseline is None
    assert alone.test is not None
    assert (alone.test.n, alone.test.reason) == (0, "no comparable baseline")


def test_costs_are_payload_private_tensors_and_seconds(tmp_path):
    run = write_run(tmp_path / "a", 0, 70, 70)
    zero_shot, blend = (line.row for line in compared(tmp_path).lines)
    # 4000 bytes each round; four bytes a value; rounds of 2 and 4 seconds.
    assert (costs(blend).bytes_up, costs(blend).private_bytes) == (4000, 4 * PRIVATE_VALUES)
    assert costs(blend).seconds == 3.0
    assert (costs(zero_shot).bytes_up, costs(zero_shot).private_bytes) == (0, 0)
    change(run, parameters=None)
    assert costs(compared(tmp_path).lines[1].row).private_bytes is None


def test_clients_and_replies_that_are_missing_are_said(tmp_path):
    run = write_run(tmp_path / "a", 0, 70, 70)
    rounds = json.loads((run / "results.json").read_text())["rounds"]
    rounds[1]["clients"][0] = {"client": "client-00", "status": "refused", "reason": "nan"}
    change(run, rounds=rounds, clients_not_evaluated={"client-01": "no reply"})
    notes = compared(tmp_path).notes
    assert f"{run}: 1 of 2 replies did not count" in notes
    assert f"{run}: not in its means: client-01" in notes


def test_unfinished_runs_are_one_line_with_their_number(tmp_path, blend):
    write_run(tmp_path / "good", 0, 70, 70)
    for name in "abcde":
        (tmp_path / "sweep" / name).mkdir(parents=True)
        (tmp_path / "sweep" / name / "config.yaml").write_text("{}")
    code, output, _ = blend(tmp_path, tmp_path / "sweep")
    assert code == 0
    (line,) = (line for line in output.splitlines() if "left out" in line)
    named = ", ".join(str(tmp_path / "sweep" / name) for name in "abc")
    assert line == f"left out: 5 unfinished runs without results.json: {named} and 2 more"


def test_unfinished_and_damaged_runs_are_named_and_left_out(tmp_path, blend):
    write_run(tmp_path / "good", 0, 70, 70)
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("{}")
    for name, text in (("damaged", '{"seed": 1'), ("nan", '{"seed": NaN}'), ("other", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(text)
    code, output, _ = blend(tmp_path)
    assert code == 0
    for name in ("damaged", "nan", "other"):
        assert f"left out: {tmp_path / name}" in output
    unfinished = f"1 unfinished run without results.json: {tmp_path / 'unfinished'}"
    assert f"left out: {unfinished}\n" in output
    code, output, error = blend(tmp_path / "unfinished", tmp_path / "damaged")
    assert code == 1
    assert "left out" in output
    assert "no finished run is left" in error


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_the_place_of_the_output_is_wrong_usage(tmp_path, blend, place):
    write_run(tmp_path / "good", 0, 70, 70)
    (tmp_path / "file").write_text("precious")
    code, output, error = blend(tmp_path / "good", "--out", tmp_path / place)
    assert (code, output) == (2, "")
    assert (
        error == f"error: --out {tmp_path / place}: {tmp_path / 'file'} is a file; name a folder\n"
    )
    assert (tmp_path / "file").read_text() == "precious"


def test_odd_results_are_one_line_each_and_the_others_are_compared(tmp_path, blend):
    write_run(tmp_path / "good", 0, 70, 70)
    odd = ["[" * 200_000, "3", '{"seed": 1e999}', "", '"\\ud800"']
    for number, text in enumerate(odd):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "results.json").write_text(text)
    change(write_run(tmp_path / "a\x1b[2J\nb", 1, 70, 70), final=[])
    code, output, error = blend(tmp_path, "--out", tmp_path / "out")
    assert (code, error) == (0, "")
    lines = [line for line in output.splitlines() if line.startswith("left out: ")]
    for number in range(len(odd)):
        assert any(f"{tmp_path / str(number)}/results.json: " in line for line in lines)
    name = f"{tmp_path}/a[2J b/results.json: not the results of a finished run: final: "
    assert any(name in line for line in lines)
    assert len(lines) == 6
    assert "\x1b" not in output


def test_a_path_that_does_not_exist_is_wrong_usage(tmp_path, blend):
    code, _, error = blend(tmp_path / "nothing")
    assert (code, error.count("\n")) == (2, 1)
    assert str(tmp_path / "nothing") in error


def test_a_folder_without_runs_is_named(tmp_path, blend):
    code, output, _ = blend(tmp_path)
    assert code == 1
    assert f"left out: {tmp_path}: holds no run" in output


@pytest.mark.parametrize("columns", ["80", "200"])
def test_tables_fit_80_columns_whatever_the_labels(tmp_path, blend, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for seed, per in enumerate((1, 100)):
        for number, length in enumerate((3, 40)):
            folder = tmp_path / f"{number}-{seed}"
            settings = {"method__layers": list(range(length)), "clients": 10 + number}
            write_run(folder, seed, per, 100 - 50 * seed, zero_shot=3, **settings)
    write_run(tmp_path / "one", 0, 70, 70, "a-method-with-a-rather-long-name")
    code, output, _ = blend(tmp_path)
    assert code == 0
    rows = [row for row in output.splitlines() if row[:1] in "┏┡│└"]
    assert len(rows) > 20
    assert {len(row) for row in rows if len(row) > 80} == set()
    for heading in ("H-Mean", "Novel", "95 % interval", "p Holm", "s/round"):
        assert heading in output
    assert NOTE in output
    assert "[0,1,2]" in output  # A list is no markup.


def test_files_hold_the_table_its_statistics_and_its_note(three_seeds, tmp_path):
    out = tmp_path / "new" / "out"
    command = [sys.executable, "-m", "deploy.cli", "compare", str(three_seeds), "--out", str(out)]
    root = Path(cli.__file__).parent.parent
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True, timeout=120
    )
    assert "written:" in done.stdout
    assert {path.suffix for path in out.iterdir()} == {
        ".json",
        ".csv",
        ".md",
        ".tex",
        ".png",
        ".svg",
    }

    data = json.loads((out / "compare.json").read_text())
    row = data["rows"][1]
    assert (row["label"], row["n"], data["note"]) == ("blend", 3, NOTE)
    assert row["test"]["p"] == pytest.approx(1 - 7**0.5 / 3)
    assert [entry["per"] for entry in row["seeds"]] == [51, 52, 54]
    assert row["seeds"][0]["folder"] == str(three_seeds / "a" / "seed-0")

    with (out / "compare.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [entry["label"] for entry in table] == ["zero-shot", "blend", "mma-fedavg"]
    expected = {
        "per": "52.33",
        "per_std": "1.53",
        "difference": "2.33",
        "difference_low": "-1.46",
        "difference_high": "6.13",
        "t": "2.65",
        "p": "0.118",
        "bytes_up": "4000",
        "private_bytes": "4000",
        "seconds_per_round": "3.00",
        "pairs": "3",
        "baseline": "zero-shot",
        "note": NOTE,
    }
    assert {key: table[1][key] for key in expected} == expected
    assert table[0]["p"] == ""

    markdown = (out / "compare.md").read_text()
    rows = [row for row in markdown.splitlines() if row.startswith("|")]
    assert len(rows) == 5
    assert {row.count(" | ") for row in rows} == {rows[0].count(" | ")}
    assert "| 52.33 ± 1.53 |" in rows[3]
    assert "| -1.46 to 6.13 | 2.65 | 0.1181 | 0.2362 |" in rows[3]
    assert NOTE in markdown

    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(out / "compare.svg").getroot().tag.endswith("svg")


def test_latex_is_a_plain_table_that_compiles(tmp_path, blend):
    write_run(tmp_path / "runs" / "0", 0, 70, 70, method__odd="50%_of #1 & {more}|")
    write_run(tmp_path / "runs" / "1", 0, 80, 70, method__odd="-5")
    assert blend(tmp_path / "runs", "--out", tmp_path / "out")[0] == 0
    text = (tmp_path / "out" / "compare.tex").read_text()
    tables = text.split("\\begin{tabular}{")[1:]
    assert len(tables) == 3
    for table in tables:
        columns, rest = table.split("}", 1)
        rows = [row for row in rest.split("\\end{tabular}")[0].splitlines() if "&" in row]
        assert len(rows) == 4
        for row in rows:
            assert row.endswith(r" \\")
            assert row.replace(r"\&", "").count("&") == len(columns) - 1
    assert r"odd=50\%\_of \#1 \& \{more\}$|$" in text
    assert "odd=$-$5" in text
    assert NOTE in text


# A text that a terminal, Markdown, LaTeX, a spreadsheet or matplotlib would take for something.
ODD = "*a* `b` <i> | _c_ $\\bad{$\n\x1b[31m\u202e"


@pytest.fixture
def odd_files(tmp_path, blend) -> tuple[str, Path]:
    """What is printed of runs with odd texts, and the folder of the files."""
    for number, (method, value) in enumerate((("[m", ODD), ("*m", "-5"), ("=m", "7"))):
        for change_of in ("", "y"):
            folder = tmp_path / "runs" / f"{number}{change_of}"
            run = write_run(folder, 0, 70, 70, method, method__odd=value + change_of)
            change(run, note=f"=1 {ODD}")
    code, output, error = blend(tmp_path / "runs", "--out", tmp_path / "out")
    assert (code, error) == (0, "")
    return output, tmp_path / "out"


def test_no_text_of_a_run_changes_what_a_terminal_shows(odd_files):
    output, out = odd_files
    texts = [output, *((out / f"compare.{ending}").read_text() for ending in ("csv", "md", "tex"))]
    for text in texts:
        assert "[31m" in text
        assert {c for c in text if not c.isprintable()} == {"\n"}


def test_markdown_shows_labels_and_notes_as_they_are(odd_files):
    text = (odd_files[1] / "compare.md").read_text()
    assert r"- =1 \*a\* \`b\` \<i\> \| \_c\_ \$\\bad{\$ \[31m" in text.splitlines()
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {19}
    assert r"| \*m odd=-5 |" in text


def test_latex_takes_no_label_for_an_argument_of_the_row_before(odd_files):
    text = (odd_files[1] / "compare.tex").read_text()
    assert "\n{}[m odd=" in text
    assert "\n{}*m odd=$-$5 & " in text
    assert not any(line.startswith(("[", "*")) for line in text.splitlines())


def test_a_spreadsheet_takes_no_label_for_a_formula_and_numbers_stay_numbers(odd_files):
    with (odd_files[1] / "compare.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    row = next(entry for entry in table if entry["label"] == "'=m odd=7")
    assert row["method"] == "'=m"
    assert row["note"].startswith("'=1 *a*")
    assert row["difference"] == "20.00"
    write_run(odd_files[1] / "worse", 0, 20, 20)
    worse = next(line for line in as_csv(compared(odd_files[1])).splitlines() if "blend" in line)
    assert ",-30.00," in worse


def test_the_results_of_real_runs_are_compared(tmp_path, tiny_experiment, tower):
    from deploy.loop import run_loop

    backbone = tower("tower_a").model_dump()
    for seed in (0, 1):
        experiment = tiny_experiment(seed=seed, rounds=1, backbone=backbone)
        run_loop(experiment, tmp_path / f"seed-{seed}", "fed")
    zero_shot, blend = compared(tmp_path).lines
    results = json.loads((tmp_path / "seed-1" / "results.json").read_text())
    assert blend.row.values("hmean")[1] == results["final"]["hmean"]
    assert zero_shot.row.values("base")[1] == results["zero_shot"]["base"]
    assert costs(blend.row).bytes_up == results["bytes_per_round"]["up"]["client-00"]
    assert blend.test is not None
    assert blend.test.n == 2
