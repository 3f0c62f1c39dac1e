"""One rank's mistake is every rank's ValueError, before anything moves, and the exchange goes on working."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import imbrex
from imbrex.codec.int8 import Int8
from imbrex.contracts import Codec
from imbrex.placement import contiguous, from_slots
from imbrex.transport.alltoall import FEW_BYTES, AllToAll
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks

E, K, D = 6, 2, 5


def good_input() -> tuple[torch.Tensor, imbrex.Routing]:
    x_TD = torch.randn(3, D)
    ids_TK = torch.tensor([[0, 1], [2, 5], [-1, 3]])
    return x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(3, K))


def bad_input(kind: str) -> tuple[torch.Tensor, imbrex.Routing]:
    x_TD, routing = good_input()
    ids_TK, weights_TK = routing.ids_TK, routing.weights_TK
    wrong = {
        "width": torch.randn(3, D + 1),
        "tokens": torch.randn(4, D),
        "integers": x_TD.long(),
        "sparse": x_TD.to_sparse(),
        "nested": torch.nested.nested_tensor(list(x_TD)),
        "dtype": x_TD.bfloat16(),
    }
    x_TD = wrong.get(kind, x_TD)
    if kind == "choices":
        ids_TK, weights_TK = ids_TK[:, :1], weights_TK[:, :1]
    elif kind == "range":
        ids_TK[1, 1] = 99
    elif kind == "twice":
        ids_TK[2] = torch.tensor([4, 4])
    elif kind == "nan":
        weights_TK[0, 1] = torch.nan
    elif kind == "weights":
        weights_TK = weights_TK.flatten()
    elif kind == "int32 ids":
        ids_TK = ids_TK.int()
    elif kind == "float64 weights":
        weights_TK = weights_TK.double()
    elif kind == "device":
        ids_TK = ids_TK.to("meta")
    return x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)


MESSAGES = {
    "width": r"on rank 1, x has 2 dimensions and last size 6; give tokens \[T, 5\]",
    "tokens": r"on rank 1, x has 4 tokens but the routing has 3; route the same tokens",
    "weights": r"on rank 1, weights have 1 dimensions and another shape than ids; give one for every choice, "
    r"\[3, 2\]",
    "choices": r"on rank 1, the routing has 1 choices a token; this exchange was made for 2",
    "range": r"on rank 1, choice 1 of token 1 is expert 99, which does not exist; ids are 0..E-1, or -1",
    "twice": r"on rank 1, token 2 wants expert 4 twice; an expert may stand at most once",
    "nan": r"on rank 1, the weight of choice 1 of token 0 is NaN or infinite",
    "integers": r"on rank 1, x has a dtype that cannot be exchanged; use float32",
    "sparse": r"on rank 1, x is sparse or nested; give a plain tensor, as x.to_dense\(\)",
    "nested": r"on rank 1, x is sparse or nested; give a plain tensor, as x.to_dense\(\)",
    "int32 ids": r"on rank 1, ids must be int64 and weights float32; convert them",
    "float64 weights": r"on rank 1, ids must be int64 and weights float32; convert them",
    "dtype": r"ranks disagree about the dtype of x: torch.float32 on rank 0, torch.bfloat16 on rank 1",
    "device": r"on rank 1, x, ids and weights must be on one device",
}


def run_bad(ranks: Ranks, kind: str, transport: str) -> str:
    exchange = imbrex.Exchange(contiguous(E, 2), D, K, group=ranks.group, transport=transport)
    given = bad_input(kind) if ranks.rank == 1 else good_input()
    try:
        exchange.dispatch(*given)
    except ValueError as error:
        x_TD, routing = good_input()
        torch.manual_seed(0)
        d = exchange.dispatch(x_TD, routing)
        exchange.combine(d.rows_RD, d.handle)
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("transport", ["alltoall", "allgather", "allreduce"])
@pytest.mark.parametrize("kind", list(MESSAGES))
def test_wrong_on_one_rank(pool: Pool, kind: str, transport: str) -> None:
    answers = pool.run(2, run_bad, kind, transport)
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match=MESSAGES[kind]):
        raise ValueError(answers[0])


def run_layer_width(ranks: Ranks, losses: Any) -> str:
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K)
    layer = imbrex.MoELayer(config, ranks.group, losses=losses)
    try:
        layer(torch.randn(2, 3, D + 2 * ranks.rank))
    except ValueError as error:
        layer(torch.randn(2, 3, D))
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("losses", [None, imbrex.AuxLosses(z=0.1)], ids=["plain", "collective router"])
def test_unequal_widths_stop_the_layer_before_its_router(pool: Pool, losses: Any) -> None:
    answers = pool.run(4, run_layer_width, losses)
    assert set(answers) == {"dispatch: on rank 1, x has 2 dimensions and last size 7; give tokens [T, 5]"}


def run_layer_sparse(ranks: Ranks, losses: Any, kind: str) -> str:
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K)
    layer, x = imbrex.MoELayer(config, ranks.group, losses=losses), torch.randn(3, D)
    odd = {"sparse": x.to_sparse, "csr": x.to_sparse_csr, "nested": lambda: torch.nested.nested_tensor([x])}
    try:
        layer(odd[kind]() if ranks.rank else x)
    except ValueError as error:
        layer(x)
        return str(error)
    return "nothing was raised"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["sparse", "csr", "nested"])
@pytest.mark.parametrize("losses", [None, imbrex.AuxLosses(z=0.1)], ids=["plain", "collective router"])
def test_sparse_tokens_stop_the_layer_on_all_ranks(pool: Pool, losses: Any, kind: str) -> None:
    answers = set(pool.run(2, run_layer_sparse, losses, kind))
    assert len(answers) == 1
    assert answers.pop().startswith("dispatch: on rank 1, x is sparse or nested; give a plain tensor")


def run_layer_without_tensor(ranks: Ranks, losses: Any) -> tuple[str, bool]:
    """What a rank is told where one of them gives the layer no tensor; and whether the next call works."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall", losses=losses)
    x: Any = torch.ones(2, 4)
    with pytest.raises((TypeError, ValueError)) as caught:
        layer(None if ranks.rank == 1 else x)
    return f"{caught.type.__name__}: {caught.value}", layer(x).shape == x.shape


