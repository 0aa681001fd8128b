"""`python -m chaos [NAME...]`: perform the cases, print the table, and write it with --write."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from chaos.cases import CASES, Case, Outcome, perform

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- table of make chaos -->", "<!-- end of the table -->"
YES = {True: "yes", False: "no", None: "-"}


def main() -> int:
    """Number of cases that failed."""
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = [case for case in CASES if not names or case.name in names]
    done: list[tuple[Case, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="blend-chaos-") as folder:
        for number, case in enumerate(chosen, start=1):
            print(f"{number}/{len(chosen)} {case.what} ...", flush=True)
            began = time.monotonic()
            outcome = perform(case, Path(folder))
            done.append((case, outcome))
            verdict = "ok" if outcome.recovered else f"FAILED: {outcome.problem}"
            print(f"    {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    table = rows(done)
    print(table)
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        head, _, rest = page.partition(BEGIN)
        PAGE.write_text(
            f"{head}{BEGIN}\n\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8"
        )
    return sum(not outcome.recovered for _, outcome in done)


def rows(done: list[tuple[Case, Outcome]]) -> str:
    """The table in Markdown."""
    lines = [
        "| what happens | ended as it must | same bytes | seconds lost |",
        "|---|---|---|---:|",
    ]
    for case, outcome in done:
        same = "not compared" if outcome.same is None else YES[outcome.same]
        lines.append(
            f"| {case.what} | {YES[outcome.recovered]} | {same} | {max(outcome.lost, 0.0):.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
