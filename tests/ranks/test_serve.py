"""Serving on several ranks: the tokens of one, whichever way experts are reached; and ranks that are lost."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

import imbrex
from imbrex.bench.serve.models import ALONE, GATHER, TRANSFORMERS, Way, make_beside, make_moe, takes_graphs
from imbrex.cli import main
from imbrex.kernels.rows.keys import TokenChoice
from imbrex.serve.attention import Grouped
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.heads import sharded_argmax, slice_of
from imbrex.serve.model import Decoder, ModelConfig, draw
from imbrex.serve.request import Request
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.forked import run_ranks
from tests.ranks.pool import Pool, RankError, Ranks

MOE = imbrex.MoEConfig(hidden_size=16, intermediate_size=24, num_experts=6, top_k=2)
CONFIG = ModelConfig(
    moe=MOE,
    attention=Grouped(num_heads=2, num_kv_heads=1, head_size=8),
    num_layers=2,
    vocabulary=29,
    positions=48,
    drafting=True,
)
ASKED = (((3, 5), (9, 7), (1, 1), (4, 2)), ((2, 9),), (), ((6, 3),))
"""(length of a prompt, tokens wanted), by rank: one has none, and they end at different times."""


def make(way: Way, ranks: Ranks) -> Decoder:
    whole = None if way.transport == ALONE else ranks.group
    moe = make_moe(MOE, way, ranks.group, torch.device("cpu"), torch.float32)
    model = Decoder(CONFIG, moe, head_group=whole)
    draw(model, seed=5)
    return model


def requests(rank: int) -> list[Request]:
    generator = torch.Generator().manual_seed(rank)
    return [
        Request(prompt=torch.randint(29, (length,), generator=generator).tolist(), max_tokens=wanted)
        for length, wanted in ASKED[rank]
    ]


def answers(ranks: Ranks, transport: str, drafts: int) -> list[list[int]]:
    return answers_of(make(Way(transport=transport), ranks), ranks, drafts)


def answers_beside(ranks: Ranks) -> list[list[int]]:
    """Those of a model over the parameters of another, by another way."""
    first = make(Way(transport="alltoall"), ranks)
    other = make_beside(first, Way(transport=GATHER), ranks.group)
    for mine, theirs in zip(other.parameters(), first.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
    return answers_of(other, ranks, 1)


def answers_of(model: Decoder, ranks: Ranks, drafts: int) -> list[list[int]]:
    settings = Settings(slots=2, room=20, chunk=(1, 4), interval=1 + drafts, drafting=Drafting(length=drafts))
    engine = Engine(model, settings, ranks.group)
    asked = [engine.submit(request) for request in requests(ranks.rank)]
    engine.run()
    engine.close()
    return [answer.tokens for answer in asked]


def test_tokens_are_those_of_one_rank(pool: Pool) -> None:
    """Ways of reaching experts, and none, on four ranks of which one has no request."""
    truth = pool.run(4, answers, ALONE, 0)
    assert [[len(tokens) for tokens in of] for of in truth] == [[5, 7, 1, 2], [9], [], [3]]
    for transport, drafts in (("alltoall", 0), (GATHER, 0), (TRANSFORMERS, 0), ("alltoall", 3)):
        assert pool.run(4, answers, transport, drafts) == truth
    assert pool.run(4, answers_beside) == truth


def answers_beside_a_drop(ranks: Ranks) -> list[list[int]]:
    engine = Engine(
        make(Way(transport="alltoall"), ranks), Settings(slots=2, room=20, chunk=(1, 4)), ranks.group
    )
    asked = [engine.submit(request) for request in requests(ranks.rank)]
    for _ in range(3):
        engine.step()
    if ranks.rank == 0:
        engine.drop()
    engine.run()
    return [answer.tokens for answer in asked]


def test_a_rank_that_drops_its_requests_goes_on_with_the_others(pool: Pool) -> None:
    truth, beside = (
        pool.run(2, of, *more) for of, more in ((answers, (ALONE, 0)), (answers_beside_a_drop, ()))
    )
    assert beside[1] == truth[1]
    assert sum(map(len, beside[0])) < sum(map(len, truth[0]))


def in_graphs(ranks: Ranks, transport: str) -> bool:
    way = Way(transport=transport)
    return takes_graphs(make(way, ranks), way)


def test_graphs_take_what_asks_no_host(pool: Pool) -> None:
    """`auto` takes a byte transport over gloo, as it does among GPUs that do not reach each other."""
    taken = {name: pool.run(2, in_graphs, name) for name in ("auto", "alltoall", ALONE, GATHER)}
    assert taken == {"auto": [False] * 2, "alltoall": [False] * 2, ALONE: [True] * 2, GATHER: [True] * 2}
    assert pool.run(1, in_graphs, "auto") == [True]


def lost(ranks: Ranks) -> None:
    """Rank 1 stops stepping, and the other is to say so."""
    model = make(Way(transport=ALONE), ranks)
    engine = Engine(model, Settings(slots=1, room=8, chunk=(1, 4)), ranks.group)
    engine.submit(Request(prompt=[1], max_tokens=4))
    engine.step()
    if ranks.rank == 1:
        time.sleep(5)
        return
    os.environ["IMBREX_TIMEOUT_S"] = "0.5"
    engine.run()


def test_a_rank_that_does_not_come_ends_the_loop() -> None:
    ranks = Pool(2, timeout_s=120.0, grace_s=0.1)
    said = "rank 0 lost its peers in agreement on the next step: a rank was silent for 0.5 s"
    try:
        with pytest.raises(RankError, match=said):
            ranks.run(2, lost)
    finally:
        ranks.close()


def chosen(ranks: Ranks) -> bool:
    torch.manual_seed(1)
    weight = torch.randn(13, 8).round()
    x = torch.randn(ranks.world_size * 5, 8).round()
    begin, end = slice_of(13, ranks.rank, ranks.world_size)
    own = x.view(ranks.world_size, 5, 8)[ranks.rank]
    found = sharded_argmax(own, weight[begin:end], 13, ranks.group)
    return torch.equal(found, (own @ weight.T).argmax(-1))


@pytest.mark.parametrize("world", [2, 8])
def test_a_split_head_chooses_as_a_whole_one(pool: Pool, world: int) -> None:
    """Whole numbers, so that logits tie; on eight ranks the last has none of thirteen tokens."""
    assert pool.run(world, chosen) == [True] * world


def chosen_on_heap(ranks: Ranks) -> int:
    """Calls that chose wrongly. Ranks dawdle between calls, each as it likes, so that one is often ahead."""
    nvlink, dawdle, wrong = EmulatedNvlink(ranks.group), random.Random(ranks.rank), 0
    choice = TokenChoice(nvlink._make_heap, ranks.world_size, 5, timeout=20.0, load=kernel.load)
    torch.manual_seed(2)
    weight = torch.randn(7, 8).round()
    begin, end = slice_of(7, ranks.rank, ranks.world_size)
    own = weight[begin:end]
    for call in range(150):
        rows = 1 + call % 5
        logits = torch.randn(ranks.world_size * rows, 8).round() @ weight.T
        part = logits[:, begin:end].contiguous()
        assert choice.why_not(part) is None
        token_T = choice.choose(part[None], 7)[0]
        wrong += not torch.equal(token_T, logits.view(-1, rows, 7)[ranks.rank].argmax(-1))
        time.sleep(dawdle.choice([0, 0, 0, 0.001, 0.003]))
    # And by the head, whose rows come from all ranks.
    x_TD = torch.randn(ranks.world_size, 4, 8).round()[ranks.rank]
    token_T = sharded_argmax(x_TD, own, 7, ranks.group, choice)
    return wrong + (not torch.equal(token_T, (x_TD @ weight.T).argmax(-1)))


@pytest.mark.skipif(not kernel.available(), reason="compiles the kernel with g++")
@pytest.mark.parametrize("world", [2, 4])
def test_tokens_are_chosen_over_the_heap(pool: Pool, world: int) -> None:
    """Of seven tokens over four ranks, each has two and the last one."""
    assert pool.run(world, chosen_on_heap) == [0] * world


def test_the_command_serves_the_demos_model(tmp_path: Path) -> None:
    words = ["bench", "serve", "--device", "cpu", "--users", "2", "--rounds", "3", "--input", "3,9"]
    words += ["--output", "3", "--chunk", "1x4", "--transport", "alltoall,gather-scatter", "--drafts", "1"]
    words += ["--codec", "identity,int8", "--forced", "1", "--json", str(tmp_path / "rows.json")]
    words += ["--report", str(tmp_path / "page.html")]
    printed = run_ranks(words, ranks=2, folder=tmp_path)
    for word in ("demo, 2 ranks, 3,9 tokens in and 3 out", "alltoall", "1 (1 forced)", "random weights"):
        assert word in printed
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    ways = ("alltoall", "alltoall int8", "gather-scatter")
    assert [(row["impl"], row["case"]["input"]) for row in rows] == [(w, n) for w in ways for n in (3, 9)]
    # One rank says how far it is, beside the tables.
    said = "".join((tmp_path / f"stderr-{rank}").read_text() for rank in range(2)).splitlines()
    said = [line for line in said if line.startswith(ways)]
    assert said[:2] == ["alltoall: makes the model", "alltoall, 3 in, 1 drafts, interval 1: begins"]
    assert [line.count(" a rank, ") for line in said] == [0, 0, 1, 0, 1] * 3
    assert not set(said) & set(printed.splitlines())
    page = (tmp_path / "page.html").read_text()
    for tokens in (3, 9):
        assert f"Pareto curves: demo, 2 ranks, {tokens} tokens in, 3 out" in page


def test_the_command_turns_levers_off(tmp_path: Path) -> None:
    words = ["bench", "serve", "--device", "cpu", "--users", "4", "--rounds", "2", "--input", "4"]
    words += ["--output", "3", "--transport", "alltoall", "--levers", "1"]
    words += ["--json", str(tmp_path / "rows.json")]
    printed = run_ranks(words, ranks=2, folder=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    off = [row["case"].get("off") for row in rows]
    assert off == [None, "interval", "chunk", "buckets"]
    for row in rows[1:]:
        assert row["case"]["interval"] == 4
        assert row["steps"] > 0
        assert f"without {row['case']['off']}: " in printed
    # Of four prompts of four tokens in chunks of one a rank runs more steps than of whole ones.
    assert rows[2]["steps"] < rows[0]["steps"]
    assert printed.count("│ alltoall │") == 2 + 3
    assert "1 loop in turns" in " ".join(printed.split())


def test_no_graph_is_a_lever_where_there_are_none(tmp_path: Path) -> None:
    words = ["bench", "serve", "--device", "cpu", "--users", "2", "--rounds", "2", "--input", "4", "--output"]
    words += ["2", "--levers", "1", "--json", str(tmp_path / "rows.json")]
    run_ranks(words, ranks=1, folder=tmp_path)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["case"].get("off") for row in rows} == {None, "interval", "chunk", "buckets"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--users", "0"], "--users is 0"),
        (["--users", "a"], "--users is a"),
        (["--chunk", "4"], "--chunk is 4"),
        (["--rounds", "1"], "--rounds is 1"),
        (
            ["--transport", "pigeon"],
            "'pigeon' is not known; use some of auto, gather-scatter, transformers, alone, ",
        ),
        (["--transport", "auto,"], "--transport: '' is not known"),
        (["--transport", "allreduce"], "it wants equal tokens, and ranks serve their own"),
        (["--model", "qwen3-30b-a3b", "--drafts", "1"], "no block to draft with"),
        (["--drafts", "1", "--forced", "2"], "force at most as many"),
        (["--train", "2"], "--train 2: the demo's model is trained"),
        (["--json", "/nowhere/at/all.json"], "its folder is missing"),
        (["--json", "/tmp"], "that is no file"),
        (["--report", ""], "that is no file"),
        (["--report", "/tmp"], "that is no file"),
        (["--json", "/dev/full"], "that is no file"),
        (["--report", "/dev/full"], "that is no file"),
        (["--json", __file__], "is no result file"),
        (["--json", "rows", "--report", "./rows"], "--json is the same file"),
        (["--drafts", "16"], "an answer has 16 tokens"),
        (["--forced", "1"], "nothing is drafted"),
        (["--interval", "0"], "--interval is 0"),
        (["--input", "8,0"], "--input is 8,0"),
        (["--sizes", "4,0"], "--sizes is 4,0"),
        (["--sizes", "1,4", "--users", "6"], "--sizes is 1,4: a rank has 3 rows at most"),
        (["--input", "-5"], "--input is -5"),
        (["--levers", "0"], "--levers 0: give 1 or more"),
        (["--levers", "--report", "page.html"], "leave --report out"),
        (["--levers", "--interval", "1", "--chunk", "1x24", "--users", "2"], "no lever is on"),
        (["--levers", "--input", "a"], "--input is a"),
        (["--codec", "identity,smoke"], "'smoke' is not known"),
        (["--experts", "auto,none"], "implementation 'none'"),
        (["--experts", "kernels-fp8"], "--experts kernels-fp8: "),
        (["--users", "1000000000"], "give fewer --users"),
        (["--ranks", "1", "--chunk", "4x9999999999"], "1 rank needs some"),
    ],
)
def test_wrong_words_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--device", "cpu", *words])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
