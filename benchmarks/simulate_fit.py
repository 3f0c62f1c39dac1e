"""The simulator's shipped profiles, fitted to parts that were measured alone.

    python -m benchmarks.simulate_fit             # writes src/imbrex/simulate/profiles/*.json; 3 minutes
    python -m benchmarks.simulate_fit two-cores   # that one alone

`FITTED` says to what, `benchmarks/simulate_cores.py` for two cores. `benchmarks/simulate.py` predicts the
rest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from benchmarks.simulate_cores import fit_two_cores
from benchmarks.simulate_rows import (
    Row,
    commits,
    entries,
    exchange_rows,
    links,
    minimise,
    of_exchange,
    of_schedule,
    off,
    rows,
    shape_of,
)

from imbrex.simulate import device
from imbrex.simulate.device import Shape, Share
from imbrex.simulate.fabric import Fabric, islands
from imbrex.simulate.profile import SHIPPED, Entry, Profile
from imbrex.simulate.run import Case, Layout, predict

SMS, HEIGHT, COLUMNS = 132, 128, 256
H200_CODECS = ("bf16", "fp16", "fp8", "int8", "int4", "nvfp4")
FITTED = {
    "experts": "uniform rows of ffn, decode and ffn_training, imbrex",
    "exchange": "whole calls to expert-major rows, bf16, uniform or recorded; products beside kernels",
    "layer_fp8": "dispatch, experts and what is left of forward, imbrex-serial",
    "codecs": "encode and decode, bfloat16",
    "schedule": "run 12 (NCCL over NVLink), two rows of run 7",
    "fused": "run 0: experts alone, serial layers of 4096 tokens; run 2: fused steps, two of four models",
    "layer": "imbrex-alltoall, two of four models",
    "tiers": "the network alone, forwards of `tiered` in one chunk and in eight",
    "collectives": "run 7, top-8, copy-per-rank (sockets)",
}


def share_of(row: Row) -> tuple[Shape, Share]:
    case, shape = row["case"], shape_of(row["case"])
    ranks = case["ranks"] if "ranks" in case else case["W"]
    number = case["rows"] if "rows" in case else case["M"] * case["K"] / ranks
    rows_W = np.array([float(number)])
    return shape, Share(experts=shape.experts / ranks, inner=shape.inner, rows_W=rows_W)


def fit_experts(profile: Profile) -> Profile:
    """One GPU's products, forward first, then what the backward takes more."""
    ours = [r for r in rows("experts") if r["impl"] == "imbrex" and r["case"].get("skew") == "uniform"]
    pair = [r for r in rows("fused") if r["run"] == 0 and r["impl"] == "imbrex-experts-alone"]
    ahead = [r for r in (*ours, *pair) if r["op"] in ("ffn", "decode", "forward")]
    both = [r for r in (*ours, *pair) if r["op"] in ("ffn_training", "forward+backward")]
    source = f"{commits('experts', {r['run'] for r in ours})}; {commits('fused', [0])}: experts alone"
    first = (
        "product_flops_s",
        "weights_bytes_s",
        "experts_start_s",
        "rows_bytes_s",
        "power_slowdown",
        "reading_exponent",
    )

    def forward(some: Profile, row: Row) -> float:
        return float(device.forward(some, *share_of(row))[0])

    def training(some: Profile, row: Row) -> float:
        own = share_of(row)
        gradients = device.backward_rows(some, *own) + device.backward_weights(some, *own)
        return forward(some, row) + float(gradients[0])

    def pairs(some: Profile, of: Sequence[Row], how: Callable[[Profile, Row], float]) -> list:
        return [(how(some, row), 1e-6 * row["median_us"]) for row in of]

    def with_first(x: Iterable[float]) -> Profile:
        return profile.with_entries(entries(first, x, source))

    best = minimise(
        lambda x: off(pairs(with_first(x), ahead, forward)), (9e14, 4.7e12, 33e-6, 6.8e12, 0.1, 3.0), 600
    )
    profile = with_first(best)
    second = ("backward_rows_factor", "backward_weights_factor", "gradients_bytes_s")

    def with_second(x: Iterable[float]) -> Profile:
        return profile.with_entries(entries(second, x, source))

    return with_second(minimise(lambda x: off(pairs(with_second(x), both, training)), (1.0, 1.0, 3e12)))


