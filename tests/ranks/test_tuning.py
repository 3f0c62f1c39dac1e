"""What `auto` keeps of a layer, and what other layers and processes make of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import imbrex
from imbrex import Routing
from imbrex.balancer import OnlineBalancer
from imbrex.cli import main
from imbrex.contracts import Roles
from imbrex.observe import Recorder
from imbrex.overlap import Auto, Fused, auto, profiler, tuner
from imbrex.overlap.tuner import broadcast_text
from imbrex.runtime.gradients import saves_elsewhere
from tests.emulated import kernel
from tests.ranks.forked import run_ranks
from tests.ranks.layer_jobs import Case, make_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import Kernels, an_exchange, inputs_of

SMALL = imbrex.MoEConfig(hidden_size=8, intermediate_size=16, num_experts=4, top_k=2)


def run_once(
    ranks: Ranks, folders: list[str], tokens: int = 12, options: dict[str, Any] | None = None
) -> tuple[int, str]:
    """How often a layer's first call measured, and its reason. folders: the cache of every rank; nothing is
    remembered from calls before, as in a new process. Nobody wants the times, so each is of one run."""
    counted, before = [], auto.measure
    settings: dict[str, Any] = {"degrees": (1, 2), **(options or {})}

    def counting(*given, **more):
        counted.append(1)
        return before(*given, **more, repeats=1)

    tuner._remembered.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_CACHE_DIR", folders[ranks.rank])
        patch.setattr(auto, "measure", counting)
        patch.setattr(profiler, "TASK_REPEATS", 1)
        schedule = Auto(**settings)
        case = Case(config=SMALL, tokens=(tokens, 3), options={"transport": "alltoall", "schedule": schedule})
        layer = make_layer(case, ranks.group)
        layer.exchange.observer = recorder = Recorder()
        balancer = OnlineBalancer()
        balancer.attach(layer.eval())
        layer(tokens_of(case, ranks.rank))
        (loads,) = [value for (name, _), value in recorder.take_counters().items() if name == "expert_load"]
        assert sum(loads) == tokens_of(case, ranks.rank).shape[0] * SMALL.top_k, (
            "what is timed is not counted"
        )
        spans = recorder.end_step()
        assert ("measure" in spans, "dispatch" in spans) == (bool(counted), True)
        balancer.step()
        heard = balancer.seats[0].latest
        balancer.settle()
        balancer.close()
        assert heard is not None
        assert heard.counts_E.sum() == (tokens + 3) * SMALL.top_k
        return len(counted), layer.reasons["schedule"]


def run_again(ranks: Ranks, folder: str) -> list[int]:
    """How often alike layers of a process measure: one finds a file, two renew it, two use none."""
    counted, measure = [], auto.measure

    def counting(*given, **more):
        counted[-1] += 1
        return measure(*given, **more, repeats=1)

    ways: list[dict[str, Any]] = [{}, *[{"renew": True}] * 2, *[{"keep": False}] * 2]
    tuner._remembered.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_CACHE_DIR", folder)
        patch.setattr(auto, "measure", counting)
        for way in ways:
            counted.append(0)
            schedule = Auto(degrees=(1,), **way)
            group = ranks.group if ranks.world_size > 1 else None
            imbrex.MoELayer(SMALL, group, transport="alltoall", schedule=schedule)(torch.randn(3, 8))
    return counted


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_process_has_read_is_renewed_once(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """A rank without a group, too, measures layers that are alike once."""
    pool.run(ranks, run_again, str(tmp_path))
    assert pool.run(ranks, run_again, str(tmp_path)) == [[0, 1, 0, 0, 0]] * ranks


def run_first_checkpointed(ranks: Ranks, schedule: str) -> list[bool]:
    """Whether a first call that activation checkpointing runs, with its measurements, and the second give
    the gradients of a plain third."""
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    layer = imbrex.MoELayer(config, ranks.group, schedule=schedule)
    x_TD, gradients = torch.randn(12, 8, requires_grad=True), []
    for call in range(3):
        y_TD: Any = checkpoint(layer, x_TD, use_reentrant=False) if call < 2 else layer(x_TD)
        gradients.append(torch.autograd.grad(y_TD.square().sum(), (x_TD, *layer.parameters())))
    return [all(map(torch.equal, gradients[2], these)) for these in gradients[:2]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_measurements_are_no_part_of_a_checkpointed_call(pool: Pool, ranks: int) -> None:
    """Else the second run of the call, in its backward, saves fewer tensors than the first."""
    assert pool.run(ranks, run_first_checkpointed, "tutel") == [[True, True]] * ranks


def test_what_is_timed_saves_as_a_plain_call() -> None:
    """Fused kernels bring dy otherwise where somebody else keeps what is saved."""
    x_TD, routing = torch.zeros(2, 4), Routing(ids_TK=torch.zeros(2, 1).long(), weights_TK=torch.ones(2, 1))
    with torch.autograd.graph.save_on_cpu():
        assert saves_elsewhere()
        with auto.copies_for_timing(x_TD, routing):
            assert not saves_elsewhere()


def the_file(folder: Path) -> Path:
    (path,) = (folder / "tuned").iterdir()
    return path


def test_a_kept_result_is_not_measured_again(pool: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path)] * 2
    first = pool.run(2, run_once, folders)
    path = the_file(tmp_path)
    assert [count for count, _ in first] == [1, 1]
    assert all(reason.endswith(f"; kept in {path}") for _, reason in first)
    second = pool.run(2, run_once, folders)
    assert [count for count, _ in second] == [0, 0]
    date = json.loads(path.read_text())["date"]
    for (_, before), (_, after) in zip(first, second, strict=True):
        assert after == before.replace("kept in", f"kept on {date} in")
    assert [count for count, _ in pool.run(2, run_once, folders, 9)] == [0, 0]  # of the same bucket
    assert [count for count, _ in pool.run(2, run_once, folders, 17)] == [1, 1]
    assert [count for count, _ in pool.run(2, run_once, folders, 12, {"renew": True})] == [1, 1]
    assert [count for count, _ in pool.run(2, run_once, folders, 12, {"keep": False})] == [1, 1]
    assert len(list((tmp_path / "tuned").iterdir())) == 2


def test_ranks_run_what_the_first_has_kept(pool: Pool, tmp_path: Path) -> None:
    """Each has a cache of its own, and they hold different results; or one of them holds none."""
    folders = [tmp_path / "first", tmp_path / "second"]
    pool.run(2, run_once, [str(folders[0])] * 2)
    path = the_file(folders[0])
    content = json.loads(path.read_text())
    content["value"] |= {"scheduler": "stage-major", "degree": 2}
    folders[1].joinpath("tuned").mkdir(parents=True)
    other = folders[1] / "tuned" / path.name
    other.write_text(json.dumps(content))
    for order in (folders, folders[::-1]):
        answers = pool.run(2, run_once, [*map(str, order)])
        assert [count for count, _ in answers] == [0, 0]
        assert answers[0] == answers[1]
        assert ("stage-major-2" in answers[0][1]) == (order[0] is folders[1])
    other.unlink()
    assert [count for count, _ in pool.run(2, run_once, [*map(str, folders[::-1])])] == [1, 1]


def test_a_broken_file_is_ignored_with_a_sentence(pool: Pool, tmp_path: Path) -> None:
    folders = [str(tmp_path)] * 2
    pool.run(2, run_once, folders)
    path = the_file(tmp_path)
    path.write_text(path.read_text()[:100])
    for count, reason in pool.run(2, run_once, folders):
        assert count == 1
        assert f"{path} was ignored: it holds no result of this (JSONDecodeError" in reason
        assert reason.endswith(f"; kept in {path}")
    assert [count for count, _ in pool.run(2, run_once, folders)] == [0, 0]


def test_what_cannot_be_kept_is_said(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("")
    for count, reason in pool.run(2, run_once, [str(tmp_path)] * 2):
        assert count == 1
        assert "measured in this process; " in reason
        assert "could not be written (" in reason


def run_spread(ranks: Ranks, text: str) -> str:
    exchange = make_layer(Case(config=SMALL, options={"transport": "alltoall"}), ranks.group).exchange
    leads = ranks.rank == 0
    return broadcast_text(exchange.transport.exchange_counts, text if leads else "another", is_first=leads)


@pytest.mark.parametrize("text", ["", "a", "eight ch", "nine char", "ä" * 50])
def test_the_first_ranks_text_is_everyones(pool: Pool, text: str) -> None:
    assert pool.run(2, run_spread, text) == [text] * 2


def run_fused(ranks: Ranks, folder: str) -> tuple[Roles, str]:
    """The roles that a first call of `fused` takes, and what its reason says of them."""
    tuner._remembered.clear()
    with an_exchange(ranks) as (exchange, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_CACHE_DIR", folder)
        experts, (x_TD, routing) = Kernels(ranks.rank, train_down=True), inputs_of(ranks.rank, 9)
        settings = {"fuses": True, "uses_files": True, "renews": False}
        mine = tuner.tuner_of(exchange, experts, x_TD, **settings)
        if ranks.rank == 0:
            mine.tunings.write("fused", mine.subject, {"stage": 1, "sums": 2, "first": None})
        strategy = Fused()
        strategy.run(x_TD, routing, exchange, experts, None)
        return exchange.dispatcher.roles, strategy.reason(exchange, experts)


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
def test_fused_takes_the_roles_that_are_kept(pool: Pool, tmp_path: Path) -> None:
    for roles, reason in pool.run(2, run_fused, str(tmp_path)):
        assert roles == Roles(stage=1, sums=2)
        assert "staged by 1 blocks, sums begun by 2 blocks (kept on " in reason


@pytest.mark.untraced
def test_the_command_fills_what_a_layer_finds(pool: Pool, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    words = ["tune", "--model", "8,16,4,2", "--tokens", "24,8", "--device", "cpu", "--transport", "alltoall"]
    settings = {"ranks": 2, "folder": tmp_path, "IMBREX_CACHE_DIR": str(cache)}
    printed = run_ranks(words, **settings)
    lines = re.findall(r"^(24|8) tokens, schedule auto: \w+-\d, predicted .*; kept in (\S+)$", printed, re.M)
    assert [tokens for tokens, _ in lines] == ["24", "8"]
    assert {path for _, path in lines} == {str(path) for path in (cache / "tuned").iterdir()}
    assert run_ranks(words, **settings).count("; kept on ") == 2
    for count, reason in pool.run(2, run_once, [str(cache)] * 2, 12, {"degrees": (1, 2, 4, 8)}):
        assert count == 0
        assert "; kept on " in reason


def test_the_command_gives_the_same_tokens_to_a_transport_that_wants_them(tmp_path: Path) -> None:
    words = ["tune", "--model", "8,16,4,2", "--tokens", "8", "--device", "cpu", "--transport", "allreduce"]
    printed = run_ranks(words, ranks=2, folder=tmp_path, IMBREX_CACHE_DIR=str(tmp_path))
    assert "8 tokens, transport allreduce" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "1,2"], "--model: '1,2'"),
        (["--model", "8,16,4,2", "--tokens", "x"], "--tokens is x"),
        (["--model", "8,16,4,2", "--ranks", "3", "--tp", "2"], "--tp 2 does not divide --ranks 3"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--device", "cpu", "--tokens", "8", *words])
    assert said in capsys.readouterr().err
