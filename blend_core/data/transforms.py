"""From a decoded photo to what a vision tower reads: test preparation, training crops, scaling.

Everything up to `normalise` stays in uint8, a quarter of the memory and of the copy to a device.
The test preparation is open_clip's evaluation transform. Crops follow torchvision's
`RandomResizedCrop`, but draw from the caller's generator only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

__all__ = [
    "Preprocess",
    "augment",
    "cifar_preprocess",
    "limit_size",
    "normalise",
    "prepare_test",
    "resize_crops",
]


@dataclass(frozen=True)
class Preprocess:
    """How images become the input of a vision tower.

    A backbone's own says what it expects; data may need another (CIFAR's small images).

    Attributes:
        size: height and width S of the input, pixels, 1 or more.
        mean: of red, green and blue, for values in 0..1.
        std: of red, green and blue, for values in 0..1; above 0.
        interpolation: "bicubic" or "bilinear"; both with antialiasing.
        crop: training images are cropped at random.
        flip: training images are flipped at random.
        resize_last: images keep their size, which is the same for all, until they have been
            normalised; then they are resized bilinearly.

    Raises:
        ValueError: a field is out of range.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    crop: bool = True
    flip: bool = True
    resize_last: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be 1 or more, not {self.size}")
        if len(self.mean) != 3 or len(self.std) != 3 or not all(s > 0 for s in self.std):
            raise ValueError(
                f"mean and std need three values, std above 0: {self.mean}, {self.std}"
            )
        if self.interpolation not in ("bicubic", "bilinear"):
            raise ValueError(
                f"interpolation must be bicubic or bilinear, not {self.interpolation!r}"
            )


def prepare_test(image: Tensor, pre: Preprocess) -> Tensor:
    """Resize the shorter side to S (the longer is rounded down) and cut out the centre.

    Args:
        image: uint8, shape [3, H, W].
        pre: the backbone's preprocessing.

    Returns:
        uint8, shape [3, S, S]; with `resize_last` the image as it is.

    Raises:
        ValueError: `image` has another type or shape.
    """
    if pre.resize_last:
        _check(image)
        return image
    size = pre.size
    image = _scaled(image, size, pre)
    # Python's round, half to even, is what torchvision's centre crop uses.
    top, left = (round((side - size) / 2) for side in image.shape[1:])
    return image[:, top : top + size, left : left + size].contiguous()


def limit_size(image: Tensor, pre: Preprocess) -> Tensor:
    """Shrink a training image whose shorter side is above 4 S to 4 S; others stay as they are.

    A client's training images are kept, and a 12-megapixel photo is 36 MB. At 4 S the smallest
    crops, 8 % of the area, still have about as many pixels as the tower sees.

    Args:
        image: uint8, shape [3, H, W].
        pre: the backbone's preprocessing.

    Returns:
        uint8, shape [3, h, w], same proportions to within a pixel.

    Raises:
        ValueError: `image` has another type or shape.
    """
    _check(image)
    limit = _KEPT * pre.size
    return _scaled(image, limit, pre) if min(image.shape[1:]) > limit else image


def normalise(batch: Tensor, pre: Preprocess, device: torch.device | str) -> Tensor:
    """Scale to 0..1, subtract the mean, divide by the standard deviation, channel by channel.

    Args:
        batch: uint8, shape [B, 3, S, S]; with `resize_last` of any size.
        pre: the preprocessing of the data.
        device: where the result lives; the copy is made in uint8.

    Returns:
        float32, shape [B, 3, S, S].
    """
    mean = torch.tensor(pre.mean, dtype=torch.float32, device=device).view(3, 1, 1)
    std = torch.tensor(pre.std, dtype=torch.float32, device=device).view(3, 1, 1)
    pixels = batch.to(device).to(torch.float32).div_(255).sub_(mean).div_(std)
    if pre.resize_last:
        return functional.interpolate(pixels, (pre.size, pre.size), mode="bilinear")
    return pixels