def fit_nvlink(profile: Profile) -> Profile:
    """Dispatch and combine, alone. Such a call also takes a time for every choice that it routes, which is
    fitted and not kept: layers route beside what else they do, and show none."""
    points = [*_exchange_points(), *_layer_points()]
    sources = f"{commits('exchange', (1, 2, 3))}; {commits('layer_fp8', (1, 2))}"
    names = (
        "node_bytes_s",
        "stored_bytes_s_a_multiprocessor",
        "dispatch_start_s",
        "combine_wire_factor",
        "summed_bytes_s",
        "combine_start_s",
    )

    def fitted(x: Sequence[float]) -> Profile:
        return profile.with_entries(entries(names, x[:-1], sources))

    def pairs(x: Sequence[float]) -> list:
        return [(_crossing(fitted(x), point, x[-1]), 1e-6 * point["us"]) for point in points]

    start = (3.3e11, 4.3e10, 2.5e-5, 1.03, 1.54e12, 2.5e-5, 1e-9)
    return fitted(tuple(minimise(lambda x: off(pairs(tuple(x))), start, 500)))


def fit_pieces(profile: Profile) -> Profile:
    """What a layer over NVLink takes beside its kernels."""
    names = ("piece_forward_s", "piece_backward_s")
    ours = [row for row in rows("fused") if is_piece_fitted(row)]
    source = f"{commits('fused', [0])}: serial, 4096 tokens"

    def fitted(x: Iterable[float]) -> Profile:
        return profile.with_entries(entries(names, x, source))

    def pairs(some: Profile) -> list:
        return [(of_schedule(some, one_node(some, 2), row), 1e-6 * row["median_us"]) for row in ours]

    return fitted(minimise(lambda x: off(pairs(fitted(x))), (4e-5, 4e-5), 100))


def is_piece_fitted(row: Row) -> bool:
    return row["run"] == 0 and row["impl"] == "imbrex-serial" and row["case"]["M"] == 4096


FUSED_MODELS = ("qwen2-moe", "phi3.5-moe")
"""Narrow and wide experts, whose fused layers are fitted; those of other models are held out."""
NEVER = {"fused_again_bytes_s": Entry(value=1.0, status="assumed", source="rows of dy come before a product")}


def fit_fused(profile: Profile) -> Profile:
    """Fit what fused kernels hide of a backward to their gain over serial, without serial's own error: rows
    of dy before their product and beside it."""
    names = ("fused_again_bytes_s", "fused_hides_home")
    ours = [row for row in rows("fused") if is_fused_fitted(row)]
    serial = {
        (row["op"], str(row["case"])): row["median_us"]
        for row in rows("fused")
        if row["run"] == FUSED_RUN and row["impl"] == "imbrex-serial"
    }
    source = f"{commits('fused', [FUSED_RUN])}: fused over serial, {', '.join(FUSED_MODELS)}"

    def fitted(x: Iterable[float]) -> Profile:
        return profile.with_entries(entries(names, x, source))

    def seconds(some: Profile, row: Row, schedule: str) -> float:
        return of_schedule(some, one_node(some, 2), {**row, "impl": schedule})

    def gains(some: Profile) -> list:
        before = some.with_entries(NEVER)
        found = []
        for row in ours:
            beside = row["impl"] == "imbrex-fused"
            gain = seconds(some if beside else before, row, "fused") / seconds(some, row, "serial")
            found.append((gain, row["median_us"] / serial[row["op"], str(row["case"])]))
        return found

    return fitted(minimise(lambda x: off(gains(fitted(x))), (2.5e12, 0.7), 150))


