"""The search for the best layout of a model on a cluster, with the reasons against all others.

Every layout that can run is simulated: all divisions of the ranks into EP x TP x DP, transports, codecs,
schedules, and numbers of replicas. For one that cannot run there is a reason. Loads come from a trace or a
distribution. Experts are placed by a plan of the whole trace, or of a record drawn from the distribution, and
choices are split over replicas as evenly as possible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from imbrex.codec import make
from imbrex.simulate import loads, run
from imbrex.simulate.engine import Floats
from imbrex.simulate.memory import memory_of
from imbrex.simulate.profile import Profile
from imbrex.simulate.request import MODES, Request, World
from imbrex.simulate.run import Case, Layout, Outcome

TRANSPORTS = ("nvlink", "alltoall", "allgather", "hierarchical", "tiered", "2dh", "pipe")
SCHEDULES = {
    "train": ("serial", "fused", "optsche-1", "optsche-2", "optsche-4"),
    "forward": ("serial", "fused", "optsche-2", "optsche-4"),
    "decode": ("serial",),
}
"""Schedules worth a look, by mode: in one chunk only the backward has something to hide."""
FUSED_RANKS = 4
"""Ranks on which fused kernels were measured (`benchmarks/results/fused.json`)."""
NODEWISE = ("hierarchical", "tiered", "2dh", "pipe")
"""Transports for several whole nodes."""
TIERED_NODES = 2
"""Nodes, of a GPU each, on which two tiers in one stream were measured (`benchmarks/results/tiers.json`)."""
NVLINK_CODECS = ("identity", "fp8")
FP8_MULTIPLE, FUSED_MULTIPLE = 512, 8
"""Values of a row of which the kernels over NVLink write multiples in fp8 (`exchange/nvlink_fit.py`), and
widths of which fused ones take multiples (`kernels/ffn/widths.py`)."""
CLOSE = 1.02
"""Plans within this of the best are as good: the simpler one is taken."""
TELLS = 0.05
"""A smaller change cannot be told from a prediction's error."""
MOST_PLACED = 256 * 256
"""Ranks times experts up to which four layers are drawn and placed; beyond, one is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout and its predictions. why_not: why another plan is better, or why it cannot run; `None` for the
    best plan. imbalance: the load of the fullest rank over the mean. memory: bytes of a rank.
    extrapolates: what of it is outside of what was measured, if anything."""

    layout: Layout
    outcome: Outcome | None
    memory: float = 0.0
    imbalance: float = 0.0
    extrapolates: tuple[str, ...] = ()
    why_not: str | None = None

    @property
    def seconds(self) -> float:
        return math.inf if self.outcome is None else self.outcome.step


def choose(request: Request, world: World) -> list[Plan]:
    """All plans: the best first, then those that could run, by their time, then those that could not."""
    if request.mode not in MODES:
        raise ValueError(f"plan: mode {request.mode!r}; use {', '.join(MODES)}")
    for what in ("ranks", "tokens", "layers"):
        if getattr(request, what) < 1:
            raise ValueError(f"plan: {getattr(request, what)} {what}; give at least 1")
    if request.seed < 0:
        raise ValueError(f"plan: seed {request.seed}; give a number from 0 up")
    world.fabric.peers(request.ranks)  # says so where they are more than the network holds
    drawn: dict[tuple[int, int], Floats] = {}
    plans = [weigh(request, world, layout, drawn) for layout in layouts(request)]
    able = sorted((p for p in plans if p.why_not is None), key=lambda plan: plan.seconds)
    unable = [p for p in plans if p.why_not is not None]
    # That a rank alone moves nothing says least about a transport.
    unable.sort(key=lambda plan: (plan.memory or math.inf, plan.layout.group == 1))
    if not able:
        return unable
    # Among equals the layout with fewest parts that move.
    near = [p for p in able if p.seconds <= CLOSE * able[0].seconds]
    best = min(near, key=lambda plan: (_complexity(plan.layout), plan.seconds))
    others = [replace(p, why_not=_against(p, best)) for p in able if p is not best]
    return [best, *others, *unable, *unasked_plans(best, request, world, drawn)]


