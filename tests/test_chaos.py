"""Some of the faults of `make chaos`, each in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.cases import CASES, Case, perform

from client.process import PROC

pytestmark = pytest.mark.skipif(not PROC.is_dir(), reason="looks into /proc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all cases run, and the one undisturbed run that they are compared with."""
    found: Path = tmp_path_factory.mktemp("chaos")
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.quick else pytest.mark.slow) for c in CASES],
)
def test_a_fault_costs_time_and_nothing_else(case: Case, folder: Path) -> None:
    outcome = perform(case, folder)
    assert outcome.problem == ""
    assert outcome.same in (True, None)
    assert (outcome.same is None) == (case.same is None)
