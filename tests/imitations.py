"""Imitations of the papers' data sets: the files of the real ones, in full number, without photos.

Every function writes below a root as `data.root` holds it. With `images=True` there is a small real
JPEG for every record: one per class, the others are hard links to it.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from blend_core.data import datasets

# Test images of base classes (PROTOCOL 1.1).
TEST_BASE = {
    "caltech101": 1549,
    "oxford_pets": 1881,
    "stanford_cars": 4002,
    "oxford_flowers": 1053,
    "dtd": 864,
    "eurosat": 4200,
    "ucf101": 1934,
    "food101": 15300,
    "sun397": 9950,
    "fgvc_aircraft": 1667,
}
# In these, labels do not appear in ascending order.
UNORDERED = ("oxford_flowers", "stanford_cars")
BROKEN_SKETCH = "sketch/dog/n02103406_4068-1.png"
Entry = tuple[str, int, str]


def patch_description(monkeypatch: pytest.MonkeyPatch, kind: str, **changes: Any) -> None:
    """Let a data set be smaller, e.g. `classes=3, counts={"train": 9}`, for one test."""
    known = dict(datasets.descriptions())
    known[kind] = known[kind].model_copy(update=changes)
    monkeypatch.setattr(datasets, "descriptions", lambda: known)


def shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole numbers that differ by one at most, larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def entries(kind: str) -> dict[str, list[Entry]]:
    """(path, label, name) of all images of a CoOp data set, with the counts of the real one."""
    description = datasets.describe(kind)
    n = description.class_count
    base = (n + 1) // 2
    sizes = {part: shares(description.counts[part], n) for part in ("train", "val")}
    of_base = TEST_BASE[kind]
    sizes["test"] = shares(of_base, base) + shares(description.counts["test"] - of_base, n - base)
    # Cars' paths count from the folder of the data set.
    inner = "" if description.images else "cars_train/"
    order = range(n)[::-1] if kind in UNORDERED else range(n)
    return {
        part: [
            (f"{inner}class_{label:03d}/{part}_{i:04d}.jpg", label, f"class_{label:03d}")
            for label in order
            for i in range(counts[label])
        ]
        for part, counts in sizes.items()
    }


def write_coop(root: Path, kind: str, images: bool = False) -> Path:
    """A data set with a `split_zhou_*.json`; returns the path of that file."""
    description = datasets.describe(kind)
    folder = root / description.folder
    (folder / description.images).mkdir(parents=True)
    parts = entries(kind)
    path = folder / description.lists[0]
    path.write_text(json.dumps(parts))
    if images:
        write_images(
            (folder / description.images / p, label)
            for part in parts.values()
            for p, label, _ in part
        )
    return path


def write_fgvc(root: Path) -> Path:
    """FGVC-Aircraft: variants and three lists of numbers; returns its folder."""
    folder = root / "fgvc_aircraft"
    (folder / "images").mkdir(parents=True)
    parts = entries("fgvc_aircraft")
    # Two of the real names have a slash, most a space.
    names = [f"Model {label}/B" if label < 2 else f"Model {label}" for label in range(100)]
    (folder / "variants.txt").write_text("".join(f"{name}\n" for name in names))
    number = count()
    for part, listed in parts.items():
        lines = [f"{next(number):07d} {names[label]}\n" for _, label, _ in listed]
        (folder / f"images_variant_{part}.txt").write_text("".join(lines))
    return folder


def write_imagenet(root: Path, names: Sequence[str], train: int, test: int) -> Path:
    """ImageNet with one class per name and some empty files; returns its folder.

    It needs `patch_description(..., "imagenet", classes=..., counts=...)`.
    """
    folder = root / "imagenet"
    wnids = [f"n{2000000 + 7 * i:08d}" for i in range(len(names))]
    for wnid in reversed(wnids):
        for part, number in (("train", train), ("val", test)):
            inner = folder / "images" / part / wnid
            inner.mkdir(parents=True)
            for i in reversed(range(number)):
                (inner / f"{wnid}_{part}_{i}.JPEG").touch()
            (inner / ".hidden.JPEG").touch()
            (inner / "Thumbs.db").touch()
        (folder / "images" / "train" / ".DS_Store").touch()
    lines = [f"{wnid} {name}\n" for wnid, name in zip(wnids, names, strict=True)]
    (folder / "classnames.txt").write_text("".join(reversed(lines)))
    return folder


def write_cifar(root: Path, kind: str) -> Path:
    """CIFAR-10 or CIFAR-100 as the python archive has it; returns the folder of the batches.

    The pixels repeat after a thousand images; red, green and blue planes of an image differ.
    """
    description = datasets.describe(kind)
    folder = root / description.folder / description.images
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 3072), dtype=np.uint8)

    def write(name: str, value: Any, protocol: int = 2) -> None:
        (folder / name).write_bytes(python2_pickle(value, protocol))

    def labels(number: int, classes: int) -> list[int]:
        return [i % classes for i in range(number)]

    if kind == "cifar10":
        for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
            data = np.tile(pixels, (10, 1))
            write(name, {"batch_label": name, "labels": labels(10000, 10), "data": data})
        # The real one is a pickle of protocol 0.
        write("batches.meta", {"label_names": [f"kind_{i}" for i in range(10)]}, 0)
        return folder
    for name, number in (("train", 50000), ("test", 10000)):
        fine = labels(number, 100)
        content = {"filenames": [f"image_{i:06d}.png" for i in range(number)]}
        write(
            name,
            {
                **content,
                "fine_labels": fine,
                # Not the first five, the next five, ...: neighbours belong to different groups.
                "coarse_labels": [label % 20 for label in fine],
                "data": np.tile(pixels, (number // 1000, 1)),
            },
        )
    names = {
        "fine": [f"fine_{i}" for i in range(100)],
        "coarse": [f"coarse_{i}" for i in range(20)],
    }
    write("meta", {f"{level}_label_names": listed for level, listed in names.items()})
    return folder


def write_domains(root: Path, kind: str, images: bool = False) -> Path:
    """A data set of domains in its real number of images; returns its folder.

    domainnet345 gets one image per class, domain and part, but none of class 327 in the training
    list of painting.
    """
    folder = root / datasets.describe(kind).folder
    folder.mkdir(parents=True)
    write = {
        "domainnet10": _write_fedbn,
        "office_caltech10": _write_fedbn,
        "domainnet345": _write_lists,
        "pacs": _write_pacs,
        "office_home": _write_folders,
        "office31": _write_folders,
    }[kind]
    files = write(root, datasets.describe(kind))
    # Where nothing lists the images, the files themselves must be there.
    if images or write is _write_folders:
        write_images(files)
    return folder


Files = list[tuple[Path, int]]


def _write_fedbn(root: Path, description: datasets.Description) -> Files:
    names = description.names or ()
    domains = description.domains
    files: Files = []
    for part in ("train", "test"):
        sizes = shares(description.counts[part], len(domains))
        if description.kind == "office_caltech10":
            images = (958, 1123, 157, 295)
            sizes = [(766, 898, 125, 236)[i] for i in range(4)]
            sizes = (
                sizes if part == "train" else [n - s for n, s in zip(images, sizes, strict=True)]
            )
        for domain, size in zip(domains, sizes, strict=True):
            # Neither sorted nor in groups: position and label have nothing to do with each other.
            labels = [(7 * i + i // 10) % len(names) for i in range(size)]
            paths = [
                f"{description.folder}/{domain}/{names[label]}/{part}_{i:05d}.jpg"
                for i, label in enumerate(labels)
            ]
            texts = np.array([names[label] for label in labels], dtype=object)
            with (root / description.folder / f"{domain}_{part}.pkl").open("wb") as file:
                pickle.dump((np.array(paths, dtype=object), texts), file, protocol=2)
            files += [(root / path, label) for path, label in zip(paths, labels, strict=True)]
    return files


def _write_lists(root: Path, description: datasets.Description) -> Files:
    files: Files = []
    for domain in description.domains:
        for part in ("train", "test"):
            lines = []
            for label in range(description.class_count):
                if (domain, part, label) != ("painting", "train", 327):
                    path = f"{domain}/class_{label:03d}/{part}.jpg"
                    lines.append(f"{path} {label}\n")
                    files.append((root / description.folder / path, label))
            (root / description.folder / f"{domain}_{part}.txt").write_text("".join(lines))
    return files


def _write_pacs(root: Path, description: datasets.Description) -> Files:
    names = description.names or ()
    lists = root / "PACS" / "label"
    lists.mkdir()
    files: Files = []
    for domain, size in zip(description.domains, (2048, 2344, 1670, 3929), strict=True):
        listed: dict[str, list[str]] = {"train": [], "crossval": []}
        for i in range(size):
            label = i % len(names)
            path = f"{domain}/{names[label]}/pic_{i:04d}.jpg"
            listed["crossval" if i % 10 == 9 else "train"].append(f"{path} {label + 1}\n")
            files.append((root / "PACS" / "raw_images" / path, label))
        if domain == "sketch":
            listed["train"].append(f"{BROKEN_SKETCH} 1\n")
        listed["test"] = listed["train"] + listed["crossval"]
        for part, lines in listed.items():
            (lists / f"{domain}_{part}_kfold.txt").write_text("".join(lines))
    return files


def _write_folders(root: Path, description: datasets.Description) -> Files:
    files: Files = []
    sizes = shares(description.counts["total"], len(description.domains))
    for domain, size in zip(description.domains, sizes, strict=True):
        for i in range(size):
            label = i % description.class_count
            path = f"{domain}/class_{label:02d}/{i:05d}.jpg"
            files.append((root / description.folder / path, label))
    return files


def write_images(files: Iterable[tuple[Path, int]]) -> None:
    """One small JPEG per label, and hard links to it for its other paths."""
    first: dict[int, Path] = {}
    made: set[Path] = set()
    for path, label in files:
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        if label in first:
            os.link(first[label], path)
            continue
        first[label] = path
        values = np.random.default_rng(label).integers(0, 256, (2, 3, 3), dtype=np.uint8)
        image = Image.fromarray(values).resize((48, 40), Image.Resampling.NEAREST)
        image.save(path, "JPEG", quality=90)


def python2_pickle(value: Any, protocol: int) -> bytes:
    """Pickle dicts, lists, texts, integers and uint8 arrays as Python 2 did, as 8-bit strings."""
    start = b"" if protocol == 0 else b"\x80\x02"
    return start + _python2(value, protocol) + b"."


def _python2(value: Any, protocol: int) -> bytes:
    def many(values: Iterable[Any]) -> bytes:
        return b"".join(_python2(v, protocol) for v in values)

    if isinstance(value, np.ndarray):
        dtype = b"cnumpy\ndtype\n(" + many(["u1", 0, 1]) + b"tR(" + many([3, "|"])
        dtype += b"NNN" + many([-1, -1, 0]) + b"tb"
        made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n("
        made += many([0]) + b"t" + many(["b"]) + b"tR"
        shape = b"(" + many(value.shape) + b"t"
        return made + b"(" + many([1]) + shape + dtype + b"I00\n" + many([value.tobytes()]) + b"tb"
    if isinstance(value, dict):
        return b"(d" + b"".join(many(pair) + b"s" for pair in value.items())
    if isinstance(value, list):
        return b"(" + many(value) + b"l"
    if isinstance(value, int):
        return f"I{value}\n".encode() if protocol == 0 else b"J" + struct.pack("<i", value)
    data = value if isinstance(value, bytes) else value.encode()
    if protocol == 0:
        # As its repr, without the b of Python 3.
        return b"S" + repr(data)[1:].encode() + b"\n"
    return (
        b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
    ) + data
