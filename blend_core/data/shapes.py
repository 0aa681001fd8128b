"""The classes and styles of the built-in benchmark: coloured, filled outlines.

A class is a combination of one colour, one fill and one outline ("red striped star"); there are
10 x 5 x 12 = 600 of them. Sixty are held out of the pre-training of the packaged model and are
the classes of the benchmark. A `Style` describes how a client's camera distorts its pictures.

All randomness comes from the generators that the caller passes in, or from private ones with a
fixed seed (the splits). `drawing` makes the pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np

__all__ = [
    "ALL_COMBINATIONS",
    "CLEAN",
    "COLOURS",
    "FILLS",
    "IMAGE_SIZE",
    "OUTLINES",
    "SHIFTED",
    "BenchmarkClasses",
    "Combination",
    "Style",
    "benchmark_classes",
    "held_out",
    "style_around",
]

IMAGE_SIZE = 48
"""Height and width of every image, in pixels."""

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.10, 0.12),
    "orange": (0.98, 0.52, 0.08),
    "yellow": (0.97, 0.90, 0.15),
    "green": (0.12, 0.62, 0.20),
    "cyan": (0.15, 0.83, 0.88),
    "blue": (0.12, 0.25, 0.85),
    "purple": (0.50, 0.15, 0.68),
    "pink": (0.98, 0.55, 0.75),
    "black": (0.05, 0.05, 0.06),
    "white": (0.97, 0.97, 0.96),
}
"""Red, green, blue of each colour name, in 0..1."""

FILLS = ("plain", "striped", "dotted", "checkered", "hollow")
OUTLINES = (
    "circle",
    "square",
    "triangle",
    "star",
    "cross",
    "heart",
    "diamond",
    "hexagon",
    "moon",
    "arrow",
    "flower",
    "bolt",
)


@dataclass(frozen=True)
class Combination:
    """One class: a key of `COLOURS`, one of `FILLS` and one of `OUTLINES`."""

    colour: str
    fill: str
    outline: str

    @property
    def name(self) -> str:
        """The class name as it goes into a caption, such as "red striped star"."""
        return f"{self.colour} {self.fill} {self.outline}"


ALL_COMBINATIONS: tuple[Combination, ...] = tuple(
    Combination(colour, fill, outline)
    for colour, fill, outline in product(COLOURS, FILLS, OUTLINES)
)
"""All 600 classes; the outline varies fastest, the colour slowest."""


@dataclass(frozen=True)
class BenchmarkClasses:
    """The benchmark's three disjoint sets of 20 classes, each in a fixed order."""

    base: tuple[Combination, ...]
    new: tuple[Combination, ...]
    development: tuple[Combination, ...]


@lru_cache(maxsize=1)
def _held_out_groups() -> tuple[tuple[Combination, ...], ...]:
    """Three groups of 20 combinations.

    There is one combination for each of the 12 x 5 pairs of outline and fill. Its colour comes
    from a Latin-square rule, which gives every colour exactly six combinations and every outline
    five different colours; the group comes from a like rule: four of each fill, one or two of
    each outline and one to three of each colour. Shuffles hide the regularity.
    """
    private = np.random.default_rng(20240607)
    outlines, fills = private.permutation(OUTLINES).tolist(), private.permutation(FILLS).tolist()
    colours = private.permutation(list(COLOURS)).tolist()
    groups: list[list[Combination]] = [[], [], []]
    for (i, outline), (j, fill) in product(enumerate(outlines), enumerate(fills)):
        groups[(i + j) % 3].append(Combination(colours[(i + 2 * j) % 10], fill, outline))
    return tuple(tuple(group[k] for k in private.permutation(20)) for group in groups)


def held_out() -> tuple[Combination, ...]:
    """The 60 combinations that pre-training never sees, in the order of `ALL_COMBINATIONS`.

    Each outline occurs 5 times among them, each colour 6 times and each fill 12 times; that
    leaves 45, 54 and 108 occurrences among the remaining 540.
    """
    chosen = {combination for group in _held_out_groups() for combination in group}
    return tuple(combination for combination in ALL_COMBINATIONS if combination in chosen)


