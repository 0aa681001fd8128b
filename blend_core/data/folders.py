"""A site's own images, read for training or examined for mistakes (PROTOCOL 7).

Both go the same way: list what lies there, decide which names compete, apply the rules, decode.
`load_folder` keeps the images and stops at the first error, `examine` keeps none and goes on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from blend_core.data.client_data import ClientData, Labelled
from blend_core.data.decoder import Decoder
from blend_core.data.findings import Finding, error, has_errors, log_warnings, raise_first, warning
from blend_core.data.holdout import Held, hold_out, read_holdout, write_holdout
from blend_core.data.label_space import LabelSpace, label_space_of
from blend_core.data.listing import SiteImage
from blend_core.data.repeated import repeated_images
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


@dataclass(frozen=True)
class FolderOptions:
    """How a site's folder is read.

    Attributes:
        label_space: "node" or "federation".
        federation_classes: the federation's class names; only used with "federation".
        template: the prompt, with exactly one {}.
        holdout: share of the training images of each class that becomes the test part of a site
            that has none, from 0 (no test part), below 1.
        holdout_file: remembers which they are; None: they are drawn, and not remembered.
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
        base_names: names that compete in training; empty if the folder cannot be read.
    """

    findings: tuple[Finding, ...]
    train: Counter[str]
    test: Counter[str]
    novel: Counter[str]
    domains: Counter[str]
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
        SiteError: the first error; one line that begins with the code of PROTOCOL 7.3, where it
            has one.
        ConfigError: an unknown label space, or federation classes that read the same.
    """
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
    labels, new_names = survey.space.labels, _classes(survey.images.novel)
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
        progress: called with the images decoded so far and their number, in any thread.

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
        base_names=survey.space.names,
    )


@dataclass(frozen=True)
class _Survey:
    """What is known of a site before an image is decoded.

    Attributes:
        images: by part, the held-out ones in test.
        space: the names that compete.
        held: what is to be remembered of the holdout; None: nothing new.
    """

    images: SiteImages
    space: LabelSpace
    held: Held | None


def _survey(data_dir: Path, options: FolderOptions, findings: list[Finding]) -> _Survey:
    if options.template.count("{}") != 1:
        text = f"prompt-template {options.template!r} must contain {{}} exactly once"
        findings.append(error("E12", text))
    images, held = list_site(data_dir, findings), None
    if options.holdout > 0 and images.train:
        try:
            known = {} if options.holdout_file is None else read_holdout(options.holdout_file)
            # Beside test images that came later only what was held out before stays so.
            choices: Held = {name: [] for name in _classes(images.train)} if images.test else {}
            train, test, held = hold_out(images.train, options.holdout, {**choices, **known})
            held = None if images.test or held == known else held
            images = replace(images, train=train, test=(*images.test, *test))
        except SiteError as failure:
            findings.append(error("", str(failure)))
    trained, local = _classes(images.train), _classes([*images.train, *images.test])
    space = label_space_of(
        data_dir, local, options.label_space, options.federation_classes, findings
    )
    # A class that competes in training is no longer new to the model.
    check_names(_classes(images.novel), f"{data_dir}/novel", findings, taken=space.names)
    untrained = [name for name in local if name not in trained]
    if trained and untrained:
        text = f"{data_dir}: test classes without training images: {quoted(untrained)}"
        findings.append(warning("W02", text))
    repeated = repeated_images(data_dir, images)
    if repeated:
        occur = "image also occurs" if len(repeated) == 1 else "images also occur"
        text = (
            f"{data_dir}: {len(repeated)} test {occur} in train: {quoted(repeated)}; scores will "
            "be too high; remove one of the two"
        )
        findings.append((error if options.strict else warning)("W04", text))
    return _Survey(images, space, held)


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
        findings.append(warning("", text))


def _classes(images: Iterable[SiteImage]) -> tuple[str, ...]:
    return tuple(sorted({image.class_name for image in images}))


def _counts(images: Iterable[SiteImage]) -> Counter[str]:
    return Counter(image.class_name for image in images)
