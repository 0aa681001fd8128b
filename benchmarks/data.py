"""What each part of the way from files to training batches saves, on made-up photos.

Every line compares two ways in this process, in turn, so that their ratio means something on a
noisy machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from blend_core.backbone import Backbone
from blend_core.config import BackboneConfig, TrainConfig
from blend_core.data.images import decode_image
from blend_core.data.prefetch import prefetched
from blend_core.data.store import GIB, ImageStore, load_images
from blend_core.data.transforms import Preprocess, augment, limit_size, normalise, resize_crops
from blend_core.methods import build_method
from blend_core.methods.blend import BlendConfig

BATCH = 16
CROP_SCALE = 0.08  # as in the papers
SIDES = (375, 500)  # height and width of a photo, as in many data sets
SIZE = 224  # of the input of ViT-B/16

Way = Callable[[], Iterable[Any]]


def measure(images: int, repeats: int) -> None:
    """Print milliseconds a batch of both ways of each comparison, and their ratio."""
    torch.set_num_threads(TrainConfig().threads)
    tiny = Backbone.load(BackboneConfig())
    big = replace(tiny.preprocess, size=SIZE)
    with tempfile.TemporaryDirectory(prefix="blend-data-") as folder:
        paths = _photos(Path(folder), images)

        def read(path: Path) -> Tensor:
            return limit_size(decode_image(path), big)

        kept, _ = load_images(paths, read, ImageStore(100 * GIB))
        filed, _ = load_images(paths, read, ImageStore(0, Path(folder)))
        step = _training_step(tiny)

        def again() -> Iterator[Tensor]:
            return _augmented([read(path) for path in paths], big)

        ways: dict[str, tuple[Way, Way]] = {
            f"crops of {SIZE}: decoded once, decoded in every epoch": (
                lambda: _augmented(kept, big),
                again,
            ),
            "images from memory, from a file beyond the budget": (
                lambda: (kept[i] for i in range(images)),
                lambda: (filed[i] for i in range(images)),
            ),
            **{
                f"crops of {pre.size} on the CPU: one by one, as a batch": _crop_ways(kept, pre)
                for pre in (tiny.preprocess, big)
            },
            "training the built-in model: a batch ahead, in turn": (
                lambda: map(step, prefetched(_augmented(kept, tiny.preprocess))),
                lambda: map(step, _augmented(kept, tiny.preprocess)),
            ),
            "the same with photos from a file": (
                lambda: map(step, prefetched(_augmented(filed, tiny.preprocess))),
                lambda: map(step, _augmented(filed, tiny.preprocess)),
            ),
        }
        console = Console(highlight=False, soft_wrap=True)
        for what, pair in ways.items():
            first, second = _medians(pair, repeats, -(-images // BATCH))
            ratio = f"ratio {second / first:.2f}"
            console.print(f"{what}: {first:.1f} and {second:.1f} ms a batch, {ratio}")
    console.print(
        f"{images} photos of {SIDES[1]} x {SIDES[0]}, batch {BATCH}, "
        f"{torch.get_num_threads()} threads, median of {repeats}"
    )


def _crop_ways(images: Sequence[Tensor], pre: Preprocess) -> tuple[Way, Way]:
    def one_by_one() -> Iterator[Tensor]:
        return (augment(batch, pre, 1 - 1e-9, 0, _draws()) for batch in _cut(images))

    def as_a_batch() -> Iterator[Tensor]:
        return (resize_crops(batch, pre, "cpu") for batch in _cut(images))

    return one_by_one, as_a_batch


def _medians(ways: Sequence[Way], repeats: int, batches: int) -> list[float]:
    """Milliseconds a batch of each way; the first pass, which warms up, does not count."""
    taken: list[list[float]] = [[] for _ in ways]
    for repeat in range(repeats + 1):
        for way, seconds in zip(ways, taken, strict=True):
            start = time.perf_counter()
            for _ in way():
                pass
            if repeat:
                seconds.append(time.perf_counter() - start)
    return [1000 * statistics.median(seconds) / batches for seconds in taken]


def _photos(folder: Path, count: int) -> list[Path]:
    """JPEG files as smooth and as noisy as photos are."""
    draw = np.random.default_rng(0)
    height, width = SIDES
    for number in range(count):
        coarse = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(
            coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16
        )
        noisy = smooth + draw.integers(-12, 13, smooth.shape, dtype=np.int16)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg")
    return [folder / f"{number}.jpg" for number in range(count)]


def _draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _cut(images: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    for start in range(0, len(images), BATCH):
        yield [images[i] for i in range(start, min(start + BATCH, len(images)))]


def _augmented(images: Sequence[Tensor], pre: Preprocess) -> Iterator[Tensor]:
    draws = _draws()
    for batch in _cut(images):
        yield augment(batch, pre, CROP_SCALE, 0.5, draws)


def _training_step(backbone: Backbone) -> Callable[[Tensor], None]:
    """A step of BLEND on the built-in model with twenty classes."""
    method = build_method(BlendConfig(name="blend", projection_rank=64), backbone, 0)
    prompts = method.tokenize([f"thing number {n}" for n in range(20)], "a photo of a {}.")
    trained = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step(pixels: Tensor) -> None:
        labels = torch.arange(len(pixels)) % 20
        images = normalise(pixels, backbone.preprocess, backbone.device)
        optimizer.zero_grad()
        method.loss(images, labels, prompts)["loss"].backward()
        optimizer.step()

    return step
