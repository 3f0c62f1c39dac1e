"""Traffic and products by hand, plans and why not the others, files in and out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from imbrex.placement import LoadHistory
from imbrex.simulate import device, loads, run, scale, traffic
from imbrex.simulate.device import Shape, Share
from imbrex.simulate.fabric import Fabric, Tier, islands, parse
from imbrex.simulate.loads import Spread, Stragglers
from imbrex.simulate.plans import choose, divisions, rivals, weigh
from imbrex.simulate.profile import STATUSES, Entry, Profile, shipped_profiles
from imbrex.simulate.request import Request, World
from imbrex.simulate.run import Case, Layout, predict

H200 = Profile.load("h200")
DEEPSEEK = Shape(width=7168, inner=2048, experts=256, top_k=8)
QWEN = Shape(width=2048, inner=768, experts=128, top_k=8)
TWO_TIERS = Fabric(
    name="by hand",
    tiers=(Tier(name="near", ranks=4, bytes_s=10.0), Tier(name="far", ranks=8, bytes_s=1.0, start=0.5)),
)
EVERY = traffic.Crowd(ranks=8, tensor=1, experts=8, top_k=8, tokens=10, row_bytes=2)
"""A token wants every rank: 20 bytes for each."""


@pytest.mark.parametrize(
    ("name", "nbytes", "seconds"),
    [
        ("alltoall", (60, 80), 82.0),  # 4 messages of 20 bytes far: 80 + 4 halves; 6 near are hidden
        ("copy-per-choice", (60, 80), 82.0),
        ("allgather", (60, 80), 82.0),
        ("sequential", (60, 80), 88.0),
        ("2dh", (120, 80), 12.0 + 80.5),  # near all rows of both nodes, far one message
        ("hierarchical", (120, 20), 22.0 + 12.0 / 4),  # once to a node, in 4 messages
        ("tiered", (120, 20), 20.5 + 12.0),  # once to a node in one message, then inside
    ],
)
def test_bytes_by_tier_by_hand(name: str, nbytes: tuple[float, float], seconds: float) -> None:
    flow = traffic.FLOWS[name](EVERY, TWO_TIERS)
    assert flow.nbytes == pytest.approx(nbytes)
    assert traffic.seconds(flow, TWO_TIERS) == pytest.approx(seconds)


def test_what_share_of_tokens_want_a_rank() -> None:
    crowd = traffic.Crowd(ranks=4, tensor=1, experts=256, top_k=8, tokens=1, row_bytes=1)
    draws = np.random.default_rng(0)
    ids = np.stack([draws.choice(256, 8, replace=False) for _ in range(20000)])
    assert traffic.share_reached(crowd, 1) == pytest.approx(np.mean((ids < 64).any(1)), abs=0.01)
    assert traffic.share_reached(crowd, 2) == pytest.approx(np.mean((ids < 128).any(1)), abs=0.01)


def test_a_shared_port_and_an_oversubscribed_tier_are_slower() -> None:
    tier = Tier(name="port", ranks=4, bytes_s=10.0, port_ranks=4)
    assert tier.seconds(20, 1, sharing=2) == pytest.approx(4.0)
    assert tier.seconds(20, 1, sharing=8) == pytest.approx(8.0)
    lines = [{"ranks": 8, "gbytes_s": 300}, {"ranks": 64, "gbytes_s": 50}, {"oversubscription": 4}]
    fabric = parse({"tiers": lines}, 500)
    assert [tier.bytes_s for tier in fabric.tiers] == [300e9, 50e9, 12.5e9]
    assert fabric.tiers[2].ranks == 512
    assert fabric.peers(128) == [7, 56, 64]


def test_fabric_files(tmp_path: Path) -> None:
    content = {"name": "racks", "tiers": [{"name": "nvlink", "ranks": 8, "gbytes_s": 300}]}
    (tmp_path / "fabric.json").write_text(json.dumps(content))
    (tmp_path / "fabric.toml").write_text('[[tiers]]\nname = "nvlink"\nranks = 8\ngbytes_s = 300\n')
    assert Fabric.read(tmp_path / "fabric.json", 8).tiers == Fabric.read(tmp_path / "fabric.toml", 8).tiers
    pytest.importorskip("yaml")
    (tmp_path / "fabric.yaml").write_text("tiers:\n  - {name: nvlink, ranks: 8, gbytes_s: 300}\n")
    assert Fabric.read(tmp_path / "fabric.yaml", 8).tiers == Fabric.read(tmp_path / "fabric.json", 8).tiers


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no tiers"),
        ([8], "no tiers; give a list of them"),
        ([{"ranks": 8}], "no `gbytes_s`, and none below"),
        ([{"gbytes_s": 1}, {"ranks": 8}], "only the last one holds all"),
        ([{"ranks": 8, "gbytes_s": 1}, {"ranks": 12}], "no multiple of the 8 below"),
        ([{"ranks": 8, "gbytes_s": 1, "speed": 2}], "'speed'; known are"),
        ([{"ranks": 8, "gbytes_s": 0}], "gbytes_s 0; give a number above 0"),
        ([{"ranks": 8, "gbytes_s": 10**400}], "gbytes_s 10*; give a number above 0"),
        ([{"ranks": 8, "gbytes_s": math.nan}], "gbytes_s nan; give a number above 0"),
        ([{"gbytes_s": "1e3"}], "gbytes_s '1e3'; give a number above 0; it is text, as 1e3 is in YAML"),
        ([{"gbytes_s": 1, "status": "sure"}], "status 'sure'; use measured, fitted, assumed"),
        ([{"gbytes_s": 1, "oversubscription": 0}], "oversubscription 0; give a number above 0"),
        ([{"gbytes_s": 1, "start_us": -1}], "start_us -1; give a number from 0 up"),
        ([{"gbytes_s": 1, "port_ranks": 0}], "port_ranks 0; give a whole number from 1 up"),
        ([{"gbytes_s": 1, "ranks": 8.5}], "ranks 8.5; give a whole number from 1 up"),
    ],
)
def test_wrong_fabrics_are_refused(lines: list, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse({"tiers": lines}, 8)
    with pytest.raises(ValueError, match="no tiers"):
        parse(lines, 8)  # type: ignore[arg-type]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    for content in (b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "fabric.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"fabric\.json cannot be read"):
            Fabric.read(tmp_path / "fabric.json", 8)


def test_a_network_holds_all_ranks_or_says_so() -> None:
    """Also where nothing fits into memory, which was said in its place."""
    small = parse({"tiers": [{"ranks": 4, "gbytes_s": 300}]}, 4)
    request = Request(shape=DEEPSEEK, ranks=8, tokens=4096, mode="train", layers=58)
    with pytest.raises(ValueError, match="holds 4 ranks, not 8"):
        choose(request, world(8, 8, fabric=small))


def test_a_product_is_its_waves_or_its_weights() -> None:
    """Two experts of 1024 rows, 256 columns: 16 tiles, one wave of 132. Many experts: the weights."""
    plain = {"tile_rows": 128, "tile_columns": 256, "multiprocessors": 132, "product_flops_s": 1e12}
    plain |= {"weights_bytes_s": 1e9, "rows_bytes_s": 1e30, "experts_start_s": 0.0, "power_slowdown": 0.0}
    plain |= {"reading_exponent": 50.0}
    entries = {n: Entry(value=v, status="assumed", source="by hand") for n, v in plain.items()}
    profile = Profile(machine="by hand", most_ranks=1, entries=entries)
    shape = Shape(width=128, inner=128, experts=2, top_k=1)
    share = Share(experts=2, inner=128, rows_W=np.array([2048.0]))
    wave = 132 * 128 * 256 * 2 / 1e12
    spare = float(device.tiles(share.rows_W, 2, 128)[0]) / 16  # half of the experts need one tile more
    assert 1.0 < spare < 1.1
    assert float(device.forward(profile, shape, share)[0]) == pytest.approx(2 * 128 * wave)
    few = Share(experts=1000, inner=128, rows_W=np.array([1e5]))
    weights = 1000 * 3 * 128 * 128 * 2 / 1e9
    assert float(device.forward(profile, shape, few)[0]) == pytest.approx(weights, rel=1e-6)


def test_a_processor_adds_the_gradients_of_chunks() -> None:
    """Two experts of 1024 x 176 have gradients of 4.3 MB. Of two chunks the second one's are read with
    the sum, which is written: half of three times 4.3 MB a chunk."""
    cores, width, inner = Profile.load("two-cores"), 1024, 176
    shape = Shape(width=width, inner=inner, experts=4, top_k=1, value_bytes=4)
    share = Share(experts=2, inner=inner, rows_W=np.array([512.0]))
    alone, added = (float(device.backward_weights(cores, shape, share, chunks=n)[0]) for n in (1, 2))
    assert added - alone == pytest.approx(1.5 * 2 * 3 * width * inner * 4 / cores["gradients_bytes_s"])


@pytest.mark.parametrize(("bytes_s", "paid"), [(1e12, 8.0), (1e6, 0.4)])
def test_a_processor_works_on_other_chunks_while_rows_are_under_way(bytes_s: float, paid: float) -> None:
    """What every chunk takes of the processor is paid eight times where rows take nothing. Where the link is
    always busy, it is paid by the first of its five tasks before the first row and the last behind the last.
    """
    cores = Profile.load("two-cores").with_entries(
        {
            "bytes_slows_compute": Entry(value=1.0, status="assumed", source="by hand"),
            "bytes_slows_moves": Entry(value=1.0, status="assumed", source="by hand"),
        }
    )
    shape = Shape(width=512, inner=88, experts=4, top_k=1, value_bytes=4)
    tiers = (Tier(name="node", ranks=1, bytes_s=1e12), Tier(name="link", ranks=2, bytes_s=bytes_s))
    took = []
    for seconds in (1e-3, 6e-3):
        host = {"chunk_forward_s": Entry(value=seconds, status="assumed", source="by hand")}
        case = Case(
            profile=cores.with_entries(host), fabric=Fabric(name="two", tiers=tiers), shape=shape, tokens=2048
        )
        took.append(predict(case, Layout(ep=2, schedule="optsche-8"), backward=False).forward)
    assert took[1] - took[0] == pytest.approx(paid * 5e-3, rel=0.02)


@pytest.mark.parametrize(("schedule", "messages"), [("serial", 1), ("optsche-1", 1), ("optsche-8", 2)])
def test_several_chunks_say_in_a_message_of_their_own_that_the_input_is_fine(
    schedule: str, messages: int
) -> None:
    """Before the plan's message, and in a forward alone."""
    cores, shape = Profile.load("two-cores"), Shape(width=512, inner=88, experts=4, top_k=1, value_bytes=4)
    later = {"plan_s": Entry(value=cores["plan_s"] + 1e-3, status="assumed", source="by hand")}
    now, then = (
        predict(
            Case(profile=some, fabric=islands(some, 2, 1, network="pair"), shape=shape, tokens=2048),
            Layout(ep=2, schedule=schedule),
        )
        for some in (cores, cores.with_entries(later))
    )
    assert then.forward - now.forward == pytest.approx(messages * 1e-3)
    assert then.backward == now.backward


