import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from blend_core import state
from blend_core.errors import SiteError
from blend_core.state import (
    Generations,
    StateError,
    lock_folder,
    read_tensors,
    tensors_sha256,
    write_bytes_atomic,
    write_json_atomic,
    write_tensors,
)

ROOT = Path(__file__).parents[2]
TENSORS = {
    "vision.down": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scale": np.array(0.5, dtype=np.float64),
    "none": np.zeros((0, 4), dtype=np.int64),
    "mask": np.array([True, False]),
}


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_checksum_is_the_documented_byte_sequence() -> None:
    def number(value: int) -> bytes:
        return value.to_bytes(8, "little")

    expected = b"".join(
        [
            *(number(1), b"a", number(5), b"int16", number(1), number(2)),
            *(number(4), b"\x01\x00\x00\x01"),
            *(number(2), "é".encode(), number(7), b"float32", number(0)),
            *(number(4), b"\x00\x00\x80\x3f"),
        ]
    )
    tensors = {"é": np.array(1, dtype=np.float32), "a": np.array([1, 256], dtype=np.int16)}
    assert tensors_sha256(tensors) == hashlib.sha256(expected).hexdigest()
    assert tensors_sha256({}) == hashlib.sha256(b"").hexdigest()


def test_checksum_ignores_order_byte_order_and_memory_layout() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    same = {"b": np.asfortranarray(a), "a": a.astype(">f4")}
    assert tensors_sha256(same) == tensors_sha256({"a": a, "b": a})


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.zeros(2, np.float32), "b": np.ones(1, np.float32)},
        {"a": np.zeros(3, np.float32), "b": np.zeros(0, np.float32)},
        {"a": np.zeros((2, 1), np.float32), "b": np.zeros(1, np.float32)},
        {"a": np.zeros(2, np.int32), "b": np.zeros(1, np.float32)},
        {"a": np.zeros(2, np.float32), "c": np.zeros(1, np.float32)},
        {"a": np.zeros(2, np.float32)},
        {"a": np.array([0.0, -0.0], np.float32), "b": np.zeros(1, np.float32)},
    ],
)
def test_checksum_sees_every_difference(other: dict) -> None:
    reference = {"a": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    assert tensors_sha256(other) != tensors_sha256(reference)


@pytest.mark.parametrize("tensors", [TENSORS, {}])
def test_tensors_and_header_come_back_bit_for_bit(tensors: dict, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"method": "blend", "sha256": "0" * 64, "nested": {"ü": [1, 2.5, None]}}
    write_tensors(path, tensors, header)
    back, header_back = read_tensors(path)
    assert header_back == header
    assert tensors_sha256(back) == tensors_sha256(tensors)
    assert {n: (v.dtype, v.shape) for n, v in back.items()} == {
        n: (v.dtype, v.shape) for n, v in tensors.items()
    }
    assert all(v.flags.writeable for v in back.values())
    assert load_file(path).keys() == tensors.keys()  # any safetensors reader opens it


def test_values_are_stored_right_whatever_their_memory_layout(tmp_path: Path) -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_tensors(tmp_path / "x", {"t": a.T, "big": a.astype(">f4"), "step": a[:, ::2]}, {})
    back, _ = read_tensors(tmp_path / "x")
    np.testing.assert_array_equal(back["t"], a.T)
    np.testing.assert_array_equal(back["big"], a)
    np.testing.assert_array_equal(back["step"], a[:, ::2])


def test_the_same_content_gives_the_same_file(tmp_path: Path) -> None:
    digests = set()
    for names in (("a", "b"), ("b", "a")):
        write_tensors(tmp_path / "x", {n: np.ones(1) for n in names}, {n: 1 for n in names})
        digests.add((tmp_path / "x").read_bytes())
    assert len(digests) == 1


def test_a_bit_flipped_anywhere_is_noticed_and_the_file_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"é": np.ones(3, np.float32)}, {"round": 1, "text": "é\n"})
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(StateError, match=r"x\.safetensors"):
                read_tensors(path)


