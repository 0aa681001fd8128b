"""Test preparation as open_clip's, crops as torchvision's, and chance from one generator only."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor

from blend_core.data import transforms
from blend_core.data.transforms import (
    Preprocess,
    _resize_crop,
    augment,
    cifar_preprocess,
    limit_size,
    normalise,
    prepare_test,
    resize_crops,
)

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PRE = Preprocess(48, MEAN, STD)


def photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Something as smooth as a photo, with edges; uint8, shape [3, height, width]."""
    coarse = np.random.default_rng(seed).integers(20, 235, (6, 8, 3)).astype(np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    picture.paste((10, 200, 60), (width // 4, height // 4, width // 2, height // 2))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [48, 224])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(375, 500), (301, 200), (48, 48), (32, 33), (97, 451)])
def test_a_photo_is_prepared_as_open_clip_does(
    size: int, interpolation: str, shape: tuple[int, int]
) -> None:
    image = photo(*shape)
    pre = Preprocess(size, MEAN, STD, interpolation)
    theirs = open_clip.image_transform(
        size, is_train=False, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation=interpolation
    )(Image.fromarray(image.permute(1, 2, 0).numpy()))
    ours = prepare_test(image, pre)
    assert ours.dtype == torch.uint8
    assert ours.shape == (3, size, size)
    assert (ours - 255 * theirs).abs().max() < 0.01


def test_an_image_of_the_right_size_is_untouched() -> None:
    image = photo(48, 48)
    assert torch.equal(prepare_test(image, PRE), image)
    assert torch.equal(prepare_test(photo(48, 50), PRE), photo(48, 50)[:, :, 1:49])


def test_normalise_by_hand() -> None:
    pre = Preprocess(1, (0.5, 0.25, 0.0), (0.5, 0.25, 2.0))
    batch = torch.tensor([[255, 0, 51]], dtype=torch.uint8).view(1, 3, 1, 1)
    result = normalise(batch, pre, "cpu")
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.flatten(), torch.tensor([1.0, -1.0, 0.1]))
    assert batch.flatten().tolist() == [255, 0, 51]


def test_training_images_are_kept_at_no_more_than_four_times_the_input_size() -> None:
    assert limit_size(photo(600, 400), PRE).shape == (3, 288, 192)
    assert limit_size(photo(192, 400), PRE).shape == (3, 192, 400)


def test_crops_of_a_kept_photo_are_close_to_those_of_the_whole() -> None:
    whole = photo(900, 1200)
    crops = [augment([i], PRE, 0.08, 0, generator()).int() for i in (whole, limit_size(whole, PRE))]
    difference = (crops[0] - crops[1]).abs().float()
    assert float(difference.mean()) < 2
    assert float(difference.max()) < 60  # at the edges of the pasted square


def test_no_crop_and_no_flip_is_the_test_preparation() -> None:
    images = [photo(60, 90), photo(200, 48), photo(48, 48)]
    result = augment(images, PRE, 1.0, 0.0, generator())
    assert torch.equal(result, torch.stack([prepare_test(i, PRE) for i in images]))


def test_flip_one_mirrors_every_image() -> None:
    images = [photo(60, 90), photo(48, 48)]
    result = augment(images, PRE, 1.0, 1.0, generator())
    assert torch.equal(result, torch.stack([prepare_test(i, PRE).flip(2) for i in images]))


def test_flip_is_a_probability() -> None:
    image = photo(48, 48)
    result = augment([image] * 400, PRE, 1.0, 0.25, generator())
    flipped = sum(torch.equal(r, image.flip(2)) for r in result)
    assert 70 <= flipped <= 130  # 100 expected, standard deviation 8.7


def test_crops_have_the_areas_aspects_and_places_of_the_rule() -> None:
    # Red holds the row, green the column: a crop's corner pixels say where it lies.
    height, width = 200, 240
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    image[0] = torch.arange(height, dtype=torch.uint8)[:, None]
    image[1] = torch.arange(width, dtype=torch.uint8)
    crops = augment([image] * 500, replace(PRE, size=100), 0.08, 0.0, generator()).float()
    rows, columns = crops[:, 0, :, 50], crops[:, 1, 50, :]
    # The 98 steps between the centres of the outer pixels' neighbours span 98 % of the crop.
    heights = (rows[:, 98] - rows[:, 1]) / 0.97
    widths = (columns[:, 98] - columns[:, 1]) / 0.97
    share = heights * widths / (height * width)
    assert 0.07 < share.min() < 0.12
    assert 0.88 < share.max() <= 1.02
    # Uniform on 0.08..1 has mean 0.54; large shares of odd aspect do not fit, which lowers it.
    assert 0.47 < share.mean() < 0.55
    aspect = widths / heights
    assert 0.70 < aspect.min() < 0.80
    assert 1.26 < aspect.max() < 1.40
    centre = (rows[:, 49] + rows[:, 50]) / 2
    assert abs(float(centre.mean()) - height / 2) < 5
    assert centre.min() < 60
    assert centre.max() > 140


def test_an_image_too_narrow_for_any_try_gives_the_largest_centred_crop() -> None:
    # With at least 95 % of the area, no aspect up to 4/3 fits into 1:5.
    image = photo(40, 200)
    result = augment([image], PRE, 0.95, 0.0, generator())
    centre = image[:, :, 73:126]  # 40 * 4/3 = 53 columns, 73 on the left of them
    expected = open_clip.image_transform(48, is_train=False, resize_mode="squash", mean=(0.0,) * 3,
        std=(1.0,) * 3)(Image.fromarray(centre.permute(1, 2, 0).numpy()))  # fmt: skip
    assert (result[0] - 255 * expected).abs().max() <= 2.001


def test_an_image_s_crop_depends_on_its_place_not_on_the_others() -> None:
    target = photo(80, 70)
    alone = augment([photo(50, 400, 1), target], PRE, 0.08, 0.5, generator(7))[1]
    again = augment([photo(48, 48, 2), target, photo(9, 9)], PRE, 0.08, 0.5, generator(7))[1]
    assert torch.equal(alone, again)


def test_seeds_differ_and_repeat() -> None:
    images = [photo(80, 70)] * 3
    first = augment(images, PRE, 0.08, 0.5, generator(1))
    assert torch.equal(first, augment(images, PRE, 0.08, 0.5, generator(1)))
    assert not torch.equal(first, augment(images, PRE, 0.08, 0.5, generator(2)))
    assert not torch.equal(first[0], first[1])


def test_global_generators_are_neither_seeded_nor_consulted() -> None:
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].copy(),
    )
    augment([photo(80, 70)], PRE, 0.08, 0.5, generator())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state(legacy=False)["state"]["key"])


