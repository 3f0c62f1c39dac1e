"""Who holds the heaps that layers share by name, and when all ranks make new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import imbrex
from imbrex.adapters.deep_ep import Buffer, opening
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.placement import contiguous
from imbrex.transport import Nvlink
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
E, K, D = 4, 2, 16


def make_exchange(ranks: Ranks, transport: Nvlink) -> imbrex.Exchange:
    return imbrex.Exchange(contiguous(E, ranks.world_size), D, K, group=ranks.group, transport=transport)


def call(exchange: imbrex.Exchange) -> torch.Tensor:
    ids_TK = torch.tensor([[0, 3], [1, 2], [3, 0]])
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.full((3, K), 0.5))
    dispatched = exchange.dispatch(torch.arange(3 * D).view(3, D).bfloat16(), routing)
    return exchange.combine(dispatched.rows_RD, dispatched.handle)


def works(exchange: imbrex.Exchange) -> bool:
    return torch.equal(call(exchange), torch.arange(3 * D).view(3, D).bfloat16())


def hold_on_one_rank(ranks: Ranks) -> tuple[bool, bool, bool]:
    """Rank 0 still holds an old model when the next is made."""
    first = EmulatedNvlink.of(ranks.group, timeout=20.0)
    shared = EmulatedNvlink.of(ranks.group, timeout=20.0) is first
    held = first if ranks.rank == 0 else None
    del first
    second = EmulatedNvlink.of(ranks.group, timeout=20.0)
    return shared, second is not held, works(make_exchange(ranks, second))


def test_a_rank_that_holds_an_old_model_does_not_hang_the_next(pool: Pool) -> None:
    assert pool.run(2, hold_on_one_rank) == [(True, True, True)] * 2


def close_one_by_one(ranks: Ranks) -> list[object]:
    transport = EmulatedNvlink.of(ranks.group, timeout=21.0)
    first, second = make_exchange(ranks, transport), make_exchange(ranks, transport)
    call(first)
    kernels = next(iter(transport._held))
    first.close()
    first.close()
    open_still = works(second), kernels.heap.local.numel() > 0
    second.close()
    try:
        transport.agree_on_call(1, fine=True)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    anew = EmulatedNvlink.of(ranks.group, timeout=21.0)
    return [*open_still, kernels.heap.local.numel(), said, anew is not transport]


def test_the_last_owner_frees_the_heap(pool: Pool) -> None:
    for worked, there, left, said, anew in pool.run(2, close_one_by_one):
        assert (worked, there, left, anew) == (True, True, 0, True)
        assert said.startswith("transport 'nvlink': it was closed, by close() or by that of the last layer")


def destroy_a_buffer(ranks: Ranks) -> tuple[bool, bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening.Nvlink, "of_or_reason", lambda group, **_: (EmulatedNvlink.of(group), ""))
        buffers = [Buffer(ranks.group, explicitly_destroy=True) for _ in range(2)]
    transport = EmulatedNvlink.of(ranks.group)
    buffers[0].destroy()
    one_left = transport.usable
    buffers[1].destroy()
    return one_left, transport.usable


def test_a_buffer_of_deep_ep_is_an_owner_until_it_is_destroyed(pool: Pool) -> None:
    assert pool.run(2, destroy_a_buffer) == [(True, False)] * 2


def keep_what_is_mine(ranks: Ranks) -> bool:
    mine = EmulatedNvlink(ranks.group)
    make_exchange(ranks, mine).close()
    return works(make_exchange(ranks, mine))


def test_an_object_of_the_callers_is_the_callers_to_close(pool: Pool) -> None:
    assert pool.run(2, keep_what_is_mine) == [True, True]


def fail_and_go_on(ranks: Ranks) -> list[object]:
    """A call fails on rank 1 alone, as far as the hosts know."""
    transport = EmulatedNvlink.of(ranks.group, timeout=22.0)
    exchange, other = make_exchange(ranks, transport), make_exchange(ranks, transport)
    call(exchange)
    kernels = next(iter(transport._held))
    if ranks.rank == 1:
        kernels._status.words_L8[0] = torch.tensor([1, 1, 0, 3, 5, 7, 0, 1])
    anew = EmulatedNvlink.of(ranks.group, timeout=22.0)
    found = [anew is not transport, works(make_exchange(ranks, anew))]
    exchange.close()
    said = "nothing"
    try:
        other.check()
    except ExchangeError as error:
        said = str(error)
    return [*found, kernels.heap.local.numel() == 0, said]


def test_after_a_failure_closing_frees_and_a_new_layer_has_a_new_transport(pool: Pool) -> None:
    (anew, works_0, freed_0, said_0), (anew_1, works_1, freed_1, said_1) = pool.run(2, fail_and_go_on)
    assert (anew, works_0, anew_1, works_1) == (True,) * 4
    assert (freed_0, freed_1) == (False, True)  # rank 0 has heard of no failure: `other` is open there
    assert said_0 == "nothing"
    assert said_1.startswith("exchange: rank 1 in ")


def ask_for_another_time(ranks: Ranks, *, alike: bool) -> list[object]:
    short = EmulatedNvlink.of(ranks.group, timeout=5.0)
    try:
        long = EmulatedNvlink.of(ranks.group, timeout=23.0 if alike else 23.0 + ranks.rank)
    except ValueError as error:
        return [str(error)]
    again = EmulatedNvlink.of(ranks.group, timeout=5.0)
    return [long.timeout_s, long is not short, again is short]


def test_another_time_out_is_another_transport(pool: Pool) -> None:
    assert pool.run(2, _alike) == [[23.0, True, True]] * 2
    for (said,) in pool.run(2, _unlike):
        assert "ranks disagree about timeout: [23.0, 24.0] s by rank; give every rank the same" in str(said)


def _alike(ranks: Ranks) -> list[object]:
    return ask_for_another_time(ranks, alike=True)


def _unlike(ranks: Ranks) -> list[object]:
    return ask_for_another_time(ranks, alike=False)


def come_back(path: str) -> tuple[bool, str, str]:
    """Groups of the same name, one after the other; the first one's transport is still held."""
    made = []
    for number in range(2):
        dist.init_process_group("gloo", init_method=f"file://{path}{number}", rank=0, world_size=1)
        world = dist.group.WORLD
        assert world is not None
        made.append((EmulatedNvlink.of(world), world.group_name))
        dist.destroy_process_group()
    (first, name), (second, again) = made
    return first is second, name, again


def test_a_destroyed_groups_transport_never_comes_back(tmp_path: Path) -> None:
    import multiprocessing as mp

    with mp.get_context("forkserver").Pool(1) as process:
        same, name, again = process.apply(come_back, (str(tmp_path / "store"),))
    assert name == again
    assert not same


def ask_on_cpus(ranks: Ranks, gpus: tuple[bool, ...]) -> tuple[bool, bool]:
    """Whether kernels are worth asking for where the group is gloo's, and whether `auto` of a layer does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imbrex.transport.nvlink._uses_gpu", lambda: gpus[ranks.rank])
        return Nvlink.may_run_on(ranks.group), Nvlink.of_or_reason(ranks.group)[0] is not None


@pytest.mark.parametrize(("gpus", "worth"), [((True, True), True), ((True, False), False)])
def test_a_group_on_cpus_may_have_its_rows_on_gpus_if_all_ranks_do(
    pool: Pool, gpus: tuple[bool, ...], worth: bool
) -> None:
    assert pool.run(2, ask_on_cpus, gpus) == [(worth, False)] * 2
