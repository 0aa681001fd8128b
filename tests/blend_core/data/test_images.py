"""Decoding photos: every kind that sites have, and one clear line for files that are none."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from blend_core.data import images
from blend_core.data.images import decode_image
from blend_core.errors import SiteError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def stripes(width: int = 3, height: int = 2) -> Image.Image:
    """Left column red, middle green, right blue."""
    picture = Image.new("RGB", (width, height))
    for x in range(width):
        for y in range(height):
            picture.putpixel((x, y), (RED, GREEN, BLUE)[3 * x // width])
    return picture


def pixel(image: torch.Tensor, y: int, x: int) -> tuple[int, ...]:
    return tuple(image[:, y, x].tolist())


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.TIFF", "a.PNG"])
def test_lossless_photos_come_back_channel_first_as_they_were(tmp_path: Path, name: str) -> None:
    stripes().save(tmp_path / name)
    image = decode_image(tmp_path / name)
    assert image.dtype == torch.uint8
    assert image.shape == (3, 2, 3)
    assert image.is_contiguous()
    assert [pixel(image, 1, x) for x in range(3)] == [RED, GREEN, BLUE]


@pytest.mark.parametrize("name", ["a.jpg", "a.JPEG", "a.webp"])
def test_lossy_photos_are_close(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / name)
    assert np.abs(np.subtract(pixel(decode_image(tmp_path / name), 8, 8), (200, 100, 50))).max() < 6


def test_a_palette_image_has_its_colours_not_its_indices(tmp_path: Path) -> None:
    stripes().convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "a.png")
    assert pixel(decode_image(tmp_path / "a.png"), 0, 2) == BLUE


def test_grey_and_black_and_white_become_three_equal_channels(tmp_path: Path) -> None:
    Image.new("L", (2, 2), 77).save(tmp_path / "grey.png")
    Image.new("1", (2, 2), 1).save(tmp_path / "bilevel.png")
    assert pixel(decode_image(tmp_path / "grey.png"), 0, 0) == (77, 77, 77)
    assert pixel(decode_image(tmp_path / "bilevel.png"), 0, 0) == (255, 255, 255)


@pytest.mark.parametrize("name", ["a.tif", "a.jpg"])  # JPEG files hold the inks inverted
def test_cmyk_is_converted(tmp_path: Path, name: str) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / name)
    assert np.abs(np.subtract(pixel(decode_image(tmp_path / name), 8, 8), RED)).max() < 6


def test_transparent_pixels_are_white_and_half_transparent_ones_half_white(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (3, 1), (255, 0, 0, 0))
    picture.putpixel((1, 0), (0, 0, 0, 128))
    picture.putpixel((2, 0), (0, 0, 255, 255))
    picture.save(tmp_path / "a.png")
    image = decode_image(tmp_path / "a.png")
    assert [pixel(image, 0, x) for x in range(3)] == [(255,) * 3, (127,) * 3, BLUE]


def test_papers_code_drops_transparency_and_so_do_benchmarks(tmp_path: Path) -> None:
    Image.new("RGBA", (1, 1), (255, 0, 0, 0)).save(tmp_path / "a.png")
    image = decode_image(tmp_path / "a.png", upright=False)
    assert pixel(image, 0, 0) == RED


def test_transparent_grey_is_white(tmp_path: Path) -> None:
    picture = Image.new("LA", (2, 1), (0, 0))
    picture.putpixel((1, 0), (77, 255))
    picture.save(tmp_path / "a.png")
    image = decode_image(tmp_path / "a.png")
    assert [pixel(image, 0, x) for x in range(2)] == [(255,) * 3, (77,) * 3]


def test_a_transparent_palette_entry_is_white(tmp_path: Path) -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([*GREEN, *BLUE])
    picture.putpixel((1, 0), 1)
    picture.save(tmp_path / "a.gif", transparency=0)
    image = decode_image(tmp_path / "a.gif")
    assert [pixel(image, 0, x) for x in range(2)] == [(255, 255, 255), BLUE]


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_grey_is_scaled_over_its_full_range(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 257, 128 * 257, 65535]], np.uint16)
    Image.fromarray(values).save(tmp_path / name)
    assert decode_image(tmp_path / name)[1].tolist() == [[0, 1, 128, 255]]


def test_32_bit_and_floating_point_grey_are_refused_not_guessed(tmp_path: Path) -> None:
    Image.fromarray(np.array([[70000]], np.int32)).save(tmp_path / "int.tif")
    Image.fromarray(np.array([[0.5]], np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(SiteError, match=r"int\.tif: grey values outside 0 to 65535; save it"):
        decode_image(tmp_path / "int.tif")
    with pytest.raises(SiteError, match=r"float\.tif: floating-point pixels"):
        decode_image(tmp_path / "float.tif")


def test_16_bit_colours_are_scaled_like_16_bit_grey(tmp_path: Path) -> None:
    # Pillow cannot write such a file: one row, no filter, big-endian red, green, blue.
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    row = b"\0" + struct.pack(">6H", 65535, 0, 128 * 257, 0, 257, 65535)
    (tmp_path / "a.png").write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(row))
        + chunk(b"IEND", b"")
    )
    image = decode_image(tmp_path / "a.png")
    assert [pixel(image, 0, x) for x in range(2)] == [(255, 0, 128), (0, 1, 255)]


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.webp", "a.tif"])
def test_the_first_frame_of_an_animation_and_the_first_page_count(
    tmp_path: Path, name: str
) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (GREEN, RED)]
    options = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **options)
    assert pixel(decode_image(tmp_path / name), 0, 0) == GREEN


def test_the_first_of_the_pictures_that_a_phone_puts_into_one_jpeg_counts(tmp_path: Path) -> None:
    small = Image.new("RGB", (8, 8))
    Image.new("RGB", (16, 16), (200, 100, 50)).save(
        tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[small]
    )
    image = decode_image(tmp_path / "a.jpg")
    assert image.shape == (3, 16, 16)
    assert np.abs(np.subtract(pixel(image, 8, 8), (200, 100, 50))).max() < 6


def save_turned(path: Path) -> None:
    # Orientation 6: the stored picture must be turned by 90 degrees clockwise to be upright.
    picture = Image.new("RGB", (16, 8), RED)
    picture.paste(BLUE, (8, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(path, exif=exif)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.jpg"])
def test_a_photo_taken_with_a_turned_camera_is_upright(tmp_path: Path, name: str) -> None:
    save_turned(tmp_path / name)
    image = decode_image(tmp_path / name)
    assert image.shape == (3, 16, 8)
    assert pixel(image, 2, 4)[0] > 240  # the left half is now on top
    assert pixel(image, 13, 4)[2] > 240


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])  # Pillow turns a TIFF for everybody
def test_a_benchmark_reads_a_turned_photo_as_the_papers_code_does(
    tmp_path: Path, name: str
) -> None:
    save_turned(tmp_path / name)
    image = decode_image(tmp_path / name, upright=False)
    assert image.shape == (3, 8, 16)
    assert pixel(image, 4, 2)[0] > 240
    assert pixel(image, 4, 13)[2] > 240


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "note.jpg").write_text("hello")
    (tmp_path / "empty.png").touch()
    for name in ("note.jpg", "empty.png"):
        with pytest.raises(SiteError) as error:
            decode_image(tmp_path / name)
        assert str(error.value) == (
            f"{tmp_path / name}: not a JPEG, PNG, BMP, WEBP, TIFF, GIF image; replace or remove it"
        )


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.webp", "a.tif", "a.gif"])
def test_a_file_cut_short_is_an_error_not_a_grey_picture(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SiteError, match=rf"{name}: not .*; replace or remove it$"):
        decode_image(tmp_path / name)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for name in ("none.png", "folder.png"):
        with pytest.raises(SiteError, match=rf"{name}: no (such|regular) file"):
            decode_image(tmp_path / name)


def test_another_kind_of_file_is_refused_whatever_it_holds(tmp_path: Path) -> None:
    stripes().save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.ppm")
    with pytest.raises(SiteError, match=r"a\.ppm: not one of \.bmp, \.gif"):
        decode_image(tmp_path / "a.ppm")
    stripes().save(tmp_path / "b.ppm")
    (tmp_path / "b.ppm").rename(tmp_path / "b.png")
    with pytest.raises(SiteError, match=r"b\.png: not a JPEG"):
        decode_image(tmp_path / "b.png")


def test_a_decompression_bomb_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripes(30, 20).save(tmp_path / "a.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 599)
    with pytest.raises(SiteError, match=r"a\.png: more than 599 pixels; shrink or remove it"):
        decode_image(tmp_path / "a.png")
    monkeypatch.setattr(images, "MAX_PIXELS", 600)
    assert decode_image(tmp_path / "a.png").shape == (3, 20, 30)


def test_a_bomb_that_pillow_itself_refuses_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripes(30, 20).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(SiteError, match=r"a\.png: more than 89,478,485 pixels"):
        decode_image(tmp_path / "a.png")


def test_a_thread_like_picture_cannot_fill_the_memory_when_resized(tmp_path: Path) -> None:
    Image.new("L", (101, 1)).save(tmp_path / "a.png")
    with pytest.raises(SiteError, match=r"a\.png: 101 x 1 pixels is too narrow"):
        decode_image(tmp_path / "a.png")
