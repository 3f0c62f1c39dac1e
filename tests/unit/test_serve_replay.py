"""A replayed loop takes the steps of a real one, and its figures are those of the times it is given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import serve as benchmark

from imbrex.bench.serve import loop
from imbrex.bench.serve.device import DeviceTime
from imbrex.bench.serve.loop import Load, serve
from imbrex.bench.serve.measured import step_times
from imbrex.bench.serve.replay import StepTimes, Timeline, at, replay
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import Engine, Settings
from tests.unit.test_serve import make

SIZES = (2, 4)
TIMES = StepTimes(decode={2: [(0, 1.0)], 4: [(0, 2.0), (10, 3.0)]}, prefill={2: [(0, 5.0)]})


def settings(**more: object) -> Settings:
    kind: dict = {"slots": 4, "room": 40, "chunk": (2, 8), "sizes": SIZES, "interval": 3} | more
    return Settings(**kind)


def test_a_time_is_on_the_line_through_its_neighbours() -> None:
    curve = [(1024, 10.0), (2048, 12.0), (4096, 13.0)]
    assert [at(curve, x) for x in (1024, 1536, 3072, 0, 8192)] == [10.0, 11.0, 12.5, 8.0, 15.0]
    assert at([(1024, 10.0)], 9000) == 10.0


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_steps_are_those_of_a_real_engine(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(users=4, input=11, output=9)
    kind = settings(drafting=Drafting(length=drafts, forced=1.5 if drafts else None))
    taken: list[list[int | str]] = []

    capture = Engine._capture

    def told(engine: Engine) -> dict:
        steps: list[int | str] = []
        taken.append(steps)
        return {key: noted(steps, key, of) for key, of in capture(engine).items()}

    def noted(steps: list[int | str], key: int | str, program: Callable[[], None]) -> Callable[[], None]:
        return lambda: (steps.append(key), program())[1]

    monkeypatch.setattr(Engine, "_capture", told)
    real = serve(Engine(make(), kind), load, None)
    again = replay(TIMES, load, kind)
    assert taken[0] == taken[1]
    assert {"prefill", 4} <= set(taken[0])
    assert (again["steps"], again["requests"]) == (real["steps"], real["requests"])
    assert again["tokens_per_row_step"] == real["tokens_per_row_step"]


def test_one_user_sees_a_token_a_step() -> None:
    times = StepTimes(decode={1: [(0, 0.5)]}, prefill={1: [(0, 5.0)]})
    kind = Settings(slots=1, room=30, chunk=(1, 8), sizes=(1,))
    point = replay(times, Load(users=1, input=8, output=20), kind)
    assert point["tokens_per_s_user"] == pytest.approx(2.0)
    # 20 tokens take a chunk and 19 steps.
    assert point["tokens_per_s_gpu"] == pytest.approx(20 / (5 + 19 * 0.5))


def test_what_was_not_measured_is_not_replayed() -> None:
    with pytest.raises(ValueError, match=r"no measured step of \[3\] rows"):
        replay(TIMES, Load(users=2, input=4, output=4), settings(slots=3, sizes=(2,)))
    with pytest.raises(ValueError, match="no steps of demo by nvlink with 0 drafts"):
        step_times([], "demo", "nvlink")


def test_times_out_of_rows() -> None:
    def row(op: str, us: float, impl: str = "nvlink", *, model: str = "demo", **case: int) -> dict:
        return {"op": op, "impl": impl, "case": {"model": model} | case, "median_us": us}

    rows = [
        row("decode step", 3e6, B=8, context=20),
        row("decode step", 1e6, B=8, context=10),
        row("decode step", 9e6, B=8, context=10, drafts=1),
        row("decode step", 9e6, "alone", B=8, context=10),
        row("chunk", 2e6, context=0, rows=4),
        row("chunk", 4e6, context=10, rows=4),
        row("chunk", 7e6, context=0, rows=4),
        row("chunk", 1e6, context=0, rows=4, live=1),
        {"op": "token choice", "impl": "heap", "case": {"T": 1}, "median_us": 4.0},
    ]
    times = step_times(rows, "demo", "nvlink")
    assert times.decode == {8: [(10, 1.0), (20, 3.0)]}
    assert times.prefill == {4: [(0, 2.0), (10, 4.0)], 1: [(0, 1.0)]}
    latent = [
        row("decode step", 1e6, model="deepseek-v3-8", B=8, context=10, room=30),
        row("chunk", 2e6, model="deepseek-v3-8", context=10, room=30, rows=4),
    ]
    times = step_times(latent, "deepseek-v3-8", "nvlink")
    assert times == StepTimes(
        decode={8: [(30, 1.0)]}, prefill={4: [(30, 2.0)]}, decode_by_room=True, prefill_by_room=True
    )
    del latent[1]["case"]["room"]
    times = step_times(latent, "deepseek-v3-8", "nvlink")
    assert times == StepTimes(decode={8: [(30, 1.0)]}, prefill={4: [(10, 2.0)]}, decode_by_room=True)


def test_a_step_over_the_whole_room_takes_as_long_at_any_length() -> None:
    curves: dict = {"decode": {1: [(20, 0.5), (40, 0.9)]}, "prefill": {1: [(20, 5.0), (40, 7.0)]}}
    for prefill_by_room, chunk in ((True, 6), (False, 3)):
        times = StepTimes(**curves, decode_by_room=True, prefill_by_room=prefill_by_room)
        point = replay(times, Load(users=1, input=8, output=20), Settings(slots=1, room=30, chunk=(1, 8)))
        assert point["tokens_per_s_user"] == pytest.approx(1 / 0.7)
        assert point["tokens_per_s_gpu"] == pytest.approx(20 / (chunk + 19 * 0.7))


def test_a_chunk_of_one_prompt_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummies beside it have a slot each behind those of requests, as in a loop."""
    engine = Engine(make(), Settings(slots=6, room=30, chunk=(4, 8)))
    benchmark.ready_chunk(engine, 5, 1)
    chunk = engine.chunk
    of_row = [of.tolist() for of in (chunk.slot_B, chunk.start_B, chunk.count_B)]
    assert of_row == [[0, 7, 8, 9], [5, 0, 0, 0], [256, 0, 0, 0]]
    benchmark.ready_chunk(engine, 5, 4)
    assert [of.tolist() for of in (chunk.slot_B, chunk.start_B)] == [[0, 1, 2, 3], [5] * 4]
    monkeypatch.setattr(benchmark, "slowest_seconds", lambda *_: 1.0)
    run: Any = None
    row = benchmark.Run.chunk(run, engine, "auto", {"room": 30, "context": 5}, 1)
    assert row["case"] == {"context": 5, "rows": 4, "tokens": 256, "live": 1}