def test_reading_hides_less_beside_a_product_of_its_length() -> None:
    """128 rows an expert of DeepSeek-V3: multiplying and reading take about as long, together more."""
    deepseek = Shape(width=7168, inner=2048, experts=256, top_k=8)
    share = Share(experts=128, inner=2048, rows_W=np.array([16384.0]))
    sharp = Entry(value=50.0, status="assumed", source="the longer alone")
    alone = device.forward(H200.with_entries({"reading_exponent": sharp}), deepseek, share)[0]
    assert 1.1 < float(device.forward(H200, deepseek, share)[0] / alone) < 1.4


def test_loads_of_ranks() -> None:
    even = Spread(kind="even").draw(8, 800, 0)
    assert loads.of_ranks(even, 4).tolist() == [[1.0] * 4] * 4
    law = Spread.parse("zipf:1.0")
    skewed, record = law.draw(64, 64000, 0, top_k=4), law.record(64, 64000, 0, top_k=4)
    assert skewed.max() / skewed.sum(1).max() < 0.26
    in_order = loads.of_ranks(skewed, 8).max()
    planned, replicated = (loads.of_homes(skewed, loads.homes(record, 8, n)).max() for n in (64, 72))
    assert replicated < planned < in_order
    assert replicated < 1.01


def test_experts_of_drawn_choices_live_where_a_plan_of_other_batches_has_them() -> None:
    """So few tokens a rank are noisy, and a plan that knew the batch would leave no rank fuller."""
    law = Spread.parse("lognormal:0.4")
    batch_LE, record = law.draw(32, 1600, 3, top_k=4), law.record(32, 1600, 3, top_k=4, layers=30)
    assert record.counts_ILE.shape == (16, 30, 32)
    assert (record.counts_ILE.sum(2) == 1600).all()
    assert not (record.counts_ILE[:, 0] == batch_LE[0]).all(1).any()
    of_batch = LoadHistory(counts_ILE=batch_LE.astype(np.int64)[None], layers=(0, 1, 2, 3))
    known, planned = (
        loads.of_homes(batch_LE, loads.homes(of, 8, 32)).max(1) - 1 for of in (of_batch, record)
    )
    assert planned.mean() > known.mean() + 0.02
    world = World(profile=H200, fabric=islands(H200, 8, 8), spread=law, stragglers=Stragglers())
    small = Shape(width=64, inner=32, experts=32, top_k=4)
    request = Request(shape=small, ranks=8, tokens=50, mode="forward", layers=30, seed=3)
    plan = next(p for p in choose(request, world) if p.layout.ep == 8)
    assert plan.imbalance == pytest.approx(sorted(planned)[2])