@pytest.mark.parametrize("losses", [None, imbrex.AuxLosses(z=0.1)], ids=["plain", "collective router"])
def test_no_tensor_stops_the_layer_on_all_ranks(pool: Pool, losses: Any) -> None:
    (theirs, works), (own, own_works) = pool.run(2, run_layer_without_tensor, losses)
    assert own == "TypeError: MoELayer: x is a NoneType; give tokens [..., 4]"
    assert theirs.startswith("ValueError: dispatch: on rank 1, x has ")
    assert works
    assert own_works


def run_forward_mode(ranks: Ranks, schedule: str) -> tuple[list[str], bool]:
    """What ranks are told where the last one computes derivatives forward, which torch would drop without
    gradients; and whether the next call works."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall", schedule=schedule).requires_grad_(
        False
    )
    x, told = torch.ones(2, 4), []
    for derive in (lambda: torch.func.jvp(layer, (x,), (x,)), lambda: torch.func.jacfwd(layer)(x)):
        with pytest.raises(ValueError, match="derivatives are computed forward") as caught:
            derive() if ranks.rank == ranks.world_size - 1 else layer(x)
        told.append(str(caught.value))
    return told, layer(x).shape == x.shape


@pytest.mark.parametrize("schedule", ["serial", "optsche-2", "events"])
def test_derivatives_do_not_come_forward_through_a_layer(pool: Pool, schedule: str) -> None:
    for ranks in (1, 2):
        for told, works in pool.run(ranks, run_forward_mode, schedule):
            assert works
            for said in told:
                assert said.startswith(f"dispatch: on rank {ranks - 1}, derivatives are computed forward")
                assert said.endswith("use backward(), torch.autograd.grad or jacobian")


def run_on_meta(ranks: Ranks) -> tuple[str, bool]:
    """What ranks are told of tokens on the meta device on the last one, and whether the next call works."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall")
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="on rank 1, x, ids and weights must be on one device") as caught:
        layer(x.to("meta") if ranks.rank == 1 else x)
    return str(caught.value), layer(x).shape == x.shape


def test_tokens_without_values_stop_the_layer_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, run_on_meta)
    assert first == second
    assert first[1]


def run_unequal_settings(ranks: Ranks, name: str) -> str:
    odd = ranks.rank == 1
    placement = from_slots(
        [[0, 1, 2], [3, 4, 5]] if not (odd and name == "placement") else [[0, 2, 1], [3, 4, 5]], E
    )
    options: dict[str, Any] = {"transport": "alltoall"}
    if odd and name == "codec":
        options["codec"] = "int8"
    if odd and name == "transport":
        options["transport"] = "allgather"
    width, top_k = D + (odd and name == "hidden_size"), K - (odd and name == "top_k")
    try:
        imbrex.Exchange(placement, width, top_k, group=ranks.group, **options)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


