"""Which runs make which table of the papers; the data is in `assets/reproductions.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from itertools import product
from typing import Any

import yaml

from blend_core.errors import ConfigError

Settings = Mapping[str, Any]

# The pseudo-dataset of `--on shapes`.
SHAPES = "shapes"

# Where a setting comes from, in words.
SOURCES = {
    "document": "stated in the paper",
    "code": "from the released code, the paper is silent",
    "choice": "chosen here",
    "on_shapes": "for the tiny model, over the quickstart",
}
# What a run must agree with for its numbers to stand beside the paper's.
_BINDING = ("document", "code")


@dataclass(frozen=True)
class Choices:
    """Settings by their source, and why the paper's numbers may be no exact target."""

    document: Settings = field(default_factory=dict)
    code: Settings = field(default_factory=dict)
    choice: Settings = field(default_factory=dict)
    on_shapes: Settings = field(default_factory=dict)
    remarks: Sequence[str] = ()

    def merged(self, on_shapes: bool) -> dict[str, Any]:
        """All settings that apply there."""
        if on_shapes:
            return dict(self.on_shapes)
        return {**self.document, **self.code, **self.choice}

    def by_source(self, on_shapes: bool) -> list[tuple[str, Settings]]:
        """(source, settings) of the sources that say something there."""
        names = ("on_shapes",) if on_shapes else ("document", "code", "choice")
        return [(name, settings) for name in names if (settings := getattr(self, name))]


@dataclass(frozen=True)
class Protocol:
    """What the runs of a table have in common.

    Attributes:
        common: settings of all runs.
        methods: name of a method -> settings of its runs.
        conflicts: where paper ("document") and released code disagree: "item", and "here".
    """

    common: Choices
    methods: Mapping[str, Choices]
    conflicts: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class TableRow:
    """One line of a table.

    Attributes:
        name: key in the paper's numbers.
        label: as shown.
        method: `method.name`.
        set: the settings that make the row what it is.
        on_shapes: what stands instead on the built-in benchmark.
        paper: whether the paper prints it.
        measured: "final", or "zero_shot" for what the same runs measured before training.
        measured_as: printed metric -> the metric of ours that it is.
        remarks: why the printed numbers are no exact target.
    """

    name: str
    label: str
    method: str
    set: Settings = field(default_factory=dict)
    on_shapes: Settings = field(default_factory=dict)
    paper: bool = True
    measured: str = "final"
    measured_as: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, and how to make it.

    Attributes:
        notes, notes_on_shapes: what a reader should know; the latter on the built-in benchmark.
        cells, mean, std: dotted paths into the paper's numbers, with {dataset} and {row}; None:
            not printed.
    """

    name: str
    title: str
    protocol: Protocol
    datasets: Mapping[str, Choices]
    metrics: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: Sequence[str]
    notes_on_shapes: Sequence[str] = ()
    cells: str | None = None
    mean: str | None = None
    std: str | None = None

    @cached_property
    def varied(self) -> set[str]:
        """Settings that the table itself varies."""
        return {"seed", "method.name", "data.kind"}.union(*(row.set for row in self.rows))

    @cached_property
    def methods(self) -> list[str]:
        """Names of the methods in the order of the rows."""
        return list(dict.fromkeys(row.method for row in self.rows))


@dataclass(frozen=True)
class Planned:
    """The runs of one row on one dataset, seed apart.

    Attributes:
        settings: dotted settings over the base preset.
        binding: the part of the settings that is the paper's or its code's.
    """

    dataset: str
    row: TableRow
    settings: Settings
    binding: Settings


@dataclass(frozen=True)
class Plan:
    """A table as it is to be made.

    Attributes:
        table: which.
        planned: the rows on the datasets, in the order of datasets.
        seeds: of every run.
        on_shapes: on the built-in benchmark instead of the paper's datasets.
        given: dotted settings of the user.
    """

    table: PaperTable
    planned: Sequence[Planned]
    seeds: Sequence[int]
    on_shapes: bool
    given: Settings

    @cached_property
    def datasets(self) -> list[str]:
        """Names of the datasets."""
        return list(dict.fromkeys(work.dataset for work in self.planned))


def read_reproductions() -> dict[str, PaperTable]:
    """All tables that can be made, by name."""
    file = resources.files("blend_core") / "assets" / "reproductions.yaml"
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    protocols = {name: _protocol(**entry) for name, entry in data["protocols"].items()}
    return {name: _table(name, protocols, **entry) for name, entry in data["tables"].items()}


def plan(
    table: PaperTable,
    datasets: Sequence[str] | None,
    seeds: Sequence[int],
    on_shapes: bool,
    given: Settings,
) -> Plan:
    """All rows on all datasets.

    Later settings win: those of all runs, of the dataset, of the method, of the row, given ones.

    Args:
        table: which.
        datasets: some of the table's; None: all.
        seeds: of every run.
        on_shapes: on the built-in benchmark instead.
        given: dotted settings of the user.

    Raises:
        ConfigError: unknown dataset, or a given setting that the table varies.
    """
    known = {SHAPES: Choices()} if on_shapes else table.datasets
    for dataset in datasets or ():
        if dataset not in known:
            where = "--on shapes" if on_shapes else table.name
            raise ConfigError(f"--datasets {dataset}: not in {where}; known: {', '.join(known)}")
    for key in given:
        if key in table.varied:
            hint = "; use --seeds" if key == "seed" else ""
            raise ConfigError(f"--set {key}: varied by {table.name}{hint}")
    planned = []
    for dataset in known if datasets is None else datasets:
        for row in table.rows:
            method = table.protocol.methods.get(row.method, Choices())
            scopes = (table.protocol.common, known[dataset], method)
            settings: dict[str, Any] = {"data.kind": dataset, "method.name": row.method}
            binding: dict[str, Any] = {}
            for scope in scopes:
                settings |= scope.merged(on_shapes)
                for source in _BINDING:
                    binding |= getattr(scope, source)
                # A choice replaces what the paper says of its own method.
                binding = {k: v for k, v in binding.items() if k not in scope.choice}
            settings |= {**row.set, **(row.on_shapes if on_shapes else {}), **given}
            planned.append(Planned(dataset, row, settings, {**binding, **row.set}))
    return Plan(table, planned, seeds, on_shapes, given)


def _protocol(
    methods: Mapping[str, Any],
    conflicts: Sequence[Mapping[str, str]],
    **common: Any,
) -> Protocol:
    named = {name: Choices(**entry) for name, entry in methods.items()}
    return Protocol(Choices(**common), named, conflicts)


def _table(
    name: str,
    protocols: Mapping[str, Protocol],
    *,
    protocol: str,
    datasets: Mapping[str, Any],
    metrics: Sequence[str],
    rows: Mapping[str, Any],
    grid: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    **rest: Any,
) -> PaperTable:
    listed = [TableRow(key, **entry) for key, entry in rows.items()]
    return PaperTable(
        name=name,
        protocol=protocols[protocol],
        datasets={key: Choices(**entry) for key, entry in datasets.items()},
        metrics=tuple(metrics),
        rows=(*listed, *(_grid_rows(**grid) if grid else ())),
        notes=notes,
        **rest,
    )


def _grid_rows(method: str, label: str, set: Mapping[str, Sequence[Any]]) -> list[TableRow]:
    """A row that no paper prints for each combination of the listed values."""
    labelled = [(label.format(*values), values) for values in product(*set.values())]
    return [
        TableRow(text, text, method, dict(zip(set, values, strict=True)), paper=False)
        for text, values in labelled
    ]