def unasked_plans(
    best: Plan, request: Request, world: World, drawn: dict[tuple[int, int], Floats]
) -> list[Plan]:
    """The best plan with the fastest codec that nobody asked for, and with a replica a rank more, so that
    what they would change is known: a codec rounds rows, and replicas take memory."""
    known = [name.partition(":")[2] for name in world.profile if name.startswith("encode_values_s:")]
    able = [c for c in known if best.layout.transport != "nvlink" or c in NVLINK_CODECS]
    coded = [replace(best.layout, codec=c) for c in able if c not in request.codecs]
    more = replace(best.layout, replicas=best.layout.ep)
    plans = [weigh(request, world, layout, drawn) for layout in coded] if best.layout.group > 1 else []
    plans = sorted((p for p in plans if p.outcome is not None), key=lambda plan: plan.seconds)[:1]
    if best.layout.ep > 1 and request.replicas == (0,):
        plans.append(weigh(request, world, more, drawn))
    return [p if p.outcome is None else replace(p, why_not=_unasked_for(p, best)) for p in plans]


def _unasked_for(plan: Plan, best: Plan) -> str:
    layout, change = plan.layout, plan.seconds / best.seconds - 1
    if layout.codec != best.layout.codec:
        price, option = "it rounds rows", f"--codecs {best.layout.codec},{layout.codec}"
    else:
        price, option = "it takes memory", f"--replicas 0,{layout.replicas}"
    if change > -TELLS:
        return f"nobody asked for it, and it gains nothing that can be told ({change:+.1%})"
    return f"takes {-change:.0%} less, but {price}: ask by {option}"


def layouts(request: Request) -> Iterator[Layout]:
    """Every combination worth a look."""
    for ep, tp in divisions(request):
        for transport in TRANSPORTS:
            codecs = [c for c in request.codecs if transport != "nvlink" or c in NVLINK_CODECS]
            # A rank alone encodes nothing.
            for codec in codecs if ep * tp > 1 else request.codecs[:1]:
                for schedule in SCHEDULES[request.mode]:
                    if schedule == "fused" and transport != "nvlink":
                        continue
                    for replicas in request.replicas:
                        yield Layout(
                            ep=ep,
                            tp=tp,
                            dp=request.ranks // (ep * tp),
                            transport=transport,
                            codec=codec,
                            schedule=schedule,
                            replicas=replicas,
                        )


