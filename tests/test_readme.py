"""What README says is true: its files exist, its versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import blend_core
from blend_core.config import parse_experiment
from blend_core.report.reproductions import read_reproductions
from blend_core.settings import preset_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_settings_it_names_are_settings():
    experiment = parse_experiment({}).to_json()
    for key in set(re.findall(r"--set ([a-z_.]+)=", README)) - {"key"}:
        value = experiment
        for part in key.split("."):
            assert part in value, key
            value = value[part]


def test_the_presets_grids_and_tables_it_names_exist():
    known = {
        "run": preset_names(),
        "sweep": preset_names("sweeps"),
        "reproduce": list(read_reproductions()),
    }
    for command, names in known.items():
        # Names of files are written in capitals.
        named = set(re.findall(rf"blend {command} +([a-z][a-z0-9_.-]*)", README))
        assert named, command
        assert named <= set(names), command


def test_package_and_project_have_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == blend_core.__version__
