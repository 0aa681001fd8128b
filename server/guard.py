"""Is this reply acceptable? One question, one place, every reply of every engine."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from blend_core import __version__
from blend_core.config import ServerConfig
from blend_core.errors import one_line
from blend_core.messages import Reply, Request, Tensors, flatten
from blend_core.names import is_plain_name

# All that a reply that counts may say beside its tensors; what else it holds would reach the
# results. One with an error does not count; of it "state" is read, too (`Coordinator._note_lost`).
STATISTICS = {
    "backbone_sha256",
    "cold_start",
    "counts",
    "data",
    "evaluate_span",
    "private_sha256",
    "train_span",
    "training",
    "worker",
}


def refusal(
    reply: Reply,
    request: Request,
    client: str,
    private: Collection[str],
    limits: ServerConfig,
) -> str | None:
    """Why a reply must not be used; None if it may.

    Args:
        reply: what came back.
        request: what was asked; a train reply carries exactly the tensors of its request.
        client: the client that was asked.
        private: names of tensors that must never leave a site.
        limits: largest number of images and largest change that are believed.
    """
    if (reason := other_version(reply)) is not None:
        return reason
    if reply.client != client:
        return f"it claims to come from '{_shown(reply.client)}', which was not asked here"
    if (reply.kind, reply.round) != (request.kind, request.round):
        return (
            f"it answers {reply.kind} of round {reply.round}, asked was {request.kind} of round "
            f"{request.round}"
        )
    leaked = sorted(set(reply.shared) & set(private))
    if leaked:
        return f"it carries private tensors: {', '.join(leaked[:3])}"
    images, least = reply.train_images, 1 if request.kind == "train" else 0
    if type(images) is not int or not least <= images <= limits.max_images:
        return (
            f"its number of training images is {_shown(images)}, allowed are {least} to "
            f"{limits.max_images}"
        )
    sent = request.shared if request.kind == "train" else {}
    return _tensors_refusal(reply.shared, sent, limits) or _statistics_refusal(reply, request)


def other_version(reply: Reply) -> str | None:
    """Why a site of another version takes no part; None if it has this one.

    Asked before anything else that a reply says: an error of another version may come from the
    difference alone.
    """
    if reply.version == __version__:
        return None
    return f"it runs version '{_shown(reply.version)}', the server {__version__}"


def disagreement(reply: Reply, first: Reply, manifest: str | None) -> str | None:
    """Why a client cannot share a federation with the others; None if it can.

    All clients of a benchmark hold parts of one partition, and adapters fit one backbone only.

    Args:
        reply: of a client that joins, already checked by `refusal`.
        first: of the first client that joined.
        manifest: SHA-256 of the partition as the server knows it, empty if there must be none;
            None: that of the first client.
    """
    own, other = (r.statistics.get("data", {}).get("manifest_sha256", "") for r in (reply, first))
    known = manifest is not None
    facts = (
        ("partition", own, manifest if known else other, "the server" if known else first.client),
        (
            "backbone",
            reply.statistics.get("backbone_sha256"),
            first.statistics.get("backbone_sha256"),
            first.client,
        ),
    )
    for what, has, expected, whose in facts:
        if has != expected:
            return (
                f"its {what} (SHA-256 {_shown(has)[:12]}) is not that of {whose} "
                f"({_shown(expected)[:12]}); give both the same files and settings"
            )
    return None


def outliers(
    replies: Mapping[str, Reply], requests: Mapping[str, Request], limits: ServerConfig
) -> dict[str, str]:
    """Which accepted replies changed the shared tensors far more than the others, and why.

    Judged when all replies of a round are in, so their order decides nothing.

    Args:
        replies: client -> a reply that `refusal` has passed.
        requests: client -> what it was asked.
        limits: `max_change_ratio`; unset: nobody is an outlier.

    Returns:
        client -> reason. Nobody, with fewer than 3 replies or if most changed nothing.
    """
    trained = {c: r for c, r in sorted(replies.items()) if r.kind == "train"}
    if limits.max_change_ratio is None or len(trained) < 3:
        return {}
    norms = {c: _change(requests[c].shared, r.shared) for c, r in trained.items()}
    middle = float(np.median(list(norms.values())))
    if middle == 0.0:
        return {}
    bound = limits.max_change_ratio * middle
    return {
        client: f"it changed the shared tensors by {norm:.3g} (L2 norm), the median of the round "
        f"is {middle:.3g}, allowed are {bound:.3g} (server.max_change_ratio)"
        for client, norm in norms.items()
        if norm > bound
    }


def _change(sent: Tensors, received: Tensors) -> float:
    """L2 norm of the difference of all shared tensors."""
    before, after = flatten(sent).astype(np.float64), flatten(received).astype(np.float64)
    return float(np.linalg.norm(after - before))


def _tensors_refusal(shared: Tensors, sent: Tensors, limits: ServerConfig) -> str | None:
    missing, extra = sorted(set(sent) - set(shared)), sorted(set(shared) - set(sent))
    if missing:
        return f"{len(missing)} shared tensors are missing, e.g. {missing[0]}"
    if extra:
        return f"{len(extra)} tensors are unknown, e.g. {_shown(extra[0])}"
    for name, value in sorted(shared.items()):
        if value.shape != sent[name].shape:
            return f"{name} has shape {value.shape}, expected {sent[name].shape}"
        if value.dtype != np.float32:
            return f"{name} has dtype {value.dtype}, expected float32"
        # A sum is finite only if every value is, and needs no temporary array.
        if not math.isfinite(float(value.sum(dtype=np.float64))):
            return f"{name} holds values that are not finite"
    change = _change(sent, shared)
    # A set that was sent as zeros must be able to move.
    bound = limits.max_change * max(float(np.linalg.norm(flatten(sent).astype(np.float64))), 1.0)
    if change > bound:
        return f"it changed the shared tensors by {change:.3g} (L2 norm), allowed are {bound:.3g}"
    return None


def _statistics_refusal(reply: Reply, request: Request) -> str | None:
    """Counts of right answers are [right, total] per group, spans [start, end] in unix seconds."""
    statistics = reply.statistics
    if unknown := sorted(set(statistics) - STATISTICS):
        return f"its statistics hold something unknown: {_shown(unknown[0])}"
    if "counts" in statistics:
        counts = statistics["counts"]
        groups = ("local", "base", "novel")
        whole = isinstance(counts, dict) and sorted(counts) == sorted(groups)
        if not whole or not all(_is_count(counts[group]) for group in groups):
            return f"its counts of right answers are {_shown(counts)}"
    elif request.evaluate or request.kind != "train":
        return "it holds no counts of right answers"
    for key in ("train_span", "evaluate_span"):
        if key in statistics and not _is_span(statistics[key]):
            return f"its {key} is {_shown(statistics[key])}"
    training = statistics.get("training", {})
    named = isinstance(training, dict) and len(training) <= 20 and all(map(is_plain_name, training))
    if not named or not all(_is_number(value) for value in training.values()):
        return f"its training statistics are {_shown(training)}"
    for key in ("private_sha256", "backbone_sha256"):
        if key in statistics and not _is_line(statistics[key]):
            return f"its {key} is not a short text"
    if "data" in statistics and not _is_description(statistics["data"]):
        return f"its description of its data is {_shown(statistics['data'])}"
    if "cold_start" in statistics:
        cold = statistics["cold_start"]
        if not _is_cold_start(cold):
            return f"its cold_start is {_shown(cold)}"
        if not _may_start_cold(cold, request):
            return "it speaks of a cold start that it may not make"
    worker = statistics.get("worker", {"pid": 0, "backbone_loads": 0})
    if not isinstance(worker, dict) or not all(
        type(worker.get(key)) is int and 0 <= worker[key] < 2**31
        for key in ("pid", "backbone_loads")
    ):
        return f"its worker is {_shown(worker)}"
    return None


def _shown(value: object) -> str:
    """What a site sent, fit for the server's log."""
    return one_line(str(value), 80)


