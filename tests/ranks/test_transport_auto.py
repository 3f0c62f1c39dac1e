"""`auto` on several nodes: measured once, kept, and decided alike on every rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import imbrex
from imbrex import Exchange
from imbrex.cost import Link, Network
from imbrex.exchange.exchange import _may_choose_again as may_choose_again
from imbrex.placement import contiguous
from imbrex.transport import Auto, make, pick
from tests.emulated import kernel
from tests.poison import real_empty
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, RankError, Ranks
from tests.ranks.test_layer import SMALL, largest_error


def run_auto(ranks: Ranks, path: str | None, top_k: int) -> tuple[str, str]:
    made, reason = make(
        Auto(profile=path, tokens=1024, ranks_per_node=2),
        ranks.group,
        num_ranks=ranks.world_size,
        top_k=top_k,
    )
    assert made.exchange_counts(torch.tensor([3])).tolist() == [[3]] * ranks.world_size
    return made.name, reason


def test_measured_and_kept(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "network.json")
    first = pool.run(4, run_auto, path, 2)
    assert len(set(first)) == 1
    assert "by profile, " in first[0][1]
    assert first[0][1].endswith("on 2 nodes of 2")
    measured = Network.load(path, 2, 2)
    # Loopback: a mebibyte in more than 20 microseconds and less than a second.
    for link in (measured.inside, measured.across):
        assert 2e-5 < link(1, 1 << 20) < 1.0
    stamp = Path(path).stat().st_mtime_ns
    assert pool.run(4, run_auto, path, 2) == first
    assert Path(path).stat().st_mtime_ns == stamp


def run_tensor(ranks: Ranks) -> str:
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    return imbrex.MoELayer(config, ranks.group, tensor_parallel=2).reasons["transport"]


def test_of_tensor_ranks_alone_there_is_something_to_move(pool: Pool) -> None:
    said = "alltoall: all are tensor ranks of one, and every token goes to all of them"
    assert pool.run(2, run_tensor) == [said] * 2


@pytest.mark.parametrize(("top_k", "name"), [(1, "alltoall"), (8, "hierarchical")])
def test_decided_by_what_was_measured(pool: Pool, tmp_path: Path, top_k: int, name: str) -> None:
    slow = Network(
        nodes=2, size=2, inside=Link(start=1e-5, per_byte=1e-10), across=Link(start=1e-4, per_byte=3e-8)
    )
    slow.save(tmp_path / "network.json")
    found = pool.run(4, run_auto, str(tmp_path / "network.json"), top_k)
    assert {picked for picked, _ in found} == {name}


def test_a_measurement_of_other_nodes_is_refused(pool: Pool, tmp_path: Path) -> None:
    link = Link(start=0.0, per_byte=1e-9)
    Network(nodes=4, size=1, inside=link, across=link).save(tmp_path / "network.json")
    with pytest.raises(RankError, match="measured on 4 nodes of 1 ranks, these are 2 of 2"):
        pool.run(4, run_auto, str(tmp_path / "network.json"), 2)


def test_a_measurement_that_could_not_be_kept_is_not_made(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"nowhere/network\.json is in no folder; make it, or give another"):
        pool.run(4, run_auto, str(tmp_path / "nowhere" / "network.json"), 2)


def run_layer_with_auto(ranks: Ranks, case: Case) -> dict:
    options = {"transport": Auto(ranks_per_node=2)}
    return run_layer(ranks, Case(config=case.config, options=options))


def test_oracle(pool: Pool) -> None:
    case = Case(config=SMALL)
    errors = largest_error(case, 4, pool.run(4, run_layer_with_auto, case))
    assert max(errors.values()) < 1e-5, errors


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="Auto for 0 tokens; give at least 1"):
        Auto(tokens=0)
    assert pick("auto", num_ranks=1, top_k=1)[0] == "alltoall"


def told_of_dtype(ranks: Ranks) -> list[int]:
    """How often an exchange warns: two calls of bfloat16 on a GPU, of float32 there, of bfloat16 elsewhere;
    for float32 and bfloat16 tokens expected, and for a transport that was asked for."""
    found = []
    for dtype, transport in ((None, "auto"), (torch.bfloat16, "auto"), (None, "alltoall")):
        exchange = Exchange(contiguous(2, 2), 16, 1, group=ranks.group, dtype=dtype, transport=transport)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for now, device in (
                (torch.float32, "cuda"),
                (torch.bfloat16, "cpu"),
                *[(torch.bfloat16, "cuda")] * 2,
            ):
                if exchange._missed_for_dtype:
                    exchange._tell_of_dtype(now, device)
        assert all("give dtype=torch.bfloat16" in str(one.message) for one in heard)
        found.append(len(heard))
    return found


def test_tokens_that_became_bfloat16_are_told_of_nvlink_once(pool: Pool) -> None:
    assert pool.run(2, told_of_dtype) == [[1, 0, 0]] * 2


def settled(ranks: Ranks, kind: str) -> tuple[str, Any]:
    """The transport behind a first call under autocast, of ranks on which NVLink is there; what came of it,
    and the gradient of an expert. kind: `compiled`, on the second rank alone."""
    from imbrex.exchange import exchange as home

    real, nvlink = home.make_transport, EmulatedNvlink(ranks.group)

    def make_here(*arguments: Any, not_nvlink: str | None = None, **options: Any) -> Any:
        return (nvlink, "here") if not_nvlink is None else real(*arguments, not_nvlink=not_nvlink, **options)

    config = imbrex.MoEConfig(hidden_size=128, intermediate_size=16, num_experts=4, top_k=2)
    torch.manual_seed(1)
    x_TD = torch.randn(6 + ranks.rank, 128)
    home.make_transport, home._may_choose_again = make_here, lambda group: True
    try:
        asked = kind == "asked for"
        layer = imbrex.MoELayer(config, ranks.group, transport=nvlink if asked else "auto")
        assert (layer.exchange.transport.name == "nvlink") is asked
        with torch.autocast("cpu", torch.bfloat16, enabled=kind != "one rank" or ranks.rank == 0):
            compiled = kind == "compiled" and ranks.rank == 1
            with real_empty():
                y_TD = (torch.compile(layer, backend="aot_eager") if compiled else layer)(x_TD)
        y_TD.float().sum().backward()
    except ValueError as error:
        return "none", str(error)
    finally:
        home.make_transport, home._may_choose_again = real, may_choose_again
    return layer.exchange.transport.name, (y_TD.detach(), layer.experts.down_proj.grad)


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
def test_autocast_over_float32_weights_takes_nvlink(pool: Pool) -> None:
    by_itself, asked = (pool.run(2, settled, kind) for kind in ("autocast", "asked for"))
    for (name, found), (other, wanted) in zip(by_itself, asked, strict=True):
        assert name == other == "nvlink"
        assert found[0].dtype == torch.bfloat16
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    for kind, sentence in (("one rank", "the dtype of x"), ("compiled", "compile all ranks there, or none")):
        for name, said in pool.run(2, settled, kind):
            assert name == "none"
            assert sentence in said