@pytest.mark.parametrize("text", ["zipf", "even:1", "zipf:x", "fast", "zipf:-1"])
def test_a_wrong_skew_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--skew"):
        Spread.parse(text)


def test_slow_ranks_are_drawn_from_the_seed() -> None:
    slow = Stragglers.parse("0.1,0.01,5")
    assert (slow.draw(1000, 1) == slow.draw(1000, 1)).all()
    assert (slow.draw(1000, 1) != slow.draw(1000, 2)).any()
    assert slow.draw(10000, 1).min() >= 1.0
    assert np.mean(slow.draw(10000, 1) > 4) == pytest.approx(0.01, abs=0.004)
    with pytest.raises(ValueError, match="--stragglers"):
        Stragglers.parse("0.1,2")


def world(ranks: int, node: int, **more) -> World:
    kind = {
        "profile": H200,
        "fabric": islands(H200, ranks, node),
        "spread": Spread(),
        "stragglers": Stragglers(),
    }
    return World(**(kind | more))


def test_the_best_comes_first_and_the_others_say_why_not() -> None:
    plans = choose(Request(shape=QWEN, ranks=8, tokens=4096, codecs=("identity", "fp8")), world(8, 8))
    assert plans[0].why_not is None
    assert plans[0].layout.transport == "nvlink"
    assert all(plan.why_not for plan in plans[1:])
    able = [plan for plan in plans if plan.outcome is not None]
    assert plans[0].seconds <= 1.02 * min(plan.seconds for plan in able)
    said = {plan.layout.transport: plan.why_not for plan in rivals(plans)}
    assert "slower" in str(said["alltoall"])
    assert said["hierarchical"] == "all ranks are on one node"
    assert plans == choose(Request(shape=QWEN, ranks=8, tokens=4096, codecs=("identity", "fp8")), world(8, 8))