def benchmark_classes() -> BenchmarkClasses:
    """The fixed split of `held_out()` into base, new and development classes, 20 each.

    Development classes are for choosing hyper-parameters; the other two only for measuring.
    """
    return BenchmarkClasses(*_held_out_groups())


@dataclass(frozen=True)
class Style:
    """How pictures are distorted; the defaults distort nothing but the usual rotation jitter.

    Applied in the order hue, gain, contrast and brightness, blur, noise.

    Attributes:
        rotation: systematic rotation of every outline, degrees, -180..180.
        jitter: half-width of each image's own random rotation around it, degrees, 0..180.
        hue: rotation of all colours about the grey axis, degrees, -180..180.
        gain: factors on red, green and blue (a colour cast), each 0.2..2.
        contrast: factor on the distance from mid-grey, 0.1..1.5; below 1 washes out.
        brightness: added to every channel after that, -0.5..0.5.
        blur: standard deviation of a Gaussian blur, pixels, 0..4.
        noise: standard deviation of independent noise per channel, 0..0.5 of full scale.

    Raises:
        ValueError: a field is outside its range.
    """

    rotation: float = 0.0
    jitter: float = 12.0
    hue: float = 0.0
    gain: tuple[float, float, float] = (1.0, 1.0, 1.0)
    contrast: float = 1.0
    brightness: float = 0.0
    blur: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for field, (low, high) in _RANGES.items():
            for value in np.atleast_1d(getattr(self, field)):
                if not low <= value <= high:
                    raise ValueError(f"Style.{field} must be in {low}..{high}, not {value}")


_RANGES: dict[str, tuple[float, float]] = {
    "rotation": (-180.0, 180.0),
    "jitter": (0.0, 180.0),
    "hue": (-180.0, 180.0),
    "gain": (0.2, 2.0),
    "contrast": (0.1, 1.5),
    "brightness": (-0.5, 0.5),
    "blur": (0.0, 4.0),
    "noise": (0.0, 0.5),
}

CLEAN = Style()
"""The style of pre-training (which adds mild variation) and of the easy end of the benchmark."""

SHIFTED = Style(
    rotation=16.0,
    hue=22.0,
    gain=(1.12, 0.94, 0.75),
    contrast=0.5,
    brightness=0.06,
    blur=1.0,
    noise=0.03,
)
"""The benchmark's shifted domain. Mostly systematic, so that a few examples suffice to adapt."""


def style_around(base: Style, generator: np.random.Generator, spread: float) -> Style:
    """Draw one client's own style near `base`.

    Args:
        base: the centre; returned unchanged if `spread` is 0.
        generator: the source of nine uniform draws, always consumed.
        spread: 0 or more; at 1 the rotation varies by up to 10 degrees, the hue by 12 degrees,
            each gain by 12 %, the contrast by 15 %, the brightness by 0.06 and the blur and the
            noise by 20 %. Fields are clipped to their ranges; `jitter` is kept.

    Raises:
        ValueError: `spread` is negative.
    """
    if not spread >= 0:
        raise ValueError(f"spread must be 0 or more, not {spread}")
    u = (spread * generator.uniform(-1.0, 1.0, 9)).tolist()

    def within(field: str, value: float) -> float:
        low, high = _RANGES[field]
        return min(max(value, low), high)

    red, green, blue = (
        within("gain", g * (1 + 0.12 * d)) for g, d in zip(base.gain, u[2:5], strict=True)
    )
    return replace(
        base,
        rotation=within("rotation", base.rotation + 10 * u[0]),
        hue=within("hue", base.hue + 12 * u[1]),
        gain=(red, green, blue),
        contrast=within("contrast", base.contrast * (1 + 0.15 * u[5])),
        brightness=within("brightness", base.brightness + 0.06 * u[6]),
        blur=within("blur", base.blur * (1 + 0.2 * u[7])),
        noise=within("noise", base.noise * (1 + 0.2 * u[8])),
    )
