"""One local update: the method's trainable tensors after passes over the client's images."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor

from blend_core.backbone import Classes
from blend_core.config import TrainConfig
from blend_core.data import ClientData
from blend_core.data.prefetch import prefetched
from blend_core.data.transforms import Preprocess, augment, normalise
from blend_core.errors import RunError
from blend_core.methods.base import Method
from blend_core.names import is_plain_name
from blend_core.randomness import torch_generator


def local_update(
    method: Method,
    data: ClientData,
    classes: Classes,
    config: TrainConfig,
    seed: int,
    client: str,
    round: int,
    rounds: int,
) -> dict[str, float]:
    """Train `method` in place with a fresh optimiser; nothing is carried to the next round.

    The result depends on the tensors the method holds, the client's images and
    (seed, client, round) alone, so a round can be done again.

    Args:
        method: holds the round's shared and the client's private tensors.
        data: the client's images; at least one training image.
        classes: the method's constants of `data.base_names`.
        config: optimiser, batch, epochs, augmentation.
        seed: the run's seed.
        client: the client's name.
        round: the round's number, from 1.
        rounds: number of rounds of the run, over which a cosine schedule falls.

    Returns:
        Means over all images of "loss" and its parts, and the number of "steps"; with fp16 also
        "skipped_steps", whose gradient overflowed.

    Raises:
        RunError: a loss is not finite, or not what `Method.loss` promises; names round and step.
    """
    backbone = method.backbone
    optimizer = _optimizer(method, config)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    half = config.precision == "fp16"
    # The default first scale, 65536, is meant to be found by skipping steps over a long training;
    # a local update has few steps and a fresh scaler.
    scaler = torch.amp.GradScaler(backbone.device.type, init_scale=256.0, enabled=half)
    steps = config.local_steps or config.local_epochs * _steps_per_epoch(len(data.train), config)
    preprocess = data.preprocess or backbone.preprocess
    sums: dict[str, float] = defaultdict(float)
    seen = skipped = 0
    method.draws = torch_generator(seed, "method", client, round)
    try:
        batches = _batches(data, config, preprocess, backbone.device, seed, client, round)
        for step, (pixels, labels) in enumerate(prefetched(islice(batches, steps))):
            with backbone.autocast():
                losses = method.loss(
                    normalise(pixels, preprocess, backbone.device),
                    labels.to(backbone.device),
                    classes,
                )
            _require_usable(losses, round, step + 1, optimizer)
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _decay(config, round, step, rounds, steps)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(losses["loss"]).backward()
            if config.clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trained, config.clip_norm)
            scaler.step(optimizer)
            scale = scaler.get_scale()
            scaler.update()
            skipped += scaler.get_scale() < scale
            for name, value in losses.items():
                sums[name] += value.item() * len(labels)
            seen += len(labels)
    finally:
        method.draws = None
    means = {name: total / seen for name, total in sums.items()}
    return {**means, "steps": steps, **({"skipped_steps": skipped} if half else {})}


def _require_usable(
    losses: dict[str, Tensor], round: int, step: int, optimizer: torch.optim.Optimizer
) -> None:
    where = f"round {round}, step {step}"
    scalars = isinstance(losses, dict) and all(
        isinstance(value, Tensor) and value.numel() == 1 for value in losses.values()
    )
    trained = scalars and "loss" in losses and losses["loss"].requires_grad
    named = trained and all(map(is_plain_name, losses))
    if not named or set(losses) & {"steps", "skipped_steps"}:
        raise RunError(
            f'{where}: the method\'s loss must be a dictionary of scalar tensors with "loss", '
            'without "steps" and "skipped_steps"; names are letters, digits, ".", "_" and "-"'
        )
    for name, value in losses.items():
        if not torch.isfinite(value):
            rates = sorted({group["initial_lr"] for group in optimizer.param_groups})
            raise RunError(
                f"{where}: {name} is {value.item()}; lower the learning rate (now "
                f"{', '.join(map(str, rates))}) or look at the method's own factors"
            )


def _steps_per_epoch(images: int, config: TrainConfig) -> int:
    """Batches of one pass; the last may be smaller, and is dropped only if that is asked for."""
    whole, rest = divmod(images, config.batch_size)
    dropped = config.drop_last == "if-larger" and whole > 0
    return whole + (rest > 0 and not dropped)


def _batches(
    data: ClientData,
    config: TrainConfig,
    preprocess: Preprocess,
    device: torch.device,
    seed: int,
    client: str,
    round: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Augmented images, uint8 [B, 3, S, S], and labels, int64 [B], of one step after the other.

    Every epoch visits all images in a new order. It does not end.
    """
    images, labels = data.train.images, data.train.labels
    steps = _steps_per_epoch(len(images), config)
    for epoch in count():
        order = torch.randperm(
            len(images), generator=torch_generator(seed, "shuffle", client, round, epoch)
        )
        draws = torch_generator(seed, "augment", client, round, epoch)
        for batch in order.split(config.batch_size)[:steps]:
            chosen = [images[i] for i in batch.tolist()]
            pixels = augment(chosen, preprocess, config.crop_scale, config.flip, draws, device)
            yield pixels, labels[batch]


def _decay(config: TrainConfig, round: int, step: int, rounds: int, steps: int) -> float:
    """Factor of the learning rate in a step (from 0) of a round (from 1)."""
    if config.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (round - 1 + step / steps) / rounds))


def _optimizer(method: Method, config: TrainConfig) -> torch.optim.Optimizer:
    by_rate: dict[float, list[Tensor]] = defaultdict(list)
    for name, parameter in method.named_parameters():
        if parameter.requires_grad:
            by_rate[method.learning_rate(name, config.lr)].append(parameter)
    groups = [
        {"params": tensors, "lr": rate, "initial_lr": rate} for rate, tensors in by_rate.items()
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay)
