"""Services `register` and `run`: what an operator does with `flwr`, once, at a SuperLink.

`python -m deploy.docker.operate register|run`; FOLDER holds what `make_keys` handed over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from blend_core.errors import BlendError, RunError, error_from_code
from blend_core.report.runs import RESULTS
from deploy.engine import script
from deploy.events import EventTail

FOLDER = Path("/etc/blend/operator")
APP = Path("/opt/blend/app")
CONNECTION = "federation"
REGISTERED = "already in use"
# Between a submission that was cut off and the next; a SuperLink takes some seconds to start.
PAUSE_SECONDS = 5.0
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 60.0
# Submissions in a row after which no ServerApp started: the SuperLink is not coming back, or
# something is wrong that time does not mend.
FALSE_STARTS = 5
# What the ServerApp writes at its end may come a little after the end of `flwr run`.
SETTLE_SECONDS = 5.0


def connect(superlink: str) -> None:
    """Tell `flwr` where the SuperLink (HOST:PORT) is, in $FLWR_HOME/config.toml."""
    home = Path(os.environ["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink.{CONNECTION}]\naddress = "{superlink}"\n'
        f'root-certificates = "{FOLDER / "ca.crt"}"\n',
        encoding="utf-8",
    )


def register() -> None:
    """Register every site's key under the site's name; one that is registered stays as it is.

    Raises:
        RunError: the SuperLink refuses a key or does not answer.
    """
    for key in sorted((FOLDER / "public-keys").glob("*.pub")):
        command = [script("flwr"), "supernode", "register", str(key), CONNECTION]
        command += ["--name", key.stem]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"{key.stem} cannot be registered: no answer within {ANSWER_SECONDS:.0f} s"
            ) from None
        said = done.stdout + done.stderr
        if done.returncode and REGISTERED not in said.lower():
            raise RunError(f"{key.stem} cannot be registered: {' '.join(said.split())}")
        print(f"{key.stem}: {'was registered' if done.returncode else 'registered'}", flush=True)


def run(settings: str, out: Path, seconds: float) -> None:
    """Submit a run, and again whenever a SuperLink takes it down with it, until it has finished.

    Args:
        settings: pairs for `--run-config`.
        out: the run's folder on the results volume. A run in it goes on after its last whole
            round; one that has finished stays as it is.
        seconds: within which it has to finish.

    Raises:
        BlendError: the run failed, in the server's own words, or it did not start, or it was not
            finished in time.
    """
    if (out / RESULTS).exists():
        print(f"{out / RESULTS}: finished before; another run needs another RUN_NAME", flush=True)
        return
    # The first submission finds nothing to resume and starts.
    pairs = f"{settings} out='{out}' resume=true"
    command = [script("flwr"), "run", str(APP), CONNECTION, "--stream", "--run-config", pairs]
    deadline = time.monotonic() + seconds
    false_starts = 0
    while time.monotonic() < deadline:
        tail = EventTail(out, resume=True)
        with subprocess.Popen(command) as submission:
            try:
                last = _follow(tail, submission, deadline)
            finally:
                submission.terminate()
        if last == "finished":
            print(f"results: {out / RESULTS}", flush=True)
            return
        false_starts = 0 if last else false_starts + 1
        if false_starts == FALSE_STARTS:
            raise RunError(f"the run did not start {FALSE_STARTS} times; see above and `superlink`")
        print(f"cut off; submitted again in {PAUSE_SECONDS:.0f} s", flush=True)
        time.sleep(PAUSE_SECONDS)
    raise RunError(f"{out}: not finished within {seconds:.0f} s; give more RUN_SECONDS")


def _follow(tail: EventTail, submission: subprocess.Popen[bytes], deadline: float) -> str:
    """Read the journal until the run has finished or nothing more comes; returns the last event.

    Raises:
        BlendError: the run failed.
    """
    last, end = "", deadline
    while time.monotonic() < end:
        for event in tail.read():
            last = str(event["event"])
            if last == "failed":
                raise error_from_code(str(event["message"]), int(event["exit_code"]))
            if last == "finished":
                return last
        if submission.poll() is not None:
            end = min(end, time.monotonic() + SETTLE_SECONDS)
        time.sleep(LOOK_SECONDS)
    return last


def main(command: str, environment: Mapping[str, str]) -> None:
    """Do one of the two, with the settings that docker-compose.yml gives."""
    connect(environment["SUPERLINK"])
    if command == "register":
        register()
    else:
        run(environment["RUN_CONFIG"], Path(environment["OUT"]), float(environment["RUN_SECONDS"]))


if __name__ == "__main__":
    try:
        main(sys.argv[1], os.environ)
    except BlendError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
