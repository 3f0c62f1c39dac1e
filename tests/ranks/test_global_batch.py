"""Losses, capacity and their gradients do not depend on how many ranks hold the batch."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imbrex
from imbrex.router.capacity import Capacity
from imbrex.router.gates import Gate
from imbrex.router.global_batch import GlobalBatch
from imbrex.router.losses import AuxLosses
from imbrex.router.router import Router
from tests.poison import real_empty

D, E, K, LENGTH = 6, 7, 3, 4
SEQUENCES = (3, 0, 5, 1)  # of every rank: ragged, and one rank holds no token
ALL = AuxLosses(load_balance=0.1, sequence_balance=0.01, z=0.001)
GATES = {
    "position": Gate(capacity=Capacity(factor=0.6)),
    "probability": Gate(score="sigmoid", capacity=Capacity(factor=0.6, drop_by="probability")),
    "dropless": Gate(),
}


def route(router, x_TD, sequences, divide=1, compiled=False):
    """Losses, kept mask and the gradients of the tokens and the gate."""
    x_TD = x_TD.clone().requires_grad_()
    call = torch.compile(router, fullgraph=True, backend="aot_eager") if compiled else router
    with real_empty():
        routing = call(x_TD, num_sequences=max(sequences, 1))
    (router.losses.total(routing.losses) / divide).backward()
    kept = torch.ones_like(routing.ids_TK, dtype=torch.bool) if routing.kept_TK is None else routing.kept_TK
    losses = {name: loss.item() for name, loss in routing.losses.items()}
    return losses, kept, x_TD.grad, router.weight.grad


def tokens_and_router(name, batch=None):
    torch.manual_seed(0)
    router = Router(D, E, K, gate=GATES[name], losses=ALL, batch=batch)
    # Rounded, so that scores tie within and between ranks.
    return torch.randn(sum(SEQUENCES) * LENGTH, D).round(), router


def on_rank(ranks, name, nested, compiled):
    """compiled: how many ranks are; they meet eager ones."""
    groups = (ranks.group,)
    if nested:
        # Every rank of the pool takes part in the making of every group.
        pairs = [dist.new_group([a, b]) for a, b in ((0, 1), (2, 3), (0, 2), (1, 3))]
        if ranks.rank >= 4:
            return None
        groups = (pairs[ranks.rank // 2], pairs[2 + ranks.rank % 2])
    batch = GlobalBatch(groups)
    assert (batch.rank, batch.num_ranks) == (ranks.rank, 4)
    x_TD, router = tokens_and_router(name, batch)
    x_TD = x_TD.split([n * LENGTH for n in SEQUENCES])[ranks.rank]
    # The sum of the losses of all ranks is differentiated; / 4 is the average of data parallelism.
    losses, kept, dx, dw = route(router, x_TD, SEQUENCES[ranks.rank], 4, ranks.rank < compiled)
    assert dw is not None
    return losses, kept, dx, batch.sum(dw)


@pytest.mark.parametrize("nested", [False, True], ids=["one_group", "ep_then_dp"])
@pytest.mark.parametrize("name", GATES)
def test_four_ragged_ranks_are_one_process(pool, name, nested):
    compare(pool.run(8 if nested else 4, on_rank, name, nested, 0)[:4], name)


@pytest.mark.untraced
def test_compiled_ranks_are_one_process(pool):
    """Two of four, of which one has no tokens."""
    compare(pool.run(4, on_rank, "probability", False, 2), "probability")


def compare(answers, name):
    x_TD, router = tokens_and_router(name)
    losses, kept_TK, dx_TD, dw_ED = route(router, x_TD, sum(SEQUENCES))
    if name != "dropless":
        assert not kept_TK.all()
    assert torch.equal(torch.cat([a[1] for a in answers]), kept_TK)
    torch.testing.assert_close(torch.cat([a[2] for a in answers]), dx_TD, rtol=1e-5, atol=1e-8)
    for got, _, _, dw in answers:
        assert got == answers[0][0], "the losses differ between ranks"
        assert got == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(dw, dw_ED, rtol=1e-5, atol=1e-7)


def sums(ranks):
    batch = GlobalBatch((ranks.group,))
    x = torch.full((2, 3), float(ranks.rank + 1), requires_grad=True)
    total = batch.sum(x.T)
    total.sum().backward()
    before, everyone = batch.before(torch.tensor([ranks.rank + 1]))
    return total.detach(), x.grad, before.item(), everyone.item(), batch.count(5, x.device).item()


def test_sums_by_hand(pool):
    for rank, (total, grad, before, everyone, count) in enumerate(pool.run(4, sums)):
        assert total.tolist() == [[10.0, 10.0]] * 3
        assert grad.tolist() == [[4.0] * 3] * 2
        assert (before, everyone, count) == (rank * (rank + 1) // 2, 10, 20)


def misuse_one_group(ranks, kind):
    """Rank 1 is wrong; ranks 2 and 3 hold the same experts in another group. Then a call as it should be.
    The other ranks of the pool make the groups too, and no more."""
    groups: list[Any] = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    if ranks.rank > 3:
        return "nothing", 0.0, True
    group, data_group = groups[ranks.rank // 2], groups[2 + ranks.rank % 2]
    gate = GATES["position"]
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2, gate=gate)
    options: dict[str, Any] = {
        "data_group": data_group,
        "losses": ALL,
        "transport": "alltoall",
        "timeout": 20.0,
    }
    layer = imbrex.MoELayer(config, group, **options)
    wrong, kept_TK = ranks.rank == 1, None
    if kind == "mask":
        kept_TK = torch.ones(3 - wrong, 2, dtype=torch.bool)
    elif kind == "mask on one" and wrong:
        kept_TK = torch.ones(3, 2, dtype=torch.bool)
    began, said = time.monotonic(), "nothing"
    try:
        layer(torch.randn(3, 9 if wrong and kind == "width" else 8), kept_TK=kept_TK)
    except ValueError as error:
        said = str(error)
    seconds = time.monotonic() - began
    finite = bool(layer(torch.randn(3, 8)).isfinite().all())
    for made in groups:
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(made)
    return said, seconds, finite


@pytest.mark.parametrize("kind", ["width", "mask"])
def test_what_is_wrong_in_one_group_is_every_group_s_error(pool, kind):
    answers = pool.run(8, misuse_one_group, kind)[:4]
    for said, seconds, finite in answers:
        assert seconds < 10
        assert finite
        assert "on rank 1, " in said
    assert answers[0][0].startswith("dispatch: on rank 1, ")
    assert answers[2][0].startswith("MoELayer: in its data group: on rank 0, dispatch: on rank 1, ")


def test_a_mask_on_one_rank_alone_leaves_nobody_waiting(pool):
    for said, seconds, finite in pool.run(8, misuse_one_group, "mask on one"):
        assert (said, finite) == ("nothing", True)
        assert seconds < 10
