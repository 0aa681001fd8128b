"""Flower's SuperLink and SuperNode with less waiting, for many of them on one machine.

Usage: python -m deploy.warm flower-supernode ARGUMENTS (or flower-superlink). The processes and
what they do are Flower's own; two things about them are different:

1. Flower starts a new interpreter for its SuperExec and again for every message, and each spends
   1.3 s of processor time importing Flower. Here a copy of this process that has imported
   everything waits, and starts them by forking.
2. A SuperNode looks for messages every 3 s. Here it looks as often as PULL_SECONDS says.

A site's SuperNode on its own machine needs neither and is started with `flower-supernode`.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

# Seconds between a SuperNode's looks for messages, in the environment.
PULL_SECONDS = "BLEND_PULL_SECONDS"
REPLY_SECONDS = 0.05
COMMANDS = {
    "flower-superlink": "flwr.superlink.cli.flower_superlink:flower_superlink",
    "flower-supernode": "flwr.supernode.cli.flower_supernode:flower_supernode",
    "flower-superexec": "flwr.supercore.cli.flower_superexec:flower_superexec",
    "flwr-serverapp": "flwr.superlink.cli.flwr_serverapp:flwr_serverapp",
    "flwr-clientapp": "flwr.supernode.cli.flwr_clientapp:flwr_clientapp",
}
# Where Flower starts processes, and where a SuperNode pauses between its looks.
STARTERS = (
    "flwr.superlink.cli.flower_superlink",
    "flwr.supernode.start_client_internal",
    "flwr.supercore.superexec.executor.subprocess_executor",
)
PAUSER = "flwr.supernode.start_client_internal"
# Not imported by the commands until they run.
LATER = ("flwr.superlink.main", "flwr.supernode.main")


def main() -> None:
    """Run the command that the arguments name, as its own script would."""
    name, *arguments = sys.argv[1:]
    entries = {command: _entry(reference) for command, reference in COMMANDS.items()}
    for module in LATER:
        importlib.import_module(module)
    nursery = Nursery(entries)
    for module in STARTERS:
        vars(importlib.import_module(module))["subprocess"] = nursery.stand_in()
    pause = float(os.environ.get(PULL_SECONDS, "3"))
    clock = SimpleNamespace(sleep=lambda seconds: _sleep(seconds, pause))
    vars(importlib.import_module(PAUSER))["time"] = clock
    # While this process has a single thread: a fork copies no other.
    nursery.open()
    sys.argv = [name, *arguments]
    entries[name]()


class Nursery:
    """A copy of this process that starts Flower's commands by forking itself.

    Args:
        entries: what to call, by name of the command.
    """

    def __init__(self, entries: dict[str, Callable[[], Any]]) -> None:
        self.entries = entries
        self.read_end, self.write_end = os.pipe()

    def open(self) -> None:
        """Fork the copy. It ends with this process."""
        parent = os.getpid()
        if os.fork() == 0:
            # Its children's ends interest nobody; the kernel forgets them.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            self._serve(parent)
            os._exit(0)

    def stand_in(self) -> SimpleNamespace:
        """What Flower's modules use in the place of the module `subprocess`."""
        names = ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")
        return SimpleNamespace(Popen=self._popen, **{n: getattr(subprocess, n) for n in names})

    def _popen(self, command: Sequence[str], **options: Any) -> Any:
        if command[0] not in self.entries:
            return subprocess.Popen(command, **options)
        silent = options.get("stdout") == subprocess.DEVNULL
        line = json.dumps({"command": list(command), "silent": silent}) + "\n"
        os.write(self.write_end, line.encode())
        # Flower's commands watch their parent and end with it, so that nobody has to end them.
        return SimpleNamespace(terminate=lambda: None, wait=lambda timeout=None: None)

    def _serve(self, parent: int) -> None:
        waiting = b""
        while os.getppid() == parent:
            if not select.select([self.read_end], [], [], 0.5)[0]:
                continue
            waiting += os.read(self.read_end, 65536)
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                if os.fork() == 0:
                    self._run(**json.loads(line))

    def _run(self, command: list[str], silent: bool) -> None:
        """Be the command, then end this process."""
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if silent:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
            sys.argv = command
            self.entries[command[0]]()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: what follows in this copy's stack is the nursery's own work.
            os._exit(code)


def _sleep(seconds: float, pause: float) -> None:
    # Flower's pauses: 3 s for messages of the server, 0.5 s for the reply of its own ClientApp.
    time.sleep(min(seconds, pause) if seconds > 1 else min(seconds, REPLY_SECONDS))


def _entry(reference: str) -> Callable[[], Any]:
    module, _, function = reference.partition(":")
    entry: Callable[[], Any] = getattr(importlib.import_module(module), function)
    return entry


if __name__ == "__main__":
    main()
