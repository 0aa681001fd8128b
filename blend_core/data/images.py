"""Decode one photo to RGB, and say clearly when a file cannot be used."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from blend_core.errors import SiteError

__all__ = [
    "MAX_ASPECT",
    "MAX_PIXELS",
    "SUFFIXES",
    "TooLargeError",
    "decode_image",
    "is_image_name",
]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"})
"""File name endings that count as images, in lower case."""

MAX_PIXELS = 89_478_485
"""Largest width times height that is decoded (a quarter of a gigabyte as RGB)."""

MAX_ASPECT = 100
"""Largest ratio of the sides: beyond it, resizing the shorter side would fill the memory."""

# Only the decoders of those endings, so that no other format hides behind one of them.
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
_ORIENTATION = 0x0112  # the EXIF tag
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class TooLargeError(SiteError):
    """An image with more than `MAX_PIXELS`."""


def is_image_name(name: str) -> bool:
    """Whether a file name ends like an image, in any case."""
    return Path(name).suffix.lower() in SUFFIXES


def decode_image(path: Path, upright: bool = True) -> Tensor:
    """Read a photo: its first frame as RGB.

    16-bit grey is scaled to 8 bits over its full range, never stretched to its own extremes, so
    that images stay comparable.

    Args:
        path: a regular file with one of `SUFFIXES`.
        upright: turn it as its EXIF says, and let transparent parts become white. The papers' code
            does neither: it drops the transparency (`convert("RGB")`).

    Returns:
        uint8, shape [3, H, W].

    Raises:
        SiteError: the file is missing, of another kind, damaged, cut short, too large or too
            narrow; the message names it. `TooLargeError` if it is too large.
    """
    if not os.path.isfile(path):
        missing = "a link that leads nowhere" if os.path.islink(path) else "no such file"
        what = "no regular file" if os.path.exists(path) else missing
        raise SiteError(f"{path}: {what}; replace or remove it")
    if not is_image_name(path.name):
        kinds = ", ".join(sorted(SUFFIXES))
        raise SiteError(f"{path}: not one of {kinds}; convert it to PNG or JPEG")
    try:
        # The size is known before the pixels are decoded, and checked in `_pixels` instead.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=_FORMATS) as image:
                pixels = _pixels(image, upright)
    except (Image.DecompressionBombError, _TooManyPixelsError):
        raise TooLargeError(
            f"{path}: more than {MAX_PIXELS:,} pixels; shrink or remove it"
        ) from None
    except _UnusableError as error:
        raise SiteError(f"{path}: {error}") from None
    except UnidentifiedImageError:
        raise SiteError(
            f"{path}: not a {', '.join(_FORMATS)} image; replace or remove it"
        ) from None
    except Exception as error:  # Decoders raise all sorts of things on damaged files.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SiteError(f"{path}: not readable ({reason}); replace or remove it") from None
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, 2, 0)))


class _UnusableError(Exception):
    """The image is whole, but not one that we take."""


class _TooManyPixelsError(Exception):
    """Pillow's own limit is higher."""


def _pixels(image: Image.Image, upright: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """RGB, uint8, shape [H, W, 3]."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _TooManyPixelsError
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise _UnusableError(f"{width} x {height} pixels is too narrow; crop or remove it")
    image.load()
    rgb = _to_rgb(image, white=upright)
    if upright:
        # After loading: a PNG may carry its EXIF behind the pixels, and Pillow turns a TIFF itself.
        orientation = image.getexif().get(_ORIENTATION)
        if orientation in _TRANSPOSE:
            rgb = rgb.transpose(_TRANSPOSE[orientation])
    return np.array(rgb)  # A copy, for what Pillow hands out cannot be written to.


def _to_rgb(image: Image.Image, white: bool) -> Image.Image:
    if image.mode.startswith("I"):
        # "I" holds 16-bit grey too, in files of some writers.
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise _UnusableError("grey values outside 0 to 65535; save it with 8 or 16 bits")
        clear = image.info.get("transparency")
        if white and isinstance(clear, int):
            values[values == clear] = 65535
        return Image.fromarray((values / 257 + 0.5).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise _UnusableError("floating-point pixels; save it with 8 or 16 bits")
    if white and image.has_transparency_data:
        rgba = image.convert("RGBA")
        ground = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, rgba).convert("RGB")
    return image.convert("RGB")
