"""What a method is: two named sets of tensors, scores and a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from blend_core.config import MethodConfig
from blend_core.errors import RunError

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes


class Method(nn.Module):
    """Base of all methods. A method is its module, next to its equations.

    `shared()` is uploaded, averaged and sent to everyone; `private()` never leaves the site.
    Frozen CLIP weights, buffers and whatever depends on the class list are in neither. What is
    trained is what requires a gradient. Transport, storage, aggregation, evaluation and the
    bytes ledger are written once against these two sets.
    """

    Config: ClassVar[type[MethodConfig]]

    def __init__(self, config: MethodConfig, backbone: Backbone, seed: int) -> None:
        super().__init__()
        self.backbone = backbone

    def shared(self) -> dict[str, nn.Parameter]:
        """The tensors that are averaged over clients, by name."""
        return {}

    def private(self) -> dict[str, nn.Parameter]:
        """The tensors that stay at the site, by name."""
        return {}

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [C, d_e]; computed once per step or evaluation."""
        raise NotImplementedError

    def scores(self, images: Tensor, text: Tensor) -> Tensor:
        """Logits [B, C] used for inference, from normalised images [B, 3, S, S]."""
        raise NotImplementedError

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """The training objective under "loss" (a scalar), and its parts, for labels [B]."""
        raise NotImplementedError

    def logits(self, images: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] of images among the classes, as used for inference."""
        return self.scores(images, self.text_features(classes))

    @property
    def trains(self) -> bool:
        """Whether there is anything to train."""
        return any(parameter.requires_grad for parameter in self.parameters())


def snapshot(tensors: Mapping[str, nn.Parameter]) -> dict[str, npt.NDArray[np.float32]]:
    """Copies of the tensors as float32 arrays; never a view of the live model."""
    return {
        name: value.detach().to("cpu", torch.float32).numpy().copy()
        for name, value in sorted(tensors.items())
    }


def restore(
    tensors: Mapping[str, nn.Parameter], values: Mapping[str, npt.NDArray[np.float32]]
) -> None:
    """Write values into the live tensors; names and shapes must be the same.

    Raises:
        RunError: names the tensors that are missing, unknown or of another shape.
    """
    wrong = sorted(set(tensors) ^ set(values)) + [
        name
        for name in sorted(set(tensors) & set(values))
        if tuple(tensors[name].shape) != tuple(values[name].shape)
    ]
    if wrong:
        raise RunError(f"tensors do not fit the method: {', '.join(wrong[:5])}")
    with torch.no_grad():
        for name, parameter in tensors.items():
            parameter.copy_(torch.from_numpy(np.array(values[name], dtype=np.float32)))
