"""What people see while a run goes on."""

from __future__ import annotations

import io
import json
import time

import pytest
from rich.console import Console

from deploy.events import EventTail
from deploy.progress import Progress, duration


def shown(*events: dict, terminal: bool = False) -> list[str]:
    """Lines that stay on the screen after these events of a run of 3 rounds."""
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=terminal, color_system=None)
    progress = Progress(console, rounds=3, clients=2, started=time.time())
    for event in events:
        progress({"time": 0.0, **event})
    return output.getvalue().splitlines()


ROUND = {"event": "round_done", "accepted": 2, "asked": 2, "per": 71.24, "gen": 60.06}


def test_every_round_is_one_plain_line_with_the_time_left():
    lines = shown(
        {**ROUND, "round": 1, "seconds": 90.0},
        {**ROUND, "round": 2, "seconds": 30.0},
        {**ROUND, "round": 3, "seconds": 60.0},
    )
    assert lines == [
        "round 1/3  clients 2/2  Per. 71.2  Gen. 60.1  1 min 30 s  about 3 min 00 s left",
        "round 2/3  clients 2/2  Per. 71.2  Gen. 60.1  30 s  about 1 min 00 s left",
        "round 3/3  clients 2/2  Per. 71.2  Gen. 60.1  1 min 00 s",
    ]


def test_a_round_without_evaluation_shows_no_metrics():
    lines = shown({**ROUND, "round": 3, "per": None, "gen": None, "seconds": 1.0})
    assert lines == ["round 3/3  clients 2/2  1.0 s"]


def test_forming_shows_who_is_there_and_how_zero_shot_does():
    assert shown(
        {"event": "forming", "have": [], "want": 2},
        {"event": "forming", "have": ["client-00"], "want": 2},
        {"event": "formed", "clients": ["a", "b"], "zero_shot": {"per": 50.0, "gen": None}},
        {"event": "formed", "clients": ["a", "b"], "zero_shot": None},
    ) == [
        "clients joined: 0 of 2",
        "clients joined: 1 of 2 (client-00)",
        "2 clients joined; zero-shot Per. 50.0",
        "2 clients joined",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_went_wrong_stays_on_the_screen(terminal):
    reason = (
        "a reason of more than eighty characters, [with] brackets, that must not be broken at all"
    )
    assert shown(
        {"event": "refused", "round": 0, "client": "client-01", "reason": "other version"},
        {"event": "refused", "round": 2, "client": "client-01", "reason": reason},
        {"event": "absent", "round": 4, "client": "client-00", "reason": "no reply in time"},
        {"event": "warning", "message": "client-00: its SuperNode ended"},
        terminal=terminal,
    ) == [
        "joining: client-01 refused: other version",
        f"round 2: client-01 refused: {reason}",
        "last evaluation: client-00 absent: no reply in time",
        "warning: client-00: its SuperNode ended",
    ]


def test_a_terminal_has_one_live_line_instead_of_a_line_per_round():
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    progress = Progress(console, rounds=10, clients=4, started=time.time() - 61)
    progress({"event": "round_done", "round": 2, **ROUND, "seconds": 20.0})
    progress({"event": "round", "round": 3, "of": 10, "asked": 4})
    progress({"event": "heard", "round": 3, "client": "a", "heard": 2, "asked": 4})
    assert output.getvalue() == ""
    line = progress.__rich__().plain
    assert line.startswith("round 3/10  heard 2/4  Per. 71.2  Gen. 60.1  about ")
    assert line.endswith(" left")
    assert len(line) <= 80


def test_an_unknown_event_is_passed_over():
    assert shown({"event": "something-new", "x": 1}) == []


def test_durations_read_well():
    seconds = (0.04, 9.94, 9.96, 59.4, 59.6, 200.0, 3599.6, 7500.0)
    assert [duration(s) for s in seconds] == [
        *("0.0 s", "9.9 s", "10 s", "59 s"),
        *("1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"),
    ]


def test_every_event_is_read_once_and_half_a_line_waits(tmp_path):
    tail = EventTail(tmp_path)
    assert tail.read() == []
    journal = tail.path.open("w")
    journal.write('{"event": "one"}\nnot json\n[]\n{"event": ')
    journal.flush()
    assert tail.read() == [{"event": "one"}]
    assert tail.read() == []
    journal.write(json.dumps("two") + "}\n")
    journal.close()
    assert tail.read() == [{"event": "two"}]