@pytest.mark.parametrize("mode", ["train", "forward", "decode"])
def test_what_a_plan_loses_by_is_the_largest_of_its_parts(mode: str) -> None:
    """Serially, nothing is hidden: the parts are the whole. So what is hidden is the rest of a difference."""
    request = Request(shape=QWEN, ranks=16, tokens=1024, mode=mode, codecs=("identity", "fp8"))
    best, *others = choose(request, world(16, 8))
    assert best.outcome
    words = {"rows": "rows take", "experts": "experts take", "copies": "take longer", "host": "its host"}
    words |= {"sync": "gradients of more copies"}
    named = set()
    for plan in others:
        if plan.outcome is None or not re.match(r"\d+% slower: ", str(plan.why_not)):
            continue
        ours, theirs = (dict(p.outcome.parts) | {"sync": p.outcome.sync} for p in (plan, best) if p.outcome)
        if plan.layout.schedule == "serial":
            assert sum(ours.values()) == pytest.approx(plan.seconds, rel=1e-9)
        longer = {name: ours[name] - theirs[name] for name in ours}
        longer["hidden"] = plan.seconds - best.seconds - sum(longer.values())
        name = max(longer, key=lambda part: longer[part])
        named.add(name)
        assert words.get(name, "hide") in str(plan.why_not)
        assert f"({1e3 * longer[name]:.2g} ms)" in str(plan.why_not)
    assert {"rows", "host"} <= named
    assert named & {"experts", "sync"}


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (replace(QWEN, width=2049), "its kernels move rows of multiples of 16 bytes"),
        (replace(QWEN, top_k=33), "its kernels take at most 32 choices a token"),
        (replace(QWEN, value_bytes=4), "its kernels move bfloat16 only"),
        (replace(QWEN, width=2056), "its kernels write fp8 rows of multiples of 512 values"),
        (replace(QWEN, inner=772), "fused kernels take widths of multiples of 8"),
    ],
)
def test_kernels_are_not_planned_for_what_they_refuse(shape: Shape, said: str) -> None:
    plans = choose(Request(shape=shape, ranks=4, tokens=1024, codecs=("identity", "fp8")), world(4, 2))
    assert said in {p.why_not for p in plans if p.layout.transport == "nvlink"}
    if "its kernels write fp8" in said or "fused" in said:
        return
    assert {p.outcome for p in plans if p.layout.transport == "nvlink"} == {None}
    inside = [run.kernels_inside(H200, of, 2) for of in (shape, QWEN)]
    assert inside == [False, True]