def test_no_images_give_an_empty_batch() -> None:
    assert augment([], PRE, 0.08, 0.5, generator()).shape == (0, 3, 48, 48)


@pytest.mark.parametrize(
    "change", [{"size": 0}, {"std": (1.0, 0.0, 1.0)}, {"interpolation": "nearest"}]
)
def test_an_impossible_preprocessing_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(change)))):
        replace(PRE, **change)  # type: ignore[arg-type]


def test_wrong_images_and_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected uint8 \[3, H, W\]"):
        prepare_test(torch.zeros(3, 48, 48), PRE)
    with pytest.raises(ValueError, match=r"expected uint8 \[3, H, W\]"):
        augment([torch.zeros(48, 48, 3, dtype=torch.uint8)], PRE, 0.5, 0.0, generator())
    for scale, flip in ((0.0, 0.5), (1.1, 0.5), (0.5, -0.1)):
        with pytest.raises(ValueError, match="out of range"):
            augment([], PRE, scale, flip, generator())


@pytest.mark.parametrize("size", [48, 224])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("kind", ["smooth", "photo with a sensor's noise", "noise"])
def test_the_batch_of_another_device_is_hardly_off_the_reference(
    size: int, interpolation: str, kind: str
) -> None:
    pre = Preprocess(size, MEAN, STD, interpolation)
    draw = np.random.default_rng(1)
    shapes = [(375, 500), (20, 31), (48, 48), (97, 451), (3, 3), (1, 5), (448, 600)]
    crops = [photo(*shape, seed=i) for i, shape in enumerate(shapes)]
    if kind != "smooth":
        spread = 6 if kind.startswith("photo") else 128
        crops = [
            torch.from_numpy((crop.numpy() + draw.normal(0, spread, crop.shape)).clip(0, 255))
            .round()
            .to(torch.uint8)
            for crop in crops
        ]
    expected = torch.stack([_resize_crop(crop, pre) for crop in crops]).int()
    difference = (resize_crops(crops, pre, "cpu").int() - expected).abs()
    assert int(difference.max()) <= 2
    assert float((difference > 1).float().mean()) < 1e-4
    assert float(difference.float().mean()) < 0.05


def test_on_another_device_the_same_draws_give_the_same_crops_and_flips(monkeypatch) -> None:
    images = [photo(90 + i, 120, seed=i) for i in range(8)]
    expected = augment(images, PRE, 0.08, 0.5, generator()).int()
    # Any device but the CPU takes the batch; "meta" shows that without having one.
    assert augment(images, PRE, 0.08, 0.0, generator(), "meta").shape == expected.shape
    # The batch has values only where there is memory.
    asked = []

    def on_the_cpu(crops: Sequence[Tensor], pre: Preprocess, device: str) -> Tensor:
        asked.append(device)
        return resize_crops(crops, pre, "cpu")

    monkeypatch.setattr(transforms, "resize_crops", on_the_cpu)
    batch = augment(images, PRE, 0.08, 0.5, generator(), "meta").int()
    assert asked == ["meta"]
    assert int((batch - expected).abs().max()) <= 2


def test_cifar_is_enlarged_as_the_backbone_says_and_flipped_but_not_cropped() -> None:
    pre = cifar_preprocess("cifar10", PRE, own_statistics=False)
    image = photo(32, 32)
    plain = prepare_test(image, PRE)
    for seed in range(5):
        [out] = augment([image], pre, 0.08, 0.5, generator(seed))
        assert torch.equal(out, plain) or torch.equal(out, plain.flip(2))
    [flipped] = augment([image], pre, 0.08, 1.0, generator())
    assert torch.equal(flipped, plain.flip(2))
    assert (pre.mean, pre.std) == (MEAN, STD)


def test_papers_mode_of_cifar_normalises_with_its_own_statistics_then_enlarges() -> None:
    pre = cifar_preprocess("cifar100", PRE, own_statistics=True)
    image = photo(32, 32)
    [same] = augment([image], pre, 0.08, 1.0, generator())
    assert torch.equal(same, image)
    assert torch.equal(prepare_test(image, pre), image)
    mean = torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)
    std = torch.tensor([0.2673, 0.2564, 0.2762]).view(3, 1, 1)
    expected = torch.nn.functional.interpolate(
        ((image / 255 - mean) / std)[None], size=(48, 48), mode="bilinear"
    )
    torch.testing.assert_close(normalise(image[None], pre, "cpu"), expected, atol=1e-6, rtol=0)
    assert cifar_preprocess("cifar10", PRE, True).std == (0.2023, 0.1994, 0.2010)
