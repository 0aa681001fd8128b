"""The next item is made while the last one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["prefetched"]

T = TypeVar("T")


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """The same items in the same order, each made in a thread one ahead of its use.

    Only that thread runs the iterator, so its draws of chance keep their order. What it raises is
    raised here in its place. The thread ends with the last item, or when this iterator is closed.
    """
    end = object()
    with ThreadPoolExecutor(1, "prefetch") as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
