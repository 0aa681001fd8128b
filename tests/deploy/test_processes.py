"""Engine `processes`: what Flower is told, who is watched, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from blend_core.config import Experiment, ServerConfig, parse_experiment
from blend_core.errors import BlendError, ConfigError, FormationError, RunError
from client.process import PROC
from deploy import engine, relatives
from deploy.children import Child, Family, telling_lines
from deploy.engine import Workspace, free_ports, script
from deploy.node_config import node_config
from deploy.processes import _Nodes, child_name, node_configs
from deploy.relatives import MARKER, is_running
from deploy.watch import Watch

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / 'a run\'s "out" \\ folder äöü', "fed")


@pytest.fixture
def family(tmp_path: Path):
    environment = {**os.environ, MARKER: f"test-{tmp_path.name}-{os.getpid()}"}
    environment["PYTHONPATH"] = str(Path(engine.__file__).parent.parent)
    with Family(environment, tmp_path, patience=0.5) as family:
        yield family


# What Flower is told


def test_flower_reads_the_node_config_as_we_meant_it(tmp_path):
    from flwr.common.config import parse_config_args

    out = tmp_path / 'with space = "quotes" ü'
    configs = node_configs(parse_experiment({"clients": 2}), out)
    assert list(configs) == ["client-00", "client-01"]
    assert parse_config_args([configs["client-01"]]) == {
        "client-name": "client-01",
        "partition-id": 1,
        "num-partitions": 2,
        "state-dir": str(out / "state" / "client-01"),
        "verbose-errors": True,
    }


def test_every_site_folder_becomes_a_node_with_its_own_data(tmp_path):
    for name in ("site-b", "site-a"):
        (tmp_path / name / "train").mkdir(parents=True)
    data = {"kind": "folders", "root": str(tmp_path)}
    configs = node_configs(parse_experiment({"clients": 2, "data": data}), tmp_path / "out")
    assert list(configs) == ["site-a", "site-b"]
    assert f"data-dir='{tmp_path}/site-a'" in configs["site-a"]


def test_sites_that_bring_their_own_folders_are_not_for_this_engine(tmp_path):
    experiment = parse_experiment({"clients": 2, "data": {"kind": "folders"}})
    with pytest.raises(ConfigError, match=r"data\.root"):
        node_configs(experiment, tmp_path)


@pytest.mark.parametrize("text", ["it's a {}", "/data/a\nb"])
def test_a_text_that_flower_cannot_be_given_is_refused_in_one_line_that_names_its_key(text):
    with pytest.raises(ConfigError, match=r"^prompt-template = ") as caught:
        node_config({"client-name": "a", "prompt-template": text})
    assert "\n" not in str(caught.value)


def test_flower_accepts_the_generated_app_and_ships_no_code(workspace):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    workspace.write_app()
    config, warnings = load_and_validate(workspace.app / "pyproject.toml", check_module=False)
    assert warnings == []
    assert config["tool"]["flwr"]["app"]["components"]["serverapp"] == "server.app:app"
    assert len(build_fab_from_disk(workspace.app)) < 4000


def test_flower_reads_the_run_config_back(workspace):
    from flwr.common.config import parse_config_args

    experiment = parse_experiment({"clients": 2, "data": {"template": 'a "photo"\tof\x7f {}'}})
    workspace.write_run_config(experiment, "processes", 12.5)
    found = parse_config_args([str(workspace.run_config)])
    assert json.loads(found.pop("experiment")) == experiment.to_json()
    assert found == {
        "out": str(workspace.out),
        "federation": "fed",
        "engine": "processes",
        "started": 12.5,
        "resume": False,
    }


def test_the_flwr_command_finds_this_runs_superlink(workspace, monkeypatch):
    from flwr.cli.flower_config import read_superlink_connection

    workspace.write_connection(23456)
    monkeypatch.setenv("FLWR_HOME", str(workspace.home))
    connection = read_superlink_connection(engine.CONNECTION)
    assert (connection.address, connection.insecure) == ("127.0.0.1:23456", True)


def test_the_environment_is_the_runs_own(workspace):
    base = {"FLWR_DATABASE": "theirs", "PATH": "/bin", "NO_PROXY": "intern", "KEPT": "1"}
    environment = workspace.environment(nodes=4, base=base)
    assert "FLWR_DATABASE" not in environment
    assert environment["KEPT"] == "1"
    assert environment["FLWR_HOME"] == str(workspace.home)
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]
    assert environment["NO_PROXY"] == "intern,127.0.0.1,localhost"
    assert environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "0.25"
    many = workspace.environment(nodes=1000)
    assert many["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "1.00"


def test_two_runs_of_the_same_name_do_not_end_each_other(tmp_path):
    one, two = (Workspace(tmp_path / name, "fed") for name in ("one", "two"))
    assert one.environment(1)[MARKER] != two.environment(1)[MARKER]


def test_a_taken_port_is_not_offered(monkeypatch):
    with socket.socket() as taken:
        taken.bind((engine.HOST, 0))
        taken.listen()
        numbers = iter([taken.getsockname()[1], *range(25000, 26000)])
        monkeypatch.setattr(engine.secrets, "choice", lambda ports: next(numbers))
        first, second = free_ports(2)
    assert 25000 <= first < second


def test_a_missing_command_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="pip install"):
        script("flwr")


# Processes and their end


def test_descendants_in_other_sessions_that_ignore_sigterm_are_ended(family, tmp_path):
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"command = [sys.executable, '-S', '-c', {stubborn!r}]\n"
        "p = subprocess.Popen(command, start_new_session=True)\n"
        "open('pid.tmp', 'w').write(str(p.pid)); import os; os.rename('pid.tmp', 'pid')\n"
        "time.sleep(600)"
    )
    code = f"import os; os.chdir({str(tmp_path)!r})\n{parent}"
    child = family.start("parent", [sys.executable, "-S", "-c", code])
    assert until((tmp_path / "pid").exists)
    grandchild = int((tmp_path / "pid").read_text())
    assert is_running(grandchild)
    # Orphaned and with another session, but still marked.
    child.process.kill()
    family.stop()
    assert not is_running(grandchild)


@pytest.mark.skipif(not PROC.is_dir(), reason="orphans are found through /proc")
def test_a_killed_launcher_takes_its_processes_with_it(tmp_path):
    code = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "from deploy.children import Family\n"
        f"environment = {{**os.environ, 'BLEND_RUN': 'killed-{os.getpid()}-{tmp_path.name}'}}\n"
        f"with Family(environment, Path({str(tmp_path)!r})) as family:\n"
        f"    print(family.start('child', {SLEEP!r}).process.pid, flush=True)\n"
        "    time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(engine.__file__).parent.parent)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    assert is_running(pid)
    launcher.kill()
    launcher.wait()
    assert until(lambda: not is_running(pid))


def test_a_log_says_why_in_one_line():
    log = (
        "INFO: hello\nTraceback (most recent call last):\n  File x\n"
        "ModuleNotFoundError: No module named 'x'\nERROR: Exit Code: 201\n\nFor more, visit: <url>"
    )
    assert telling_lines(log) == "ModuleNotFoundError: No module named 'x'"
    assert telling_lines("one\n\ntwo\n---\n") == "one | two"
    box = "╭─ Error ──────╮\n│ Unable to load module x │\n╰──────────────╯\n"
    assert telling_lines(box) == "Error | Unable to load module x"
    assert telling_lines("WARNING: attempt failed\nbye") == "WARNING: attempt failed | bye"
    assert telling_lines("") == "no output"


# Watching


def watch(family: Family, tmp_path: Path, superlink, submission, **options) -> list[dict]:
    seen: list[dict] = []
    options = {"start_timeout": 30.0, **options}
    Watch(
        tmp_path, superlink, submission, ServerConfig(), on_event=seen.append, **options
    ).until_end()
    return seen


def journal(folder: Path, *events: dict) -> None:
    lines = [json.dumps({"time": time.time(), **event}) + "\n" for event in events]
    (folder / "events.jsonl").write_text("".join(lines))


def ended(family: Family, name: str, code: str = "") -> Child:
    child = family.start(name, [sys.executable, "-S", "-c", code])
    child.process.wait()
    return child


def test_a_finished_run_ends_well_although_its_processes_have_gone(family, tmp_path):
    started = {"event": "started", "pid": 2**22 + 1}
    journal(tmp_path, started, {"event": "finished", "results": "x"})
    seen = watch(family, tmp_path, ended(family, "superlink"), ended(family, "run"))
    assert [event["event"] for event in seen] == ["started", "finished"]


def test_the_servers_own_words_and_exit_code_are_reported(family, tmp_path):
    journal(tmp_path, {"event": "failed", "message": "client-03 is missing", "exit_code": 4})
    with pytest.raises(FormationError, match="client-03 is missing"):
        watch(family, tmp_path, family.start("superlink", SLEEP), ended(family, "run"))


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        (
            "superlink",
            "the SuperLink ended \\(exit code 1\\): ValueError: no licence; see .*superlink",
        ),
        ("run", "the run did not start \\(exit code 1\\): ValueError: no licence; see .*run.log"),
    ],
)
def test_a_dead_process_is_named_with_the_reason_from_its_log(family, tmp_path, dead, expected):
    names = {"superlink": None, "run": None}
    for name in names:
        crash = "raise ValueError('no licence')"
        names[name] = ended(family, name, crash) if name == dead else family.start(name, SLEEP)
    with pytest.raises(RunError, match=expected):
        watch(family, tmp_path, names["superlink"], names["run"])


def test_a_server_that_dies_without_a_word_is_noticed(family, tmp_path):
    gone = ended(family, "server")
    journal(tmp_path, {"event": "started", "pid": gone.process.pid})
    with pytest.raises(RunError, match="ServerApp ended without a result"):
        watch(family, tmp_path, family.start("superlink", SLEEP), family.start("run", SLEEP))


def test_a_server_that_never_starts_is_not_waited_for_for_ever(family, tmp_path):
    link, run = family.start("superlink", SLEEP), family.start("run", SLEEP)
    with pytest.raises(RunError, match=r"did not start within 0 s: no output; see .*run\.log"):
        watch(family, tmp_path, link, run, start_timeout=0.3)


def test_a_dead_supernode_is_reported_and_started_again_but_not_for_ever(family, monkeypatch):
    monkeypatch.setattr(
        "deploy.processes.start_supernode",
        lambda family, name, *_: family.start(child_name(name), SLEEP),
    )
    seen: list[dict] = []
    for name in ("client-00", "client-01"):
        family.start(child_name(name), SLEEP)
    nodes = _Nodes(family, 1, {"client-00": "", "client-01": ""}, seen.append)
    nodes.check()
    assert seen == []

    def kill() -> None:
        child = [child for child in family.children if child.name == "site-client-00"][-1]
        child.process.kill()
        child.process.wait()

    clock = [1000.0]
    monkeypatch.setattr("deploy.processes.time.monotonic", lambda: clock[0])

    def started() -> int:
        return len([child for child in family.children if child.name == "site-client-00"])

    # The first restart is at once; what ends it again and again gets ever more time to pass.
    for count, pause in enumerate((0.0, 1.0, 2.0, 4.0), start=1):
        kill()
        nodes.check()
        if pause:
            assert started() == count
            clock[0] += pause - 0.1
            nodes.check()
            assert started() == count
            clock[0] += 0.2
            nodes.check()
        assert started() == count + 1
        assert [event["event"] for event in seen] == ["warning"] * count
    assert "client-00: its SuperNode ended (signal 9)" in seen[0]["message"]
    kill()
    with pytest.raises(RunError, match="client-00: its SuperNode ended 5 times within 600 s"):
        nodes.check()
    # What happened long ago counts no more: one end a day for a month is no reason to give up.
    for _ in range(30):
        clock[0] += 86_400.0
        kill()
        nodes.check()


def test_a_supernode_that_found_its_port_taken_gets_another(family, monkeypatch):
    restarted = []
    monkeypatch.setattr(
        "deploy.processes.start_supernode",
        lambda family, name, config, port: restarted.append((name, config, port)),
    )
    ended(family, child_name("client-00"), "raise OSError('[Errno 98] Address already in use')")
    nodes = _Nodes(family, 77, {"client-00": "its config"}, lambda event: None)
    nodes.check()
    assert restarted == [("client-00", "its config", 77)]


# The real thing


@pytest.fixture
def config_file(tiny_experiment, tower, tmp_path: Path) -> Path:
    experiment: Experiment = tiny_experiment(
        rounds=500, backbone=tower("tower_a").model_dump(), method={"name": "blend"}
    )
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment.to_json()))
    return path


def processes_of(out: Path) -> list[str]:
    """Command lines of all processes that have to do with a run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            facts = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(out).encode() in facts and entry.name != str(os.getpid()):
            found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def events(out: Path) -> list[str]:
    path = out / "events.jsonl"
    return [json.loads(line)["event"] for line in path.open()] if path.exists() else []