def augment(
    images: Sequence[Tensor],
    pre: Preprocess,
    crop_scale: float,
    flip: float,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Random resized crop and horizontal flip, the training transform of the papers' code.

    A crop covers a share of the image's area that is uniform in (crop_scale, 1), with an aspect
    ratio log-uniform in (3/4, 4/3). If ten tries give none that fits, it is the largest centred
    crop of an aspect ratio in that range. With `crop_scale` 1 there is no crop but the test
    preparation.

    Every image consumes 23 uniform draws, needed or not, and all are drawn before a pixel is
    touched: image i's draws depend on the generator and on i, never on other images.

    On the CPU images are resized one by one, which is the reference. On another device the whole
    batch is (`resize_crops`), at most 2 grey levels off.

    Args:
        images: B tensors, uint8, shape [3, H, W], sizes may differ.
        pre: the preprocessing of the data; may rule out crops or flips.
        crop_scale: smallest share of the area, above 0, up to 1.
        flip: probability of a horizontal flip, 0..1.
        generator: a CPU generator, the only source of chance.
        device: where the result lives.

    Returns:
        uint8, shape [B, 3, S, S]; with `resize_last` and no crop [B, 3, H, W], the images' own
        size, which must then be the same for all.

    Raises:
        ValueError: an image has another type or shape, or a number is out of range.
    """
    if not 0 < crop_scale <= 1 or not 0 <= flip <= 1:
        raise ValueError(f"crop_scale {crop_scale} or flip {flip} is out of range")
    if not len(images):
        return torch.zeros(0, 3, pre.size, pre.size, dtype=torch.uint8, device=device)
    draws = torch.rand(len(images), _DRAWS, dtype=torch.float64, generator=generator).tolist()
    flipped = torch.tensor([pre.flip and coin < flip for coin, *_ in draws], dtype=torch.bool)
    if not pre.crop or crop_scale == 1:
        batch = torch.stack([prepare_test(image, pre) for image in images]).to(device)
    else:
        crops = []
        for image, (_, *own) in zip(images, draws, strict=True):
            _check(image)
            top, left, height, width = _crop_box(image.shape[1], image.shape[2], crop_scale, own)
            crops.append(image[:, top : top + height, left : left + width])
        if torch.device(device).type == "cpu":
            batch = torch.stack([_resize_crop(crop, pre) for crop in crops])
        else:
            batch = resize_crops(crops, pre, device)
    if flipped.any():
        at = flipped.nonzero()[:, 0].to(batch.device)
        batch[at] = batch[at].flip(3)
    return batch


def resize_crops(crops: Sequence[Tensor], pre: Preprocess, device: torch.device | str) -> Tensor:
    """Resize crops of any sizes at once: two products of matrices, columns first, then rows.

    The filters are those of Pillow and torch (antialiased, cubic with a = -1/2), and values are
    rounded to grey levels after each product as theirs are.

    Args:
        crops: B tensors, uint8, shape [3, h, w], sizes may differ.
        pre: the preprocessing of the data.
        device: where it is done.

    Returns:
        uint8, shape [B, 3, S, S]; at most 2 grey levels off `_resize_crop`, more than 1 in less
        than one of 10,000 values, and below 0.05 on average. The weights there have 16 bits.
    """
    heights = torch.tensor([crop.shape[1] for crop in crops])
    widths = torch.tensor([crop.shape[2] for crop in crops])
    padded = torch.zeros(len(crops), 3, int(heights.max()), int(widths.max()), dtype=torch.uint8)
    for place, crop in zip(padded, crops, strict=True):
        place[:, : crop.shape[1], : crop.shape[2]] = crop
    rows = _filters(heights.to(device), padded.shape[2], pre)
    columns = _filters(widths.to(device), padded.shape[3], pre)
    pixels = padded.to(device).float() @ columns.transpose(1, 2)[:, None]
    pixels = rows[:, None] @ pixels.round_().clamp_(0, 255)
    return pixels.round_().clamp_(0, 255).to(torch.uint8)


def _filters(lengths: Tensor, longest: int, pre: Preprocess) -> Tensor:
    """Weights from the pixels of a line to those of the resized one: float32 [B, S, longest]."""
    scale = (lengths.double() / pre.size)[:, None, None]
    stretch = scale.clamp(min=1)  # Shrinking widens the filter: antialiasing.
    centre = (torch.arange(pre.size, device=lengths.device)[None, :, None] + 0.5) * scale
    pixel = torch.arange(longest, device=lengths.device)[None, None, :]
    reach = (2.0 if pre.interpolation == "bicubic" else 1.0) * stretch
    # Pillow cuts the filter at whole pixels.
    inside = (pixel >= (centre - reach + 0.5).floor()) & (pixel < (centre + reach + 0.5).floor())
    inside = inside & (pixel < lengths[:, None, None])
    x = ((pixel + 0.5 - centre) / stretch).abs()
    if pre.interpolation == "bicubic":
        near = (1.5 * x - 2.5) * x * x + 1
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        weight = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    else:
        weight = (1 - x).clamp(min=0)
    weight = torch.where(inside, weight, 0.0)
    return (weight / weight.sum(-1, keepdim=True)).float()


# Means and standard deviations that the papers' code normalises CIFAR with.
_CIFAR = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def cifar_preprocess(kind: str, pre: Preprocess, own_statistics: bool) -> Preprocess:
    """How the 32 x 32 images of CIFAR become the input of a backbone (PROTOCOL 6).

    Args:
        kind: "cifar10" or "cifar100".
        pre: the backbone's preprocessing.
        own_statistics: the papers' mode: normalised with CIFAR's own statistics, then enlarged
            bilinearly, without augmentation. Else enlarged as the backbone says, and flipped.
    """
    if not own_statistics:
        return replace(pre, crop=False)
    mean, std = _CIFAR[kind]
    return Preprocess(pre.size, mean, std, "bilinear", crop=False, flip=False, resize_last=True)


# Shorter side of a kept training image, in multiples of S.
_KEPT = 4
_TRIES = 10
_DRAWS = 1 + 2 + 2 * _TRIES  # flip; place down and right; area and aspect of every try
_ASPECT = (3 / 4, 4 / 3)


def _crop_box(
    height: int, width: int, scale: float, draws: Sequence[float]
) -> tuple[int, int, int, int]:
    """Top, left, height and width of a crop from 22 uniform draws in [0, 1)."""
    down, right, *tries = draws
    low, high = math.log(_ASPECT[0]), math.log(_ASPECT[1])
    for share, shape in zip(tries[::2], tries[1::2], strict=True):
        area = height * width * (scale + (1 - scale) * share)
        aspect = math.exp(low + (high - low) * shape)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(down * (height - h + 1)), int(right * (width - w + 1)), h, w
    w = min(width, round(height * _ASPECT[1]))
    h = min(height, round(width / _ASPECT[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def _check(image: Tensor) -> None:
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] != 3:
        raise ValueError(f"expected uint8 [3, H, W], not {image.dtype} {list(image.shape)}")


def _scaled(image: Tensor, shorter: int, pre: Preprocess) -> Tensor:
    """Resize so that the shorter side is `shorter`; the longer is rounded down, as open_clip's."""
    _check(image)
    height, width = image.shape[1:]
    if height <= width:
        return _resize(image, shorter, int(shorter * width / height), pre)
    return _resize(image, int(shorter * height / width), shorter, pre)


def _resize(image: Tensor, height: int, width: int, pre: Preprocess) -> Tensor:
    """Resize uint8 [3, h, w] with antialiasing; the very same tensor if the size is right.

    With Pillow, as open_clip: torch's own resizing is up to 2 grey levels off.
    """
    if image.shape[1:] == (height, width):
        return image
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    # Channels are moved by numpy: torch would wake all its threads for each small copy.
    picture = Image.fromarray(np.ascontiguousarray(np.moveaxis(image.numpy(), 0, 2)))
    resized = np.array(picture.resize((width, height), filters[pre.interpolation]))
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(resized, 2, 0)))


def _resize_crop(crop: Tensor, pre: Preprocess) -> Tensor:
    """Resize uint8 [3, h, w] to [3, S, S] with antialiasing.

    Crops are made anew for every batch, where torch's resizing saves three quarters of Pillow's
    time. In uint8, for in float32 an overshoot between the two passes is not clipped, which is
    up to 17 grey levels off on noise.
    """
    size = (pre.size, pre.size)
    return functional.interpolate(
        crop[None].contiguous(), size, mode=pre.interpolation, antialias=True
    )[0]
