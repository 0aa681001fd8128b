"""A site's own images: <data-dir>/train/<class>/*, and optionally test/, novel/ and classes.txt.

See PROTOCOL 7.1 for the layout. Every mistake ends in one line that begins with the code of
PROTOCOL 7.3, where it has one, and names the place and the fix.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from blend_core.data.client_data import ClientData, Labelled
from blend_core.data.images import decode_image
from blend_core.data.listing import class_files, require_inside
from blend_core.data.transforms import Preprocess, limit_size, prepare_test
from blend_core.data.vocabulary import check_names, quoted, read_classes_file, reading
from blend_core.errors import ConfigError, SiteError

__all__ = ["load_folder"]

_log = logging.getLogger(__name__)

Files = dict[str, list[Path]]


def load_folder(
    data_dir: Path,
    pre: Preprocess,
    label_space: str,
    federation_classes: Sequence[str],
    template: str,
) -> ClientData:
    """Read a site's folder.

    The names that compete are, with label space "node", those of `classes.txt` in its order or,
    without that file, the sorted classes of train/ and test/; with "federation" they are
    `federation_classes`, to which local classes are matched as the model reads them (`_` as
    space, any case). The names of novel/ compete among themselves alone.

    Args:
        data_dir: the site's folder.
        pre: the backbone's preprocessing.
        label_space: "node" or "federation".
        federation_classes: the federation's class names; only used with "federation".
        template: the prompt, with exactly one {}.

    Returns:
        The site's data. No training image is allowed (the site only evaluates), and so is no
        test image, but not neither.

    Raises:
        SiteError: E01 no such folder, E02 neither train/ nor test/, E03 loose images, E05 a link
            that leads out, E06 unreadable images, E07 one class, E08 no image at all, E09 names
            that read the same, E10 a class that the federation does not have, E12 an empty name
            or a wrong template; without a code, a class missing in `classes.txt`.
        ConfigError: an unknown label space, or `federation_classes` read the same.
    """
    if label_space not in ("node", "federation"):
        raise ConfigError(f"label-space = {label_space!r}: must be node or federation")
    if template.count("{}") != 1:
        raise SiteError(f"E12 prompt-template {template!r} must contain {{}} exactly once")
    train, test, novel = _list_files(data_dir)
    base_names, number_of = _vocabulary(data_dir, train, test, label_space, federation_classes)
    if len(base_names) < 2:
        raise SiteError(
            f"E07 {data_dir}: only one class ({quoted(base_names)}), so there is nothing to learn; "
            "list further names in classes.txt or set label-space to federation"
        )
    # A class that competes in training is no longer new to the model.
    check_names([*base_names, *novel], f"{data_dir}/novel")
    untrained = sorted(test.keys() - train.keys())
    if train and untrained:
        _log.warning(
            "W02 %s: test classes without training images: %s", data_dir, quoted(untrained)
        )

    bad: list[tuple[Path, str]] = []
    data = ClientData(
        base_names=base_names,
        new_names=tuple(novel),
        train=_load(train, number_of, lambda image: limit_size(image, pre), bad),
        test_base=_load(test, number_of, lambda image: prepare_test(image, pre), bad),
        test_new=_load(
            novel,
            {name: number for number, name in enumerate(novel)},
            lambda image: prepare_test(image, pre),
            bad,
        ),
    )
    if bad:
        what = "1 image" if len(bad) == 1 else f"{len(bad)} images"
        names = quoted(path.relative_to(data_dir).as_posix() for path, _ in bad)
        raise SiteError(
            f"E06 {data_dir}: {what} cannot be used: {names}; replace or remove "
            f"{'it' if len(bad) == 1 else 'them'} (the first: {bad[0][1].partition(';')[0]})"
        )
    return data


def _list_files(data_dir: Path) -> tuple[Files, Files, Files]:
    """Files by class of train/, test/ and novel/."""
    if not os.path.isdir(data_dir):  # Path.is_dir() raises where access is denied.
        raise SiteError(f"E01 data directory {data_dir} not found; set data-dir")
    if not any(os.path.isdir(data_dir / part) for part in ("train", "test")):
        raise SiteError(f"E02 expected train/<class>/ or test/<class>/ under {data_dir}")
    if os.path.exists(data_dir / "manifest.csv"):
        _log.warning("%s: manifest.csv is not read, train/ and test/ are", data_dir)
    train, test, novel = (
        class_files(data_dir / part, data_dir) if os.path.isdir(data_dir / part) else {}
        for part in ("train", "test", "novel")
    )
    if not train and not test:
        raise SiteError(
            f"E08 {data_dir}: no images in train/ or test/; add images as train/<class>/*.jpg"
        )
    return train, test, novel


def _vocabulary(
    data_dir: Path,
    train: Files,
    test: Files,
    label_space: str,
    federation_classes: Sequence[str],
) -> tuple[tuple[str, ...], dict[str, int]]:
    """The names that compete, and the label of every local class folder."""
    local = sorted(train.keys() | test.keys())
    check_names(local, str(data_dir))
    listed = data_dir / "classes.txt"
    texts = {}
    if os.path.exists(listed):
        require_inside(listed, data_dir)
        texts = read_classes_file(listed)
    if label_space == "federation":
        try:
            check_names(federation_classes, "data.classes")
        except SiteError as error:  # The operator's list, not the site's.
            raise ConfigError(str(error)) from None
        numbers = {reading(name): number for number, name in enumerate(federation_classes)}
        unknown = [name for name in local if reading(texts.get(name, name)) not in numbers]
        if unknown:
            class_word, verb = ("class", "is") if len(unknown) == 1 else ("classes", "are")
            raise SiteError(
                f"E10 {data_dir}: {class_word} {quoted(unknown)} {verb} not in the federation's "
                f"class list ({len(numbers)} classes); rename or ask the operator"
            )
        return tuple(federation_classes), {
            name: numbers[reading(texts.get(name, name))] for name in local
        }
    if not os.path.exists(listed):
        return tuple(local), {name: number for number, name in enumerate(local)}
    missing = [name for name in local if name not in texts]
    if missing:
        raise SiteError(
            f"{listed}: no line for the class folder {quoted(missing)}; add it, or remove the file "
            "to use the folders' names"
        )
    return tuple(texts.values()), {folder: number for number, folder in enumerate(texts)}


def _load(
    classes: Files,
    number_of: dict[str, int],
    prepare: Callable[[Tensor], Tensor],
    bad: list[tuple[Path, str]],
) -> Labelled:
    """Decode and prepare all images; those that fail go to `bad` with the reason."""
    images, labels = [], []
    for name, files in classes.items():
        for path in files:
            try:
                images.append(prepare(decode_image(path)))
            except SiteError as error:
                bad.append((path, str(error).removeprefix(f"{path}: ")))
            else:
                labels.append(number_of[name])
    return Labelled.of(images, labels)
