"""Puts faults into any Python process that has this folder on its PYTHONPATH.

The environment variable CHAOS holds a JSON list of faults:

    {"at": "module:attribute", "when": "before" | "after" | "instead" | "later" (a clock),
     "match": {"1.round": 2, "argv": "client-01"},
     "do": "kill" | "sleep 5" | "raise OSError 28" | "tear" | "set 0.method.rank 8" | "full 0.file",
     "once": "/path/of/a/marker"}

`match` looks at the arguments of the call: an index, then attributes or keys; an integer must be
equal, a text contained. "argv" is the command line of the process. With `once` the fault happens in
one call of one process only.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS: list[dict[str, Any]] = json.loads(os.environ.get("CHAOS", "[]"))


class Finder:
    """Finds the modules that have faults, and lets them be patched once they are executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        faults = [fault for fault in FAULTS if fault["at"].partition(":")[0] == name]
        if not faults:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = patched(spec.loader.exec_module, faults)  # type: ignore
                return spec
        return None


def patched(
    execute: Callable[[ModuleType], None], faults: list[dict[str, Any]]
) -> Callable[[ModuleType], None]:
    def execute_and_patch(module: ModuleType) -> None:
        execute(module)
        for fault in faults:
            patch(module, fault)

    return execute_and_patch


def patch(module: ModuleType, fault: dict[str, Any]) -> None:
    *owners, name = fault["at"].partition(":")[2].split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        if not matches(args, fault.get("match", {})) or not first(fault.get("once")):
            return original(*args, **kwargs)
        if fault["when"] == "later":
            return original(*args, **kwargs) + datetime.timedelta(seconds=ahead())
        if fault["when"] == "before":
            happen(fault["do"], args)
            return original(*args, **kwargs)
        if fault["when"] == "after":
            result = original(*args, **kwargs)
            happen(fault["do"], args)
            return result
        return happen(fault["do"], args)

    setattr(owner, name, faulty)


def matches(args: tuple[Any, ...], wanted: dict[str, Any]) -> bool:
    for place, value in wanted.items():
        found = " ".join(sys.argv) if place == "argv" else reached(args, place)
        if found != value if isinstance(value, int) else value not in str(found):
            return False
    return True


def reached(args: tuple[Any, ...], place: str) -> Any:
    """What a path leads to: the index of an argument, then attributes or keys."""
    index, *names = place.split(".")
    found: Any = args[int(index)]
    for name in names:
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def first(marker: str | None) -> bool:
    """Whether nobody has been here before; for ever true without a marker."""
    if marker is None:
        return True
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def happen(what: str, args: tuple[Any, ...]) -> None:
    verb, *words = what.split()
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "sleep":
        time.sleep(float(words[0]))
    elif verb == "raise":
        kind = {"OSError": OSError, "MemoryError": MemoryError}[words[0]]
        raise kind(int(words[1]), os.strerror(int(words[1]))) if len(words) > 1 else kind()
    elif verb == "tear":
        # Half of a file is on the disk when the process is killed.
        path, data = Path(args[0]), args[1]
        path.with_name(f".{path.name}.{os.getpid()}.tmp").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "set":
        place, _, name = words[0].rpartition(".")
        owner, value = reached(args, place), json.loads(words[1])
        owner.update({name: value}) if isinstance(owner, dict) else setattr(owner, name, value)
    elif verb == "full":
        # From here on the open file has no room left.
        os.dup2(os.open("/dev/full", os.O_WRONLY), reached(args, words[0]).fileno())
    else:
        raise ValueError(what)


DAY = os.environ.get("CHAOS_CLOCK")


def ahead() -> float:
    """Seconds by which the wall clock has been set ahead: a day from when the file is there."""
    return 86_400.0 if DAY and os.path.exists(DAY) else 0.0


if DAY:
    # Python's own clock, and Flower's, by which it judges deadlines and who is online. The kernel's
    # cannot be set without rights; nothing else here looks at it.
    real = time.time
    time.time = lambda: real() + ahead()
    FAULTS.append({"at": "flwr.supercore.date:now", "when": "later"})
if FAULTS:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
