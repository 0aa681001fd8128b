"""The faults: what happens, and what must come of it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blend_core.report.runs import RESULTS
from chaos.harness import (
    Attempt,
    Between,
    Disturb,
    Running,
    family,
    hashes,
    journal,
    restarted_superlink,
    start,
    undisturbed,
)

# Attempts after which a run that is resumed again and again counts as lost.
ATTEMPTS = 4


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: short, for the command line.
        what: for people.
        faults: what happens inside processes; see inject/sitecustomize.py. "once" is filled in.
        disturb: what happens from outside while the run goes on.
        between: what somebody does before the run is resumed.
        code: exit code of the disturbed run: 0 if it recovers by itself.
        cause: a part of the first line that is seen; "" where it recovers by itself.
        after: says what is wrong with the run's folder in the end, "" if nothing.
        same: whether the final bytes must be those of the undisturbed run; None: there are none to
            compare, because somebody is left out or refused on purpose.
        resumed: exit code and a part of the first line of the first resumption, if that fails too.
        settings: of this case alone.
        by_hand: starts, disturbs and ends a federation without `blend run`, instead of all that.
        quick: whether it is in `make test`.
    """

    name: str
    what: str
    faults: tuple[Mapping[str, Any], ...] = ()
    disturb: Disturb | None = None
    between: Between | None = None
    code: int = 0
    cause: str = ""
    after: Callable[[Path], str] | None = None
    same: bool | None = True
    resumed: tuple[int, str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_hand: Callable[[Path], Attempt] | None = None
    quick: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        recovered: whether the run ended as it should.
        same: whether the bytes are those of the undisturbed run; None: not compared.
        lost: seconds more than the undisturbed run took, all attempts together.
        problem: what was wrong, "" if nothing.
    """

    recovered: bool
    same: bool | None
    lost: float
    problem: str = ""


def perform(case: Case, folder: Path) -> Outcome:
    """Run a case in a new folder below `folder`."""
    expected, usual = undisturbed(folder)
    out, scratch = folder / case.name, folder / f"{case.name}-scratch"
    faults = [{**fault} for fault in case.faults]
    for number, fault in enumerate(faults):
        if fault.pop("repeated", False):
            continue
        fault["once"] = str(scratch / f"once-{number}")
    problems = []
    if case.by_hand is not None:
        attempt = case.by_hand(out)
    else:
        running = start(out, scratch, faults, False, case.settings)
        try:
            if case.disturb is not None:
                case.disturb(running)
        except (AssertionError, OSError, TimeoutError) as error:
            problems.append(f"could not be disturbed: {error}")
            running.process.send_signal(signal.SIGTERM)
        attempt = running.end()
    total = attempt.seconds
    if attempt.code != case.code:
        problems.append(f"exit code {attempt.code}, not {case.code}: {attempt.cause}")
    if case.cause not in attempt.cause:
        problems.append(f"the first line is {attempt.cause!r}, not about {case.cause!r}")
    for fault in faults:
        # A case whose fault did not happen shows nothing.
        if "once" in fault and not Path(fault["once"]).exists():
            problems.append(f"the fault never happened: {fault['at']}")
    if left := _left(out):
        problems.append(f"processes are left: {left}")
    same: bool | None = None
    if case.same is not None:
        for number in range(ATTEMPTS):
            if attempt.code == 0:
                break
            if case.between is not None:
                try:
                    case.between(out)
                except (IndexError, OSError) as error:
                    problems.append(f"nothing to spoil: {error}")
            attempt = start(out, scratch, [], True, {}).end()
            total += attempt.seconds
            code, cause = case.resumed or (0, "")
            if number == 0 and (attempt.code != code or cause not in attempt.cause):
                problems.append(f"resumed once: exit code {attempt.code}: {attempt.cause}")
        if attempt.code != 0:
            problems.append(f"not resumed: {attempt.cause}")
        else:
            try:
                same = hashes(out) == expected
            except OSError as error:
                problems.append(f"no results: {error}")
            if same is False:
                problems.append("other bytes")
    if case.after is not None and (wrong := case.after(out)):
        problems.append(wrong)
    return Outcome(not problems, same, total - usual, "; ".join(problems))


def _left(out: Path) -> list[str]:
    deadline = time.monotonic() + 10.0
    while (left := [command for _, command in family(out)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [command[:80] for command in left]


def _fault(at: str, when: str, do: str, repeated: bool = False, **match: Any) -> dict[str, Any]:
    """A fault; `match` names arguments as a0, a1__round, ..., and the command line as argv."""
    places = {
        name if name == "argv" else name[1:].replace("__", "."): value
        for name, value in match.items()
    }
    fault = {"at": at, "when": when, "do": do, "match": places}
    return {**fault, "repeated": True} if repeated else fault


def _when(event: str, round: int, act: Callable[[Running], None]) -> Disturb:
    def disturb(running: Running) -> None:
        running.until(event, round)
        act(running)

    return disturb


def _kill(word: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Running], None]:
    return lambda running: running.kill(word, number)


def _stop(number: signal.Signals) -> Callable[[Running], None]:
    """A clean stop, which must take less than ten seconds."""

    def act(running: Running) -> None:
        running.process.send_signal(number)
        try:
            running.process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            raise AssertionError("the run did not stop within 10 s") from None

    return act


def _damage(pattern: str, how: str) -> Between:
    """Spoil the newest file of a pattern, once."""

    def between(out: Path) -> None:
        marker = out.with_name(f"{out.name}-damaged")
        if marker.exists():
            return
        marker.touch()
        path = sorted(out.glob(pattern))[-1]
        data = bytearray(path.read_bytes())
        if how == "flipped":
            data[len(data) // 2] ^= 4
        path.write_bytes({"empty": b"", "truncated": bytes(data[:-10])}.get(how, bytes(data)))

    return between


def _backed_up(pattern: str, how: str) -> tuple[Disturb, Between]:
    """Spoil a site's newest private state; put the backup back only after the run complained."""
    kept: dict[str, bytes] = {}

    def disturb(running: Running) -> None:
        running.until("round_done", 1)
        running.process.send_signal(signal.SIGTERM)

    def between(out: Path) -> None:
        path = sorted(out.glob(pattern))[-1] if not kept else Path(next(iter(kept)))
        if kept:
            path.write_bytes(kept[str(path)])
            return
        kept[str(path)] = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            _damage(pattern, how)(out)

    return disturb, between


def _statuses(*expected: str) -> Callable[[Path], str]:
    """Whether the replies of client-01 counted, round by round."""

    def after(out: Path) -> str:
        rounds = json.loads((out / RESULTS).read_text())["rounds"]
        rows = [row for found in rounds for row in found["clients"] if row["client"] == "client-01"]
        found = tuple(row["status"] for row in rows)
        return "" if found == expected else f"client-01 was {', '.join(found)}"

    return after


def _warned(text: str) -> Callable[[Path], str]:
    """Whether a text was in a warning of the journal."""

    def after(out: Path) -> str:
        warnings = [event["message"] for event in journal(out) if event["event"] == "warning"]
        return "" if any(text in message for message in warnings) else f"no warning about {text}"

    return after


def _second_node(state: str) -> Disturb:
    """Somebody starts a SuperNode with the name of a client that is there.

    Args:
        state: its state folder, from the folder above the run's.
    """
    return lambda running: _start_second(running, running.out.parent / state)


def _start_second(running: Running, state: Path) -> None:
    running.until("round_done", 1)
    port = _superlink_port(running)
    scripts = Path(sys.executable).parent
    config = f"client-name='client-00' state-dir='{state}' partition-id=0 num-partitions=2"
    with (running.scratch / "second.log").open("wb") as log:
        second = subprocess.Popen(
            [
                str(scripts / "flower-supernode"),
                "--insecure",
                *("--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", "33217"),
                *("--node-config", config),
            ],
            env={
                **os.environ,
                "FLWR_HOME": str(running.scratch / "flower"),
                # Flower starts its helpers by name.
                "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", os.defpath)]),
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        running.process.wait(timeout=300)
    finally:
        os.killpg(second.pid, signal.SIGKILL)
        second.wait()