def test_a_link_that_is_not_used_is_not_said_to_be_assumed() -> None:
    """In a forward groups of data do not meet, so a rank alone has nothing to do with the network."""
    alone = Request(shape=replace(QWEN, experts=16), ranks=16, tokens=4096, mode="forward")
    for mode, assumed in (("forward", False), ("train", True)):
        layout = Layout(ep=1, dp=16)
        plan = weigh(replace(alone, mode=mode), world(16, 8), layout, {})
        assert plan.outcome
        assert any("tier network is assumed" in said for said in plan.extrapolates) == assumed


def test_no_group_lies_across_the_edge_of_a_node() -> None:
    """Of 72 ranks in nodes of 8 the third group of three would be ranks 6, 7 and 8."""
    said = "groups of {} ranks would lie across the edges of nodes of 8"
    for nodes, able in ((world(72, 8), {1, 2, 4, 8, 24, 72}), (world(72, 72), {1, 2, 3, 4, 6, 8, 9, 12})):
        plans = choose(Request(shape=QWEN, ranks=72, tokens=1024, mode="forward"), nodes)
        assert able <= {p.layout.group for p in plans if p.outcome}
        if nodes.fabric.node == 8:
            for group in (3, 6, 9, 12, 18, 36):
                reasons = {p.why_not for p in plans if p.layout.group == group}
                assert reasons == {said.format(group)}


def test_a_rank_alone_encodes_nothing() -> None:
    """It was listed once for every codec, each as fast."""
    for codecs in (("identity", "fp8"), ("fp8",)):
        plans = choose(Request(shape=QWEN, ranks=2, tokens=64, codecs=codecs), world(2, 2))
        assert {p.layout.codec for p in plans if p.layout.group == 1} == {codecs[0]}


