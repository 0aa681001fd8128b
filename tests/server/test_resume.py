"""A run that was stopped goes on after its last whole round with the same bytes, or says why."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import Client, Scripted, events, honest

from blend_core.config import Experiment
from blend_core.errors import ConfigError, FormationError, SiteError
from blend_core.messages import Reply, Request, failure
from blend_core.state import StateError
from server.checkpoints import Checkpoint, Checkpoints, require_same
from server.strategy import Coordinator

WHO = {"a": honest(1), "b": honest(3), "c": honest(7)}


class Killed(BaseException):
    """Nothing of the server survives it."""


@pytest.fixture
def start(tiny_experiment, tower, tmp_path):
    """A server of four rounds in a folder: (folder name, clients, changes) -> Coordinator."""

    def build(name: str, who: Mapping[str, Client] = WHO, **changes: Any) -> Coordinator:
        resume = changes.pop("resume", False)
        experiment: Experiment = tiny_experiment(
            **{
                "rounds": 4,
                "clients": len(who),
                "backbone": tower("tower_a").model_dump(),
                "data": {"kind": "folders"},
                **changes,
                "server": {"max_change": 1e6, **changes.get("server", {})},
            }
        )
        federation = "another" if resume else "fed"
        out = tmp_path / name
        return Coordinator(experiment, Scripted(who), out, federation, "scripted", resume=resume)

    return build


def killed_in(round: int, client: str = "b") -> dict[str, Client]:
    """Clients of which one takes the server down with it, with half the replies in."""

    def last(name: str, request: Request) -> Reply | None:
        if request.kind == "train" and request.round == round:
            raise Killed
        return WHO[name](name, request)

    return {**WHO, client: last}


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.parametrize("round", [1, 3, 4])
@pytest.mark.parametrize("server", [{}, {"fraction": 0.67, "aggregate_stale": True}])
def test_a_resumed_run_ends_as_if_nothing_had_happened(start, tmp_path, round, server) -> None:
    start("whole", server=server).run()
    with pytest.raises(Killed):
        start("cut", killed_in(round, "a"), server=server).run()
    resumed = start("cut", resume=True, server=server)
    resumed.run()
    whole, cut = results(tmp_path / "whole"), results(tmp_path / "cut")
    assert cut["shared_sha256"] == whole["shared_sha256"]
    assert cut["final"] == whole["final"]
    rows = [
        [[(c["client"], c["status"], c.get("bytes_up")) for c in r["clients"]] for r in x["rounds"]]
        for x in (whole, cut)
    ]
    assert rows[0] == rows[1]
    assert [r["round"] for r in cut["rounds"]] == [1, 2, 3, 4]
    # Only the rounds that no checkpoint holds are asked for again, and sites find their state.
    first = min(asked for asked, _ in resumed.transport.asked)
    assert first == cut["resumed_after_rounds"][0] + 1 <= round
    assert resumed.federation == "fed"


def test_a_run_may_be_stopped_again_and_again(start, tmp_path) -> None:
    start("whole").run()
    for round in (2, 3, 4):
        with pytest.raises(Killed):
            start("cut", killed_in(round), resume=True).run()
    start("cut", resume=True).run()
    cut = results(tmp_path / "cut")
    assert cut["shared_sha256"] == results(tmp_path / "whole")["shared_sha256"]
    assert cut["resumed_after_rounds"] == [1, 2, 3]
    assert [e["round"] for e in events(tmp_path / "cut") if e["event"] == "resumed"] == [1, 2, 3]


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(start, tmp_path) -> None:
    start("whole").run()
    with pytest.raises(Killed):
        start("cut", killed_in(4)).run()
    newest = Checkpoints(tmp_path / "cut").generations.path(3)
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    start("cut", resume=True).run()
    cut = results(tmp_path / "cut")
    assert cut["shared_sha256"] == results(tmp_path / "whole")["shared_sha256"]
    assert cut["resumed_after_rounds"] == [2]
    warnings = [e["message"] for e in events(tmp_path / "cut") if e["event"] == "warning"]
    assert any(str(newest) in text and "checksum" in text for text in warnings)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(start, tmp_path) -> None:
    with pytest.raises(Killed):
        start("cut", killed_in(3)).run()
    for path in (tmp_path / "cut" / "checkpoints").glob("round-*"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match="no checkpoint is intact: restore one from a backup"):
        start("cut", resume=True).run()


def test_resuming_another_experiment_is_refused_with_what_differs(start, tmp_path) -> None:
    with pytest.raises(Killed):
        start("cut", killed_in(3)).run()
    changes = {"train": {"lr": 0.5, "batch_size": 8}, "seed": 9}
    with pytest.raises(ConfigError) as caught:
        start("cut", resume=True, **changes).run()
    said = str(caught.value)
    assert "seed was 1, is 9; train.batch_size was 16, is 8; train.lr was 0.0015, is 0.5" in said
    with pytest.raises(ConfigError, match=r"rounds was 4, is 3 \(may only be extended\)"):
        start("cut", resume=True, rounds=3).run()
    cosine = {"schedule": "cosine"}
    with pytest.raises(Killed):
        start("cosine", killed_in(3), train=cosine).run()
    with pytest.raises(ConfigError, match=r"rounds was 4 and train\.schedule depends on it"):
        start("cosine", resume=True, rounds=5, train=cosine).run()


def test_a_setting_that_the_version_before_did_not_have_stands_at_its_default(start) -> None:
    experiment = start("cut").experiment
    before = Checkpoint(1, "fed", "loop", "0.0.1", experiment.to_json(), {})
    del before.experiment["train"]["threads"], before.experiment["server"]["max_change_ratio"]
    require_same(experiment, before)
    two = experiment.train.model_copy(update={"threads": 2})
    with pytest.raises(ConfigError, match=r"train\.threads was 1, is 2$"):
        require_same(experiment.model_copy(update={"train": two}), before)
    # What this version no longer has is a difference.
    before.experiment["train"]["warmup"] = 3
    with pytest.raises(ConfigError, match=r"train\.warmup was 3, is None"):
        require_same(experiment, before)


def test_rounds_may_be_extended_also_of_a_finished_run(start, tmp_path) -> None:
    start("whole").run()
    start("short", rounds=2).run()
    start("short", resume=True, rounds=4).run()
    short = results(tmp_path / "short")
    assert short["shared_sha256"] == results(tmp_path / "whole")["shared_sha256"]
    assert (len(short["rounds"]), short["resumed_after_rounds"]) == (4, [2])


def test_a_run_that_was_killed_before_anything_is_simply_begun(start, tmp_path) -> None:
    start("cut", resume=True).run()
    assert results(tmp_path / "cut")["resumed_after_rounds"] == []
    assert start("cut", resume=True).checkpoints.newest_round() == 4


def test_two_servers_in_one_folder_are_one_too_many(start, tmp_path) -> None:
    def second(name: str, request: Request) -> Reply | None:
        if request.kind == "train" and request.round == 2:
            with pytest.raises(StateError, match="is used by process"):
                start("cut", resume=True).run()
        return WHO["a"](name, request)

    start("cut", {**WHO, "a": second}).run()
    assert len(results(tmp_path / "cut")["rounds"]) == 4
    # The launcher of the first one reads the same journal.
    assert "failed" not in {event["event"] for event in events(tmp_path / "cut")}


def test_a_resumed_run_wants_the_clients_that_it_had(start, tmp_path) -> None:
    with pytest.raises(Killed):
        start("cut", killed_in(3)).run()
    other = start("cut", {"a": WHO["a"], "b": WHO["b"], "d": WHO["c"]}, resume=True)
    whole = start("cut", {**WHO, "d": WHO["c"]}, resume=True, clients=3)
    for run in (other, whole):
        run.record.engine = "flower"
    with pytest.raises(FormationError, match="missing: c; refused d: no client of this"):
        other.run()
    whole.run()
    assert [client["name"] for client in results(tmp_path / "cut")["clients"]] == ["a", "b", "c"]


def test_a_run_that_finds_nothing_to_resume_says_so(start, tmp_path) -> None:
    start("cut", resume=True).run()
    warnings = [e["message"] for e in events(tmp_path / "cut") if e["event"] == "warning"]
    assert any("no checkpoint in" in text and "begins with round 1" in text for text in warnings)


CLAIMS = [{"lost": 1, "used": 0}, {"lost": 5, "used": 0}, {"lost": 2, "used": 1}]


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("policy", ["fail", "cold-start"])
def test_a_cold_start_that_cannot_have_been_is_refused(start, tmp_path, claim, policy) -> None:
    def claims(name: str, request: Request) -> Reply | None:
        reply = WHO["b"](name, request)
        if reply is not None and request.kind == "train" and request.round == 2:
            reply.statistics["cold_start"] = claim
        return reply

    start("cut", {**WHO, "b": claims}, state={"on_missing": policy}).run()
    found = results(tmp_path / "cut")
    true = policy == "cold-start" and claim["lost"] == 1
    status = found["rounds"][1]["clients"][1]["status"]
    assert status == ("accepted" if true else "refused")
    assert len(found["cold_starts"]) == int(true)


def test_a_full_disk_at_the_journal_does_not_end_the_run(start, tmp_path, capsys) -> None:
    run = start("cut")

    class Full:
        def write(self, line: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    run.journal._file = Full()
    run.run()
    assert len(results(tmp_path / "cut")["rounds"]) == 4
    assert "events.jsonl: No space left on device" in capsys.readouterr().err


def test_a_round_that_did_not_count_may_be_lost_and_that_is_recorded(start, tmp_path) -> None:
    """Trained, but the reply never came: the site goes on from the one before, and says so."""
    claim = {"lost": 2, "used": 1}

    def late(name: str, request: Request) -> Reply | None:
        if request.kind == "train" and request.round == 2:
            return None
        reply = WHO["b"](name, request)
        if reply is not None and request.kind == "train" and request.round == 3:
            assert request.last_round == 1
            reply.statistics["cold_start"] = claim
        return reply

    start("cut", {**WHO, "b": late}).run()
    found = results(tmp_path / "cut")
    assert found["rounds"][2]["clients"][1]["status"] == "accepted"
    assert found["cold_starts"] == [{"round": 3, "client": "b", **claim}]


def losing(round: int) -> dict[str, Client]:
    """One client says in a round that its private state is gone."""

    def lost(name: str, request: Request) -> Reply | None:
        if request.kind == "train" and request.round == round:
            reply = failure("train", round, name, SiteError("private state is missing"))
            reply.statistics["state"] = "lost"
            return reply
        return WHO["b"](name, request)

    return {**WHO, "b": lost}


def test_lost_private_state_ends_the_run_with_3_and_the_run_goes_on_once_it_is_back(
    start, tmp_path
) -> None:
    start("whole").run()
    with pytest.raises(SiteError, match="round 3: b has lost its state: private state"):
        start("cut", losing(3)).run()
    last = events(tmp_path / "cut")[-1]
    assert (last["event"], last["exit_code"]) == ("failed", 3)
    lost = [e for e in events(tmp_path / "cut") if e["event"] == "state_lost"]
    assert [(e["round"], e["client"]) for e in lost] == [(3, "b")]
    start("cut", resume=True).run()
    whole, cut = results(tmp_path / "whole"), results(tmp_path / "cut")
    assert cut["shared_sha256"] == whole["shared_sha256"]


def test_who_was_not_asked_in_a_round_cannot_have_lost_it(start, tmp_path) -> None:
    first: set[str] = set()

    def claims(name: str, request: Request) -> Reply | None:
        reply = WHO["b"](name, request)
        if request.kind == "train" and request.round == 1:
            first.add(name)
        elif reply is not None and request.kind == "train" and name not in first:
            reply.statistics["cold_start"] = {"lost": 1, "used": 0}
        return reply

    server = {"fraction": 0.67, "full_first_round": False}
    start("cut", dict.fromkeys(WHO, claims), server=server).run()
    found = results(tmp_path / "cut")
    rows = [row for r in found["rounds"][1:] for row in r["clients"] if row["client"] not in first]
    assert len(first) == 2
    assert {row["status"] for row in rows} == {"refused"}
    assert found["cold_starts"] == []


@pytest.mark.parametrize("change", [{"client": "a"}, {"round": 77}, {"kind": "join"}])
def test_a_loss_that_is_told_of_somebody_else_ends_nothing(start, tmp_path, change) -> None:
    def claims(name: str, request: Request) -> Reply | None:
        reply = losing(3)["b"](name, request)
        if reply is not None and reply.error:
            for key, value in change.items():
                setattr(reply, key, value)
        return reply

    start("cut", {**WHO, "b": claims}).run()
    found = results(tmp_path / "cut")
    assert found["rounds"][2]["clients"][1]["status"] == "refused"
    assert not [e for e in events(tmp_path / "cut") if e["event"] == "state_lost"]


def test_who_never_counted_cannot_end_a_run_by_a_loss(start, tmp_path) -> None:
    start("cut", losing(1)).run()
    found = results(tmp_path / "cut")
    assert found["rounds"][0]["clients"][1]["status"] == "refused"
    assert not [e for e in events(tmp_path / "cut") if e["event"] == "state_lost"]


def test_a_cold_start_stands_in_journal_and_results_also_after_a_resumption(
    start, tmp_path
) -> None:
    def cold(name: str, request: Request) -> Reply | None:
        reply = WHO["b"](name, request)
        if reply is not None and request.kind == "train" and request.round == 2:
            reply.statistics["cold_start"] = {"lost": 1, "used": 0}
        return reply

    state = {"on_missing": "cold-start"}
    with pytest.raises(Killed):
        start("cut", {**WHO, "b": cold, "c": killed_in(3, "c")["c"]}, state=state).run()
    start("cut", resume=True, state=state).run()
    assert results(tmp_path / "cut")["cold_starts"] == [
        {"round": 2, "client": "b", "lost": 1, "used": 0}
    ]
    (event,) = [e for e in events(tmp_path / "cut") if e["event"] == "state_lost"]
    assert event["reason"] == "lost its state of round 1 and started from round 0"


@pytest.mark.parametrize(
    "said", ["x\x1b[2J", {"lost": 1}, {"lost": 1, "used": 1}, {"lost": True, "used": 0}, [1]]
)
def test_odd_words_about_a_cold_start_are_refused(start, tmp_path, said) -> None:
    def odd(name: str, request: Request) -> Reply | None:
        reply = WHO["b"](name, request)
        if reply is not None and request.kind == "train":
            reply.statistics["cold_start"] = said
        return reply

    start("cut", {**WHO, "b": odd}).run()
    row = results(tmp_path / "cut")["rounds"][0]["clients"][1]
    assert row["status"] == "refused"
    assert row["reason"].startswith("its cold_start is ")
    assert row["reason"].isprintable()


def test_a_cut_last_line_of_the_journal_spoils_no_other_line(start, tmp_path) -> None:
    with pytest.raises(Killed):
        start("cut", killed_in(3)).run()
    journal = tmp_path / "cut" / "events.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    start("cut", resume=True).run()
    lines = journal.read_text().splitlines()
    whole = [line for line in lines if line.endswith("}")]
    assert len(whole) == len(lines) - 1
    assert json.loads(whole[-1])["event"] == "finished"


def test_a_checkpoint_holds_all_tensors_and_whose_uploads_they_are(start, tmp_path) -> None:
    start("whole", server={"aggregate_stale": True}).run()
    checkpoint = Checkpoints(tmp_path / "whole").newest()
    assert checkpoint is not None
    assert (checkpoint.round, checkpoint.federation) == (4, "fed")
    assert checkpoint.last_round == {"a": 4, "b": 4, "c": 4}
    assert set(checkpoint.uploads) == {"a", "b", "c"}
    for name, value in checkpoint.shared.items():
        # The last round added 7 to what c was sent, and (1 + 3 * 3 + 7 * 7) / 11 to the mean.
        moved = checkpoint.uploads["c"][name] - value
        np.testing.assert_allclose(moved, 7 - 59 / 11, atol=1e-4)
