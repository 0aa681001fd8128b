"""Ends a run's processes when its launcher is gone without having done so (killed, crashed).

Started by `deploy.children` with the run's marker as its argument; it waits for the end of its
standard input, which the launcher holds open as long as it lives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from deploy.children import relatives


def main(marker: str, patience: float = 5.0) -> None:
    """Wait for the launcher's end, then end every process that carries the marker."""
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


if __name__ == "__main__":
    main(sys.argv[1])