def test_what_nobody_asked_for_says_what_it_would_change() -> None:
    """Two ranks on a slow link, each with room for half of the experts: four bits a value take a third of
    the time, but only who asks gets them."""
    slow = parse(
        {"tiers": [{"name": "node", "ranks": 1, "gbytes_s": 300}, {"name": "wire", "gbytes_s": 1}]}, 2
    )
    asked = Request(shape=QWEN, ranks=2, tokens=4096, mode="forward", layers=150)
    best, *others = choose(asked, world(2, 1, fabric=slow))
    assert (best.layout.codec, best.layout.replicas) == ("identity", 0)
    coded, more = (p for p in others if p.layout.codec != "identity" or p.layout.replicas)
    assert coded.seconds < 0.4 * best.seconds
    assert coded.why_not == "takes 64% less, but it rounds rows: ask by --codecs identity,int4"
    assert more.layout == replace(best.layout, replicas=2)
    assert str(more.why_not).startswith("nobody asked for it, and it gains nothing that can be told (")
    assert {coded.layout, more.layout} <= {p.layout for p in rivals([best, *others])}
    first, *_ = choose(replace(asked, codecs=("identity", "int4")), world(2, 1, fabric=slow))
    assert first.layout == coded.layout


def test_a_rank_alone_has_the_fewest_parts() -> None:
    """Three ranks of four small experts and one token: as fast alone as over NVLink, and nothing moves."""
    small = Shape(width=64, inner=64, experts=4, top_k=4)
    best, *others = choose(Request(shape=small, ranks=3, tokens=1, mode="forward"), world(3, 3))
    assert best.layout.group == 1
    over = next(p for p in others if p.layout == Layout(ep=3, transport="nvlink"))
    assert over.seconds < best.seconds * 1.02
    assert over.why_not == "0.0% slower"


def test_more_choices_than_can_be_drawn_have_no_noise() -> None:
    load_LE = Spread().draw(4, 1e20, 0)
    assert (load_LE == 2.5e19).all()


@pytest.mark.parametrize(
    ("shape", "tokens", "micros"),
    [(QWEN, 8, 149), (QWEN, 64, 306), (QWEN, 2048, 467), (replace(DEEPSEEK, experts=64), 2048, 2764)],
)
def test_a_rank_alone_has_kernels_and_no_wire(shape: Shape, tokens: int, micros: float) -> None:
    # Captured layers of one H200 without their gate: docs/LOG.md, "rows gathered inside the first product".
    case = Case(profile=H200, fabric=islands(H200, 1, 1), shape=shape, tokens=tokens, decode=True)
    alone = predict(case, Layout(), backward=False)
    assert 1e6 * alone.forward == pytest.approx(micros, rel=0.2)
    assert alone.tasks["encode_out"] == alone.tasks["decode_back"] == 0


def test_the_divisors_of_very_many_ranks_are_not_looked_for_above_the_experts() -> None:
    """Tried up to the ranks, they took longer than anybody waits."""
    pairs = list(divisions(Request(shape=QWEN, ranks=2**40, tokens=4096)))
    assert {ep for ep, _ in pairs} == {1, 2, 4, 8, 16, 32, 64, 128}


def test_one_gpu_is_not_told_of_nodes_that_it_lacks() -> None:
    """Nor to compute in chunks, which go by the operators that serve every device (`exchange/alone.py`)."""
    plans = choose(Request(shape=QWEN, ranks=1, tokens=4096), world(1, 1))
    assert (plans[0].layout.transport, plans[0].layout.schedule) == ("alltoall", "serial")
    assert [plan for plan in plans if plan.outcome] == plans[:1]
    assert {plan.why_not for plan in plans if plan.outcome is None} == {
        "there is only one rank, and nothing to move"
    }


def test_decoding_over_bytes_pays_for_its_host() -> None:
    request = Request(shape=QWEN, ranks=8, tokens=64, mode="decode")
    plans = choose(request, world(8, 8))
    by_kernels = min(p.seconds for p in plans if p.layout.transport == "nvlink")
    over_bytes = min(p.seconds for p in plans if p.layout.transport == "alltoall" and p.layout.group > 1)
    assert over_bytes > by_kernels + 0.9 * H200["chunk_forward_s"]


