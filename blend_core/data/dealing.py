"""From a data set and settings to a partition (PROTOCOL 2 and 3)."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blend_core.config import Experiment
from blend_core.data.fewshot import few_shot, items_by_class
from blend_core.data.manifest import Manifest, Part, split_sha256
from blend_core.data.partitions.coarse_label import coarse_label
from blend_core.data.partitions.dirichlet import Split, dirichlet
from blend_core.data.partitions.disjoint import disjoint
from blend_core.data.partitions.domains import domain_dirichlet
from blend_core.data.partitions.iid import iid_few_shot, iid_full, iid_overlapping
from blend_core.data.partitions.pachinko import pachinko
from blend_core.data.partitions.preferred import dirichlet_preferred
from blend_core.data.partitions.uniform_classes import uniform_classes
from blend_core.data.records import Dataset
from blend_core.data.resolved import Resolved, require_used, resolved, seen_and_new
from blend_core.errors import ConfigError

__all__ = ["deal"]

# Smallest number of training and of test images of a client of `dirichlet`.
LEAST = 10


def deal(dataset: Dataset, experiment: Experiment) -> Manifest:
    """Few-shot draw over all classes, then base classes only, then the partition (PROTOCOL 2).

    Raises:
        ConfigError: the rule does not fit the data set, a setting is of another rule, or a
            client would get nothing.
    """
    data, settings = experiment.data, resolved(experiment.data)
    require_used(data)
    labels = [record.label for record in dataset.train]
    chosen: Sequence[int] = range(len(labels))
    if settings.shots is not None and settings.rule != "iid-overlapping":
        chosen = few_shot(labels, settings.shots, experiment.fewshot_seed)
    seen = set(seen_and_new(dataset, data)[0])
    pool = [i for i in chosen if labels[i] in seen]
    test_pool = [i for i, record in enumerate(dataset.test) if record.label in seen]
    params = dict(settings.params)
    if settings.rule == "uniform-classes" and params["classes_per_client"] is None:
        classes = len({labels[i] for i in pool})
        params["classes_per_client"] = max(1, classes // (5 if classes <= 10 else 10))
    splits, held = _split(dataset, experiment, settings, params, pool, test_pool)
    parts = []
    for number, (train, test) in enumerate(splits):
        if not train:
            raise ConfigError(
                f"data.partition {settings.rule}: client {number} of {len(splits)} gets no "
                "training image; set fewer clients or more shots"
            )
        own = tuple(pool[i] for i in train)
        domains = {dataset.train[i].domain for i in own}
        parts.append(
            Part(
                id=number,
                domain=domains.pop() if len(domains) == 1 else None,
                train=own,
                test=None if held else tuple(test_pool[i] for i in test),
                classes=tuple(sorted({labels[i] for i in own})),
            )
        )
    return Manifest(
        dataset=dataset.kind,
        split_sha256=split_sha256(dataset),
        shots=settings.shots,
        subset=settings.subset,
        rule=settings.rule,
        params=params,
        fewshot_seed=experiment.fewshot_seed,
        partition_seed=experiment.partition_seed,
        class_names=dataset.names,
        clients=tuple(parts),
        versions={"python": platform.python_version(), "numpy": np.__version__},
    )


def _split(
    dataset: Dataset,
    experiment: Experiment,
    settings: Resolved,
    params: Mapping[str, Any],
    pool: Sequence[int],
    test_pool: Sequence[int],
) -> tuple[Sequence[Split], bool]:
    """Positions in the two pools per client; whether test images are those of its classes."""
    rule, shots = settings.rule, settings.shots
    clients, seed = experiment.clients, experiment.partition_seed
    train = [dataset.train[i] for i in pool]
    test = [dataset.test[i] for i in test_pool]
    labels, test_labels = [r.label for r in train], [r.label for r in test]
    most = shots or max((len(items) for items in items_by_class(labels).values()), default=0)

    def held(parts: Sequence[list[int]]) -> list[Split]:
        return [(part, []) for part in parts]

    if rule == "dirichlet-preferred":
        parts = dirichlet_preferred(labels, clients, most, params["alpha"], params["boost"], seed)
        return held(parts), True
    if rule == "disjoint":
        parts = disjoint(labels, clients, shots, seed, params["blocks"])
        return held(parts), True
    if rule == "iid-overlapping":
        if shots is None:
            raise ConfigError("data.partition iid-overlapping: draws shots; set data.shots")
        return held(iid_overlapping(labels, clients, shots, seed)), True
    if rule == "iid":
        if shots is not None:
            return held(iid_few_shot(labels, clients, seed)), True
        return iid_full(len(labels), len(test_labels), clients, seed), False
    if rule == "dirichlet":
        return dirichlet(labels, test_labels, clients, params["alpha"], LEAST, seed), False
    if rule == "uniform-classes":
        each = params["classes_per_client"]
        return uniform_classes(labels, test_labels, clients, each, seed, dataset.names), False
    if rule == "domain-dirichlet":
        if not dataset.domains:
            raise ConfigError(f"data.partition {rule}: {dataset.kind} has no domains")
        splits = domain_dirichlet(
            [(r.label, str(r.domain)) for r in train],
            [(r.label, str(r.domain)) for r in test],
            dataset.domains,
            clients,
            params["alpha"],
            seed,
        )
        return splits, False
    if dataset.coarse is None or shots is not None or settings.subset != "all":
        raise ConfigError(
            f"data.partition {rule}: needs coarse labels and all images, which only cifar100 with "
            "data.shots=0 has"
        )
    if rule == "coarse-label":
        return coarse_label(labels, test_labels, dataset.coarse, clients, seed), False
    return pachinko(labels, test_labels, dataset.coarse, clients, params["alpha"], seed), False