SETTINGS = {
    "hidden_size": "ranks disagree about hidden_size",
    "top_k": "ranks disagree about top_k",
    "placement": "ranks disagree about the placement",
    "codec": "ranks disagree about the codecs",
    "transport": "ranks disagree about the transport",
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_unequal_settings(pool: Pool, name: str) -> None:
    for answer in pool.run(2, run_unequal_settings, name):
        assert SETTINGS[name] in answer
        assert "rank 1 was given something else than rank 0" in answer
        assert "give every rank of the group the same" in answer


def run_unequal_transports(ranks: Ranks, ours: str, theirs: str) -> tuple[str, float]:
    """What the ranks are told whose transports are made in unequal ways, and a layer's sum behind it."""
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K)
    with pytest.raises(ValueError, match="Exchange: ranks disagree") as caught:
        imbrex.MoELayer(config, ranks.group, transport=theirs if ranks.rank == 1 else ours, timeout=2.0)
    layer = imbrex.MoELayer(config, ranks.group, timeout=2.0)
    return str(caught.value), float(layer(torch.ones(2, D)).detach().isfinite().all())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("auto", "allgather"), ("auto", "tiered"), ("auto", "nvlink"), ("hierarchical", "alltoall")],
)
def test_unequal_ways_to_make_a_transport(pool: Pool, ours: str, theirs: str) -> None:
    """gloo ends a process, without a word of ours, where ranks meet in calls of unequal sizes."""
    for here, (said, works) in zip(
        (ours, theirs), pool.run(2, run_unequal_transports, ours, theirs), strict=True
    ):
        assert "about the transport: rank 1 was given something else than rank 0" in said
        assert f"(here: {here}); give every rank of the group the same" in said
        assert works


class OneByteMore(Int8):
    """States the bytes of int8 and writes one more."""

    def encode(self, rows_ND, dtype):
        return torch.nn.functional.pad(super().encode(rows_ND, dtype), [0, 1])


class Breaks(Int8):
    def encode(self, rows_ND, dtype):
        raise RuntimeError("out of order")


def run_wrong_codec(ranks: Ranks, wrong: Codec) -> str:
    codec = wrong if ranks.rank == 1 else "int8"
    try:
        imbrex.Exchange(contiguous(E, 2), D, K, group=ranks.group, transport="alltoall", codec=codec)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(OneByteMore(), "encodes 2 of them as torch.uint8"), (Breaks(), "raises RuntimeError('out of order')")],
    ids=["bytes", "raises"],
)
def test_a_codec_that_is_wrong_on_one_rank_is_every_rank_s_error(pool: Pool, wrong: Codec, says: str) -> None:
    elsewhere, on_it = pool.run(2, run_wrong_codec, wrong)
    assert says in on_it
    assert elsewhere == "Exchange: rank 1 cannot be served; its own error says why"


def run_different_tokens(ranks: Ranks) -> str:
    exchange = imbrex.Exchange(contiguous(E, 2), D, K, group=ranks.group, transport="allreduce")
    x_TD, routing = good_input()
    if ranks.rank == 1:
        routing.ids_TK[0, 0] = 4
    try:
        exchange.dispatch(x_TD, routing)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_replicated_transport_wants_equal_tokens(pool: Pool) -> None:
    for answer in pool.run(2, run_different_tokens):
        assert "ranks disagree about the tokens' experts (this transport wants equal tokens)" in answer