def test_far_links_bring_nodes_together_once() -> None:
    fabric = islands(
        H200.with_entries({"network_bytes_s": Entry(value=3e9, status="assumed", source="slow")}), 32, 8
    )
    plans = choose(
        Request(shape=DEEPSEEK, ranks=32, tokens=4096, mode="forward", layers=58), world(32, 8, fabric=fabric)
    )
    assert plans[0].layout.transport in ("hierarchical", "tiered")
    assert any("tier network is assumed" in said for said in plans[0].extrapolates)


@pytest.mark.untraced
def test_two_tiers_are_weighed_and_say_why_not() -> None:
    """The network alone moves: spreading inside the node is hidden but for the last chunk's."""
    request = Request(shape=DEEPSEEK, ranks=32, tokens=4096, mode="train", layers=1)
    plans = choose(request, world(32, 8))
    (one, two) = (
        next(
            p
            for p in plans
            if p.layout.transport == "tiered"
            and p.layout.schedule == f"optsche-{n}"
            and (p.layout.ep, p.layout.tp) == (32, 1)
        )
        for n in (1, 2)
    )
    assert one.outcome
    assert two.outcome
    assert two.outcome.forward < one.outcome.forward
    inside = one.outcome.tasks["decode_out"] + one.outcome.tasks["encode_back"]
    assert one.outcome.forward - two.outcome.forward > 0.5 * inside
    assert "two tiers on 4 nodes of 8, measured on 2 of one rank" in two.extrapolates
    once = next(p for p in plans if p.layout.transport == "hierarchical" and p.layout.group == 32)
    assert once.outcome
    assert two.outcome.tiers == once.outcome.tiers
    reasons = {p.why_not for p in plans if p.layout.transport == "tiered"}
    assert "8 ranks are not several whole nodes of 8" in reasons
    split = choose(Request(shape=QWEN, ranks=16, tokens=4096), world(16, 2))
    reasons = {p.why_not for p in split if p.layout.transport == "tiered"}
    assert "4 tensor ranks of an expert are not all on one node of 2" in reasons
    older = Profile(
        machine="before two tiers",
        most_ranks=4,
        entries={name: entry for name, entry in H200.entries.items() if name != "tiers_chunk_s"},
    )
    without = choose(Request(shape=QWEN, ranks=16, tokens=4096), world(16, 8, profile=older))
    assert without[0].outcome
    assert any("nothing of two tiers" in str(p.why_not) for p in without if p.layout.transport == "tiered")


def test_slow_ranks_and_full_ranks_make_a_layer_longer() -> None:
    case = {"profile": H200, "fabric": islands(H200, 8, 8), "shape": QWEN, "tokens": 8192}
    layout = Layout(ep=8, transport="nvlink")
    even = predict(Case(**case), layout)
    full = predict(Case(**case, loads_W=np.array([1.5, *[6.5 / 7] * 7])), layout)
    slow = predict(Case(**case, speeds_W=np.array([2.0, *[1.0] * 7])), layout)
    assert full.forward > 1.2 * even.forward
    assert slow.forward == pytest.approx(even.forward + even.tasks["experts"])


def test_where_ideas_stop_helping() -> None:
    growth = scale.Growth(profile=H200)
    curves = scale.over_ranks(growth, (16, 1024))
    assert curves["events"][1][1] > curves["events"][0][1]
    assert curves["once to a rank"][1][1] < curves["once to a rank"][0][1] < 1.1
    slow = scale.over_rates(growth, (45e9, 12.5e6), 64)
    assert slow["fp8 rows"][1][1] == pytest.approx(7168 * 2 / (7168 + 7168 / 128 * 4), rel=0.05)
    assert slow["one kernel"][1][1] < scale.HELPS < slow["one kernel"][0][1]
    assert scale.ends(slow, 1e9, " GB/s")["one kernel"].startswith("from 45 to 45 GB/s, at most ")