def test_a_truncated_or_lengthened_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.ones(3, np.float32)}, {})
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(StateError, match=r"x\.safetensors: is (empty|truncated)"):
            read_tensors(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(StateError, match="damaged"):
        read_tensors(path)


def test_foreign_and_missing_files_are_named(tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "plain.safetensors")
    (tmp_path / "text").write_text("hello, I am not a tensor file")
    for name in ("plain.safetensors", "text"):
        with pytest.raises(StateError, match=f"{name}.* not a tensor file of this product"):
            read_tensors(tmp_path / name)
    with pytest.raises(SiteError, match=r"missing.*No such file"):
        read_tensors(tmp_path / "missing")
    with pytest.raises(StateError, match="cannot be read"):
        read_tensors(tmp_path)


DISK_FULL = """
import resource, sys
from pathlib import Path
from blend_core.state import StateError, write_bytes_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_bytes_atomic(Path(sys.argv[1]), bytes(5000))
except StateError as error:
    print(error)
"""


def test_a_file_that_does_not_fit_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    done = python(DISK_FULL, path)
    assert done.stdout.startswith(f"{path}: cannot be written: File too large"), done.stderr
    assert done.stdout.count("\n") == 1
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_at_any_step_leaves_the_old_file(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.os, failing, full)
    with pytest.raises(StateError, match="x: cannot be written: No space left on device"):
        write_bytes_atomic(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(state.os, "write", lambda d, data: write(d, data[:3]))
    write_bytes_atomic(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_json_is_strict_and_stable(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "x.json", {"b": 1, "a": "ü"})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": "ü",\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_json_atomic(tmp_path / "x.json", float("nan"))
    assert json.loads((tmp_path / "x.json").read_text())["b"] == 1


def value(number: float) -> dict:
    return {"p": np.full(2, number, np.float32)}


def test_the_newest_generation_before_a_round_is_found(tmp_path: Path) -> None:
    generations = Generations(tmp_path / "g")
    assert generations.newest_before(1) is None
    for round in (1, 2, 5):
        generations.save(round, value(round), {"method": "blend"})
    found = [generations.newest_before(r) for r in (1, 2, 5, 6, 9)]
    assert [f and f[0] for f in found] == [None, 1, 2, 5, 5]
    assert found[4] is not None
    np.testing.assert_array_equal(found[4][1]["p"], [5, 5])
    assert found[4][2] == {"method": "blend", "round": 5}


def test_only_the_newest_generations_are_kept(tmp_path: Path) -> None:
    generations = Generations(tmp_path, keep=2)
    for round in range(1, 6):
        generations.save(round, value(round), {})
    assert generations.rounds() == [4, 5]


def test_nothing_is_removed_when_the_new_generation_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = Generations(tmp_path, keep=1)
    generations.save(1, value(1), {})

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.os, "write", full)
    with pytest.raises(StateError, match="round-000002"):
        generations.save(2, value(2), {})
    assert generations.rounds() == [1]
    assert [f.name for f in tmp_path.iterdir()] == ["round-000001.safetensors"]


def test_a_round_done_again_gives_the_same_bytes(tmp_path: Path) -> None:
    generations = Generations(tmp_path)
    generations.save(3, value(3), {})
    first = generations.path(3).read_bytes()
    generations.save(3, value(3), {})
    assert generations.path(3).read_bytes() == first


def test_an_abandoned_future_is_set_aside_and_never_found_again(tmp_path: Path) -> None:
    generations = Generations(tmp_path, keep=3)
    for round in range(1, 7):
        generations.save(round, value(round), {})
    generations.save(5, value(50), {})  # the federation went back; rounds 4 to 6 are on disk
    assert generations.rounds() == [4, 5]
    # The client is not sampled in the new round 6; in 7 it must not meet the old 6.
    found = generations.newest_before(7)
    assert found is not None
    assert found[0] == 5
    np.testing.assert_array_equal(found[1]["p"], [50, 50])
    assert (tmp_path / "abandoned-000006.safetensors").exists()


def test_rubbish_of_a_killed_writer_is_removed_and_never_read(tmp_path: Path) -> None:
    generations = Generations(tmp_path)
    generations.save(1, value(1), {})
    (tmp_path / ".round-000002.safetensors.77.tmp").write_bytes(b"half")
    assert generations.rounds() == [1]
    generations.save(2, value(2), {})
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "swapped"])
def test_a_damaged_generation_is_named_with_the_intact_one_before_it(
    damage: str, tmp_path: Path
) -> None:
    generations = Generations(tmp_path)
    for round in (1, 2, 3):
        generations.save(round, value(round), {})
    data = generations.path(3).read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    bad = {
        "empty": b"",
        "truncated": data[:-1],
        "flipped": flipped,
        "swapped": generations.path(1).read_bytes(),
    }
    generations.path(3).write_bytes(bad[damage])
    with pytest.raises(
        StateError, match=r"round-000003\.safetensors.*round 2 before it is intact"
    ) as caught:
        generations.newest_before(4)
    assert caught.value.intact == 2
    generations.path(2).write_bytes(b"")
    with pytest.raises(StateError, match="round 1 before it is intact"):
        generations.newest_before(4)
    generations.path(1).write_bytes(b"")
    with pytest.raises(StateError, match="no intact generation") as caught:
        generations.newest_before(4)
    assert caught.value.intact is None


LOCK = """
import sys
from pathlib import Path
from blend_core.state import StateError, lock_folder
try:
    with lock_folder(Path(sys.argv[1])):
        print("mine")
except StateError as error:
    print(error)
"""


def test_a_second_process_is_refused_a_locked_folder(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    with lock_folder(folder):
        refused = python(LOCK, folder)
        assert refused.stdout.startswith(f"{folder} is used by process {os.getpid()}")
    assert python(LOCK, folder).stdout == "mine\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StateError, match="file/site: cannot be created"),
        lock_folder(tmp_path / "file" / "site"),
    ):
        pass
