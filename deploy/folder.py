"""The folder of one run, and the configuration that is printed and kept in it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from blend_core.config import Experiment
from blend_core.errors import ConfigError


def prepare_folder(out: Path | None, experiment: Experiment) -> Path:
    """Create the run's folder, store the resolved configuration in it, return its full path.

    Raises:
        ConfigError: it holds something already, or cannot be written.
    """
    if out is None:
        name = f"{experiment.method.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        out = Path("runs") / name
        number = 2
        while out.exists():  # Two runs in the same second.
            out = Path("runs") / f"{name}-{number}"
            number += 1
    out = out.expanduser().absolute()
    try:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out}: is a file; name a new folder")
        if out.exists() and any(out.iterdir()):
            raise ConfigError(f"--out {out}: not empty; name a new folder, or remove this one")
        out.mkdir(parents=True, exist_ok=True)
        # "x": of two runs that found the folder empty at the same moment, one gets it.
        with (out / "config.yaml").open("x", encoding="utf-8") as file:
            file.write(_yaml(experiment.to_json()))
    except FileExistsError:
        raise ConfigError(f"--out {out}: another run has just taken it; start again") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder you may write") from None
    return out


def compact_yaml(experiment: Experiment) -> str:
    """The resolved configuration, one paragraph per group of settings; still YAML."""
    lines = []
    for key, value in experiment.to_json().items():
        text = _yaml(value, flow_style=True) if isinstance(value, dict) else json.dumps(value)
        lines.append(f"{key}: {text.strip()}")
    return "\n".join(lines)


def _yaml(data: dict[str, Any], flow_style: bool = False) -> str:
    return str(
        yaml.safe_dump(
            data, sort_keys=False, default_flow_style=flow_style, allow_unicode=True, width=70
        )
    )
