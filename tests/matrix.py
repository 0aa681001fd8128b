"""One row per method: settings that fit small towers, closed formulas, what to expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tower:
    """Shapes of a backbone: widths, joint dimension, blocks."""

    d_v: int
    d_t: int
    d_e: int
    l_v: int
    l_t: int


VIT_B = Tower(768, 512, 512, 12, 12)
VIT_L = Tower(1024, 768, 768, 24, 12)


def bottleneck(d: int, r: int) -> int:
    """A(d, r), METHODS 0.1."""
    return 2 * d * r + r + d


def mma(t: Tower) -> int:
    return 8 * (bottleneck(t.d_v, 32) + bottleneck(t.d_t, 32) + 32**2 + 32)


@dataclass(frozen=True)
class Row:
    """A method in the matrix.

    Attributes:
        small: settings with which it fits the small towers of these tests.
        shared, private: closed formulas of METHODS 15, with the method's default settings.
        table: (shared, private) as METHODS 15 prints them for ViT-B/16.
        private_text: whether clients' private tensors change their text features.
    """

    small: Mapping[str, Any]
    shared: Callable[[Tower], int]
    private: Callable[[Tower], int]
    table: tuple[int, int]
    private_text: bool = False


CONTEXT = {"context_length": 4}
GATE = {"gate_dim": 16, "gate_heads": 4, "experts": 3}
MMA = {"rank": 4, "last_blocks": 2, "scale": 0.1}
RANKS = {"vision_rank": 4, "text_rank": 4, "projection_rank": 8}

ROWS: dict[str, Row] = {
    "zero-shot": Row({}, lambda t: 0, lambda t: 0, (0, 0)),
    "promptfl": Row(CONTEXT, lambda t: 16 * t.d_t, lambda t: 0, (8_192, 0)),
    "fedotp": Row(
        CONTEXT, lambda t: 16 * t.d_t, lambda t: 16 * t.d_t, (8_192, 8_192), private_text=True
    ),
    "fedpgp": Row(
        {**CONTEXT, "rank": 2},
        lambda t: 16 * t.d_t,
        lambda t: 4 * (16 + t.d_t),
        (8_192, 2_112),
        private_text=True,
    ),
    "fedpha": Row(
        {"context_length": 5},
        lambda t: 16 * t.d_t,
        lambda t: 16 * t.d_t,
        (8_192, 8_192),
        private_text=True,
    ),
    "pfedmoap": Row(
        {**CONTEXT, **GATE},
        lambda t: 16 * t.d_t,
        lambda t: 4 * (128**2 + 128),
        (8_192, 66_048),
    ),
    "mma-fedavg": Row(MMA, mma, lambda t: 0, (674_560, 0)),
    "pfedmma": Row(
        MMA,
        lambda t: 8 * (32**2 + 32),
        lambda t: mma(t) - 8 * (32**2 + 32),
        (8_448, 666_112),
        private_text=True,
    ),
    "blend": Row(
        RANKS,
        lambda t: t.l_v * bottleneck(t.d_v, 16) + t.l_t * bottleneck(t.d_t, 16),
        lambda t: bottleneck(t.d_v, 256),
        (507_264, 394_240),
    ),
    "clip-adapter": Row({}, lambda t: 2 * t.d_e * (t.d_e // 4), lambda t: 0, (131_072, 0)),
    "adaptformer": Row(
        {"rank": 4}, lambda t: t.l_v * bottleneck(t.d_v, 64), lambda t: 0, (1_189_632, 0)
    ),
    "clip-lora": Row(
        {},
        lambda t: 3 * 2 * (t.l_v * 2 * t.d_v + t.l_t * 2 * t.d_t),
        lambda t: 0,
        (184_320, 0),
    ),
    "pfedprompt": Row(CONTEXT, lambda t: 16 * t.d_t, lambda t: 0, (8_192, 0)),
}
