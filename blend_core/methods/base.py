"""What a method is: two named sets of tensors, scores and a loss."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import Field
from torch import Tensor, nn

from blend_core.config import MethodConfig
from blend_core.errors import ConfigError, RunError
from blend_core.messages import Tensors

if TYPE_CHECKING:
    from blend_core.backbone import Backbone, Classes
    from blend_core.data import ClientData


class Method(nn.Module):
    """Base of all methods. A method is its module, next to its equations.

    `shared()` is uploaded, averaged and sent to everyone; `private()` never leaves the site.
    Frozen CLIP weights, buffers and whatever depends on the class list are in neither. What is
    trained is what requires a gradient. Transport, storage, aggregation, evaluation and the
    bytes ledger are written once against these two sets.

    Attributes:
        backbone: the frozen CLIP; on the server it has shapes only.
        draws: the generator of a local update, for dropout and the like; None outside of one.
    """

    Config: ClassVar[type[MethodConfig]]
    # Server and site keep a client's newest upload: for `payloads`, and for `begin`.
    keeps_uploads: ClassVar[bool] = False

    def __init__(self, config: MethodConfig, backbone: Backbone, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.draws: torch.Generator | None = None

    def shared(self) -> dict[str, nn.Parameter]:
        """The tensors that are averaged over clients, by name."""
        return {}

    def private(self) -> dict[str, nn.Parameter]:
        """The tensors that stay at the site, by name."""
        return {}

    def tokenize(self, names: Sequence[str], template: str) -> Classes:
        """The class constants this method works on; see `Backbone.tokenize`."""
        return self.backbone.tokenize(names, template)

    def text_features(self, classes: Classes) -> Tensor:
        """Normalised text features [..., C, d_e] for inference; computed once per evaluation."""
        raise NotImplementedError

    def scores(self, images: Tensor, text: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] used for inference.

        Args:
            images: normalised images [B, 3, S, S].
            text: what `text_features` made of the classes.
            classes: the classes that compete.
        """
        raise NotImplementedError

    def loss(self, images: Tensor, labels: Tensor, classes: Classes) -> dict[str, Tensor]:
        """The training objective under "loss" (a scalar), and its parts, for labels [B].

        Unless a method has another: the cross-entropy of the logits.
        """
        return {"loss": F.cross_entropy(self.logits(images, classes), labels)}

    def logits(self, images: Tensor, classes: Classes) -> Tensor:
        """Logits [B, C] of images among the classes, as used for inference."""
        return self.scores(images, self.text_features(classes), classes)

    def learning_rate(self, name: str, lr: float) -> float:
        """Learning rate of the tensor with this name; `lr` (`train.lr`) unless a method differs."""
        return lr

    def observe(self, data: ClientData, base: Classes) -> None:
        """See the client's images once, before anything else; most methods need not."""

    def payloads(
        self, clients: Sequence[str], uploads: Mapping[str, Tensors], seed: int
    ) -> dict[str, Tensors]:
        """On the server: what single clients are sent beside the shared tensors.

        Args:
            clients: names of the clients that are asked.
            uploads: newest accepted upload of every client before this round; empty unless
                `keeps_uploads`.
            seed: the run's seed.

        Returns:
            Client name -> tensors; clients without an entry are sent nothing more.
        """
        return {}

    def begin(self, payload: Tensors, upload: Tensors) -> None:
        """At the site: called for every request to train or evaluate, with all tensors in place.

        Args:
            payload: this client's entry of `payloads`; empty if it has none.
            upload: what this client last uploaded; empty at first, or unless `keeps_uploads`.

        Raises:
            RunError: the method takes no payload.
        """
        if payload:
            raise RunError("this method takes no tensors beside the shared ones")

    def named(self, *parts: str) -> dict[str, nn.Parameter]:
        """Parameters whose names begin with one of the parts, sorted by name; no parts: all."""
        named = sorted(self.named_parameters())
        return {n: p for n, p in named if not parts or n.split(".")[0] in parts}

    def parameter_counts(self) -> dict[str, int]:
        """Numbers of values: "shared", "private", and "trainable" of both (METHODS 15)."""
        shared, private = list(self.shared().values()), list(self.private().values())
        return {
            "shared": sum(tensor.numel() for tensor in shared),
            "private": sum(tensor.numel() for tensor in private),
            "trainable": sum(t.numel() for t in shared + private if t.requires_grad),
        }

    @property
    def trains(self) -> bool:
        """Whether there is anything to train."""
        return any(parameter.requires_grad for parameter in self.parameters())


