"""What docs/exit-codes.md says is true: its examples are run, and every code occurs in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from deploy import cli
from deploy.signals import Interrupted

PAGE = (Path(cli.__file__).parents[1] / "docs" / "exit-codes.md").read_text()
EXAMPLES = re.findall(r"```\n\$ (blend .*)\n((?:.*\n)*?)exit code (\d+)\n```", PAGE)
# They load torch in a process of their own, or start a federation.
SLOW = ("doctor", "formation_timeout")


def _examples():
    for command, lines, code in EXAMPLES:
        marks = [pytest.mark.slow] if any(word in command for word in SLOW) else []
        yield pytest.param(command, lines, int(code), id=f"{code}-{command[6:40]}", marks=marks)


def test_every_code_has_an_example():
    assert {int(code) for _, _, code in EXAMPLES} == {0, 1, 2, 3, 4}
    # None has another form and is left out.
    assert len(EXAMPLES) == PAGE.count("\n$ blend ") == PAGE.count("\nexit code ")


@pytest.mark.parametrize(("command", "lines", "code"), _examples())
def test_an_example_ends_as_the_page_says(blend, command, lines, code):
    found, out, errors = blend(*command.split()[1:])
    said = errors or out
    assert found == code, said
    pattern = r".*".join(re.escape(part) for part in lines.rstrip("\n").split("..."))
    assert re.fullmatch(pattern, said.rstrip("\n"), re.DOTALL), said


def test_signals_have_the_codes_of_the_page():
    found = re.findall(r"(Ctrl-C|SIGTERM) (?:is )?(\d+)", PAGE)
    assert {number for number, _ in found} == {"Ctrl-C", "SIGTERM"}
    for number, code in found:
        assert Interrupted(2 if number == "Ctrl-C" else 15).exit_code == int(code)
    assert Interrupted(1).exit_code == 129


def test_every_command_is_in_the_table():
    table = PAGE[PAGE.index("## By command") : PAGE.index("## 0: done")]
    for name in get_command(cli.app).commands:  # type: ignore[attr-defined]
        assert f"| `blend {name}" in table, name
