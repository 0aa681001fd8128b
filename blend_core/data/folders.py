"""A site's own images, read for training or examined for mistakes (PROTOCOL 7).

Both go the same way: list what lies there, decide which names compete, apply the rules, decode.
`load_folder` keeps the images and stops at the first error, `examine` keeps none and goes on.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blend_core.data.client_data import ClientData, Labelled
from blend_core.data.decoder import Decoder
from blend_core.data.findings import Finding, error, has_errors, log_warnings, raise_first, warning
from blend_core.data.holdout import Held, apply_holdout, holdout_lock, write_holdout
from blend_core.data.label_space import LabelSpace, label_space_of
from blend_core.data.listing import SiteImage, classes_of
from blend_core.data.repeated import same_files
from blend_core.data.site_images import SiteImages, list_site
from blend_core.data.store import ImageStore
from blend_core.data.transforms import Preprocess, limit_size, prepare_test
from blend_core.data.vocabulary import check_names, quoted
from blend_core.errors import SiteError

__all__ = ["Examination", "FolderOptions", "examine", "load_folder"]

# Classes with fewer training images are warned about.
FEW = 2
# How many times larger than the smallest class the largest may be without a warning.
UNEVEN = 50
# Pictures in two classes that a message names.
_PAIRS = 5


@dataclass(frozen=True)
class FolderOptions:
    """How a site's folder is read.

    Attributes:
        label_space: "node" or "federation".
        federation_classes: the federation's class names; only used with "federation".
        template: the prompt, with exactly one {}.
        holdout: share of the training images of each class that becomes the test part of a site
            that has none, from 0 (no test part), below 1.
        holdout_file: remembers which they are, and they stay so whatever `holdout` becomes; None:
            they are drawn, and not remembered.
        skip_bad: leave unreadable images out (W03) instead of refusing the site (E06).
        strict: refuse a site of which images are both in train and in test (W04).
    """

    label_space: str
    federation_classes: tuple[str, ...]
    template: str
    holdout: float = 0.0
    holdout_file: Path | None = None
    skip_bad: bool = False
    strict: bool = False


@dataclass(frozen=True)
class Examination:
    """What `examine` found.

    Attributes:
        findings: errors and warnings, in the order in which they were found.
        train: usable training images by class.
        test: usable test images by class, those held out included.
        novel: usable images by class that is never trained on.
        domains: usable images of train and test by domain, where the manifest says one.
        listed: classes without images that only `classes.txt` names; they compete as well.
        base_names: names that compete in training; empty if the folder cannot be read.
    """

    findings: tuple[Finding, ...]
    train: Counter[str]
    test: Counter[str]
    novel: Counter[str]
    domains: Counter[str]
    listed: tuple[str, ...]
    base_names: tuple[str, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What keeps the site from joining."""
        return tuple(f for f in self.findings if f.level == "error")


def load_folder(
    data_dir: Path, pre: Preprocess, options: FolderOptions, store: ImageStore
) -> ClientData:
    """Read a site's folder.

    The names that compete are, with label space "node", those of `classes.txt` in its order or,
    without that file, the sorted classes of train and test; with "federation" they are the
    federation's, to which local classes are matched as the model reads them (`_` as space, any
    case). The names of novel/ compete among themselves alone. Warnings go to the log.

    Args:
        data_dir: the site's folder.
        pre: the backbone's preprocessing.
        options: see `FolderOptions`; its holdout file is written when a class is new.
        store: receives the images.

    Returns:
        The site's data; all classes are local. No training image is allowed (the site only
        evaluates), and so is no test image, but not neither.

    Raises:
        SiteError: the first error; one line that begins with its code.
        ConfigError: an unknown label space, or federation classes that read the same.
    """
    remembered = options.holdout_file
    asked = options.holdout > 0 or (remembered is not None and os.path.lexists(remembered))
    with holdout_lock(remembered if asked else None):
        return _load(data_dir, pre, options, store)


def _load(data_dir: Path, pre: Preprocess, options: FolderOptions, store: ImageStore) -> ClientData:
    findings: list[Finding] = []
    survey = _survey(data_dir, options, findings)
    raise_first(findings)
    decoder = Decoder(data_dir, store)
    train, train_images = decoder.decode(survey.images.train, lambda i: limit_size(i, pre))
    test, test_images = decoder.decode(survey.images.test, lambda i: prepare_test(i, pre))
    novel, novel_images = decoder.decode(survey.images.novel, lambda i: prepare_test(i, pre))
    decoder.report(options.skip_bad, findings)
    _require_enough(data_dir, SiteImages(train, test, novel), survey.space.names, findings)
    raise_first(findings)
    if survey.held is not None and options.holdout_file is not None:
        write_holdout(options.holdout_file, survey.held)
    log_warnings(findings)
    labels, new_names = survey.space.labels, classes_of(survey.images.novel)
    new_labels = {name: number for number, name in enumerate(new_names)}
    return ClientData(
        base_names=survey.space.names,
        new_names=new_names,
        train=Labelled.of(train_images, [labels[image.class_name] for image in train]),
        test_base=Labelled.of(test_images, [labels[image.class_name] for image in test]),
        test_new=Labelled.of(novel_images, [new_labels[image.class_name] for image in novel]),
        # A class that is only tested counts as well, as a harder local task (PROTOCOL 7.2).
        local=frozenset(range(len(survey.space.names))),
    )


