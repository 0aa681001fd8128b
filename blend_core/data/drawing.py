"""The pixels of the built-in benchmark, drawn with numpy in batches.

Every image has a seed of its own, from which all of its random parameters are drawn before any
pixel is computed, so an image does not depend on which others are rendered in the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from blend_core.data.shapes import COLOURS, FILLS, IMAGE_SIZE, OUTLINES, Combination, Style

__all__ = ["render", "render_each"]

Floats = NDArray[np.float32]


def render(
    combinations: Sequence[Combination], style: Style, generator: np.random.Generator
) -> NDArray[np.uint8]:
    """Render one image per combination, all in one style.

    Takes one 63-bit seed per image from `generator`, in order; nothing else is drawn from it.

    Returns:
        uint8, shape [n, 48, 48, 3], RGB.

    Raises:
        KeyError: a combination has an unknown colour, fill or outline.
    """
    seeds = generator.integers(2**63, size=len(combinations)).tolist()
    return render_each(combinations, [style] * len(combinations), seeds)


def render_each(
    combinations: Sequence[Combination], styles: Sequence[Style], seeds: Sequence[int]
) -> NDArray[np.uint8]:
    """Render images that each have their own style and their own seed (an int, 0 or more).

    Image i depends on `combinations[i]`, `styles[i]` and `seeds[i]` only, to within one grey level:
    the last bit of a sum depends on how many images are computed at once.

    Returns:
        uint8, shape [n, 48, 48, 3], RGB.

    Raises:
        KeyError: a combination has an unknown colour, fill or outline.
        ValueError: the three sequences differ in length, or a seed is negative.
    """
    items = list(zip(combinations, styles, seeds, strict=True))
    images = np.empty((len(items), IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    for start in range(0, len(items), _CHUNK):
        chunk = items[start : start + _CHUNK]
        images[start : start + _CHUNK] = _render_chunk(
            [c for c, _, _ in chunk], [s for _, s, _ in chunk], [k for _, _, k in chunk]
        )
    return images


_CHUNK = 32  # images at once: the working set stays within a processor's cache
_TABLE, _EXTENT = 192, 1.3  # samples a side of a distance table, half its side in outline radii
_BACKGROUNDS = 6  # candidate background colours an image
_FILL_INDEX = {name: index for index, name in enumerate(FILLS)}
_OUTLINE_INDEX = {name: index for index, name in enumerate(OUTLINES)}


def _vertices(outline: str) -> NDArray[np.float64]:
    """Corners of an outline, shape [m, 2]; x to the right, y down, the radius is about 1."""
    turn = np.linspace(0, 2 * np.pi, 72, endpoint=False)
    if outline == "heart":
        y = 13 * np.cos(turn) - 5 * np.cos(2 * turn) - 2 * np.cos(3 * turn) - np.cos(4 * turn)
        return np.stack([16 * np.sin(turn) ** 3 / 16.5, (-y - 2) / 16.5], 1)
    if outline == "moon":
        outer, inner = np.linspace(0.82, 5.46, 40), np.linspace(4.88, 1.40, 30)
        arc = np.stack([0.15 + np.cos(outer), np.sin(outer)], 1)
        bite = np.stack([0.69 + 0.74 * np.cos(inner), 0.74 * np.sin(inner)], 1)
        return np.concatenate([arc, bite])
    if outline in _CORNERS:
        corners: NDArray[np.float64] = np.array(_CORNERS[outline].split(), float).reshape(-1, 2)
        return corners
    radius = {  # at equal angles, clockwise from the top
        "circle": np.full(72, 0.9),
        "triangle": np.full(3, 1.1),
        "hexagon": np.full(6, 1.0),
        "star": np.tile([1.1, 0.46], 5),
        "flower": 0.74 + 0.26 * np.cos(6 * turn),
    }[outline]
    angle = np.linspace(0, 2 * np.pi, len(radius), endpoint=False)
    return np.stack([radius * np.sin(angle), -radius * np.cos(angle)], 1)


# Outlines that are given by their corners: x y, x y, ...
_CORNERS = {
    "square": "-0.8 -0.8  0.8 -0.8  0.8 0.8  -0.8 0.8",
    "diamond": "0 -1.15  0.68 0  0 1.15  -0.68 0",
    "cross": "-0.34 -1  0.34 -1  0.34 -0.34  1 -0.34  1 0.34  0.34 0.34 "
    "0.34 1  -0.34 1  -0.34 0.34  -1 0.34  -1 -0.34  -0.34 -0.34",
    "arrow": "0 -1.1  0.9 -0.1  0.38 -0.1  0.38 1  -0.38 1  -0.38 -0.1  -0.9 -0.1",
    "bolt": "0.5 -1.1  -0.75 0.2  -0.1 0.2  -0.5 1.1  0.75 -0.25  0.1 -0.25",
}


@lru_cache(maxsize=1)
def _distance_tables() -> Floats:
    """Signed distance to each outline (negative inside), in outline radii.

    Shape [12, 192, 192] (outline, y, x), over -1.3..1.3 radii. Computed once per process.
    """
    axis = np.linspace(-_EXTENT, _EXTENT, _TABLE, dtype=np.float32)
    y, x = np.meshgrid(axis, axis, indexing="ij")
    tables = np.empty((len(OUTLINES), _TABLE, _TABLE), np.float32)
    for table, outline in zip(tables, OUTLINES, strict=True):
        corners = _vertices(outline).astype(np.float32)
        nearest, inside = np.full_like(x, np.inf), np.zeros(x.shape, bool)
        for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
            ex, ey, wx, wy = bx - ax, by - ay, x - ax, y - ay
            along = np.clip((wx * ex + wy * ey) / (ex * ex + ey * ey), 0, 1)
            np.minimum(nearest, (wx - ex * along) ** 2 + (wy - ey * along) ** 2, out=nearest)
            # Even-odd rule: count the edges that a ray to the right crosses.
            if ay != by:
                inside ^= ((ay > y) != (by > y)) & (wx < ex * wy / ey)
        table[:] = np.where(inside, -1, 1) * np.sqrt(nearest)
    return tables


def _wave(position: Floats, period: Floats) -> Floats:
    """An antialiased square wave of unit slope at its edges, -1..1; both arguments in pixels."""
    offset = np.abs(position - period * np.floor(position / period) - period / 2)
    wave: Floats = np.clip(2 * (period / 4 - offset), -1, 1)
    return wave


def _paint(fill: str, u: Floats, v: Floats, depth: Floats, period: Floats) -> Floats:
    """How much of each pixel inside an outline is painted, 0..1.

    `u` and `v` are pixel coordinates that turn with the outline, `depth` is the distance from its
    edge in pixels (positive inside) and `period` scales the pattern (around 1); the first three
    have shape [n, 48, 48], the last [n, 1, 1].
    """
    if fill == "plain":
        return np.ones_like(depth)
    if fill == "striped":
        pattern = 0.5 + 0.5 * _wave(u, 6.4 * period)
    elif fill == "checkered":
        pattern = 0.5 + 0.5 * _wave(u, 9.6 * period) * _wave(v, 9.6 * period)
    elif fill == "dotted":
        p = 7.0 * period
        du, dv = u - p * np.round(u / p), v - p * np.round(v / p)
        pattern = np.clip(0.5 + np.sqrt(du * du + dv * dv) - 0.3 * p, 0, 1)
    else:
        pattern = np.zeros_like(depth)
    rim = 2.8 if fill == "hollow" else 1.2
    painted: Floats = np.maximum(pattern, np.clip(rim + 0.5 - depth, 0, 1))
    return painted


@lru_cache(maxsize=1)
def _upsampling() -> Floats:
    """Matrix of linear interpolation from 7 knots to the 48 pixels of an axis, shape [48, 7]."""
    at = np.linspace(0, 6, IMAGE_SIZE)[:, None]
    matrix: Floats = np.maximum(0, 1 - np.abs(at - np.arange(7))).astype(np.float32)
    return matrix


def _render_chunk(
    combinations: Sequence[Combination], styles: Sequence[Style], seeds: Sequence[int]
) -> NDArray[np.uint8]:
    """`render_each` for a few images; channels come before rows in here."""
    n, size = len(combinations), IMAGE_SIZE
    random = np.empty((n, 12 + 3 * _BACKGROUNDS), np.float32)
    texture = np.empty((n, 1, 7, 7), np.float32)
    noise = np.zeros((n, 3, size, size), np.float32)
    for i, (style, seed) in enumerate(zip(styles, seeds, strict=True)):
        own = np.random.default_rng(seed)
        own.random(dtype=np.float32, out=random[i])
        own.standard_normal(dtype=np.float32, out=texture[i])
        if style.noise:
            own.standard_normal(dtype=np.float32, out=noise[i])
            noise[i] *= style.noise
    draws = random.T[:, :, None, None]  # [k, n, 1, 1]
    signed = 2 * draws - 1

    # Where the outline is, and each pixel's place in its frame (pixels, unrotated).
    radius = 14.0 + 3.5 * draws[0, :, 0]
    centre_x, centre_y = (23.5 + 4.0 * signed[k, :, 0] for k in (1, 2))
    tilt = _column(styles, "rotation") + _column(styles, "jitter") * signed[3, :, 0, 0]
    tilt = np.deg2rad(tilt)[:, None, None]
    pixel = np.arange(size, dtype=np.float32)
    dx, dy = (pixel - centre_x)[:, None, :], (pixel - centre_y)[:, :, None]
    u, v = np.cos(tilt) * dx + np.sin(tilt) * dy, np.cos(tilt) * dy - np.sin(tilt) * dx

    scale = ((_TABLE - 1) / (2 * _EXTENT) / radius)[:, :, None]
    column, row = (
        np.clip(w * scale + 0.5 * _TABLE, 0, _TABLE - 1).astype(np.int32) for w in (u, v)
    )
    which = np.array([_OUTLINE_INDEX[c.outline] for c in combinations], np.int32)[:, None, None]
    tables = _distance_tables().reshape(-1)
    depth = -radius[:, :, None] * tables[(which * _TABLE + row) * _TABLE + column]

    paint = np.empty_like(depth)
    fills = np.array([_FILL_INDEX[c.fill] for c in combinations])
    for number in np.unique(fills):
        at = np.flatnonzero(fills == number)
        shift_u, shift_v = 10 * draws[4, at], 10 * draws[5, at]
        period = 0.9 + 0.2 * draws[6, at]
        paint[at] = _paint(FILLS[number], u[at] + shift_u, v[at] + shift_v, depth[at], period)

    # Colours, [n, 3, 1, 1] or full size. The background is the first candidate far enough from
    # the outline's colour, else the last; a gap in a pattern shows the background, a bit tinted.
    colour = np.array([COLOURS[c.colour] for c in combinations], np.float32)[:, :, None, None]
    colour = colour + 0.05 * np.moveaxis(signed[7:10], 0, 1)
    candidates = random[:, 12:].reshape(n, _BACKGROUNDS, 3)
    candidates = 0.1 + 0.8 * candidates[:, :, :1] + 0.24 * (candidates - 0.5)
    far = np.sqrt(((candidates - colour[:, None, :, 0, 0]) ** 2).sum(2)) > 0.5
    far[:, -1] = True
    ground = candidates[np.arange(n), far.argmax(1)][:, :, None, None]
    ramp = 0.12 * (signed[10] * (pixel / 23.5 - 1) + signed[11] * (pixel / 23.5 - 1)[:, None])
    stretch = _upsampling()
    ground = ground + ramp[:, None] + 0.035 * (stretch @ texture @ stretch.T)
    cover = (np.clip(depth + 0.5, 0, 1) * (0.15 + 0.85 * paint))[:, None]
    image = np.clip(ground + cover * (colour - ground), 0, 1)

    return _distort(image, styles, noise)


def _column(styles: Sequence[Style], field: str) -> Floats:
    """One field of all styles, shape [n] or, for the gain, [n, 3]."""
    return np.array([getattr(style, field) for style in styles], np.float32)


def _distort(image: Floats, styles: Sequence[Style], noise: Floats) -> NDArray[np.uint8]:
    """Apply each style's colours, blur and noise to float [n, 3, 48, 48]; uint8, channels last."""
    hue = np.deg2rad(_column(styles, "hue"))[:, None, None]
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], np.float32) / np.sqrt(np.float32(3))
    rotate = np.cos(hue) * np.eye(3, dtype=np.float32) + np.sin(hue) * cross
    rotate = rotate + (1 - np.cos(hue)) / 3  # Rodrigues' formula about the grey axis
    contrast = _column(styles, "contrast")[:, None]
    matrix = (contrast * _column(styles, "gain"))[:, :, None] * rotate
    offset = 0.5 - 0.5 * contrast + _column(styles, "brightness")[:, None]
    image = (matrix @ image.reshape(len(image), 3, -1)).reshape(image.shape)
    image = image + offset[:, :, None, None]

    blur = _column(styles, "blur")
    at = np.flatnonzero(blur > 0)
    if at.size:
        pixel = np.arange(IMAGE_SIZE, dtype=np.float32)
        apart = (pixel[:, None] - pixel) / blur[at, None, None]
        # Nothing beyond five deviations: denormal numbers would slow the products many times.
        kernel = np.where(np.abs(apart) <= 5, np.exp(-0.5 * apart * apart), np.float32(0))
        kernel = (kernel / kernel.sum(2, keepdims=True))[:, None]
        image[at] = kernel @ image[at] @ kernel.transpose(0, 1, 3, 2)
    scaled = np.clip(image + noise, 0, 1) * 255 + 0.5
    return np.ascontiguousarray(np.moveaxis(scaled, 1, 3)).astype(np.uint8)
