"""Read the pickles that data sets come in, without running what they say (P28).

A pickle is a program. Here a small part of its instructions is known: those that build lists,
tuples, dicts, texts, bytes, numbers and numpy arrays. No object's own code is called. The arrays
and bytes that calls make take at most four times the file's size in all; any other instruction
makes one object, no larger than the bytes of the file that it was read from or the objects it
holds.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from blend_core.errors import SiteError, one_line

__all__ = ["load_restricted"]

# fmt: off
_KNOWN = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT",
    "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "EMPTY_DICT",
    "EMPTY_TUPLE", "LIST", "DICT", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS",
    "SETITEM", "SETITEMS", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
)
# fmt: on
# Kinds of array elements: numbers, texts of one length, and lists of plain objects.
_ELEMENTS = "biufSUO"


def load_restricted(path: Path) -> Any:
    """Read a pickle of plain containers, texts, bytes, numbers and numpy arrays.

    Texts of Python 2 (8-bit) are read as latin-1.

    Args:
        path: a pickle of any protocol, written by Python 2 or 3 and any numpy.

    Raises:
        SiteError: it cannot be read, is cut short, or asks for anything else; nothing has run.
    """
    try:
        content = path.read_bytes()
        unpickler = _Unpickler(io.BytesIO(content), encoding="latin1")
        # Texts as four bytes a character are the most that an honest file grows by.
        unpickler.left = 4 * len(content)
        return unpickler.load()
    except _RefusedError as error:
        raise SiteError(
            f"{path}: refused, for it {one_line(str(error), 100)}, which data never does; replace "
            "it by the published file"
        ) from None
    except OSError as error:
        raise SiteError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # Wrong instructions end in errors of all sorts.
        reason = "it is cut short" if isinstance(error, EOFError) else type(error).__name__
        raise SiteError(
            f"{path}: damaged, or no pickle of lists and arrays ({reason}); replace it by the "
            "published file"
        ) from None


class _RefusedError(Exception):
    """What a pickle asks for."""


class _Dtype:
    """Stand-in for a dtype: of what a pickle says of it only the byte order is taken."""

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)
        if self.dtype.kind not in _ELEMENTS or self.dtype.names or self.dtype.subdtype:
            raise _RefusedError(f"has arrays of {code}")

    def restore(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


def _bytes(data: str | bytes | bytearray) -> bytes:
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


def _fill(array: np.ndarray[Any, Any], state: tuple[Any, ...]) -> None:
    """What `ndarray.__setstate__` does, with a dtype of ours and a shape that fits the data."""
    _, shape, described, by_columns, data = state
    dtype = described.dtype
    values = list(data) if dtype.kind == "O" else _bytes(data)
    size = 1 if dtype.kind == "O" else dtype.itemsize
    if min(shape, default=1) < 0 or len(values) != math.prod(shape) * size:
        raise ValueError("an array's shape does not fit its data")
    array.__setstate__((1, shape, dtype, bool(by_columns), values))  # type: ignore[arg-type]


def _from_buffer(data: bytes, described: _Dtype, shape: tuple[int, ...], order: str) -> Any:
    array = np.empty(0, np.uint8)
    _fill(array, (1, shape, described, order == "F", data))
    return array


def _scalar(described: _Dtype, data: str | bytes) -> Any:
    return np.frombuffer(_bytes(data), described.dtype, 1)[0]


# The functions that numpy's pickles call, and what is called in their stead.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "multiarray._reconstruct": lambda *_: np.empty(0, np.uint8),
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": _from_buffer,
}
_STANDINS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): lambda code, *_: _Dtype(code),
    ("numpy", "ndarray"): lambda *_: None,  # only named, as an argument
    ("_codecs", "encode"): lambda text, _: _bytes(text),  # bytes in protocols 0 to 2
    **{
        (f"numpy.{core}.{name.split('.')[0]}", name.split(".")[1]): function
        for core in ("core", "_core")
        for name, function in _FUNCTIONS.items()
    },
}


# The one written in Python, for its instructions can be chosen one by one, and numbers in a file
# do not make it reserve memory.
class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _KNOWN)
    }
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    # Bytes that functions and arrays may still make.
    left = 0

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STANDINS[module, name]
        except KeyError:
            raise _RefusedError(f"asks for {module}.{name}") from None

    def call(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if function not in _STANDINS.values():
            raise _RefusedError("calls what is no function")
        self.stack[-1] = function(*arguments)
        self._spend(self.stack[-1])

    def _spend(self, made: Any) -> None:
        if isinstance(made, np.ndarray):
            self.left -= made.nbytes
        elif isinstance(made, bytes):
            self.left -= len(made)
        if self.left < 0:
            raise _RefusedError("makes more than four times what the file holds")

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, np.ndarray):
            _fill(target, state)
            self._spend(target)
        elif isinstance(target, _Dtype):
            target.restore(state)
        else:
            raise _RefusedError("sets attributes")

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set_items(self.stack[-1], [key, value])

    def set_items(self) -> None:
        items = self.pop_mark()
        _set_items(self.stack[-1], items)

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        _set_items(self.stack[-1], items)

    dispatch |= {
        pickle.REDUCE[0]: call,
        pickle.BUILD[0]: build,
        # As bytes: a bytearray would be made in the size that the file claims, before it is read.
        pickle.BYTEARRAY8[0]: dispatch[pickle.BINBYTES8[0]],
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
        pickle.DICT[0]: make_dict,
    }


def _set_items(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    # Hashing a tuple of tuples of tuples ... would overflow the stack.
    if type(target) is not dict or not all(isinstance(key, str | bytes | int) for key in keys):
        raise _RefusedError("has keys that are no texts or numbers")
    target.update(zip(keys, items[1::2], strict=True))
