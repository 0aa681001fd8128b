"""The grid of a sweep: a base experiment, seeds, and small grids of settings over it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from blend_core.errors import BlendError, ConfigError, error_from_code, one_line
from blend_core.report.labels import differing, settings_label
from deploy.check import check

if TYPE_CHECKING:
    from blend_core.config import Experiment

KEYS = ("base", "set", "seeds", "cells")
MAX_RUNS = 10_000
METHOD = "method.name"
SLUG_LENGTH = 48
_SINGLE = "write single settings with dots, e.g. train.lr"


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        settings: (dotted key, value) over the base, without the seed; lists become tuples.
        seed: the run's seed.
    """

    settings: tuple[tuple[str, Any], ...]
    seed: int

    def __post_init__(self) -> None:
        """Make the cell hashable.

        Raises:
            ConfigError: a value is a mapping or a set, or holds one.
        """
        for key, value in self.settings:
            if _grouped(value):
                raise ConfigError(f"{key}: {_SINGLE}")
        frozen = tuple((key, _frozen(value)) for key, value in self.settings)
        object.__setattr__(self, "settings", frozen)

    @property
    def label(self) -> str:
        """The method and every setting; `labels` names only what tells cells apart."""
        return _label(self.settings, [key for key, _ in self.settings])

    @property
    def folder(self) -> str:
        """A readable and safe folder name, the same for equal settings in whatever order."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.label)[:SLUG_LENGTH].strip("-.")
        content = json.dumps(dict(self.settings), sort_keys=True, default=str)
        return f"{slug}-{hashlib.sha256(content.encode()).hexdigest()[:8]}".lstrip("-")

    @property
    def overrides(self) -> list[str]:
        """Settings and seed as `load_experiment` takes them; JSON is YAML."""
        return [f"{key}={_json(value)}" for key, value in (*self.settings, ("seed", self.seed))]


@dataclass(frozen=True)
class Sweep:
    """Cells over one base.

    Attributes:
        base: name of a preset or path of a YAML file of settings.
        cells: all different.
    """

    base: str
    cells: tuple[Cell, ...]


def read_grid(source: str) -> Sweep:
    """Read a grid and multiply it out: the cells of each entry, and for each its seeds.

    Every cell names its method, be it the base's. What its settings mean is not looked at here.

    Args:
        source: name of a grid that comes with the package, or path of a YAML file.

    Raises:
        ConfigError: one line that names the place in the grid.
    """
    from blend_core.settings import read_yaml

    data = read_yaml(source, "sweeps")
    if unknown := [key for key in data if key not in KEYS]:
        raise ConfigError(f"{source}: {unknown[0]}: unknown key; known: {', '.join(KEYS)}")
    base = data.get("base", "quickstart")
    if not isinstance(base, str):
        raise ConfigError(f"{source}: base = {_json(base)}: name a preset or a YAML file")
    common = _settings(data.get("set", {}), f"{source}: set")
    common = {METHOD: _method_of(read_yaml(base)), **common}
    seeds = _seeds(data.get("seeds"), f"{source}: seeds")
    entries = data.get("cells")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{source}: cells: give a list of small grids, e.g. '- train.lr: [...]'")
    places = [f"{source}: cells, entry {number}" for number, _ in enumerate(entries, 1)]
    counts = (_count(_settings(e, p), p) for e, p in zip(entries, places, strict=True))
    _few(sum(counts) * len(seeds), source)
    cells: list[Cell] = []
    entry_of: dict[tuple[Any, int], int] = {}
    for number, (entry, place) in enumerate(zip(entries, places, strict=True), 1):
        for chosen in _combinations(entry):
            settings = {METHOD: common[METHOD], **chosen}
            settings |= {key: value for key, value in common.items() if key not in settings}
            for seed in seeds:
                cell = Cell(tuple(settings.items()), seed)
                identity = frozenset(cell.settings), seed  # whatever the order of settings
                if identity in entry_of:
                    earlier = entry_of[identity]
                    raise ConfigError(f"{place}: {cell.label}: already in entry {earlier}")
                entry_of[identity] = number
                cells.append(cell)
    return Sweep(base, tuple(cells))


def narrowed(sweep: Sweep, seeds: Sequence[int] | None, methods: Sequence[str]) -> Sweep:
    """The cells of some methods, with other seeds.

    Args:
        sweep: all cells.
        seeds: instead of the grid's; None: those of the grid.
        methods: names of the methods to keep; empty: all.

    Raises:
        ConfigError: the grid has no cell of one of these methods.
    """
    known = list(dict.fromkeys(_method(cell) for cell in sweep.cells))
    for name in methods:
        if name not in known:
            raise ConfigError(f"--only {name}: not in this grid; its methods: {', '.join(known)}")
    cells = [cell for cell in sweep.cells if not methods or _method(cell) in methods]
    if seeds is not None:
        different = dict.fromkeys(cell.settings for cell in cells)
        _few(len(different) * len(seeds), "--seeds")
        cells = [Cell(settings, seed) for settings in different for seed in seeds]
    return Sweep(sweep.base, tuple(cells))


def resolve(sweep: Sweep) -> dict[Cell, Experiment]:
    """The experiment of every cell, checked as far as it can be without running it.

    Raises:
        ConfigError: what is wrong with which cells; one line per mistake.
        SiteError: the same, if nothing but images is missing.
    """
    from blend_core.settings import load_experiment

    names = labels(sweep.cells)
    found: dict[Cell, Experiment] = {}
    first: dict[str, Cell] = {}
    checked: set[Any] = set()
    wrong: dict[str, list[str]] = {}
    codes: set[int] = set()
    for cell in sweep.cells:
        try:
            found[cell] = load_experiment(sweep.base, cell.overrides)
            if cell.settings not in checked:  # Seeds make no difference to what fits together.
                check(found[cell])
            same = json.dumps(found[cell].to_json(), sort_keys=True)
            if (twin := first.setdefault(same, cell)) is not cell:
                raise ConfigError(
                    f"the same experiment as {names[twin]}, in other words; leave one out"
                )
        except BlendError as error:
            wrong.setdefault(str(error), []).append(names[cell])
            codes.add(error.exit_code)
        checked.add(cell.settings)
    if wrong:
        lines = [f"{_listed(cells)}: {message}" for message, cells in wrong.items()]
        # Missing images are no mistake in the settings.
        code = codes.pop() if len(codes) == 1 else ConfigError.exit_code
        raise error_from_code("\n       ".join(lines), code)
    return found


def labels(cells: Sequence[Cell]) -> dict[Cell, str]:
    """Short names: the method, and the settings in which cells of the same method differ."""
    of_method: dict[Any, list[dict[str, Any]]] = {}
    for settings in {cell.settings: dict(cell.settings) for cell in cells}.values():
        of_method.setdefault(settings.get(METHOD), []).append(settings)
    telling = {method: set(differing(rivals)) for method, rivals in of_method.items()}
    found = {}
    for cell in cells:
        shown = telling[dict(cell.settings).get(METHOD)]
        found[cell] = _label(cell.settings, [key for key, _ in cell.settings if key in shown])
    return found


def _label(settings: Sequence[tuple[str, Any]], shown: Sequence[str]) -> str:
    """E.g. "blend gamma=0.2"."""
    given = dict(settings)
    method = _text(given[METHOD]) if METHOD in given else ""
    rest = settings_label(given, [key for key in shown if key != METHOD], _text)
    return f"{method} {rest}".strip() or "base"


def _count(settings: Mapping[str, Any], place: str) -> int:
    """How many combinations there are."""
    for key, value in settings.items():
        if value == []:
            raise ConfigError(f"{place}: {key}: empty list; give at least one value")
    return math.prod(len(_choices(value)) for value in settings.values())


def _few(runs: int, place: str) -> None:
    if runs > MAX_RUNS:
        raise ConfigError(f"{place}: {runs:,} runs; a sweep has at most {MAX_RUNS:,}")


def _combinations(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All choices of one value per key."""
    choices = map(_choices, settings.values())
    return [dict(zip(settings, values, strict=True)) for values in product(*choices)]


