"""The built-in benchmark as a federation: rendered shapes, dealt by class, one style per client.

A client renders its own images only. Every image has a stream of its own, named by what it is,
so it is the same whichever and however many others are rendered.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from blend_core.config import Experiment
from blend_core.data.client_data import ClientData, Labelled, Origin
from blend_core.data.dealing import deal
from blend_core.data.drawing import render_each
from blend_core.data.records import Dataset, Record
from blend_core.data.resolved import resolved
from blend_core.data.shapes import (
    ALL_COMBINATIONS,
    SHIFTED,
    Combination,
    Style,
    benchmark_classes,
    held_out,
    style_around,
)
from blend_core.data.transforms import Preprocess, limit_size, prepare_test
from blend_core.randomness import derive_seed, numpy_generator

__all__ = ["client_style", "load_shapes", "shapes_classes", "shapes_dataset"]


def load_shapes(experiment: Experiment, client_index: int, pre: Preprocess) -> ClientData:
    """Render one client's part of the benchmark.

    Training images are its part of `data.shots` images per base class over the whole federation.
    Test images are its own: `data.test_per_class` of every base and of every new class. All are
    in the client's style.

    Args:
        experiment: with `data.kind` shapes.
        client_index: 0 .. `experiment.clients` - 1.
        pre: the backbone's preprocessing; the rendered 48 x 48 images are resized to its size.

    Raises:
        ConfigError: there is no such client, or there are too few images for so many clients.
    """
    dataset = shapes_dataset(experiment)
    manifest = deal(dataset, experiment)
    records = [dataset.train[position] for position in manifest.part(client_index).train]
    data, seed = experiment.data, experiment.fewshot_seed
    base, new = shapes_classes(experiment)
    style = client_style(experiment, client_index)

    part = [(record.label, int(record.path.rpartition("/")[2])) for record in records]
    train = _render(
        [base[label] for label, _ in part],
        style,
        # Named by class and number alone: whom an image is dealt to changes its style, not it.
        [derive_seed(seed, "shapes", "train", base[label].name, number) for label, number in part],
    )

    def test_set(classes: tuple[Combination, ...]) -> Labelled:
        items = [(k, number) for k in range(len(classes)) for number in range(data.test_per_class)]
        seeds = [
            derive_seed(seed, "shapes", "test", client_index, classes[k].name, number)
            for k, number in items
        ]
        images = _render([classes[k] for k, _ in items], style, seeds)
        return Labelled.of([prepare_test(image, pre) for image in images], [k for k, _ in items])

    return ClientData(
        base_names=tuple(combination.name for combination in base),
        new_names=tuple(combination.name for combination in new),
        train=Labelled.of([limit_size(image, pre) for image in train], [k for k, _ in part]),
        test_base=test_set(base),
        test_new=test_set(new),
        origin=Origin(manifest.sha256()),
    )


def shapes_classes(
    experiment: Experiment,
) -> tuple[tuple[Combination, ...], tuple[Combination, ...]]:
    """Base and new classes of `data.split`, 20 each.

    In the development split nobody trains on the new ones, either, but the tiny CLIP has seen
    them in its pre-training: all 20 combinations that are left of the held-out ones are needed as
    base, so that sizes are those of the benchmark.
    """
    classes = benchmark_classes()
    if experiment.data.split == "benchmark":
        return classes.base, classes.new
    seen = sorted(set(ALL_COMBINATIONS) - set(held_out()), key=ALL_COMBINATIONS.index)
    chosen = numpy_generator(0, "shapes", "development").choice(len(seen), 20, replace=False)
    return classes.development, tuple(seen[index] for index in chosen)


def shapes_dataset(experiment: Experiment) -> Dataset:
    """The benchmark's images by name, as if they lay in files: `data.shots` of each base class to
    train on, `data.test_per_class` of each class to test on.

    Every client renders the test images in its own style, hence others with the same names.
    """
    base, new = shapes_classes(experiment)
    names = tuple(combination.name for combination in (*base, *new))
    data = experiment.data

    def records(part: str, classes: int, each: int | None) -> tuple[Record, ...]:
        return tuple(
            Record(f"shapes/{part}/{names[label]}/{number}", label, names[label])
            for label in range(classes)
            for number in range(each or 0)
        )

    return Dataset(
        kind="shapes",
        names=names,
        train=records("train", len(base), resolved(data).shots),
        val=(),
        test=records("test", len(names), data.test_per_class),
        sources={"shapes": hashlib.sha256(json.dumps(names).encode()).hexdigest()},
    )


def client_style(experiment: Experiment, client_index: int) -> Style:
    """The style of everything that one client photographs."""
    generator = numpy_generator(experiment.fewshot_seed, "shapes", "style", client_index)
    return style_around(SHIFTED, generator, experiment.data.style_spread)


def _render(combinations: list[Combination], style: Style, seeds: list[int]) -> list[Tensor]:
    """Render images of one style; each uint8, shape [3, 48, 48]."""
    pixels = render_each(combinations, [style] * len(combinations), seeds)
    return list(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().unbind())
