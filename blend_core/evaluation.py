"""Counts of right answers of one client's model, in the three groups of PROTOCOL section 4."""

from __future__ import annotations

import torch

from blend_core.backbone import Classes
from blend_core.data import ClientData, Labelled
from blend_core.data.transforms import Preprocess, normalise
from blend_core.errors import RunError
from blend_core.methods.base import Method

# group -> [right, total]
Counts = dict[str, list[int]]


@torch.no_grad()
def evaluate(
    method: Method,
    data: ClientData,
    base: Classes,
    new: Classes | None,
    batch_size: int,
) -> Counts:
    """Count right answers of the personalised model.

    Args:
        method: holds the newest shared and the client's own private tensors.
        data: the client's test images.
        base: prompts of `data.base_names`; they all compete for "local" and "base".
        new: prompts of `data.new_names`, which alone compete for "novel"; None if there are none.
        batch_size: images per forward pass.

    Returns:
        {"local": [right, total], "base": [...], "novel": [...]}: test images of the client's own
        classes, all base test images, all new test images.

    Raises:
        RunError: scores that are not finite.
    """
    preprocess = data.preprocess or method.backbone.preprocess
    predicted = _predict(method, data.test_base, base, batch_size, preprocess)
    labels = data.test_base.labels
    right = predicted == labels
    local = torch.isin(labels, torch.tensor(sorted(data.local_classes), dtype=torch.long))
    counts = {
        "local": [int(right[local].sum()), int(local.sum())],
        "base": [int(right.sum()), len(labels)],
        "novel": [0, 0],
    }
    if new is not None:
        found = _predict(method, data.test_new, new, batch_size, preprocess)
        counts["novel"] = [int((found == data.test_new.labels).sum()), len(found)]
    return counts


def _predict(
    method: Method, part: Labelled, classes: Classes, batch_size: int, preprocess: Preprocess
) -> torch.Tensor:
    """Index of the best class of every image, int64 [n]."""
    if not part.images:
        return torch.zeros(0, dtype=torch.long)
    backbone = method.backbone
    found = []
    with backbone.autocast():
        text = method.text_features(classes)
        for start in range(0, len(part.images), batch_size):
            pixels = torch.stack(list(part.images[start : start + batch_size]))
            images = normalise(pixels, preprocess, backbone.device)
            scores = method.scores(images, text, classes)
            if not torch.isfinite(scores).all():  # argmax would call them the first class
                raise RunError("the model's scores are not finite; its training has diverged")
            found.append(scores.argmax(-1).cpu())
    return torch.cat(found)