def examine(
    data_dir: Path,
    options: FolderOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Examination:
    """Find all errors and warnings of a site's folder; every image is decoded once, none is kept.

    Nothing is written, not even the holdout file.

    Args:
        data_dir: the site's folder.
        options: as for `load_folder`.
        progress: called with the images begun so far and their number, in any thread.

    Raises:
        ConfigError: as `load_folder`.
    """
    findings: list[Finding] = []
    survey = _survey(data_dir, options, findings)
    parts = (survey.images.train, survey.images.test, survey.images.novel)
    decoder = Decoder(data_dir, ImageStore(sys.maxsize), sum(map(len, parts)), progress)
    nothing = torch.empty(3, 0, 0, dtype=torch.uint8)  # All that is kept of an image.
    train, test, novel = (decoder.decode(part, lambda _: nothing)[0] for part in parts)
    decoder.report(options.skip_bad, findings)
    _require_enough(data_dir, SiteImages(train, test, novel), survey.space.names, findings)
    return Examination(
        findings=tuple(findings),
        train=_counts(train),
        test=_counts(test),
        novel=_counts(novel),
        domains=Counter(i.domain for i in (*train, *test) if i.domain is not None),
        listed=tuple(name for name in survey.space.labels if name not in survey.local),
        base_names=survey.space.names,
    )


@dataclass(frozen=True)
class _Survey:
    """What is known of a site before an image is decoded.

    Attributes:
        images: by part, the held-out ones in test.
        local: classes of train and test.
        space: the names that compete.
        held: what is to be remembered of the holdout; None: nothing new.
    """

    images: SiteImages
    local: tuple[str, ...]
    space: LabelSpace
    held: Held | None


def _survey(data_dir: Path, options: FolderOptions, findings: list[Finding]) -> _Survey:
    if options.template.count("{}") != 1:
        text = f"prompt-template {options.template!r} must contain {{}} exactly once"
        findings.append(error("E12", text))
    images, held = list_site(data_dir, findings), None
    try:
        images, held = apply_holdout(data_dir, images, options.holdout, options.holdout_file)
    except SiteError as failure:
        findings.append(error("E13", str(failure)))
    trained, local = classes_of(images.train), classes_of([*images.train, *images.test])
    space = label_space_of(
        data_dir,
        [*images.train, *images.test],
        options.label_space,
        options.federation_classes,
        findings,
    )
    _check_novel(data_dir, classes_of(images.novel), local, space.names, findings)
    untrained = [name for name in local if name not in trained]
    if trained and untrained:
        text = f"{data_dir}: test classes without training images: {quoted(untrained)}"
        findings.append(warning("W02", text))
    _report_same(data_dir, images, options.strict, findings)
    return _Survey(images, local, space, held)


def _check_novel(
    data_dir: Path,
    novel: Sequence[str],
    local: Sequence[str],
    competing: Sequence[str],
    findings: list[Finding],
) -> None:
    """E09 and E12 of novel classes: one that competes in training is not new to the model."""
    own = []
    for name in novel:
        if name in local or name in competing:
            place = "in train or test" if name in local else "among the names that compete there"
            text = (
                f"{data_dir}: class {quoted([name])} is in novel and {place}; a novel class must "
                "not be trained on; take it out of one of the two"
            )
            findings.append(error("E09", text))
        else:
            own.append(name)
    check_names(own, f"{data_dir}/novel", findings, taken=competing)


def _report_same(data_dir: Path, images: SiteImages, strict: bool, findings: list[Finding]) -> None:
    """W04 and W08: one file in train and in test, and one in two classes."""
    groups = same_files(data_dir, (*images.train, *images.test, *images.novel))
    train, test = set(images.train), set(images.test)
    both = [group for group in groups if not train.isdisjoint(group)]
    repeated = sorted(image.path for group in both for image in group if image in test)
    if repeated:
        occur = "image also occurs" if len(repeated) == 1 else "images also occur"
        text = (
            f"{data_dir}: {len(repeated)} test {occur} in train: {quoted(repeated)}; scores will "
            "be too high; remove one of the two"
        )
        findings.append((error if strict else warning)("W04", text))
    pairs = []
    for first, *others in groups:
        other = next((i for i in others if i.class_name != first.class_name), None)
        if other is not None:
            pairs.append(f"{quoted([first.path])} and {quoted([other.path])}")
    if pairs:
        more = f" and {len(pairs) - _PAIRS} more" if len(pairs) > _PAIRS else ""
        text = (
            f"{data_dir}: the same picture in two classes: {', '.join(pairs[:_PAIRS])}{more}; "
            "keep it in one"
        )
        findings.append(warning("W08", text))


def _require_enough(
    data_dir: Path, usable: SiteImages, names: Sequence[str], findings: list[Finding]
) -> None:
    """What is wrong with the numbers of images that can be used."""
    if not usable.train and not usable.test:
        if not has_errors(findings):
            findings.append(error("E08", f"{data_dir}: no usable image is left in train or test"))
        return
    counts = _counts(usable.train)
    few = [name for name, count in counts.items() if count < FEW]
    if few:
        text = f"{data_dir}: classes with fewer than {FEW} training images: {quoted(few)}"
        findings.append(warning("W05", text))
    ordered = counts.most_common()
    if ordered and ordered[0][1] > UNEVEN * ordered[-1][1]:
        (largest, most), (smallest, least) = ordered[0], ordered[-1]
        text = (
            f"{data_dir}: {quoted([largest])} has {most} training images, {quoted([smallest])} "
            f"{least}, more than {UNEVEN} times fewer"
        )
        findings.append(warning("W05", text))
    if len(counts) == 1 and len(names) > 1:
        text = (
            f"{data_dir}: only {quoted(counts)} has training images; the model may learn to answer "
            "nothing else"
        )
        findings.append(warning("W05", text))


def _counts(images: Iterable[SiteImage]) -> Counter[str]:
    return Counter(image.class_name for image in images)
