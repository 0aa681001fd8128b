"""The `blend` command: exit codes, one-line errors, and where things are put."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from blend_core import __version__
from blend_core.errors import ConfigError, FormationError, RunError, SiteError
from blend_core.settings import load_experiment
from blend_core.state import lock_folder
from deploy import cli, folder
from deploy.check import check
from deploy.signals import Interrupted, interruptible, uninterrupted


@pytest.fixture
def small(tiny_experiment, tower, tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    experiment = tiny_experiment(backbone=tower("tower_a").model_dump())
    path.write_text(yaml.safe_dump(experiment.to_json()))
    return path


def test_help_and_version_are_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys, deploy.cli\n"
        "print({'torch', 'flwr', 'pydantic', 'ray', 'numpy'} & set(sys.modules) or 'light')"
    )
    root = str(Path(cli.__file__).parent.parent)
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert found.stdout == "light\n"


@pytest.mark.parametrize(
    ("command", "argument"),
    [("run", "CONFIG"), ("sweep", "GRID"), ("compare", "RUN"), ("reproduce", "TABLE")],
)
def test_the_help_of_a_command_says_what_its_argument_is(blend, command, argument):
    code, out, _ = blend(command, "--help")
    assert code == 0
    assert f"{argument} is " in out


def test_version(blend):
    assert blend("--version") == (0, f"blend {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--set", "rouns=3"], "rouns: unknown key"),
        (["run", "--set", "rounds=0"], "rounds = 0"),
        (["run", "--set", "method.gama=0.5"], "method.gama: unknown key"),
        (["run", "--set", "rounds"], "expected key=value"),
        (["run", "no-such-file.yaml"], "no-such-file.yaml: no such file, and not a preset"),
        (["run", "--actors", "2"], "only --engine simulation has actors"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_code_2(blend, tmp_path, arguments, expected):
    code, out, errors = blend(*arguments)
    assert (code, out) == (2, "")
    assert expected in errors
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["run", "--engin", "loop"], ["run", "--engine", "cloud"], ["rum"], ["run", "--actors", "0"]],
)
def test_wrong_usage_is_code_2(blend, arguments):
    code, _, errors = blend(*arguments)
    assert code == 2
    assert "Traceback" not in errors


def test_a_folder_with_something_in_it_is_never_written_to(blend, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    code, out, errors = blend("run", "--out", tmp_path / "full")
    assert (code, out) == (2, "")
    assert (
        errors
        == f"error: --out {tmp_path}/full: not empty; name a new folder, or remove this one\n"
    )
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_full_disk_is_code_3_and_the_command_can_be_given_again(
    blend, small, tmp_path, monkeypatch
):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*_: object) -> None:
        raise full

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("deploy.folder._yaml", fails)
        code, _, errors = blend("run", small, "--engine", "loop", "--out", out)
    line = "cannot be written: No space left on device; make room, then start again"
    assert (code, errors.startswith(f"error: {out}: {line}")) == (3, True)
    with monkeypatch.context() as patch:
        full.filename = str(out / "flower")
        patch.setattr("deploy.loop.run_loop", fails)
        code, _, errors = blend("run", small, "--engine", "loop", "--out", out)
    assert (code, errors) == (3, f"error: {out / 'flower'}: {line}\n")
    # By now there is something to go on with, and the refusal says how.
    code, _, errors = blend("run", small, "--engine", "loop", "--out", out)
    assert (code, f"or go on with it: --resume {out}" in errors) == (2, True)
    (out / "config.yaml").write_bytes(b"")
    code, _, errors = blend("run", "--resume", out)
    assert (code, "config.yaml is empty" in errors) == (2, True)


def test_two_commands_cannot_go_on_with_one_run(blend, small, tmp_path):
    out = tmp_path / "out"
    assert blend("run", small, "--engine", "loop", "--out", out)[0] == 0
    with lock_folder(out):
        code, _, errors = blend("run", "--resume", out, "--set", "rounds=5")
    assert (code, f"{out} is used by process {os.getpid()}" in errors) == (3, True)
    assert yaml.safe_load((out / "config.yaml").read_text())["rounds"] != 5


@pytest.mark.parametrize("wrong", [["--actors", "3"], ["--set", "server.aggregation=krum"]])
def test_a_resumption_that_is_refused_changes_nothing(blend, small, tmp_path, wrong):
    out = tmp_path / "out"
    assert blend("run", small, "--engine", "loop", "--out", out)[0] == 0
    before = (out / "config.yaml").read_bytes()
    code, _, _ = blend("run", "--resume", out, "--set", "rounds=9", *wrong)
    assert code == 2
    assert (out / "config.yaml").read_bytes() == before


def test_a_file_in_the_place_of_the_folder_is_refused(blend, tmp_path):
    (tmp_path / "file").touch()
    code, _, errors = blend("run", "--out", tmp_path / "file")
    assert (code, len(errors.splitlines())) == (2, 1)
    code, _, errors = blend("run", "--out", tmp_path / "file" / "below")
    assert (code, len(errors.splitlines())) == (2, 1)


def test_a_run_prints_what_it_runs_and_then_its_table(blend, small, tmp_path):
    code, out, errors = blend("run", small, "--engine", "loop", "--set", "rounds=1")
    assert (code, errors) == (0, "")
    (made,) = (tmp_path / "runs").glob("blend-????????-??????")
    # What the settings leave open, too.
    assert "\n# data: shapes, base classes, 2 shots; dirichlet-preferred, alpha 0.01, boost" in out
    assert out.index("rounds: 1\n") < out.index("server started") < out.index("H-Mean")
    assert out.rstrip().endswith(f"results: {made}/results.json")
    printed = yaml.safe_load(out[: out.index("engine loop")])
    assert printed == yaml.safe_load((made / "config.yaml").read_text())
    # The stored configuration is the run's own, and can be run again.
    assert load_experiment(str(made / "config.yaml")) == load_experiment(str(small), ["rounds=1"])


def test_two_runs_in_the_same_second_get_two_folders(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folder.time, "strftime", lambda form: "20260101-000000")
    experiment = load_experiment("quickstart")
    names = [folder.prepare_folder(None, experiment).name for _ in range(3)]
    assert names == [f"blend-20260101-000000{end}" for end in ("", "-2", "-3")]


@pytest.mark.parametrize("kind", [SiteError, FormationError])
def test_the_exit_code_is_the_errors_own(blend, small, tmp_path, monkeypatch, kind):
    def fail(*arguments: object) -> None:
        raise kind("client-01: what, where and what to do")

    monkeypatch.setattr("deploy.loop.run_loop", fail)
    code, _, errors = blend("run", small, "--engine", "loop", "--out", tmp_path / "out")
    expected = "error: client-01: what, where and what to do; blend doctor "
    assert (code, errors) == (
        kind.exit_code,
        f"{expected}{tmp_path / 'out' / 'config.yaml'} says more\n",
    )


def test_errors_that_the_doctor_could_not_have_found_do_not_point_to_it(
    blend, small, tmp_path, monkeypatch
):
    def fail(experiment: object, out: Path, *arguments: object) -> None:
        if started:
            (out / "events.jsonl").touch()
        raise RunError("round 2: too few replies")

    monkeypatch.setattr("deploy.loop.run_loop", fail)
    for started in (True, False):
        code, _, errors = blend("run", small, "--engine", "loop")
        assert code == 1
        assert errors.startswith("error: round 2: too few replies")
        assert ("blend doctor" in errors) is not started


def test_settings_that_do_not_fit_point_to_the_doctor_with_the_same_settings(blend, tmp_path):
    options = ["--set", "data.kind=folders", "--set", f"data.root={tmp_path}"]
    code, _, errors = blend("run", "quickstart", *options)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert errors.endswith(f"; blend doctor quickstart {' '.join(options)} says more\n")


def test_a_bug_is_one_line_and_a_traceback_only_with_debug(blend, small, monkeypatch):
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("deploy.loop.run_loop", fail)
    code, _, errors = blend("run", small, "--engine", "loop")
    assert (code, errors) == (
        1,
        "error: ZeroDivisionError: division by zero; --debug shows where\n",
    )
    code, _, errors = blend("run", small, "--engine", "loop", "--debug")
    assert code == 1
    assert "Traceback" in errors


def test_a_presets_folder_for_results_may_exist_if_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    found = folder.prepare_folder(tmp_path / "empty", load_experiment("quickstart"))
    assert (found / "config.yaml").is_file()


def test_a_signal_waits_for_the_clean_up_and_a_second_one_does_nothing():
    steps = []
    before = signal.getsignal(signal.SIGTERM)

    def clean_up() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("cleaned up")

    with interruptible():
        with pytest.raises(Interrupted) as caught:
            clean_up()
        os.kill(os.getpid(), signal.SIGINT)
        steps.append("went on")
    assert caught.value.exit_code == 143
    assert steps == ["cleaned up", "went on"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_how_a_child_ended_is_known_where_our_parent_ignored_its_own():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with interruptible():
            child = subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(7)"], timeout=60)
        assert child.returncode == 7
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_ctrl_c_is_code_130_and_one_line(blend, small, monkeypatch):
    def fail(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("deploy.loop.run_loop", fail)
    code, _, errors = blend("run", small, "--engine", "loop")
    assert (code, errors) == (130, "stopped by SIGINT\n")


def test_a_signal_that_an_importer_swallowed_does_not_make_the_others_deaf(monkeypatch):
    monkeypatch.setattr("deploy.signals.PATIENCE", 0.0)

    def send(number: signal.Signals) -> None:
        os.kill(os.getpid(), number)
        time.sleep(1)

    with interruptible():
        with contextlib.suppress(Interrupted):
            send(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            send(signal.SIGTERM)
    assert caught.value.exit_code == 143


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.name=promptfl"], r"context_length = 16: .* at least 20 .* at most 12"),
        (["method.name=promptfl", "method.context_length=12"], "class name too long: '.*' with a"),
        (
            ["method.name=fedpgp", "method.context_length=4", "method.prompts=2"],
            r"method\.prompts = 2: must be 1",
        ),
        (["method.name=fedpgp", "method.context_length=4", "method.rank=129"], "rank = 129"),
        (["method.name=pfedmma"], "last_blocks = 8: .* 6 blocks, .* 4; choose 1 to 4"),
        (["method.name=pfedmma", "method.last_blocks=3", "method.rank=0"], r"method\.rank = 0"),
        (["method.name=mma-fedavg", "method.last_blocks=3", "method.rank=200"], "rank = 200.*128"),
        (["method.projection_rank=256"], "projection_rank = 256: the tower is 128 wide"),
        (["method.vision_rank=0"], "vision_rank = 0: expected a number from 1"),
        (["method.name=clip-lora", "method.rank=0"], r"method\.rank = 0"),
        (["method.name=adaptformer", "method.rank=129"], "rank = 129"),
        (["method.name=pfedmoap", "method.context_length=4", "method.gate_dim=96"], "divide 128"),
        (["backbone.name=RN50-quickgelu", "backbone.weights=openai"], "no blocks for adapters"),
        (
            ["method.name=fedotp", "backbone.name=RN50-quickgelu", "backbone.weights=openai"],
            "vision transformer",
        ),
    ],
)
def test_what_a_backbone_cannot_carry_is_one_line_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message) as refused:
        check(load_experiment("quickstart", settings))
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