def test_chunks_stand_behind_prompts_that_were_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 20 tokens by three chunks of 2 x 8."""
    monkeypatch.setattr(benchmark, "CHUNK", (2, 8))
    engine = Engine(make(), Settings(slots=3, room=40, chunk=(2, 8)))
    benchmark.fill_prompts(engine, 20)
    keys_ZL = engine.steps.caches[0][0].abs().flatten(2).sum(-1)
    assert (keys_ZL > 0).sum(1)[:2].tolist() == [24, 24]
    assert engine.steps.state.length_Z[:3].tolist() == [24, 24, 0]


def test_contexts_of_latent_attention_want_an_engine_each() -> None:
    short = benchmark.brief(benchmark.SWEEPS["qwen3-30b-a3b"])
    assert benchmark.at_contexts("qwen3-30b-a3b", short, [1024, 4608]).rooms == ((1024, 4608),)
    assert benchmark.at_contexts("deepseek-v3-8", short, [1024, 4608]).rooms == ((1024,), (4608,))


def test_engines_are_timed_in_the_order_of_their_drafts() -> None:
    sweep = benchmark.Sweep(ways=("nvlink",), rooms=((1024,), (4608,)), drafting=("nvlink",))
    plain = [(0, (1024,)), (0, (4608,))]
    assert benchmark.engines_of(sweep, "nvlink", sweep.rooms, [3, 0]) == [(3, (1024,)), (3, (4608,)), *plain]
    assert benchmark.engines_of(sweep, "nvlink", sweep.rooms, []) == [*plain, (1, (1024,)), (3, (1024,))]
    assert benchmark.engines_of(sweep, "alone", sweep.rooms[:1], []) == plain[:1]


def test_a_chunk_of_one_prompt_takes_less_than_one_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four users' prompts of 8 tokens in chunks of 4 x 4: two chunks of four, then of one alone each."""
    curves = {4: [(0, 8.0), (4, 9.0)], 1: [(0, 2.0), (16, 3.0)]}
    times = StepTimes(decode={4: [(0, 1.0)]}, prefill=curves)
    kind = Settings(slots=4, room=40, chunk=(4, 4), sizes=(4,))
    spent: list[float] = []
    launch = Timeline.launch

    def noted(timeline: Timeline, seconds: float) -> None:
        spent.append(seconds)
        launch(timeline, seconds)

    monkeypatch.setattr(Timeline, "launch", noted)
    replay(times, Load(users=4, input=8, output=32, rounds=2), kind)
    chunks = [seconds for seconds in spent if seconds != 1.0]
    # Four prompts; the second chunk has four tokens before each of them.
    assert chunks[:2] == [8.0, 9.0]
    # One prompt, of four tokens before it.
    assert chunks[-2:] == [2.0, 2.25]


