"""What holds for a kind of data where its settings are left unset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blend_core.config import DataConfig
from blend_core.data.datasets import describe
from blend_core.data.fewshot import split_base_new
from blend_core.data.records import Dataset
from blend_core.errors import ConfigError

__all__ = ["RULE_SETTINGS", "Resolved", "require_used", "resolved", "seen_and_new"]

# Which settings each partition rule reads; the others read none.
RULE_SETTINGS: dict[str, tuple[str, ...]] = {
    "dirichlet-preferred": ("alpha", "boost"),
    "disjoint": ("blocks",),
    "dirichlet": ("alpha",),
    "pachinko": ("alpha",),
    "domain-dirichlet": ("alpha",),
    "uniform-classes": ("classes_per_client",),
}
_ALPHA = {"dirichlet-preferred": 0.01, "domain-dirichlet": 0.5, "dirichlet": 0.3, "pachinko": 0.3}


@dataclass(frozen=True)
class Resolved:
    """Settings that depend on the kind of data where the user leaves them unset.

    Attributes:
        shots: training images per class in the federation; None: all.
        subset: train on the first half of the classes ("base") or on all.
        rule: of the partition.
        params: what the rule reads, by name of the setting.
    """

    shots: int | None
    subset: Literal["base", "all"]
    rule: str
    params: Mapping[str, Any]


def resolved(data: DataConfig) -> Resolved:
    """What holds for the kind of data, as the help texts of the settings say."""
    description = None if data.kind in ("shapes", "folders") else describe(data.kind)
    few = description is None or description.base_new
    usual = "dirichlet-preferred" if few else "dirichlet"
    if description is not None and description.domains:
        usual = "domain-dirichlet"
    rule = data.partition or usual
    params = {name: getattr(data, name) for name in RULE_SETTINGS.get(rule, ())}
    if "alpha" in params and data.alpha is None:
        params["alpha"] = _ALPHA[rule]
    shots = data.shots if data.shots is not None else (16 if few else 0)
    return Resolved(shots or None, data.subset or ("base" if few else "all"), rule, params)


def require_used(data: DataConfig) -> None:
    """Refuse settings of other partition rules, which would change nothing.

    Raises:
        ConfigError: names the setting and the rules that read it.
    """
    rule = resolved(data).rule
    for name in sorted({name for names in RULE_SETTINGS.values() for name in names}):
        value, unset = getattr(data, name), DataConfig.model_fields[name].default
        if name not in RULE_SETTINGS.get(rule, ()) and value != unset:
            readers = " or ".join(r for r, names in RULE_SETTINGS.items() if name in names)
            raise ConfigError(
                f"data.{name} = {value}: data.partition {rule} does not read it, only {readers} "
                f"does; leave it out, or choose that rule"
            )


def seen_and_new(dataset: Dataset, data: DataConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Labels of the classes that are trained on, and of those that are only measured.

    With subset "base" the first are the labels 0 to ceil(n/2) - 1, the second those from there to
    n - 1 (PROTOCOL 2); n is the number of the data set's names. The rule of the papers' code
    counts the labels that the training list has, which is the same where every class has training
    images. Where one has none, the names alone keep the halves as they are defined (P30).

    Returns:
        Two ascending tuples; the second is empty with subset "all".
    """
    labels = range(len(dataset.names))
    if resolved(data).subset == "all":
        return tuple(labels), ()
    split = split_base_new(labels)
    return split.base, split.new
