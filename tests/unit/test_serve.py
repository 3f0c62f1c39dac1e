"""The serving engine on one rank: its tokens are those of a model without a cache, however it is run."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.bench.serve.command import points_of
from imbrex.bench.serve.loop import Load
from imbrex.bench.serve.training import train
from imbrex.demo.corpus import Corpus
from imbrex.serve.attention import Grouped, Latent, Span
from imbrex.serve.decoding import Drafting, Steps
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.heads import best_keys, pack, slice_of, unpack
from imbrex.serve.model import Decoder, ModelConfig, draw
from imbrex.serve.request import Answer, Request

GROUPED = Grouped(num_heads=4, num_kv_heads=2, head_size=8, qk_norm=True)
LATENT = Latent(num_heads=2, query_rank=12, kv_rank=10, nope=6, rope=4, value=6)
VOCABULARY = 61


def make(attention: Grouped | Latent = GROUPED) -> Decoder:
    moe = imbrex.MoEConfig(hidden_size=16, intermediate_size=24, num_experts=4, top_k=2)
    config = ModelConfig(
        moe=moe, attention=attention, num_layers=2, vocabulary=VOCABULARY, positions=64, drafting=True
    )
    model = Decoder(config, lambda layer: imbrex.MoELayer(moe, layer=layer))
    draw(model, seed=3)
    return model


@torch.no_grad()
def greedy(model: Decoder, prompt: list[int], wanted: int) -> list[int]:
    """The oracle: every token from a call over all tokens before it, without a cache."""
    tokens = list(prompt)
    for _ in range(wanted):
        span = Span(torch.zeros(1, dtype=torch.int64), len(tokens), 0)
        tokens.append(int(model.best(model(torch.tensor([tokens]), span))[-1]))
    return tokens[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("attention", "drafts", "interval"),
    [(GROUPED, 0, 1), (GROUPED, 0, 4), (GROUPED, 1, 1), (GROUPED, 3, 3), (LATENT, 0, 2), (LATENT, 3, 1)],
)
def test_tokens_are_those_of_greedy_decoding(attention: Grouped | Latent, drafts: int, interval: int) -> None:
    """Prompts shorter and longer than a chunk, more requests than slots, drafts that are mostly wrong."""
    model = make(attention)
    settings = Settings(slots=2, room=30, chunk=(2, 4), interval=interval, drafting=Drafting(length=drafts))
    engine = Engine(model, settings)
    answers = [
        engine.submit(Request(prompt=prompt, max_tokens=wanted))
        for prompt, wanted in zip(prompts(5, 9, 1, 4), (5, 7, 1, 6), strict=True)
    ]
    engine.run()
    for answer in answers:
        assert answer.tokens == greedy(model, list(answer.request.prompt), answer.request.max_tokens)
        assert answer.done
    assert not engine.filling
    assert not engine.running
    assert sorted(engine.free) == [0, 1]


@pytest.mark.parametrize(("drafts", "steps"), [(0, [1, 3, 5]), (1, [12, 11])])
def test_steps_that_gave_nothing_are_not_copied(drafts: int, steps: list[int]) -> None:
    """An interval beyond all answers takes no more memory than the longest, and a request that ends takes
    with it the steps since it began, or since the last delivery."""
    model, drafting = make(), Drafting(length=drafts)
    engine = Engine(model, Settings(slots=2, room=12, chunk=(2, 8), interval=10**6, drafting=drafting))
    assert len(engine.steps.state.ring_NZX) == 12
    copied, copy = [], engine._copy

    def watched(tensors: list[torch.Tensor], take: Any) -> None:
        copied.append(tensors[0].shape)
        copy(tensors, take)

    engine._copy = watched  # type: ignore[method-assign]
    answers = [
        engine.submit(Request(prompt=p, max_tokens=n))
        for p, n in zip(prompts(5, 4, 3), (4, 2, 6), strict=True)
    ]
    engine.run()
    for answer in answers:
        assert answer.tokens == greedy(model, list(answer.request.prompt), answer.request.max_tokens)
    assert [shape[0] for shape in copied if len(shape) == 3] == steps


def test_tokens_leave_every_few_steps_the_first_and_the_last_at_once() -> None:
    engine = Engine(make(), Settings(slots=2, room=30, chunk=(2, 8), interval=4))
    long, short = (
        engine.submit(Request(prompt=prompt, max_tokens=wanted))
        for prompt, wanted in zip(prompts(3, 3), (11, 3), strict=True)
    )
    engine.run()
    # Behind the first tokens the short request ends after two steps, alone; the other's leave every four.
    assert [count for _, count in short.arrivals] == [1, 2]
    assert [count for _, count in long.arrivals] == [1, 4, 4, 2]


def test_right_drafts_leave_in_one_step_and_wrong_ones_cost_nothing() -> None:
    """Drafts put in by hand: the second of three is wrong, so two tokens leave, and then all is as ever."""
    model, prompt = make(), prompts(6)[0]
    truth = greedy(model, prompt, 9)
    engine = Engine(model, Settings(slots=1, room=30, chunk=(1, 8), drafting=Drafting(length=3)))
    answer = engine.submit(Request(prompt=prompt, max_tokens=9))
    engine.step()
    wrong = (truth[2] + 1) % VOCABULARY
    engine.steps.state.drafts_ZX[0] = torch.tensor([truth[1], wrong, truth[3]])
    engine.step()
    engine.steps.state.drafts_ZX[0] = torch.tensor(truth[3:6])
    engine.run()
    assert answer.tokens == truth
    assert [count for _, count in answer.arrivals][:3] == [1, 2, 4]


def test_forced_drafts_count_as_right_in_the_mean() -> None:
    settings = Settings(slots=1, room=40, chunk=(1, 8), drafting=Drafting(length=3, forced=1.5))
    engine = Engine(make(), settings)
    answer = engine.submit(Request(prompt=[1, 2], max_tokens=26))
    engine.run()
    assert [count for _, count in answer.arrivals] == [1] + [2, 3] * 5
    with pytest.raises(ValueError, match="force at most as many"):
        Drafting(length=1, forced=1.5)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stop_token_ends_an_answer(drafts: int) -> None:
    model, prompt = make(), prompts(7)[0]
    truth = greedy(model, prompt, 12)
    stop = truth[4]
    settings = Settings(
        slots=1, room=30, chunk=(1, 8), drafting=Drafting(length=drafts), stop=stop, interval=2
    )
    engine = Engine(model, settings)
    answers = [engine.submit(Request(prompt=prompt, max_tokens=12)) for _ in range(2)]
    engine.run()
    assert [answer.tokens for answer in answers] == [truth[: truth.index(stop) + 1]] * 2


def test_a_bad_request_is_refused_alone() -> None:
    ended: list[Answer] = []
    engine = Engine(make(), Settings(slots=2, room=12, chunk=(1, 8)), answered=ended.append)
    asked = [([], 3), ([1] * 10, 3), ([1, VOCABULARY], 2), ([1, -1], 2), ([1], 0), ([1, 2], 4)]
    answers = [engine.submit(Request(prompt=prompt, max_tokens=wanted)) for prompt, wanted in asked]
    assert [answer.refused is not None for answer in answers] == [True] * 5 + [False]
    assert answers[1].refused == (
        "10 tokens and 3 more are wanted, and a slot has room for 12; shorten the prompt or ask for fewer"
    )
    assert "token 1 is 61" in str(answers[2].refused)
    engine.run()
    assert len(answers[-1].tokens) == 4
    assert ended == answers


@pytest.mark.parametrize(
    ("prompt", "wanted", "said"),
    [
        (None, 1, "the prompt is NoneType"),
        ({1, 2}, 1, "the prompt is set"),
        ({0: 1}, 1, "the prompt is dict"),
        ((token for token in [1]), 1, "the prompt is generator"),
        (torch.tensor([1]), 1, "the prompt is Tensor"),
        ("ab", 1, "token 0 is 'a'"),
        ([True], 1, "token 0 is True"),
        ([1.0], 1, "token 0 is 1.0"),
        ([1], 2.5, "2.5 tokens are wanted"),
        ([1], float("nan"), "nan tokens are wanted"),
        ([1], "3", "'3' tokens are wanted"),
        ([1], None, "None tokens are wanted"),
        ([1], True, "True tokens are wanted"),
        ([1], 10**30, "more are wanted, and a slot has room for 12"),
    ],
)
def test_what_is_no_request_is_refused_between_others(prompt: Any, wanted: Any, said: str) -> None:
    engine = Engine(make(), Settings(slots=2, room=12, chunk=(1, 8)))
    good = [engine.submit(Request(prompt=[1, 2], max_tokens=4)) for _ in range(3)]
    engine.step()
    bad = engine.submit(Request(prompt=prompt, max_tokens=wanted))
    for _ in range(20):
        engine.step()
    assert said in str(bad.refused)
    assert [len(answer.tokens) for answer in good] == [4, 4, 4]


def test_a_prompt_that_changes_later_is_answered_as_it_was() -> None:
    """As that of a conversation, which grows while it is served; it would outgrow its slot."""
    engine = Engine(make(), Settings(slots=1, room=12, chunk=(1, 4)))
    whole = engine.submit(Request(prompt=[5, 6, 7, 8, 9], max_tokens=4))
    engine.run()
    growing = [5, 6, 7, 8, 9]
    answer = engine.submit(Request(prompt=growing, max_tokens=4))
    engine.step()
    growing += [VOCABULARY] * 20
    engine.run()
    assert answer.tokens == whole.tokens
    assert answer.request.prompt == (5, 6, 7, 8, 9)


def test_whole_numbers_of_numpy_are_tokens() -> None:
    engine = Engine(make(), Settings(slots=1, room=12, chunk=(1, 8)))
    answer = engine.submit(Request(prompt=list(np.array([1, 2])), max_tokens=np.int32(3)))  # type: ignore[arg-type]
    engine.run()
    assert answer.tokens == greedy(engine.model, [1, 2], 3)


@pytest.mark.parametrize("drafts", [0, 3])
def test_dropped_requests_leave_an_engine_as_new(drafts: int) -> None:
    """One that decodes, one whose prompt is half in, one that waits; the next ones get their own tokens."""
    model = make()
    settings = Settings(slots=2, room=30, chunk=(1, 4), interval=3, drafting=Drafting(length=drafts))
    engine = Engine(model, settings)
    short, long, last = prompts(3, 12, 5)
    dropped = [engine.submit(Request(prompt=p, max_tokens=9)) for p in (short, long, last)]
    for _ in range(3):
        engine.step()
    assert (len(engine.running), len(engine.filling), len(engine.waiting)) == (1, 1, 1)
    engine.drop()
    assert int(engine.steps.state.remaining_Z.sum()) == 0
    answers = [engine.submit(Request(prompt=p, max_tokens=7)) for p in (last, short, long)]
    engine.run()
    assert [answer.tokens for answer in answers] == [greedy(model, p, 7) for p in (last, short, long)]
    assert not any(answer.done for answer in dropped)
    assert sorted(engine.free) == [0, 1]


def test_what_an_engine_cannot_be_made_of() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        Settings(slots=0, room=8)
    with pytest.raises(ValueError, match="sizes is 0; give 1 or more"):
        Settings(slots=2, room=8, sizes=(2, 0))
    with pytest.raises(ValueError, match="64 positions, and a slot takes 108"):
        Engine(make(), Settings(slots=1, room=100, chunk=(1, 8)))
    model = make()
    model.draft = None
    with pytest.raises(ValueError, match="no block to draft with"):
        Steps(model, slots=1, capacity=8, drafting=Drafting(length=1))


def test_the_caches_of_an_engine_go_before_the_next_ones_come() -> None:
    """Without waiting for Python's collector: two engines' caches may not fit a GPU."""
    engine = Engine(make(), Settings(slots=2, room=12, chunk=(1, 8)))
    caches = weakref.ref(engine.steps)
    loads = [Load(users=2, input=3, output=4)]
    gc.disable()
    try:
        assert len(points_of(engine, loads, None)) == 1
        del engine
        assert caches() is None
    finally:
        gc.enable()


def test_the_host_says_what_a_step_costs_it() -> None:
    engine = Engine(make(), Settings(slots=1, room=12, chunk=(1, 8)))
    engine.submit(Request(prompt=[1, 2], max_tokens=4))
    engine.run()
    # One chunk, three steps of decoding, the one that lands the last tokens, the one that finds nothing.
    assert engine.host.steps >= 5
    assert engine.host.busy_s > 0
    assert engine.host.launches == 1 + 1 + 3
    assert engine.host.seconds["model"] > 0
    others = sum(engine.host.seconds[name] for name in ("model", "wait"))
    assert engine.host.busy_s == pytest.approx(sum(engine.host.seconds.values()) - others)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_keys_choose_as_argmax_does(ranks: int) -> None:
    """Planted ties within a slice and across slices, both zeros, infinities, NaN of either sign."""
    torch.manual_seed(0)
    logits = torch.randn(9, 13).round()
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    logits[2, [3, 11]] = torch.nan
    logits[3, [4, 5]] = torch.inf
    logits[4] = -torch.inf
    logits[5, 12] = -torch.nan
    logits[6, 0] = 5.0
    logits[6, 12] = 5.0
    keys: list[Tensor] = []
    for rank in range(ranks):
        begin, end = slice_of(13, rank, ranks)
        if begin < end:
            keys.append(best_keys(logits[:, begin:end], begin))
    assert torch.equal(unpack(torch.stack(keys).amax(0)), logits.argmax(-1))


def test_keys_order_all_floats() -> None:
    values = torch.tensor([-torch.inf, -3.0, -1e-45, 0.0, 1e-45, 2.0, torch.inf, torch.nan])
    keys = pack(values, torch.zeros(8, dtype=torch.int64))
    assert torch.equal(keys.argsort(), torch.arange(8))
    assert unpack(pack(torch.zeros(1), torch.tensor([2**32 - 1]))).item() == 2**32 - 1


def test_a_trained_block_drafts_what_comes() -> None:
    """A text that repeats every five bytes: soon most drafts are right, and tokens are as ever."""
    moe = imbrex.MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2)
    attention = Grouped(num_heads=2, num_kv_heads=2, head_size=16)
    config = ModelConfig(
        moe=moe, attention=attention, num_layers=1, vocabulary=256, positions=96, drafting=True
    )
    model = Decoder(config, lambda layer: imbrex.MoELayer(moe, layer=layer))
    draw(model, seed=3)
    text = torch.frombuffer(bytearray(b"tiles" * 60), dtype=torch.uint8)
    corpus = Corpus(name="tiles", num_files=1, train=text, held_out=text)
    first, last = (train(model, corpus, steps, None, rate=1e-2) for steps in (1, 40))
    assert last["loss"] < 0.5 < first["loss"]
    assert last["draft_loss"] < 1.0 < first["draft_loss"]
    tokens = []
    for drafts in (0, 3):
        settings = Settings(slots=1, room=60, chunk=(1, 16), drafting=Drafting(length=drafts))
        engine = Engine(model, settings)
        answer = engine.submit(Request(prompt=list(b"lestil"), max_tokens=40))
        engine.run()
        tokens.append(answer.tokens)
    assert tokens[0] == tokens[1]
    # 39 tokens behind the first, of at most four a step.
    assert engine.host.row_tokens == 39
    assert engine.host.row_steps <= 20