def _is_cold_start(value: object) -> bool:
    """Whether it says which round's private state was lost and which was used instead."""
    if not isinstance(value, dict) or set(value) != {"lost", "used"}:
        return False
    lost, used = value["lost"], value["used"]
    return type(lost) is int and type(used) is int and 0 <= used < lost < 10**9


def _may_start_cold(cold: Mapping[str, int], request: Request) -> bool:
    """Whether the client may go on from the round it says instead of the one it lost."""
    if cold["used"] >= request.last_round:
        # What it lost is a round of its own that has not counted.
        return cold["lost"] < request.round
    allowed = request.experiment.get("state", {}).get("on_missing") == "cold-start"
    return bool(allowed and cold["lost"] == request.last_round)


def _is_description(value: object) -> bool:
    """Whether it says which partition a client's part is of, of which domain and split."""
    if not isinstance(value, dict) or type(value.get("published")) is not bool:
        return False
    domain = value.get("domain")
    return _is_line(value.get("manifest_sha256")) and (domain is None or _is_line(domain))


def _is_line(value: object) -> bool:
    """Whether it is a text that can stand in a table."""
    return _is_short_text(value) and value != "" and one_line(str(value)) == value


def _is_count(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int for n in value):
        return False
    return bool(0 <= value[0] <= value[1] < 10**12)


def _is_span(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(time) for time in value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # type: ignore[arg-type]


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 100