def _superlink_port(running: Running) -> str:
    for _, command in family(running.out):
        words = command.split()
        if "flower-superlink" in command and "--port" in words:
            return words[words.index("--port") + 1]
    raise AssertionError("no SuperLink")


def _clock(running: Running) -> None:
    (running.scratch / "a-day-later").touch()


TRAIN_2 = {"a1__round": 2, "a1__kind": "train", "a0__site__name": "client-01"}
SAVE_2 = {"a0__folder": "client-01", "a1": 2}
STATE = "state/*/*/client-01/round-000001.safetensors"
_state = {how: _backed_up(STATE, how) for how in ("missing", "truncated", "empty", "flipped")}

# Time for a second SuperNode to start in the middle of a run.
_PAUSE = (_fault("client.node:local_update", "before", "sleep 40", a5="client-01", a6=3),)
_TORN = {"a0": "checkpoints/round-000003"}
CASES = (
    Case(
        "two-faults",
        "a worker killed before it saves round 2, then the ServerApp in the checkpoint of round 3",
        (
            _fault("blend_core.state:Generations.save", "before", "kill", **SAVE_2),
            _fault("blend_core.state:write_bytes_atomic", "instead", "tear", **_TORN),
        ),
        code=1,
        cause="the ServerApp ended",
        quick=True,
    ),
    Case(
        "server-before-sampling",
        "ServerApp killed before it samples round 2",
        (_fault("server.strategy:Coordinator.sample", "before", "kill", a1=2),),
        code=1,
        cause="the ServerApp ended",
    ),
    Case(
        "server-half-the-replies",
        "ServerApp killed with half of the replies of round 2 in",
        (
            _fault(
                "server.strategy:Coordinator._refusal",
                "after",
                "kill",
                a2__round=2,
                a2__kind="train",
            ),
        ),
        code=1,
        cause="the ServerApp ended",
    ),
    Case(
        "server-in-checkpoint",
        "ServerApp killed while it writes the checkpoint of round 2",
        (
            _fault(
                "blend_core.state:write_bytes_atomic",
                "instead",
                "tear",
                a0="checkpoints/round-000002",
            ),
        ),
        code=1,
        cause="the ServerApp ended",
    ),
    Case(
        "server-after-checkpoint",
        "ServerApp killed after the checkpoint of round 2",
        (_fault("server.checkpoints:Checkpoints.save", "after", "kill", a1__round=2),),
        code=1,
        cause="the ServerApp ended",
    ),
    Case(
        "supernode",
        "SuperNode of client-01 killed after round 1",
        disturb=_when("round_done", 1, _kill("client-name='client-01'")),
    ),
    Case(
        "worker",
        "worker of client-01 killed after round 1",
        disturb=_when("round_done", 1, lambda r: r.kill('"name": "client-01"')),
    ),
    Case(
        "worker-training",
        "worker killed before it trains round 2",
        (_fault("client.node:Node.train", "before", "kill", **TRAIN_2),),
    ),
    Case(
        "worker-before-saving",
        "worker killed after training round 2, before it saves",
        (_fault("blend_core.state:Generations.save", "before", "kill", **SAVE_2),),
    ),
    Case(
        "worker-before-replying",
        "worker killed after it saved round 2, before it replies",
        (_fault("blend_core.state:Generations.save", "after", "kill", **SAVE_2),),
    ),
    Case(
        "clientapp-before",
        "ClientApp process killed before training",
        (_fault("client.link:ask", "before", "kill", a0__name="client-01", a2__round=2),),
    ),
    Case(
        "clientapp-after",
        "ClientApp process killed after training, before it replies",
        (_fault("client.link:ask", "after", "kill", a0__name="client-01", a2__round=2),),
    ),
    Case(
        "superlink",
        "SuperLink killed after round 1",
        disturb=_when("round_done", 1, _kill("flower-superlink")),
        code=1,
        cause="the SuperLink ended",
    ),
    Case(
        "superlink-database",
        "SuperLink with a database stopped after round 1 and started again, the run resumed",
        by_hand=restarted_superlink,
    ),
    Case(
        "launcher",
        "the `blend run` command itself killed after round 1",
        disturb=_when("round_done", 1, lambda r: r.process.kill()),
        code=-9,
    ),
    Case(
        "sigterm",
        "SIGTERM after round 1",
        disturb=_when("round_done", 1, _stop(signal.SIGTERM)),
        code=143,
        cause="stopped by SIGTERM",
    ),
    Case(
        "ctrl-c",
        "Ctrl-C after round 1",
        disturb=_when("round_done", 1, _stop(signal.SIGINT)),
        code=130,
        cause="stopped by SIGINT",
    ),
    *(
        Case(
            f"checkpoint-{how}",
            f"stopped after round 2, its checkpoint {how}",
            disturb=_when("round_done", 2, _stop(signal.SIGTERM)),
            between=_damage("checkpoints/round-*.safetensors", how),
            code=143,
            cause="stopped by SIGTERM",
            after=_warned("checkpoints/round-000002"),
        )
        for how in ("truncated", "empty", "flipped")
    ),
    *(
        Case(
            f"state-{how}",
            f"stopped after round 1, private state of client-01 {how}: refused until restored",
            disturb=_state[how][0],
            between=_state[how][1],
            code=143,
            cause="stopped by SIGTERM",
            resumed=(3, "client-01 has lost its state"),
        )
        for how in _state
    ),
    Case(
        "full-disk-server",
        "disk full at the checkpoint of round 2",
        (
            _fault(
                "blend_core.state:os.replace",
                "before",
                f"raise OSError {errno.ENOSPC}",
                a1="checkpoints/round-000002",
            ),
        ),
        code=3,
        cause="No space left on device",
    ),
    Case(
        "full-disk-journal",
        "disk full at the journal from the end of round 1 on",
        (_fault("server.journal:Journal.write", "before", "full 0._file", a1="round_done"),),
    ),
    Case(
        "read-only-server",
        "the run's folder turns read-only at the checkpoint of round 2",
        (
            _fault(
                "blend_core.state:os.open",
                "before",
                f"raise OSError {errno.EROFS}",
                a0="checkpoints/.round-000002",
            ),
        ),
        code=3,
        cause="Read-only file system",
    ),
    Case(
        "full-disk-site",
        "disk full at a site when it saves round 2",
        (
            _fault(
                "blend_core.state:os.replace",
                "before",
                f"raise OSError {errno.ENOSPC}",
                a1="client-01/round-000002",
            ),
        ),
        code=3,
        cause="No space left on device",
    ),
    Case(
        "read-only-site",
        "a site's state folder turns read-only in round 2",
        (
            _fault(
                "blend_core.state:os.open",
                "before",
                f"raise OSError {errno.EROFS}",
                a0="client-01/.round-000002",
            ),
        ),
        code=3,
        cause="Read-only file system",
    ),
    Case(
        "clock",
        "the wall clock of all processes jumps ahead by a day after round 1",
        disturb=_when("round_done", 1, _clock),
        # To Flower nobody has been heard of for a day then, the ServerApp included.
        code=1,
        cause="stopped from outside",
    ),
    Case(
        "second-name",
        "a second SuperNode claims the name of a client that is there",
        _PAUSE,
        disturb=_second_node("second-name-scratch/other"),
        after=_warned("a second SuperNode"),
    ),
    Case(
        "second-worker",
        "a second SuperNode, with another's name and on its state folder",
        _PAUSE,
        disturb=_second_node("second-worker/state"),
        after=_warned("a second SuperNode"),
    ),
    Case(
        "other-version",
        "a client runs another version of the package, which does not know a setting",
        (
            _fault(
                "client.node:parse_experiment",
                "before",
                "set 0.unknown 1",
                repeated=True,
                argv="client-01",
            ),
            _fault(
                "blend_core.messages:Reply.pack",
                "before",
                'set 0.version "0.0.1"',
                repeated=True,
                argv="client-01",
            ),
        ),
        code=4,
        cause="refused client-01: it runs version '0.0.1'",
        same=None,
    ),
    Case(
        "other-classes",
        "a client has another list of classes",
        (
            _fault(
                "client.node:parse_experiment",
                "before",
                'set 0.data.split "development"',
                repeated=True,
                argv="client-01",
            ),
        ),
        code=4,
        cause="client-01: its partition",
        same=None,
    ),
    Case(
        "other-rank",
        "a client has adapters of another rank",
        (
            _fault(
                "client.node:parse_experiment",
                "before",
                "set 0.method.vision_rank 8",
                repeated=True,
                argv="client-01",
            ),
        ),
        code=1,
        cause="client-01: ",
        same=None,
    ),
    Case(
        "slow",
        "a client takes ten times the deadline in round 2",
        (_fault("client.node:local_update", "before", "sleep 400", a5="client-01", a6=2),),
        settings={"server.round_timeout": 40, "server.min_replies": 1, "rounds": 4},
        after=_statuses("accepted", "absent", "accepted", "accepted"),
        same=None,
    ),
    Case(
        "gone",
        "a client never answers, from round 1 on",
        (
            _fault(
                "client.node:local_update",
                "before",
                "sleep 1000",
                repeated=True,
                a5="client-01",
            ),
        ),
        settings={"server.round_timeout": 40, "server.min_replies": 1},
        after=_statuses("absent", "absent", "absent"),
        same=None,
    ),
    Case(
        "memory",
        "out of memory in a client's training step",
        (
            _fault(
                "client.node:local_update",
                "before",
                "raise MemoryError",
                a5="client-01",
                a6=2,
            ),
        ),
        code=1,
        cause="out of memory",
    ),
)
