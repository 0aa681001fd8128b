"""Ends a run's processes when its launcher is gone without having done so (killed, crashed).

Started by `deploy.children` with the run's marker and possibly a folder to remove; it waits for
the end of its standard input, which the launcher holds open as long as it lives.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

from deploy.relatives import relatives


def main(marker: str, scratch: str | None = None, patience: float = 5.0) -> None:
    """Wait for the launcher's end, then end every process that carries the marker.

    Args:
        marker: of the run.
        scratch: a folder that is removed when all have ended.
        patience: seconds that the processes get to end by themselves.
    """
    while sys.stdin.buffer.read(1024):
        pass
    deadline = time.monotonic() + patience
    number = signal.SIGTERM
    # Ask once, then kill until none is left; a deadline because nothing here may stay for ever.
    while (found := relatives(marker, set())) and time.monotonic() < deadline + 10:
        for pid, _ in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while time.monotonic() < deadline and relatives(marker, set()):
            time.sleep(0.1)
        number = signal.SIGKILL
        time.sleep(0.1)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
