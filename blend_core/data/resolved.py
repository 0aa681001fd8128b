"""What holds for a kind of data where its settings are left unset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blend_core.config import DataConfig
from blend_core.data.datasets import describe
from blend_core.data.fewshot import split_base_new
from blend_core.data.records import Dataset

__all__ = ["Resolved", "resolved", "seen_and_new"]


@dataclass(frozen=True)
class Resolved:
    """Settings that depend on the kind of data where the user leaves them unset.

    Attributes:
        shots: training images per class in the federation; None: all.
        subset: train on the first half of the classes ("base") or on all.
        rule: of the partition.
        alpha: Dirichlet concentration.
    """

    shots: int | None
    subset: Literal["base", "all"]
    rule: str
    alpha: float


def resolved(data: DataConfig) -> Resolved:
    """What holds for the kind of data, as the help texts of the settings say."""
    description = None if data.kind in ("shapes", "folders") else describe(data.kind)
    few = description is None or description.base_new
    usual = "dirichlet-preferred" if few else "dirichlet"
    if description is not None and description.domains:
        usual = "domain-dirichlet"
    rule = data.partition or usual
    alpha = {"dirichlet-preferred": 0.01, "domain-dirichlet": 0.5}.get(rule, 0.3)
    shots = data.shots if data.shots is not None else (16 if few else 0)
    return Resolved(
        shots or None,
        data.subset or ("base" if few else "all"),
        rule,
        alpha if data.alpha is None else data.alpha,
    )


def seen_and_new(dataset: Dataset, data: DataConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Labels of the classes that are trained on, and of those that are only measured."""
    labels = range(len(dataset.names))
    if resolved(data).subset == "all":
        return tuple(labels), ()
    split = split_base_new(labels)
    return split.base, split.new
