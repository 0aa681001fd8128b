"""The built-in benchmark as a federation: rendered shapes, dealt by class, one style per client.

A client renders its own images only. Every image has a stream of its own, named by what it is,
so it is the same whichever and however many others are rendered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blend_core.config import Experiment
from blend_core.data.client_data import ClientData, Labelled
from blend_core.data.drawing import render_each
from blend_core.data.partitions.preferred import dirichlet_preferred
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
from blend_core.errors import ConfigError
from blend_core.randomness import derive_seed, numpy_generator

__all__ = ["client_style", "load_shapes", "shapes_classes", "shapes_partition"]


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
    if not 0 <= client_index < experiment.clients:
        raise ConfigError(
            f"client {client_index} does not exist: clients = {experiment.clients}, so partitions "
            f"are 0 to {experiment.clients - 1}"
        )
    data, seed = experiment.data, experiment.fewshot_seed
    base, new = shapes_classes(experiment)
    style = client_style(experiment, client_index)

    pool = [(label, number) for label in range(len(base)) for number in range(_shots(experiment))]
    part = [pool[position] for position in shapes_partition(experiment)[client_index]]
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


def shapes_partition(experiment: Experiment) -> list[list[int]]:
    """Per client, positions in the pool of base images (class by class, `data.shots` each).

    Raises:
        ConfigError: there are too few images for so many clients.
    """
    data = experiment.data
    base, _ = shapes_classes(experiment)
    labels = [label for label in range(len(base)) for _ in range(_shots(experiment))]
    alpha = 0.01 if data.alpha is None else data.alpha
    return dirichlet_preferred(
        labels,
        experiment.clients,
        _shots(experiment),
        alpha,
        data.boost,
        experiment.partition_seed,
    )


def _shots(experiment: Experiment) -> int:
    return 16 if experiment.data.shots is None else experiment.data.shots


def client_style(experiment: Experiment, client_index: int) -> Style:
    """The style of everything that one client photographs."""
    generator = numpy_generator(experiment.fewshot_seed, "shapes", "style", client_index)
    return style_around(SHIFTED, generator, experiment.data.style_spread)


def _render(combinations: list[Combination], style: Style, seeds: list[int]) -> list[Tensor]:
    """Render images of one style; each uint8, shape [3, 48, 48]."""
    pixels = render_each(combinations, [style] * len(combinations), seeds)
    return list(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().unbind())