FUSED_RUN = 2
"""Two H100 with the kernels of 2026-11-27; by those of run 0 rows of dy came before their product."""


def is_fused_fitted(row: Row) -> bool:
    ways = ("imbrex-fused", "imbrex-fused-dy-before")
    mine = row["run"] == FUSED_RUN and row["case"]["model"] in FUSED_MODELS
    return mine and row["impl"] in ways and row["op"] == "forward+backward"


def _exchange_points() -> list[dict]:
    points = []
    for row in rows("exchange"):
        case = row["case"]
        plain = case.get("layout") == "expert" and case.get("dtype") == "bf16" and row.get("full_call")
        if row["impl"] != "imbrex" or row["op"] not in ("dispatch", "combine") or not plain:
            continue
        if case["routing"].startswith(("uniform", "trace")) and (case["T"] > 512 or row["num_sms"] == 64):
            points.append({"op": row["op"], "case": case, "sms": row["num_sms"], "us": row["median_us"]})
    return points


def _layer_points() -> list[dict]:
    """Dispatch, and as combine what a forward takes beside dispatch and experts."""
    ours = [row for row in rows("layer_fp8") if row["impl"] == "imbrex-serial"]
    points = []
    for row in ours:
        case = row["case"] | {"T": row["case"]["M"] // row["case"]["W"]}
        same = {r["op"]: r["median_us"] for r in ours if r["case"] == row["case"]}
        if row["op"] == "dispatch":
            points.append({"op": "dispatch", "case": case, "sms": 32, "us": row["median_us"]})
        if row["op"] == "forward":
            rest = same["forward"] - same["dispatch"] - same["experts"]
            points.append({"op": "combine", "case": case, "sms": 96, "us": rest})
    return points


def _crossing(profile: Profile, point: Row, choice_s: float) -> float:
    case, sms = point["case"], Entry(value=point["sms"], status="measured", source="of the row")
    profile = profile.with_entries({f"{kind}_multiprocessors": sms for kind in ("dispatch", "small")})
    shape = shape_of(case | {"dtype": "bf16"})
    layout = Layout(ep=case["W"], transport="nvlink")
    layer = Case(profile=profile, fabric=one_node(profile, case["W"]), shape=shape, tokens=case["T"])
    done = predict(layer, layout, backward=False)
    if point["op"] == "combine":
        return done.tasks["move_back"]
    return done.tasks["move_out"] + choice_s * case["T"] * shape.top_k


def one_node(profile: Profile, ranks: int) -> Fabric:
    return islands(profile, ranks, ranks)


def beside(profile: Profile) -> Profile:
    """How kernels that move and products slow each other down, and the multiprocessors that movers take."""
    found = [r for r in rows("exchange") if r["op"] == "gemm" and r.get("num_sms") == 16]
    taken = SMS / (SMS - profile["beside_multiprocessors"])
    compute = statistics.median(r["slowdown"] for r in found) * taken
    moves = statistics.median(r["exchange_slowdown"] for r in found)
    source = f"{commits('exchange', (2, 3))}: gemm beside 16 multiprocessors, and 100 of 132 left"
    return profile.with_entries(
        entries(("nvlink_slows_compute", "nvlink_slows_moves"), (compute, moves), source)
    )


def codec_rates() -> dict:
    """Values a second, encoded and decoded: the median over widths."""
    source, found = commits("codecs", (0, 2, 3)), {}
    for codec in H200_CODECS:
        for what in ("encode", "decode"):
            ours = [
                r["case"]["T"] * r["case"]["D"] / (1e-6 * r["median_us"])
                for r in rows("codecs")
                if r["impl"] == "imbrex"
                and r["op"] == what
                and r["case"]["codec"] == codec
                and r["case"]["dtype"] == "bfloat16"
            ]
            if ours:
                rate = statistics.median(ours)
                found |= entries([f"{what}_values_s:{codec}"], [rate], source, "measured")
    return found


def fit_bytes(profile: Profile) -> Profile:
    """Copies and the host's time over NCCL, from whole layers of today's code on 2 GPUs; then the host's time
    of the older code whose schedules were measured, from those on 4 GPUs."""
    whole = [row for row in rows("layer", "H200") if is_bytes_fitted(row)]
    source = f"{commits('layer', {r['run'] for r in whole})}: imbrex-alltoall"
    within = entries(["plan_s", "plan_chunk_s"], [0.0, 0.0], "part of the chunk's", "assumed")
    timed = [r for r in rows("schedule") if r["run"] == 12 and r["op"] in ("layer-forward", "layer-backward")]

    def now(x: Iterable[float]) -> Profile:
        return profile.with_entries(within | entries((*HOST, "copied_bytes_s"), x, source))

    def off_by(some: Profile, of: Sequence[Row]) -> float:
        return off(
            (of_schedule(some, one_node(some, row["case"]["W"]), row), 1e-6 * row["median_us"]) for row in of
        )

    today = now(minimise(lambda x: off_by(now(x), whole), (1.5e-3, 1e-3, 7e11), 120))

    def earlier(x: Iterable[float]) -> Profile:
        return today.with_entries(entries(HOST, x, commits("schedule", [12])))

    then = earlier(minimise(lambda x: off_by(earlier(x), timed), (3.7e-3, 2.9e-3), 40))
    return today.with_entries({f"{name}:{OLDER}": then.entries[name] for name in HOST})


HOST = ("chunk_forward_s", "chunk_backward_s")
OLDER = "819f242"
"""The revision of the schedules that were measured over NCCL: its host took longer for a chunk."""


def with_older_host(profile: Profile) -> Profile:
    return profile.with_entries({name: profile.entries[f"{name}:{OLDER}"] for name in HOST})


def is_bytes_fitted(row: Row) -> bool:
    return row["impl"] == "imbrex-alltoall" and row["case"]["model"] in ("qwen2-moe", "deepseek-v3")


def fit_h200() -> Profile:
    """The shipped profile of H200s."""
    given = "the kernels' tiles and multiprocessors (docs/experts.md)"
    names = ("tile_rows", "tile_columns", "multiprocessors")
    profile = Profile(
        machine="NVIDIA H200, NVLink",
        most_ranks=4,
        entries=entries(names, (HEIGHT, COLUMNS, SMS), given, "measured"),
    )
    sms = ("dispatch_multiprocessors", "small_multiprocessors", "beside_multiprocessors")
    defaults = "transport/nvlink.py's defaults"
    profile = profile.with_entries(entries(sms, (32, 64, 32), defaults, "measured") | codec_rates())
    profile = profile.with_entries(links("node", 3.3e11, "", "fitted", start=0.0))
    later = ("piece_forward_s", "piece_backward_s", "host_holds_moves")
    profile = profile.with_entries(entries(later, (0.0, 0.0, 0.0), "", "assumed"))
    profile = fit_pieces(fit_nvlink(fit_experts(profile)))
    slowed = "a guess: NCCL takes few multiprocessors"
    profile = profile.with_entries(
        entries(("bytes_slows_compute", "bytes_slows_moves"), (1.05, 1.1), slowed, "assumed")
    )
    profile = fit_bytes(beside(profile))
    network = "400 Gb/s a GPU, nine tenths of it reached (Hybrid-EP's article: near the card's peak)"
    profile = profile.with_entries(links("network", 45e9, network, "assumed", start=5e-6))
    moved = exchange_rows(7, 8, "copy-per-rank", "move")[0]
    trial = profile.with_entries(links("sockets", 1e9, "", "fitted", start=1e-4))
    rate = of_exchange(islands(trial, 4, 2, network="sockets"), moved) * 1e9 / (1e-6 * moved["median_us"])
    source = f"{commits('collectives', [7])}: copy-per-rank, top-8"
    memory = {
        "memory_bytes": Entry(value=141e9, status="measured", source="the device's size"),
        "value_bytes": Entry(value=2, status="assumed", source="rows and weights in bfloat16"),
    }
    profile = profile.with_entries(
        links("sockets", float(f"{rate:.5g}"), source, "fitted", start=1e-4) | memory
    )
    return fit_tiers(fit_fused(fit_pair(profile)))


def fit_pair(profile: Profile) -> Profile:
    """The sockets of another machine, with two GPUs, and how much of a chunk's host time holds them up."""
    ours = [r for r in rows("schedule") if is_pair_fitted(r)]
    source = f"{commits('schedule', [7])}: forwards, serial by kernels and optsche-4 by torch's products"

    def fitted(x: np.ndarray) -> Profile:
        tier = links("sockets-pair", float(f"{x[0]:.5g}"), source, "fitted", start=1e-4)
        return profile.with_entries(tier | entries(["host_holds_moves"], x[1:], source))

    def pairs(some: Profile) -> list:
        fabric = islands(some, 2, 1, network="sockets-pair")
        return [(of_schedule(with_older_host(some), fabric, row), 1e-6 * row["median_us"]) for row in ours]

    return fitted(minimise(lambda x: off(pairs(fitted(x))), (2e9, 0.3), 100))


def is_pair_fitted(row: Row) -> bool:
    """Two forwards between two GPUs over sockets."""
    which = row["impl"], row["case"].get("experts")
    ways = (("serial", "kernels"), ("optsche-4", None))
    return row["run"] == 7 and row["op"] == "layer-forward" and which in ways


TIERS_FITTED = ("tiered-1", "tiered-8")
"""Numbers of chunks whose forwards in two tiers are fitted; others, and steps, are held out."""


def is_tiers_fitted(row: Row) -> bool:
    return row["op"] == "forward" and row["impl"] in ("network", *TIERS_FITTED)


def fit_tiers(profile: Profile) -> Profile:
    """The sockets of a third machine, and the host's time for a chunk of two tiers, all of which it plans
    before the first is computed."""
    ours = [row for row in rows("tiers") if is_tiers_fitted(row) and row["impl"] != "network"]
    alone = next(row for row in rows("tiers") if is_tiers_fitted(row) and row["impl"] == "network")
    source = commits("tiers", [0])
    rate = 2 * alone["case"]["bytes"] / (1e-6 * alone["median_us"])
    network = links("sockets-tiers", float(f"{rate:.5g}"), f"{source}: network", "fitted", start=1e-4)
    profile = profile.with_entries(network)
    forwards = f"{source}: forwards, {', '.join(TIERS_FITTED)}"

    def fitted(x: Iterable[float]) -> Profile:
        return profile.with_entries(entries(["tiers_chunk_s"], x, forwards))

    def pairs(some: Profile) -> list:
        return [(of_tiers(some, row), 1e-6 * row["median_us"]) for row in ours]

    return fitted(minimise(lambda x: off(pairs(fitted(x))), (2e-3,), 60))


def of_tiers(profile: Profile, row: Row) -> float:
    """Predicted seconds of a row of tiers.json: a forward, or that and a backward."""
    transport, _, chunks = row["impl"].rpartition("-")
    case = row["case"] | {"W": row["case"]["nodes"] * row["case"]["ranks_per_node"], "transport": transport}
    fabric = islands(profile, case["W"], case["ranks_per_node"], network="sockets-tiers")
    op = "layer-forward" if row["op"] == "forward" else "layer"
    return of_schedule(profile, fabric, {"op": op, "impl": f"optsche-{chunks}", "case": case})


if __name__ == "__main__":
    if "two-cores" not in sys.argv[1:]:
        fit_h200().save(SHIPPED / "h200.json")
    fit_two_cores().save(SHIPPED / "two-cores.json")