class AllOrNoneConfig(MethodConfig):
    """Settings of methods whose tensors are all averaged, or all stay."""

    aggregate: Literal["all", "none"] = Field(
        "all", description="what is averaged; none: every site keeps its own tensors"
    )


class AllOrNone(Method):
    """A method made for one site: federated by averaging all its tensors, or trained locally."""

    config: AllOrNoneConfig

    def shared(self) -> dict[str, nn.Parameter]:
        """All tensors, unless `aggregate` is none."""
        return self.named() if self.config.aggregate == "all" else {}

    def private(self) -> dict[str, nn.Parameter]:
        """All tensors, if `aggregate` is none."""
        return self.named() if self.config.aggregate == "none" else {}


def snapshot(tensors: Mapping[str, nn.Parameter]) -> Tensors:
    """Copies of the tensors as float32 arrays; never a view of the live model."""
    return {
        name: value.detach().to("cpu", torch.float32).numpy().copy()
        for name, value in sorted(tensors.items())
    }


def restore(tensors: Mapping[str, nn.Parameter], values: Tensors) -> None:
    """Write finite values into the live tensors; names and shapes must be the same.

    Raises:
        RunError: names the tensors that are missing, unknown, of another shape or not finite.
    """
    wrong = sorted(set(tensors) ^ set(values)) + [
        name
        for name in sorted(set(tensors) & set(values))
        if tuple(tensors[name].shape) != tuple(values[name].shape)
    ]
    if wrong:
        raise RunError(f"tensors do not fit the method: {', '.join(wrong[:5])}")
    require_finite(values)
    with torch.no_grad():
        for name, parameter in tensors.items():
            parameter.copy_(torch.from_numpy(np.array(values[name], dtype=np.float32)))


def require_finite(values: Tensors) -> None:
    """Raise `RunError` that names the tensors with values that are not finite."""
    wrong = [name for name, value in sorted(values.items()) if not np.isfinite(value).all()]
    if wrong:
        raise RunError(f"tensors that are not finite: {', '.join(wrong[:5])}")


def require_sets(method: Method) -> None:
    """Refuse a method whose tensors would be lost, sent twice, or trained and never kept."""
    own = dict(method.named_parameters())
    sets = {"shared()": method.shared(), "private()": method.private()}
    for title, tensors in sets.items():
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
            raise ConfigError(f"{title} must be a dictionary of parameters by name")
        for name, value in tensors.items():
            if not any(value is parameter for parameter in own.values()):
                raise ConfigError(f"{title}: {name} is not a parameter of the method's own")
            if not re.fullmatch(r"[\w.-]{1,200}", name):
                raise ConfigError(f"{title}: name {name!r}: letters, digits, and . _ - only")
            if value.dtype != torch.float32:
                raise ConfigError(f"{title}: {name} is {value.dtype}, must be float32")
    shared, private = sets.values()
    twice = sorted(set(shared) & set(private))
    if twice or {id(value) for value in shared.values()} & {id(v) for v in private.values()}:
        raise ConfigError(f"a tensor is shared and private: {', '.join(twice) or 'by two names'}")
    kept = {id(value) for value in (*shared.values(), *private.values())}
    for name, parameter in own.items():
        if parameter.requires_grad and id(parameter) not in kept:
            raise ConfigError(f"parameter {name} is trained, but neither shared nor private")
