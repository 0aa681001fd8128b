"""Makes a missing `split_zhou_*.json` by the rules of CoOp (PROTOCOL 1.1), on request only.

The published splits were drawn once; one that is made here is another one, whose seed is recorded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from blend_core.data.datasets import (
    Description,
    describe,
    file_sha256,
    folder_names,
    read_lines,
)
from blend_core.data.fewshot import items_by_class
from blend_core.data.images import is_image_name
from blend_core.errors import BlendError, ConfigError, SiteError, described, one_line
from blend_core.randomness import numpy_generator
from blend_core.state import write_json_atomic

__all__ = ["make_split"]

# Path, label and class name, as in the file.
Entry = tuple[str, int, str]

CALTECH_IGNORED = ("BACKGROUND_Google", "Faces_easy")
CALTECH_NAMES = {
    "airplanes": "airplane",
    "Faces": "face",
    "Leopards": "leopard",
    "Motorbikes": "motorbike",
}
EUROSAT_NAMES = {
    "AnnualCrop": "Annual Crop Land",
    "Forest": "Forest",
    "HerbaceousVegetation": "Herbaceous Vegetation Land",
    "Highway": "Highway or Road",
    "Industrial": "Industrial Buildings",
    "Pasture": "Pasture Land",
    "PermanentCrop": "Permanent Crop Land",
    "Residential": "Residential Buildings",
    "River": "River",
    "SeaLake": "Sea or Lake",
}


def make_split(kind: str, root: Path, seed: int) -> Path:
    """Write the split file of a data set of the CoOp family, and beside it how it was made.

    Where the source has no lists, every class is shuffled and half of it trains, a fifth
    validates and the rest tests. Where it has a training and a test list, a fifth of every class
    of the training list validates, and the test list is kept.

    Args:
        kind: the data set's id.
        root: the folder that holds the data sets.
        seed: of the draw.

    Returns:
        The path of the split file.

    Raises:
        ConfigError: the data set has no split file of this kind, or has one already.
        SiteError: its images or lists are missing or not what they must be.
        StateError: the file cannot be written.
    """
    description = describe(kind)
    if description.reader != "coop":
        makable = [known for known in _SOURCES if describe(known).reader == "coop"]
        raise ConfigError(f"{kind} needs no split to be made; these may: {', '.join(makable)}")
    folder = root / description.folder
    path = folder / description.lists[0]
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; move it away first, if it is not the right one")
    if not (folder / description.images).is_dir():
        raise SiteError(f"{folder / description.images} is missing; docs/data.md lists it")
    try:
        train, test = _SOURCES[kind](description, root)
    except BlendError:
        raise
    except Exception as error:  # Lists and .mat files that are damaged, in all sorts of ways.
        raise SiteError(
            f"{folder}: {kind}'s files are damaged ({one_line(described(error), 200)}); restore "
            "them; docs/data.md says what they are"
        ) from error
    if not train:
        raise SiteError(f"{folder}: no images were found; docs/data.md lists what belongs there")
    for image, label, name in (*train, *(test or ())):
        if label < 0 or not (image + name).isprintable():
            raise SiteError(f"{folder}: {image!r}: its label ({label + 1}) or name is wrong")
    if test is None:
        rule, parts = "50/20/30 per class", _thirds(train, kind, seed)
    else:
        rule = "80/20 of the training list per class"
        parts = _with_validation(train, test, kind, seed)
    write_json_atomic(path, parts)
    write_json_atomic(
        path.with_suffix(".made.json"),
        {
            "made_by": "blend data make-split",
            "rule": rule,
            "seed": seed,
            "sha256": file_sha256(path),
        },
    )
    return path


def _thirds(entries: Sequence[Entry], kind: str, seed: int) -> dict[str, list[Entry]]:
    parts: dict[str, list[Entry]] = {"train": [], "val": [], "test": []}
    for items in _shuffled(entries, kind, seed):
        first, second = round(0.5 * len(items)), round(0.2 * len(items))
        parts["train"] += items[:first]
        parts["val"] += items[first : first + second]
        parts["test"] += items[first + second :]
    return parts


def _with_validation(
    entries: Sequence[Entry], test: Sequence[Entry], kind: str, seed: int
) -> dict[str, list[Entry]]:
    parts: dict[str, list[Entry]] = {"train": [], "val": [], "test": list(test)}
    for items in _shuffled(entries, kind, seed):
        count = round(0.2 * len(items))
        parts["val"] += items[:count]
        parts["train"] += items[count:]
    return parts


def _shuffled(entries: Sequence[Entry], kind: str, seed: int) -> list[list[Entry]]:
    """The entries of every class, each in an order of chance of its own."""
    result = []
    for label, items in sorted(items_by_class([label for _, label, _ in entries]).items()):
        order = numpy_generator(seed, "make-split", kind, label).permutation(items)
        result.append([entries[i] for i in order.tolist()])
    return result


Source = Callable[[Description, Path], tuple[list[Entry], list[Entry] | None]]


def _folders(rename: Callable[[str], str | None]) -> Source:
    """Classes are folders; `rename` gives their names, None leaves one out."""

    def read(description: Description, root: Path) -> tuple[list[Entry], None]:
        place = root / description.folder / description.images
        # Labels follow the folders' order, not that of the names.
        kept = [f for f in folder_names(place, folders=True) if rename(f) is not None]
        return [
            (f"{name}/{file}", label, rename(name) or name)
            for label, name in enumerate(kept)
            for file in folder_names(place / name)
            if is_image_name(file)
        ], None

    return read


def _pets(description: Description, root: Path) -> tuple[list[Entry], list[Entry]]:
    folder = root / description.folder / "annotations"
    parts = []
    for name in ("trainval.txt", "test.txt"):
        entries = []
        for number, line in enumerate(read_lines(folder / name, description.kind), start=1):
            fields = line.split()
            if len(fields) < 2 or "_" not in fields[0] or not fields[1].isdecimal():
                raise SiteError(f"{folder / name} line {number}: expected an image and its label")
            breed = fields[0].rpartition("_")[0].lower()
            entries.append((f"{fields[0]}.jpg", int(fields[1]) - 1, breed))
        parts.append(sorted(entries))
    return parts[0], parts[1]


def _flowers(description: Description, root: Path) -> tuple[list[Entry], None]:
    import json

    from scipy.io import loadmat

    folder = root / description.folder
    try:
        labels = loadmat(str(folder / "imagelabels.mat"))["labels"][0].tolist()
        names = json.loads((folder / "cat_to_name.json").read_text(encoding="utf-8"))
        return [
            (f"image_{number:05d}.jpg", label - 1, names[str(label)])
            for number, label in enumerate(labels, start=1)
        ], None
    except Exception as error:  # The reader of .mat files raises all sorts of things.
        raise _unusable(folder, "imagelabels.mat and cat_to_name.json", error) from None


def _cars(description: Description, root: Path) -> tuple[list[Entry], list[Entry]]:
    from scipy.io import loadmat

    folder = root / description.folder
    files = (
        "devkit/cars_train_annos.mat",
        "cars_test_annos_withlabels.mat",
        "devkit/cars_meta.mat",
    )
    try:
        names = [str(n[0]) for n in loadmat(str(folder / files[2]))["class_names"][0]]
        parts = []
        for images, file in (("cars_train", files[0]), ("cars_test", files[1])):
            entries = []
            for record in loadmat(str(folder / file))["annotations"][0]:
                label = int(record["class"][0, 0]) - 1
                words = names[label].split(" ")
                # The year, which is last, comes first.
                name = " ".join([words[-1], *words[:-1]])
                entries.append((f"{images}/{record['fname'][0]}", label, name))
            parts.append(sorted(entries))
    except Exception as error:
        raise _unusable(folder, ", ".join(files), error) from None
    return parts[0], parts[1]


def _sun(description: Description, root: Path) -> tuple[list[Entry], list[Entry]]:
    folder = root / description.folder
    kind = description.kind
    classes = [line.strip().strip("/") for line in read_lines(folder / "ClassName.txt", kind)]
    number = {name: label for label, name in enumerate(classes)}
    parts = []
    for name in ("Training_01.txt", "Testing_01.txt"):
        entries = []
        for line, text in enumerate(read_lines(folder / name, kind), start=1):
            path = text.strip().strip("/")
            group = str(PurePosixPath(path).parent)
            if group not in number:
                raise SiteError(f"{folder / name} line {line}: {group} is not in ClassName.txt")
            # i/ice_skating_rink/outdoor reads "outdoor ice_skating_rink".
            words = " ".join(reversed(group.split("/")[1:]))
            entries.append((path, number[group], words))
        parts.append(sorted(entries))
    return parts[0], parts[1]


def _ucf(description: Description, root: Path) -> tuple[list[Entry], list[Entry]]:
    folder = root / description.folder / "ucfTrainTestlist"
    kind = description.kind
    number = {}
    for line in read_lines(folder / "classInd.txt", kind):
        label, _, action = line.partition(" ")
        number[action.strip()] = int(label) - 1
    parts = []
    for name in ("trainlist01.txt", "testlist01.txt"):
        entries = []
        for at, text in enumerate(read_lines(folder / name, kind), start=1):
            action, _, video = text.split(" ")[0].partition("/")
            if action not in number:
                raise SiteError(f"{folder / name} line {at}: {action!r} is not in classInd.txt")
            words = "_".join(re.findall(r"[A-Z][^A-Z]*", action))
            path = f"{words}/{video.removesuffix('.avi')}.jpg"
            entries.append((path, number[action], words))
        parts.append(sorted(entries))
    return parts[0], parts[1]


def _unusable(folder: Path, files: str, error: Exception) -> SiteError:
    kind = type(error).__name__
    return SiteError(f"{folder}: {files} cannot be read ({kind}); docs/data.md says what they are")


_SOURCES: dict[str, Source] = {
    "caltech101": _folders(
        lambda name: None if name in CALTECH_IGNORED else CALTECH_NAMES.get(name, name)
    ),
    "oxford_pets": _pets,
    "stanford_cars": _cars,
    "oxford_flowers": _flowers,
    "food101": _folders(lambda name: name),
    "sun397": _sun,
    "dtd": _folders(lambda name: name),
    "eurosat": _folders(lambda name: EUROSAT_NAMES.get(name, name)),
    "ucf101": _ucf,
}
