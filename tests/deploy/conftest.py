"""The `blend` command, run in this process."""

from __future__ import annotations

import sys

import pytest

from deploy import cli


@pytest.fixture
def blend(monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder: (arguments) -> exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["blend", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0), output.out, output.err

    return run
