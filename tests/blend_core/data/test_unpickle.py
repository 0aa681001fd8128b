"""Pickles of data sets: what real ones hold is read, what asks for more runs nothing."""

from __future__ import annotations

import builtins
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imitations import python2_pickle

from blend_core.data.unpickle import load_restricted
from blend_core.errors import SiteError


def read(tmp_path: Path, data: bytes) -> Any:
    path = tmp_path / "data.pkl"
    path.write_bytes(data)
    return load_restricted(path)


def refused(tmp_path: Path, data: bytes) -> str:
    with pytest.raises(SiteError) as caught:
        read(tmp_path, data)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "data.pkl") in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
def test_containers_texts_numbers_and_arrays_come_back(tmp_path: Path, protocol: int) -> None:
    value = {
        "label_names": ["cat", "naïve", ""],
        b"data": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "floats": np.array([1.5, -2.0]),
        "texts": np.array(["a", "bb"], dtype=object),
        "fixed": np.array(["a", "bb"]),
        "numbers": [0, -1, 2**40, 1.25, True, None, (1, 2)],
        "bytes": b"\x00\xff",
        "scalar": np.int64(7),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    }
    found = read(tmp_path, pickle.dumps(value, protocol=protocol))
    assert set(found) == set(value)
    for key, expected in value.items():
        if isinstance(expected, np.ndarray):
            assert found[key].dtype == expected.dtype
            assert np.array_equal(found[key], expected)
        else:
            assert found[key] == expected


@pytest.mark.parametrize("protocol", [0, 2])
def test_what_python_2_wrote_comes_back_too(tmp_path: Path, protocol: int) -> None:
    value: dict[str, Any] = {"labels": [3, 1], "label_names": ["cat", "dog"]}
    if protocol:
        value["data"] = np.arange(6, dtype=np.uint8).reshape(2, 3)
    found = read(tmp_path, python2_pickle(value, protocol))
    assert found["labels"] == [3, 1]
    assert found["label_names"] == ["cat", "dog"]
    if protocol:
        assert np.array_equal(found["data"], value["data"])


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.mkdir, ("ran",)),
        (os.system, ("mkdir ran",)),
        (builtins.eval, ("__import__('os').mkdir('ran')",)),
        (builtins.exec, ("import os; os.mkdir('ran')",)),
        (builtins.getattr, ("", "join")),
        (np.load, ("x.npy",)),
        (np.fromfile, ("/etc/passwd",)),
        (pickle.loads, (b"N.",)),
        (bytearray, (10**12,)),
    ],
)
def test_a_pickle_that_calls_something_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch, function: Any, arguments: Any, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(tmp_path, pickle.dumps([Calls(function, *arguments)], protocol=protocol))
    assert "refused" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        b"\x80\x02",
        pickle.dumps([1, 2, 3])[:-3],
        b"cos\nsystem\n(S'mkdir ran'\ntR.",
        b"(ios\nmkdir\nS'ran'\n.",  # INST
        b"\x80\x02cos\nmkdir\nU\x03ran\x85\x81.",  # NEWOBJ
        b"\x82\x01.",  # an extension code
        b"P1\n.",  # a persistent id
        b"\x80\x02]q\x00h\x01.",  # a memo entry that is not there
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    ],
)
def test_damaged_and_hand_made_pickles_are_one_line(tmp_path: Path, monkeypatch, data) -> None:
    monkeypatch.chdir(tmp_path)
    refused(tmp_path, data)
    assert not (tmp_path / "ran").exists()


def test_a_stated_length_reserves_no_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    for code in (b"\x8e", b"\x96"):  # bytes, bytearray
        refused(tmp_path, b"\x80\x05" + code + (2**28).to_bytes(8, "little") + b"x.")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_a_few_bytes_cannot_ask_for_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    huge = np.arange(4, dtype=np.uint8)
    text = pickle.dumps(huge, protocol=2)
    # The array says it has 2^31 - 1 elements, its bytes are 4.
    refused(tmp_path, text.replace(b"K\x04\x85", b"J\xff\xff\xff\x7f\x85"))
    # Bytes whose stated length is far beyond the file.
    refused(tmp_path, b"\x80\x04\x8e" + (2**60).to_bytes(8, "little") + b"x.")
    # An array of a terabyte, without its bytes.
    assert read(tmp_path, b"cnumpy\nndarray\n((L1000000000000L\nttR.") is None
    nested: Any = ()
    for _ in range(300):
        nested = (nested,)
    refused(tmp_path, pickle.dumps({nested: 1}))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_a_file_cannot_make_more_than_it_holds(tmp_path: Path) -> None:
    text = b"a" * 100_000
    encode = b"c_codecs\nencode\nh\x00U\x06latin1\x86R"
    start = b"\x80\x02X" + len(text).to_bytes(4, "little") + text + b"q\x000]("
    assert len(read(tmp_path, start + encode * 3 + b"e.")) == 3
    assert "makes more than four times what the file holds" in refused(
        tmp_path, start + encode * 100 + b"e."
    )
