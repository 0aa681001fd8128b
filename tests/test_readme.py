"""What README says is true: its files exist, its versions agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

import blend_core
from blend_core.config import DATASET_KINDS, Rule, parse_experiment
from blend_core.data.datasets import describe
from blend_core.report.reproductions import read_reproductions
from blend_core.settings import preset_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_linked_files_and_headings_exist():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert len(pages) > 4
    for page in pages:
        links = re.findall(r"\]\(([^):]*)\)", page.read_text())
        assert page.name != "README.md" or links
        for link in links:
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
                assert heading in anchors, (page.name, link)


def test_every_data_set_partition_finding_and_node_setting_is_documented():
    text = (ROOT / "docs" / "data.md").read_text()
    words = [f"`{kind}`" for kind in DATASET_KINDS] + [f"`{rule}`" for rule in get_args(Rule)]
    words += [
        f"| {kind}{n:02d} |" for kind, last in (("E", 13), ("W", 9)) for n in range(1, last + 1)
    ]
    words += ["data-dir", "holdout", "skip-bad", "strict", "prompt-template", "image-memory"]
    assert [word for word in words if word not in text] == []
    for kind in DATASET_KINDS:
        counts = describe(kind).counts
        row = next(line for line in text.splitlines() if line.startswith(f"| `{kind}` |"))
        assert all(f"{n:,}" in row for n in counts.values() if n), kind
        assert f"| {describe(kind).class_count:,} |" in row


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