def test_settings_that_make_no_sense() -> None:
    config: dict[str, Any] = {"hidden_size": 4, "intermediate_size": 4, "num_experts": 2, "top_k": 1}
    with pytest.raises(ValueError, match=r"top_k=3 of num_experts=2; choose 1 <= top_k <= num_experts"):
        imbrex.MoEConfig(**{**config, "top_k": 3})
    with pytest.raises(ValueError, match="hidden_size is 0; it must be at least 1"):
        imbrex.MoEConfig(**{**config, "hidden_size": 0})
    with pytest.raises(ValueError, match=r"transport: 'ftp' is not known; use auto, alltoall"):
        imbrex.MoELayer(imbrex.MoEConfig(**config), transport="ftp")
    with pytest.raises(ValueError, match=r"codec: 'zip' is not known; use one of identity"):
        imbrex.MoELayer(imbrex.MoEConfig(**config), codec="zip")
    with pytest.raises(ValueError, match="schedule: 'never' is not known; use one of serial"):
        imbrex.MoELayer(imbrex.MoEConfig(**config), schedule="never")
    with pytest.raises(ValueError, match="implementation 'magic'; use auto or one of loop, grouped"):
        imbrex.MoELayer(imbrex.MoEConfig(**config), experts="magic")
    with pytest.raises(ValueError, match="2 expert ranks x 1 tensor ranks do not make a group of 1"):
        imbrex.Exchange(contiguous(4, 2), 8, 2)
    with pytest.raises(ValueError, match="expert 1 has no slot"):
        from_slots([[0], [2]], 3)
    with pytest.raises(ValueError, match="rank 0 holds expert 1 twice; move one replica"):
        from_slots([[0, 1, 1]], 2)
    with pytest.raises(ValueError, match=r"rank 1 holds expert 7; use 0\.\.1, or -1 for a spare"):
        from_slots([[0, 1], [7]], 2)
    with pytest.raises(ValueError, match="timeout: 0 is not a number of seconds above 0"):
        imbrex.Exchange(contiguous(4, 1), 8, 2, timeout=0)


def run_layers_in_another_order(ranks: Ranks, transport: str) -> str:
    """Two exchanges alike, both called; then rank 0 calls the first again, and rank 1 the second."""
    moves = EmulatedNvlink(ranks.group) if transport == "nvlink" else transport
    more: Any = {"group": ranks.group, "transport": moves}
    exchanges = [imbrex.Exchange(contiguous(E, 2), 8, K, layer=number, **more) for number in range(2)]
    x_TD, (_, routing) = torch.ones(3, 8).bfloat16(), good_input()
    for exchange in exchanges:
        exchange.dispatch(x_TD, routing)
    try:
        exchanges[ranks.rank].dispatch(x_TD, routing)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_layers_called_in_another_order(pool: Pool) -> None:
    for said in pool.run(2, run_layers_in_another_order, "alltoall"):
        assert "ranks disagree about the exchange that is called (exchanges are numbered as they" in said


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
def test_layers_called_in_another_order_over_nvlink(pool: Pool) -> None:
    for rank, said in enumerate(pool.run(2, run_layers_in_another_order, "nvlink")):
        assert "ranks disagree about what is called: here call 2 of exchange" in said
        assert f"layer {rank}, placement " in said


def run_relocated_alone(ranks: Ranks, transport: str) -> list[str]:
    """Only rank 1 moves its experts; then the other follows, and both can be called again."""
    moves = EmulatedNvlink(ranks.group) if transport == "nvlink" else transport
    exchange = imbrex.Exchange(contiguous(E, 2), 8, K, group=ranks.group, transport=moves)
    x_TD, (_, routing), said = torch.ones(3, 8).bfloat16(), good_input(), []
    for mover in (1, 0):
        if ranks.rank == mover:
            exchange.relocate(from_slots([[3, 4, 5], [0, 1, 2]], E))
        try:
            dispatched = exchange.dispatch(x_TD, routing)
            said.append(str(dispatched.counts_e.tolist()))
        except ValueError as error:
            said.append(str(error))
    return said