@pytest.mark.parametrize("chunk", [64, 256])
def test_two_answers_of_a_user_tell_what_ten_do(chunk: int) -> None:
    """Users begin in the middle of answers, and the window holds as many prompts as answers; what a user sees
    is of the window alone, in which all are served."""
    times = StepTimes(decode={8: [(0, 0.0107)]}, prefill={1: [(0, 0.0085)]})
    kind = Settings(slots=8, room=320, chunk=(1, chunk), sizes=(8,), interval=4)
    two, ten = (replay(times, Load(users=8, input=256, output=64, rounds=rounds), kind) for rounds in (2, 10))
    for name in ("tokens_per_s_gpu", "tokens_per_s_user"):
        assert two[name] == pytest.approx(ten[name], rel=0.015)
    assert (two["requests"], ten["requests"]) == (8, 72)
    # A user decodes for less than the whole of the time, as prompts of its own take the rest.
    assert two["tokens_per_s_user"] > two["tokens_per_s_gpu"] / 8


def test_windows_of_ranks_that_hardly_meet_give_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    load, kind = Load(users=2, input=8, output=20), Settings(slots=2, room=30, chunk=(1, 8))
    times = StepTimes(decode={1: [(0, 1.0)], 2: [(0, 1.0)]}, prefill={1: [(0, 1.0)]})
    whole = replay(times, load, kind)
    assert whole["tokens_per_s_gpu"] is not None
    windows: list[list[float]] = []
    gathered = loop._gathered

    def beside_another(own: Any, group: Any) -> list[Any]:
        if not windows and isinstance(own, list):
            windows[:] = [own, [own[1] - 6.0, own[1] + 9.0]]
            return windows
        return gathered(own, group)

    monkeypatch.setattr(loop, "_gathered", beside_another)
    assert replay(times, load, kind)["tokens_per_s_gpu"] is None
    assert len(windows) == 2


def test_the_time_in_which_no_step_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of 3 ms and a chunk of 5, with 4 ms between the last two."""
    now = [0.0]

    class Event:
        def __init__(self, **_: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def taking(ms: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine: Any = SimpleNamespace(programs={"prefill": taking(5.0), 8: taking(3.0)})
    before = dict(engine.programs)
    device = DeviceTime(engine)
    engine.programs["prefill"]()
    engine.programs[8]()
    taking(4.0)()
    engine.programs[8]()
    figures = device.figures()
    assert engine.programs == before
    assert figures["no_step_share"] == pytest.approx(4 / 15, abs=1e-4)
    assert figures["device_ms"] == figures["device_mean_ms"] == {"prefill": 5.0, "8": 3.0}
    assert figures["device_calls"] == {"prefill": 1, "8": 2}
