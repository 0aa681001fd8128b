"""The next batch is made while the last one is used, in the same order and with the same errors."""

from __future__ import annotations

import threading

import pytest

from blend_core.data.prefetch import prefetched


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_items_and_their_order_are_the_same() -> None:
    assert list(prefetched(iter(range(100)))) == list(range(100))
    assert list(prefetched(iter(()))) == []
    assert threads() == []


def test_the_next_item_is_made_before_it_is_asked_for() -> None:
    made = threading.Event()

    def items():
        yield 1
        made.set()
        yield 2

    one_ahead = prefetched(items())
    assert next(one_ahead) == 1
    assert made.wait(10)
    one_ahead.close()
    assert threads() == []


def test_an_error_surfaces_in_its_place() -> None:
    def items():
        yield 1
        raise ValueError("second")

    one_ahead = prefetched(items())
    assert next(one_ahead) == 1
    with pytest.raises(ValueError, match="second"):
        next(one_ahead)
    assert threads() == []