def _choices(value: Any) -> list[Any]:
    """The values of a list; one that is no list is the only choice."""
    return value if isinstance(value, list) else [value]


def _settings(data: Any, place: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{place}: expected settings such as 'train.lr: 0.001'")
    for key, value in data.items():
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{place}: {_json(key)}: expected a setting such as train.lr")
        if key == "seed":
            raise ConfigError(f"{place}: seed: the seeds of all cells belong under 'seeds'")
        # A group would silently replace the base's whole group.
        if _grouped(value):
            raise ConfigError(f"{place}: {key}: {_SINGLE}")
    return data


def _seeds(data: Any, place: str) -> list[int]:
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{place}: give a list of seeds, e.g. [0, 1, 2]")
    _few(len(data), place)
    for seed in data:
        if type(seed) is not int or seed < 0:
            raise ConfigError(f"{place}: {_json(seed)}: a seed is a whole number from 0")
        if data.count(seed) > 1:
            raise ConfigError(f"{place}: {seed} is given twice")
    return data


def _method_of(base: Mapping[str, Any]) -> str:
    """Name of the method that a file of settings chooses; the schema judges the file later."""
    method = base.get("method")
    name = method.get("name") if isinstance(method, dict) else None
    return name if isinstance(name, str) else "blend"


def _method(cell: Cell) -> str:
    return _text(dict(cell.settings)[METHOD])


def _listed(names: Sequence[str], limit: int = 3) -> str:
    different = list(dict.fromkeys(names))
    rest = len(different) - limit
    return ", ".join(different[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _grouped(value: Any) -> bool:
    """Whether a value is, or holds, a mapping or a set, or holds itself (a YAML alias)."""
    try:
        listed = isinstance(value, list | tuple)
        return any(map(_grouped, value)) if listed else isinstance(value, dict | set)
    except RecursionError:
        return True


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    return one_line(value if isinstance(value, str) else _json(value))


def _json(value: Any) -> str:
    # Dates, which YAML knows, have no place in settings; as a text they are refused by name.
    return json.dumps(value, ensure_ascii=False, default=str)
