"""One local update: the method's trainable tensors after passes over the client's images."""

from __future__ import annotations

from collections import defaultdict

import torch

from blend_core.backbone import Classes
from blend_core.config import TrainConfig
from blend_core.data import ClientData
from blend_core.data.transforms import augment, normalise
from blend_core.errors import RunError
from blend_core.methods.base import Method
from blend_core.randomness import torch_generator


def local_update(
    method: Method,
    data: ClientData,
    classes: Classes,
    config: TrainConfig,
    seed: int,
    client: str,
    round: int,
) -> dict[str, float]:
    """Train `method` in place with a fresh optimiser; nothing is carried to the next round.

    The result depends on the tensors the method holds, the client's images and
    (seed, client, round) alone, so a round can be done again.

    Args:
        method: holds the round's shared and the client's private tensors.
        data: the client's images; at least one training image.
        classes: prompts of `data.base_names`.
        config: optimiser, batch, epochs, augmentation.
        seed: the run's seed.
        client: the client's name.
        round: the round's number, from 1.

    Returns:
        Means over all images of "loss" and its parts, and the number of "steps".

    Raises:
        RunError: the loss is not finite; names client, round and step.
    """
    optimizer = _optimizer(method, config)
    images, labels = data.train.images, data.train.labels
    preprocess, device = method.backbone.preprocess, method.backbone.device
    sums: dict[str, float] = defaultdict(float)
    steps = 0
    for epoch in range(config.local_epochs):
        order = torch.randperm(
            len(images), generator=torch_generator(seed, "shuffle", client, round, epoch)
        )
        draws = torch_generator(seed, "augment", client, round, epoch)
        for batch in order.split(config.batch_size):
            chosen = [images[i] for i in batch.tolist()]
            pixels = augment(chosen, preprocess, config.crop_scale, config.flip, draws)
            losses = method.loss(
                normalise(pixels, preprocess, device), labels[batch].to(device), classes
            )
            if not torch.isfinite(losses["loss"]):
                raise RunError(
                    f"{client}: the loss is {losses['loss'].item()} in round {round}, step "
                    f"{steps + 1}; lower train.lr (now {config.lr})"
                )
            optimizer.zero_grad(set_to_none=True)
            losses["loss"].backward()
            optimizer.step()
            steps += 1
            for name, value in losses.items():
                sums[name] += value.item() * len(batch)
    seen = config.local_epochs * len(images)
    return {**{name: total / seen for name, total in sums.items()}, "steps": steps}


def _optimizer(method: Method, config: TrainConfig) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in method.parameters() if parameter.requires_grad]
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            trainable, config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    return torch.optim.AdamW(trainable, config.lr, weight_decay=config.weight_decay)