def run_back_in_another_order(ranks: Ranks) -> str:
    """Two layers with as many rows, of which rank 1 goes back through the first one first; what the next call
    says. The call behind it is fine."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=2)
    layers = [imbrex.MoELayer(config, ranks.group, transport="alltoall") for _ in range(2)]
    outputs = [layer(torch.ones(3, 4)) for layer in layers]
    for y_TD in outputs if ranks.rank == 1 else reversed(outputs):
        y_TD.sum().backward()
    try:
        layers[0](torch.ones(3, 4))
    except ValueError as error:
        layers[1](torch.ones(3, 4)).sum().backward()
        layers[0](torch.ones(3, 4))
        return str(error)
    return "nothing was raised"


def test_backwards_in_another_order(pool: Pool) -> None:
    for told in pool.run(2, run_back_in_another_order):
        assert "ranks disagree about the layers gone back through since the last call" in told


def test_a_placement_that_only_one_rank_has_is_refused(pool: Pool) -> None:
    answers = pool.run(2, run_relocated_alone, "alltoall")
    for rank, (said, counts) in enumerate(answers):
        assert "ranks disagree about the placement (its checksum; every rank must relocate" in said
        assert counts == ("[2, 0, 2]", "[2, 2, 2]")[rank]


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
def test_a_placement_that_only_one_rank_has_is_refused_over_nvlink(pool: Pool) -> None:
    for said, _ in pool.run(2, run_relocated_alone, "nvlink"):
        assert "every rank must call the same layers in the same order, with the same placement" in said


WRONG_ROWS = {
    "number": r"combine: on rank 1, rows are \[\d+, 5\]; give a row for every row of the dispatch, \[\d",
    "width": r"combine: on rank 1, rows are \[\d+, 6\]; give a row for every row",
    "dtype": "combine: on rank 1, rows are torch.int64; give torch.float32 or",
    "another dtype": "combine: ranks disagree about the dtype of rows: torch.float32 on rank 0, torch.flo",
    "device": "combine: on rank 1, rows are on meta; give them on cpu",
    "handle": "combine: on rank 1, the handle is of another exchange; give the one that came with the rows",
    "addend": r"combine: on rank 1, the addend is \[1, 5\]; give a row for every token, \[3, 5\]",
    "addend's dtype": "combine: on rank 1, the addend is torch.int64; give torch.float32 or",
}


def run_wrong_rows(ranks: Ranks, kind: str) -> str:
    exchange, other = (
        imbrex.Exchange(contiguous(E, 2), D, K, group=ranks.group, transport="alltoall") for _ in range(2)
    )
    x_TD, routing = good_input()
    dispatched, foreign = exchange.dispatch(x_TD, routing), other.dispatch(x_TD, routing)
    rows_RD, handle = dispatched.rows_RD, dispatched.handle
    wrong: dict[str, Any] = {
        "nothing": (rows_RD, handle, None),
        "number": (rows_RD[1:], handle, None),
        "width": (torch.zeros(len(rows_RD), D + 1), handle, None),
        "dtype": (rows_RD.long(), handle, None),
        "another dtype": (rows_RD.double(), handle, None),
        "device": (rows_RD.to("meta"), handle, None),
        "handle": (rows_RD, foreign.handle, None),
        "addend": (rows_RD, handle, torch.zeros(1, D)),
        "addend's dtype": (rows_RD, handle, torch.zeros(3, D).long()),
    }
    exchange.combine(rows_RD, handle)
    try:
        exchange.combine(*wrong[kind if ranks.rank == 1 else "nothing"])
    except ValueError as error:
        exchange.combine(rows_RD, handle)
        return str(error)
    return "nothing was raised"


def run_wrong_rows_over_nvlink(ranks: Ranks) -> list[str]:
    """At the second combine and the third, which follows at once."""
    moves, (_, routing) = EmulatedNvlink(ranks.group, timeout=20.0), good_input()
    exchange, said = imbrex.Exchange(contiguous(E, 2), 8, K, group=ranks.group, transport=moves), []
    dispatched = exchange.dispatch(torch.ones(3, 8).bfloat16(), routing)
    rows_RD, handle = dispatched.rows_RD, dispatched.handle
    for wrong in (False, True, True, False):
        try:
            y_TD = exchange.combine(rows_RD[1:] if wrong and ranks.rank == 1 else rows_RD, handle)
            said.append(str(y_TD[:, 0].tolist()))
        except ValueError as error:
            said.append(str(error))
    begun = exchange.begin_combine(rows_RD, handle)
    with pytest.raises(ValueError, match=r"the addend is torch.float32; give torch.bfloat16") as caught:
        begun.finish(torch.ones(3, 8))
    return [*said, str(caught.value), str(begun.finish(torch.ones(3, 8).bfloat16())[:, 0].tolist())]


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
def test_rows_that_cannot_be_combined_over_nvlink(pool: Pool) -> None:
    answers = pool.run(2, run_wrong_rows_over_nvlink)
    assert answers[0] == answers[1]
    good, first, second, again, _, added = answers[0]
    assert added == "[3.0, 3.0, 2.0]"
    assert good == again == "[2.0, 2.0, 1.0]"
    assert first == second
    assert first.startswith("combine: on rank 1, rows are [")


@pytest.mark.parametrize("kind", list(WRONG_ROWS))
def test_rows_that_cannot_be_combined(pool: Pool, kind: str) -> None:
    answers = pool.run(2, run_wrong_rows, kind)
    assert answers[0] == answers[1]
    assert re.match(WRONG_ROWS[kind], answers[0]), answers[0]


def run_unequal_layers(ranks: Ranks, name: str, value: Any) -> str:
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K)
    if ranks.rank == 1:
        config = replace(config, **{name: value})
    try:
        imbrex.MoELayer(config, ranks.group)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intermediate_size", 8),
        ("gate", imbrex.Gate(score="sigmoid")),
        ("activation", "gelu"),
        ("bias", True),
    ],
)
def test_unequal_layers(pool: Pool, name: str, value: Any) -> None:
    for said in pool.run(2, run_unequal_layers, name, value):
        assert said.startswith(f"MoELayer: ranks disagree about {name}: rank 1 was given something else")


def run_pickled(ranks: Ranks) -> str:
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K)
    layer = imbrex.MoELayer(config, ranks.group)
    try:
        pickle.dumps(torch.nn.Sequential(layer))
    except TypeError as error:
        return str(error)
    return "nothing was raised"


def test_a_layer_of_several_ranks_says_what_to_save(pool: Pool) -> None:
    for said in pool.run(2, run_pickled):
        assert "save model.state_dict(), over ranks with imbrex.parallel.checkpoint" in said


def run_left_unfinished(ranks: Ranks, few_bytes: int) -> list[float]:
    """Rank 0 begins a dispatch, and an exception, say, keeps it from finishing; then both go on. few_bytes:
    up to so many go by gloo's own all-to-all, more by messages."""
    transport = AllToAll(ranks.group, timeout=20)
    transport.few_bytes = few_bytes
    exchange = imbrex.Exchange(contiguous(E, 2), D, K, group=ranks.group, transport=transport)
    x_TD, routing = good_input()
    errors = []
    for _ in range(2):
        begun = exchange.begin_dispatch(x_TD, routing)
        if ranks.rank:
            begun.finish()
        del begun
        dispatched = exchange.dispatch(2 * x_TD, routing)
        y_TD = exchange.combine(dispatched.rows_RD, dispatched.handle)
        chosen_T1 = (routing.ids_TK >= 0).sum(1, keepdim=True)
        errors.append(float((y_TD - 2 * x_TD * chosen_T1).abs().max()))
    return errors