def test_fused_layers_hide_what_they_can_and_are_chosen_where_they_gain() -> None:
    case = Case(profile=H200, fabric=islands(H200, 2, 2), shape=QWEN, tokens=8192)
    serial, fused = (predict(case, Layout(ep=2, transport="nvlink", schedule=s)) for s in ("serial", "fused"))
    assert 1.03 < serial.step / fused.step < 1.12
    moved = serial.tasks["move_out"] + serial.tasks["move_back"]
    assert serial.forward - fused.forward < 0.5 * moved
    world = World(profile=H200, fabric=case.fabric, spread=Spread(), stragglers=Stragglers())
    best = choose(Request(shape=QWEN, ranks=2, tokens=8192), world)[0]
    assert best.layout.schedule == "fused"
    assert best.extrapolates == ()
    few = choose(Request(shape=QWEN, ranks=2, tokens=256), world)
    said = {plan.why_not for plan in few if plan.layout.schedule == "fused"}
    assert "calls of 256 tokens a rank or fewer have a kernel of their own, not fused" in said
    more = World(profile=H200, fabric=islands(H200, 8, 8), spread=Spread(), stragglers=Stragglers())
    plans = choose(Request(shape=QWEN, ranks=8, tokens=8192, codecs=("identity", "fp8")), more)
    for group in (4, 8):
        wide = next(
            p for p in plans if p.layout.schedule == "fused" and p.layout.group == group and p.outcome
        )
        assert ("fused kernels on 8 ranks, at most 4 were measured" in wide.extrapolates) == (group == 8)
    assert "fused kernels move rows as they are" in {plan.why_not for plan in plans}


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_name_their_sources(name: str) -> None:
    profile = Profile.load(name)
    for entry in profile.entries.values():
        assert entry.status in STATUSES
        assert entry.source
        assert entry.status != "fitted" or "benchmarks/results/" in entry.source


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "fast", True, None, 10**400, 1e-300])
def test_a_rate_that_is_none_is_refused(value) -> None:
    """The simulator would look for a begin of a move that never comes."""
    wrong = {"pair_bytes_s": Entry(value=value, status="measured", source="by hand")}
    with pytest.raises(ValueError, match=r"profile: pair_bytes_s is .*; a number above 0 is wanted, at most"):
        H200.with_entries(wrong)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("tile_rows", 0.5, "a whole number from 1 up"),
        ("bytes_slows_moves", 0, "a number above 0"),
        ("reading_exponent", 0.1, "a number from 1 up"),
        ("plan_s", -1, "a number from 0 up"),
    ],
)
def test_a_figure_that_ends_no_task_is_refused(name: str, value: float, kind: str) -> None:
    """A part of a tile, or a move that is slowed to nothing, had no end, and so had the simulator."""
    wrong = {name: Entry(value=value, status="measured", source="by hand")}
    with pytest.raises(ValueError, match=f"profile: {name} is {value}; {kind} is wanted"):
        H200.with_entries(wrong)


def test_profiles_in_and_out(tmp_path: Path) -> None:
    H200.save(tmp_path / "here.json")
    assert Profile.load(tmp_path / "here.json") == H200
    (tmp_path / "here.json").write_text("{}")
    with pytest.raises(ValueError, match=r"here\.json is no profile .*; measure it again"):
        Profile.load(tmp_path / "here.json")
    for content in (b"\x00\xff", b"[" * 100_000):
        (tmp_path / "here.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"here\.json is no profile .{,200}; measure it again"):
            Profile.load(tmp_path / "here.json")
    (tmp_path / "here.json").write_text('{"machine": "by hand", "most_ranks": null, "entries": {}}')
    with pytest.raises(ValueError, match="most_ranks is None; a whole number from 1 up is wanted"):
        Profile.load(tmp_path / "here.json")
    with pytest.raises(ValueError, match="moon is not there; give a file of `imbrex profile`, or h200"):
        Profile.load("moon")
    with pytest.raises(ValueError, match="has no 'speed'"):
        H200["speed"]