def divisions(request: Request) -> Iterator[tuple[int, int]]:
    """EP and TP that divide the ranks, EP up to the number of experts, TP that divides the expert width."""
    largest = min(request.ranks, request.shape.experts)
    for ep in (n for n in range(1, largest + 1) if request.ranks % n == 0):
        for tp in (n for n in (1, 2, 4, 8) if (request.ranks // ep) % n == 0):
            if request.shape.inner % tp == 0:
                yield ep, tp


def weigh(request: Request, world: World, layout: Layout, drawn: dict[tuple[int, int], Floats]) -> Plan:
    """Simulate one layout, or say why it cannot run. drawn: loads of ranks by EP and replicas, kept."""
    reason = why_not_possible(request, world, layout)
    if reason is not None:
        return Plan(layout=layout, outcome=None, why_not=reason)
    load_W = _loads(request, world, layout, drawn)
    fullest = float(load_W.max())
    memory = memory_of(request, world, layout, fullest)
    room = world.profile["memory_bytes"]
    if memory > room:
        reason = f"needs {memory / 1e9:.0f} GB a rank, which has {room / 1e9:.0f}"
        return Plan(layout=layout, outcome=None, memory=memory, imbalance=fullest - 1, why_not=reason)
    slow_W = world.stragglers.draw(layout.group, request.seed)
    case = Case(
        profile=world.profile,
        fabric=world.fabric,
        shape=request.shape,
        tokens=request.tokens,
        loads_W=load_W,
        speeds_W=slow_W,
        # Over bytes the host asks for the counts of rows, which no graph can hold.
        decode=request.mode == "decode" and (layout.transport == "nvlink" or layout.group == 1),
    )
    outcome = run.predict(case, layout, backward=request.mode == "train")
    return Plan(
        layout=layout,
        outcome=outcome,
        memory=memory,
        imbalance=fullest - 1,
        extrapolates=beyond(world, layout, training=request.training),
    )


def why_not_possible(request: Request, world: World, layout: Layout) -> str | None:
    """Why the layer would refuse this layout, or the profile says nothing of it; else `None`."""
    group, node = layout.group, world.fabric.node
    if group == 1 and (layout.transport != "alltoall" or layout.schedule != "serial"):
        return "there is only one rank, and nothing to move"
    if request.ranks > node and node % group and group % node:
        return f"groups of {group} ranks would lie across the edges of nodes of {node}"
    if layout.transport == "nvlink":
        reason = _why_not_nvlink(request, world, layout)
        if reason is not None:
            return reason
    elif layout.transport in NODEWISE and request.ranks <= node:
        return "all ranks are on one node"
    elif layout.transport in NODEWISE and (group <= node or group % node):
        return f"{group} ranks are not several whole nodes of {node}"
    if layout.transport == "tiered":
        if node % layout.tp:
            return f"{layout.tp} tensor ranks of an expert are not all on one node of {node}"
        if "tiers_chunk_s" not in world.profile:
            return "the profile says nothing of two tiers in one stream; write it anew with `imbrex profile`"
    if layout.replicas and layout.replicas + request.shape.experts > layout.ep * request.shape.experts:
        return "a rank would hold an expert twice"
    return None


def _why_not_nvlink(request: Request, world: World, layout: Layout) -> str | None:
    shape, limit = request.shape, min(world.fabric.node, run.NVLINK_RANKS)
    if layout.group > limit:
        return f"its kernels exchange among at most {limit} ranks of a node"
    reason = run.why_not_kernels(shape)
    if reason is not None:
        return reason
    if layout.codec == "fp8" and shape.width % FP8_MULTIPLE:
        return f"its kernels write fp8 rows of multiples of {FP8_MULTIPLE} values"
    if layout.schedule != "fused":
        return None
    if layout.codec != "identity":
        return "fused kernels move rows as they are"
    if shape.width % FUSED_MULTIPLE or shape.inner // layout.tp % FUSED_MULTIPLE:
        return f"fused kernels take widths of multiples of {FUSED_MULTIPLE}"
    if request.tokens <= run.FEW_FUSED:
        return f"calls of {run.FEW_FUSED} tokens a rank or fewer have a kernel of their own, not fused"
    return None


def beyond(world: World, layout: Layout, *, training: bool) -> tuple[str, ...]:
    """Reasons why a prediction is of what was never measured. Groups of data meet in a training alone."""
    reasons = []
    if layout.group > world.profile.most_ranks:
        reasons.append(f"{layout.group} ranks exchange, at most {world.profile.most_ranks} were measured")
    peers = world.fabric.peers(layout.world if training else layout.group)
    used = [tier for tier, number in zip(world.fabric.tiers, peers, strict=True) if number]
    reasons += [f"tier {t.name} is assumed: {t.source}" for t in used if t.status == "assumed"]
    if layout.schedule == "fused" and layout.group > FUSED_RANKS:
        reasons.append(f"fused kernels on {layout.group} ranks, at most {FUSED_RANKS} were measured")
    if layout.transport == "tiered" and (world.fabric.node > 1 or layout.group > TIERED_NODES):
        nodes = layout.group // world.fabric.node
        reasons.append(
            f"two tiers on {nodes} nodes of {world.fabric.node}, measured on {TIERED_NODES} of one rank"
        )
    if layout.schedule in run.DESIGNS:
        reasons.append(f"schedule {layout.schedule} is a design, not measured")
    return tuple(reasons)


def _loads(request: Request, world: World, layout: Layout, drawn: dict[tuple[int, int], Floats]) -> Floats:
    """The rows of every rank of a group over their mean, of the layer whose fullest rank is the median of all
    layers'."""
    key = layout.ep, layout.replicas
    if key not in drawn:
        experts, top_k, spread = request.shape.experts, request.shape.top_k, world.spread
        choices = request.tokens * layout.group * top_k
        load_LE = spread.draw(experts, choices, request.seed, top_k=top_k)
        if layout.ep * experts > MOST_PLACED:
            load_LE = load_LE[:1]
        if spread.history or (layout.ep > 1 and (layout.replicas or spread.kind in ("zipf", "lognormal"))):
            record = spread.record(experts, choices, request.seed, top_k=top_k, layers=request.layers)
            slots = experts + layout.replicas
            load_LW = loads.of_homes(load_LE, loads.homes(record, layout.ep, slots, len(load_LE)))
        else:
            load_LW = loads.of_ranks(load_LE, layout.ep)
        drawn[key] = load_LW[load_LW.max(1).argsort()[len(load_LW) // 2]]
    return drawn[key].repeat(layout.tp)


def _complexity(layout: Layout) -> tuple[int, ...]:
    """The key by which simpler layouts come first: without codec, chunks, replicas, tensor ranks, moves."""
    return (
        layout.codec != "identity",
        run.parse_schedule(layout.schedule)[1],
        layout.schedule != "serial",
        layout.replicas,
        layout.tp,
        TRANSPORTS.index(layout.transport) if layout.group > 1 else -1,
    )


def _against(plan: Plan, best: Plan) -> str:
    """The reason against a plan that can run, beside the best one."""
    assert plan.outcome is not None
    assert best.outcome is not None
    slower = plan.seconds / best.seconds - 1
    if slower <= CLOSE - 1:
        return f"as fast ({slower:+.1%}), with more parts" if slower < 0 else f"{slower:.1%} slower"
    longer = {name: plan.outcome.parts[name] - seconds for name, seconds in best.outcome.parts.items()}
    longer["sync"] = plan.outcome.sync - best.outcome.sync
    hidden = plan.seconds - best.seconds - sum(longer.values())
    name, loss = max([*longer.items(), ("hidden", hidden)], key=lambda pair: pair[1])
    return f"{slower:.0%} slower: {_in_words(name, plan.layout, best.layout)} ({1e3 * loss:.2g} ms)"


def _in_words(name: str, layout: Layout, best: Layout) -> str:
    """A sentence for the part of an outcome by which a layout loses most; `hidden` is the time that it hides
    less than the best."""
    if name == "hidden":
        if _hiding(layout) <= _hiding(best):
            return "it hides less"
        what = "launches" if layout.schedule == "fused" else "chunks"
        return f"its {what} cost more than they hide"
    if name == "copies" and layout.transport == "tiered":
        return "its copies and rows inside nodes take longer"
    return {
        "rows": "its rows take longer",
        "experts": "its experts take longer",
        "copies": f"its {'codec and ' * (layout.codec != 'identity')}copies take longer",
        "host": "its host takes longer, as it asks for counts",
        "sync": "it sums gradients of more copies",
    }[name]


def _hiding(layout: Layout) -> tuple[int, bool]:
    """The order of layouts by how much they try to hide: by chunks, then by fused kernels."""
    return run.parse_schedule(layout.schedule)[1], layout.schedule == "fused"


def rivals(plans: Sequence[Plan]) -> list[Plan]:
    """The plans that say most about why not: for every value of the layout that the best one has not, the
    fastest with it, or one that says why it cannot run."""
    best, telling = plans[0], list[Plan]()
    for name in ("ep", "tp", "transport", "codec", "schedule", "replicas"):
        seen = {getattr(best.layout, name)}
        for plan in plans[1:]:
            value = getattr(plan.layout, name)
            if value not in seen:
                seen.add(value)
                telling.append(plan)
    unique = {plan.layout: plan for plan in telling}
    return sorted(unique.values(), key=lambda plan: plan.seconds)


def choices_of_codec(names: Sequence[str], profile: Profile) -> tuple[str, ...]:
    """The codecs whose rates a profile has. Raises ValueError for one that it lacks."""
    for name in names:
        make(name)
        if name != "identity" and f"encode_values_s:{name}" not in profile:
            rates = sorted(
                entry.partition(":")[2] for entry in profile if entry.startswith("encode_values_s")
            )
            raise ValueError(f"--codecs: the profile has no rate of {name!r}; it has {', '.join(rates)}")
    return tuple(dict.fromkeys(names))


__all__ = [
    "TRANSPORTS",
    "Plan",
    "beyond",
    "choices_of_codec",
    "choose",
    "layouts",
    "rivals",
    "unasked_plans",
    "weigh",
]