@pytest.mark.parametrize("few_bytes", [0, FEW_BYTES])
def test_what_one_rank_began_and_did_not_finish_stops_nobody(pool: Pool, few_bytes: int) -> None:
    for errors in pool.run(2, run_left_unfinished, few_bytes):
        assert errors == [0.0, 0.0]


def run_no_sequence(ranks: Ranks, with_losses: bool) -> tuple[list[int], float]:
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K)
    losses = imbrex.AuxLosses(load_balance=0.1, sequence_balance=0.1) if with_losses else None
    layer = imbrex.MoELayer(config, ranks.group, losses=losses, timeout=20)
    y = layer(torch.ones(0 if ranks.rank else 2, 3, D))
    (y.sum() + imbrex.aux_loss(layer)).backward()
    grad = layer.gate.weight.grad
    return [*y.shape], 0.0 if grad is None else float(grad.abs().sum())


@pytest.mark.parametrize("with_losses", [False, True])
def test_a_rank_without_a_sequence_takes_part(pool: Pool, with_losses: bool) -> None:
    (with_some, grad), (without, _) = pool.run(2, run_no_sequence, with_losses)
    assert (with_some, without) == ([2, 3, D], [0, 3, D])
    assert grad > 0


def run_promised(ranks: Ranks, transport: str) -> list[Any]:
    """How many messages of numbers a forward and backward sends, and what is said: with imbrex's experts;
    where a hook of one rank sees their result, and where it changes that."""
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=E, top_k=K)
    layer = imbrex.MoELayer(config, ranks.group, transport=transport, dtype=torch.float32)
    moves: Any = layer.exchange.transport
    messages: list[int] = []
    heard: list[Any] = []
    tell = moves.exchange_counts
    moves.exchange_counts = lambda said: messages.append(len(said)) or tell(said)
    for hook in (None, lambda *_: None, lambda module, inputs, rows_RD: rows_RD[:, :-1]):
        handle = layer.experts.register_forward_hook(hook) if hook and ranks.rank == 1 else None
        messages.clear()
        try:
            layer(torch.randn(3 + ranks.rank, 8)).sum().backward()
            heard.append(len(messages))
        except ValueError as error:
            heard.append(str(error))
        if handle is not None:
            handle.remove()
    return heard


@pytest.mark.parametrize("transport", ["alltoall", "allgather"])
def test_ranks_meet_once_a_call_where_rows_are_sure_to_fit(pool: Pool, transport: str) -> None:
    for once, twice, said in pool.run(2, run_promised, transport):
        assert (once, twice) == (1, 2)
        assert "combine: on rank 1, rows are [" in said