def launch(config_file: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "run", config_file, "--out", out, *options],
        env={**os.environ, "PYTHONPATH": str(Path(engine.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(not PROC.is_dir(), reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_leaves_no_process(config_file, tmp_path, number, code):
    out = tmp_path / "out"
    run = launch(config_file, out)
    try:
        assert until(lambda: "round_done" in events(out) or run.poll() is not None, 120)
        assert run.poll() is None, run.communicate()
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == code
    if number != signal.SIGKILL:
        kept = f"every finished round is kept: blend run --resume {out}"
        assert errors.splitlines() == [f"stopped by {number.name}", kept]
        assert processes_of(out) == []
    assert until(lambda: not processes_of(out)), processes_of(out)


@pytest.mark.slow
@pytest.mark.skipif(not PROC.is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("victim", ["flower-superlink", "server"])
def test_the_death_of_the_superlink_or_the_server_ends_the_run_with_code_1(
    config_file, tmp_path, victim
):
    out = tmp_path / "out"
    run = launch(config_file, out)
    try:
        assert until(lambda: "round_done" in events(out) or run.poll() is not None, 120)
        if victim == "server":
            first = json.loads((out / "events.jsonl").read_text().splitlines()[0])
            os.kill(first["pid"], signal.SIGKILL)
        else:
            table = relatives.processes()
            pids = [pid for (pid, _), parent in table.items() if parent == run.pid]
            (link,) = [p for p in pids if victim in Path(f"/proc/{p}/cmdline").read_text()]
            os.kill(link, signal.SIGKILL)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == BlendError.exit_code
    cause, kept = errors.splitlines()
    assert ("SuperLink ended (signal 9)" if victim != "server" else "ServerApp ended") in cause
    assert kept == f"every finished round is kept: blend run --resume {out}"
    assert processes_of(out) == []
