"""What one client holds: its images, their labels and the names that compete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blend_core.data.transforms import Preprocess

__all__ = ["ClientData", "Labelled", "Origin"]


@dataclass(frozen=True)
class Origin:
    """Where a client's part of a data set comes from, for the results.

    Attributes:
        manifest_sha256: of the partition; equal at all clients that share the same data.
        domain: of domain sets; else None.
        published: whether the split is the published one, not made by `blend data make-split`.
    """

    manifest_sha256: str
    domain: str | None = None
    published: bool = True


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images and their labels, in a fixed order; possibly none.

    Attributes:
        images: n tensors, uint8, shape [3, H, W] each; heights and widths may differ. Positions
            and slices may be asked for; what they give may have to be read from a file.
        labels: int64, shape [n]; indices into a list of class names.

    Raises:
        ValueError: the two differ in length, or `labels` is not int64 of one dimension.
    """

    images: Sequence[Tensor]
    labels: Tensor

    def __post_init__(self) -> None:
        if self.labels.dtype != torch.int64 or self.labels.shape != (len(self.images),):
            raise ValueError(
                f"{len(self.images)} images need int64 labels of shape [{len(self.images)}], not "
                f"{self.labels.dtype} of shape {list(self.labels.shape)}"
            )

    @classmethod
    def of(cls, images: Sequence[Tensor], labels: Sequence[int]) -> Labelled:
        """Build from images and one integer label each; both may be empty."""
        return cls(images, torch.tensor(labels, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's data, held in memory for as long as its worker lives.

    Test images are prepared (uint8 [3, S, S]); training images keep what a random crop needs.

    Attributes:
        base_names: names that compete in training, Local and Base.
        new_names: names that compete in Novel; may be empty.
        train: training images; labels index `base_names`. Empty for a site that only evaluates.
        test_base: test images; labels index `base_names`.
        test_new: test images of classes never trained on; labels index `new_names`.
        local: classes whose test images count as Local; None: those with a training image here.
        preprocess: of images that need another than the backbone's; None: the backbone's.
        origin: the partition that the images are a part of; None for a site's own.

    Raises:
        ValueError: a label is outside its list of names.
    """

    base_names: tuple[str, ...]
    new_names: tuple[str, ...]
    train: Labelled
    test_base: Labelled
    test_new: Labelled
    local: frozenset[int] | None = None
    preprocess: Preprocess | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        for field, names in (
            ("train", self.base_names),
            ("test_base", self.base_names),
            ("test_new", self.new_names),
        ):
            labels = getattr(self, field).labels
            if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < len(names):
                raise ValueError(f"{field} has a label outside 0..{len(names) - 1}")

    @cached_property
    def local_classes(self) -> frozenset[int]:
        """Classes whose test images make up Local."""
        return frozenset(self.train.labels.tolist()) if self.local is None else self.local
