"""Predicts the time of one layer with one layout: the seconds of its tasks, and the events of its schedule.

Over NVLink a crossing is one kernel, which routes, moves and sums, so the tasks `encode` and `decode` take no
time. A rank alone has such kernels too, and no network. Over bytes, rows are copied into buffers, encoded,
moved, decoded and copied to the experts, and every chunk costs host time too. With two tiers a move is that
over the network, and the exchange inside the node is done in turn with computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from imbrex.codec import make
from imbrex.schedule.contention import Contention
from imbrex.schedule.schedulers import SCHEDULERS
from imbrex.schedule.tasks import Kind, Task, tasks
from imbrex.simulate import device, traffic
from imbrex.simulate.device import Shape, Share
from imbrex.simulate.engine import Arrival, Floats, simulate
from imbrex.simulate.fabric import Fabric
from imbrex.simulate.loads import Stragglers
from imbrex.simulate.profile import Profile
from imbrex.transport.nvlink import MOST_CHOICES, ROW_MULTIPLE

NVLINK_RANKS = 16
"""Ranks among which the kernels over NVLink exchange rows (`transport/nvlink.py`)."""
FEW_TOKENS = 512
"""Tokens of a rank up to which a crossing over NVLink has more multiprocessors."""
FEW_FUSED = 256
"""Tokens of a rank up to which one kernel over NVLink routes and moves (`exchange/nvlink_fit.py`): a fused
layer runs serially, and no host asks how many rows come."""
PIECES = 8
"""Parts into which a layer of one kernel is thought to be cut."""
DESIGNS = ("one-kernel", "events")
"""Schedules that were designed, and measured on no GPU."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a layer runs. ranks: ep x tp x dp; tensor ranks are next to each other, and data-parallel groups
    farthest apart.
    schedule: `serial`, a scheduler and a number of chunks, `fused` (over NVLink, with the kernels that
    exist), or a design that does not exist: `one-kernel` for the whole layer, and `events` without waiting
    for all ranks."""

    ep: int = 1
    tp: int = 1
    dp: int = 1
    transport: str = "alltoall"
    codec: str = "identity"
    schedule: str = "serial"
    replicas: int = 0

    @property
    def group(self) -> int:
        """Ranks that exchange rows."""
        return self.ep * self.tp

    @property
    def world(self) -> int:
        return self.group * self.dp

    def __str__(self) -> str:
        spread = f"EP {self.ep} x TP {self.tp} x DP {self.dp}"
        more = f", {self.replicas} replicas" if self.replicas else ""
        return f"{spread}, {self.transport}, {self.codec}, {self.schedule}{more}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Predicted seconds of one layer's forward and backward on the slowest rank.

    tiers: bytes that a rank sends to experts in a forward, by tier. tasks: seconds of every kind of task of
    the slowest rank in a forward, in one chunk, one after the other. parts: the same divided into moving
    rows, experts, copies and host, and of a backward. sync: seconds to sum the gradients of experts over
    groups that have copies of them.
    """

    forward: float
    backward: float
    tiers: tuple[float, ...]
    tasks: Mapping[str, float]
    parts: Mapping[str, float]
    sync: float = 0.0

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.sync


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A layer on a machine. tokens: of a rank. loads_W: rows of every rank of a group, over their mean.
    speeds_W: how many times longer its tasks take. jitter: how much longer single tasks take, drawn from
    `seed` for every task. decode: there are few tokens, and a step is a CUDA graph, so host time does not
    count."""

    profile: Profile
    fabric: Fabric
    shape: Shape
    tokens: float
    loads_W: Floats | None = None
    speeds_W: Floats | None = None
    decode: bool = False
    jitter: Stragglers | None = None
    seed: int = 0


def predict(case: Case, layout: Layout, *, backward: bool = True) -> Outcome:
    """Predict the seconds of a layer's forward and, unless `backward` is false, of its backward."""
    costs = _Costs(case, layout)
    scheduler, degree = parse_schedule(layout.schedule)
    ways = (False, True) if backward else (False,)
    spans = [_makespan(costs, scheduler, degree, back) for back in ways]
    seconds = costs.seconds(1, backward=False, apart=True)
    parts = [costs.parts(back) for back in ways]
    return Outcome(
        forward=spans[0] + costs.planning(degree),
        backward=spans[1] if backward else 0.0,
        tiers=costs.flow.nbytes,
        tasks={task.kind.name: float(part.max()) for task, part in seconds.items()},
        parts={name: sum(of[name] for of in parts) for name in parts[0]},
        sync=gradient_sync(case, layout) if backward else 0.0,
    )


def parse_schedule(schedule: str) -> tuple[str, int]:
    """The scheduler and the number of chunks of a schedule's name."""
    if schedule in ("serial", "fused"):
        return "sequential", 1
    if schedule in DESIGNS:
        return "optsche", PIECES
    name, _, number = schedule.rpartition("-")
    if name not in SCHEDULERS or not number.isdecimal() or int(number) < 1:
        known = ", ".join(f"{part}-2" for part in SCHEDULERS)
        raise ValueError(f"simulate: schedule {schedule!r}; use serial, fused, {known}, {', '.join(DESIGNS)}")
    return name, int(number)


def has_kernels(profile: Profile, shape: Shape) -> bool:
    """Whether experts are computed by kernels, and a rank alone has those of a crossing."""
    return shape.value_bytes == 2 and profile["multiprocessors"] > 1


def kernels_inside(profile: Profile, shape: Shape, node: int) -> bool:
    """Whether kernels move rows inside a node, where something else does between nodes."""
    return has_kernels(profile, shape) and 1 < node <= NVLINK_RANKS and why_not_kernels(shape) is None


def why_not_kernels(shape: Shape) -> str | None:
    """Why the kernels over NVLink do not move a layer's rows, or `None` (`exchange/nvlink_fit.py`)."""
    if shape.value_bytes != 2:
        return "its kernels move bfloat16 only"
    if shape.width * shape.value_bytes % ROW_MULTIPLE:
        return f"its kernels move rows of multiples of {ROW_MULTIPLE} bytes"
    if shape.top_k > MOST_CHOICES:
        return f"its kernels take at most {MOST_CHOICES} choices a token"
    return None


def gradient_sync(case: Case, layout: Layout) -> float:
    """Seconds to sum the experts' gradients over the groups, as a ring over the farthest tier."""
    if layout.dp == 1:
        return 0.0
    shape, group = case.shape, layout.group
    nbytes = shape.parameters / group * shape.value_bytes * 2 * (layout.dp - 1) / layout.dp
    place = next(i for i, tier in enumerate(case.fabric.tiers) if layout.world <= tier.ranks)
    tier = case.fabric.tiers[place]
    return tier.seconds(nbytes, 2 * (layout.dp - 1), min(group, case.fabric.node))


def _makespan(costs: _Costs, scheduler: str, degree: int, backward: bool) -> float:
    seconds = costs.seconds(degree, backward=backward)
    # A scheduler knows one time a task: that of the slowest rank.
    times = {task: float(part.max()) for task, part in seconds.items()}
    order, case = SCHEDULERS[scheduler](times), costs.case
    if case.jitter is not None:
        for number, task in enumerate(seconds):
            seconds[task] = seconds[task] * case.jitter.draw(
                costs.layout.group, (case.seed, backward, number)
            )
    serial = scheduler == "sequential"
    arrival = Arrival.ONE_SIDED if costs.layout.schedule == "events" else Arrival.COLLECTIVE
    contention = Contention() if serial else costs.contention()
    span = simulate(order, seconds, contention=contention, arrival=arrival).seconds
    return max(span, costs.queued(degree, backward=backward))


class _Costs:
    """Seconds of the tasks of a layer, on every rank of one group."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.case, self.layout, self.profile = case, layout, case.profile
        shape, group = case.shape, layout.group
        self.kernels = layout.transport == "nvlink" or (group == 1 and has_kernels(self.profile, shape))
        self.kernels_inside = kernels_inside(self.profile, shape, case.fabric.node)
        self.tiered = layout.transport == "tiered"
        row = make(layout.codec).nbytes(shape.width, DTYPES[shape.value_bytes])
        self.crowd = traffic.Crowd(
            ranks=group,
            tensor=layout.tp,
            experts=shape.experts,
            top_k=shape.top_k,
            tokens=case.tokens,
            row_bytes=row,
        )
        self.flow = traffic.FLOWS[layout.transport](self.crowd, case.fabric)
        ones = np.ones(group)
        self.load_W = ones if case.loads_W is None else np.repeat(case.loads_W, group // len(case.loads_W))
        self.speed_W = ones if case.speeds_W is None else case.speeds_W
        self.runs_ahead = self.profile["multiprocessors"] > 1
        self.rows = case.tokens * shape.top_k * layout.tp
        self.slots = (shape.experts + layout.replicas) / layout.ep

    def planning(self, degree: int) -> float:
        """Seconds before the first row of a forward leaves. All chunks are planned together, in a message;
        of several, another one says before whether the input is fine."""
        if self.kernels or self.case.decode:
            return 0.0
        messages = 1 if degree == 1 else 2
        return messages * self.profile["plan_s"] + degree * self.profile["plan_chunk_s"]

    def host(self, *, backward: bool) -> float:
        """The host's seconds a chunk over bytes."""
        if self.kernels or self.case.decode:
            return 0.0
        if self.tiered:
            return self.profile["tiers_chunk_s"]
        return self.profile[f"chunk_{'backward' if backward else 'forward'}_s"]

    def queued(self, degree: int, *, backward: bool) -> float:
        """Seconds until the host of a GPU has queued a backward. It runs ahead, since all counts of rows are
        known by then; in a forward, and where the host computes itself, its time is part of the tasks."""
        return degree * self.host(backward=True) if backward and self.runs_ahead else 0.0

    def contention(self) -> Contention:
        kind = "nvlink" if self.kernels else "bytes"
        return Contention(
            compute=self.profile[f"{kind}_slows_compute"], moves=self.profile[f"{kind}_slows_moves"]
        )

    def seconds(self, degree: int, *, backward: bool, apart: bool = False) -> dict[Task, Floats]:
        """Seconds of every task of `degree` equal chunks. Pieces of one kernel are no smaller launches: they
        share one, so a piece takes its part of the whole. apart: with nothing inside of another's launch."""
        whole = self.layout.schedule in DESIGNS
        part = 1 if whole else degree
        if self.tiered:
            by_kind = self._tiers(part, backward)
        else:
            by_kind = self._nvlink(part) if self.kernels else self._bytes(part, backward)
        by_kind |= self._experts(part, backward)
        if self.layout.schedule == "fused" and not apart:
            by_kind |= self._fused(by_kind, backward)
        scale = 1 / degree if whole else 1.0
        if not self.runs_ahead:
            # A processor is its own host, and every task of it takes operators, allocations and calls.
            own = [kind for kind in by_kind if kind not in (Kind.move_out, Kind.move_back)]
            by_kind |= {kind: by_kind[kind] + self.host(backward=backward) / len(own) for kind in own}
        every = tasks(degree, weights=backward)
        return {task: by_kind[task.kind] * scale * self._slowed(task.kind) for task in every}

    def parts(self, backward: bool) -> dict[str, float]:
        """Seconds of one direction in one chunk, one task after the other, by what they are of."""
        sums = dict.fromkeys(("rows", "experts", "copies"), 0.0)
        for task, of_ranks in self.seconds(1, backward=backward, apart=True).items():
            moves = task.kind in (Kind.move_out, Kind.move_back)
            name = "rows" if moves else "experts" if task.kind in (Kind.experts, Kind.weights) else "copies"
            sums[name] += float(of_ranks.max())
        host, pause = self._asking(backward)
        host *= float(self.speed_W.max())
        # A backward waits for a host that is slower than its tasks.
        rest = self.queued(1, backward=backward) - sum(sums.values())
        sums |= {"copies": sums["copies"] - host, "rows": sums["rows"] - pause}
        planning = 0.0 if backward else self.planning(1)
        return sums | {"host": host + pause + planning + max(rest, 0.0) * backward}

    def _asking(self, backward: bool) -> tuple[float, float]:
        """The seconds of a chunk in which the host of a GPU asks for counts: those in which nothing is
        copied, and those in which nothing moves either. In two tiers rows move all the same."""
        if backward or not self.runs_ahead:
            return 0.0, 0.0
        host = self.host(backward=False)
        return host, 0.0 if self.tiered else host * self.profile["host_holds_moves"]

    def _slowed(self, kind: Kind) -> Floats:
        return np.ones(1) if kind in (Kind.move_out, Kind.move_back) else self.speed_W

    def _experts(self, degree: int, backward: bool) -> dict[Kind, Floats]:
        share = Share(
            experts=self.slots,
            inner=max(1, self.case.shape.inner // self.layout.tp),
            rows_W=self.rows * self.load_W / degree,
        )
        # A piece over NVLink takes more than its kernels: their gaps, and ranks that meet. No graph has gaps.
        gaps = self.kernels and not self.case.decode
        beside = self.profile[f"piece_{'backward' if backward else 'forward'}_s"] if gaps else 0.0
        if not backward:
            return {Kind.experts: device.forward(self.profile, self.case.shape, share) + beside}
        return {
            Kind.experts: device.backward_rows(self.profile, self.case.shape, share) + beside,
            Kind.weights: device.backward_weights(self.profile, self.case.shape, share, chunks=degree),
        }

    def _wire(self, degree: int) -> Floats:
        """Seconds of the rows on the links; a rank that gets more than the mean waits for it."""
        return self._sent(traffic.part(self.flow, degree))

    def _sent(self, flow: traffic.Flow) -> Floats:
        sharing = min(self.crowd.ranks, self.case.fabric.node)
        return traffic.seconds(flow, self.case.fabric, sharing=sharing) * np.maximum(1.0, self.load_W)

    def _nvlink(self, degree: int) -> dict[Kind, Floats]:
        """The seconds of every kind of task over NVLink, where a crossing is one kernel."""
        beside = degree > 1 or self.layout.schedule not in ("serial", "fused")
        out, back = self._crossings(self._wire(degree), degree, beside=beside)
        return dict.fromkeys(Kind, np.zeros_like(self.load_W)) | {Kind.move_out: out, Kind.move_back: back}

    def _crossings(self, wire_W: Floats, degree: int, *, beside: bool) -> tuple[Floats, Floats]:
        """Seconds of the kernels that dispatch and combine: a start, and the slower of the wire and of the
        rows that they store or read; choices are routed meanwhile. beside: products that run, too."""
        profile, rows_W = self.profile, self._row_bytes(degree)
        few = self.case.tokens <= FEW_TOKENS
        sms = profile[f"{'beside' if beside else 'small' if few else 'dispatch'}_multiprocessors"]
        stored_W = rows_W / (sms * profile["stored_bytes_s_a_multiprocessor"])
        out = np.maximum(wire_W, stored_W) + profile["dispatch_start_s"]
        back = np.maximum(wire_W * profile["combine_wire_factor"], rows_W / profile["summed_bytes_s"])
        return out, back + profile["combine_start_s"]

    def _row_bytes(self, degree: int = 1) -> Floats:
        """Bytes of the rows that the experts of every rank compute in a chunk."""
        return self.rows * self.load_W / degree * self.case.shape.width * self.case.shape.value_bytes

    def _fused(self, alone: Mapping[Kind, Floats], backward: bool) -> dict[Kind, Floats]:
        """The seconds that a crossing still takes if it runs in the launch of a product. Rows come beside
        gate and up, two thirds of the experts; rows of dy beside the gradient through down, a third of the
        rows' gradients; dx goes home beside the weights' gradients. To bring rows, every token is read once
        and its rows are stored; the product beside lacks the bandwidth for these bytes. What is left of a
        crossing is the time of these bytes, or that by which it is longer than the product, whichever is
        more."""
        profile, out, experts = self.profile, alone[Kind.move_out], alone[Kind.experts]
        read = self.case.tokens * self.case.shape.width * self.case.shape.value_bytes + sum(self.flow.nbytes)
        rate = profile["fused_again_bytes_s" if backward else "weights_bytes_s"]
        beside, start = experts * (1 if backward else 2) / 3, profile["dispatch_start_s"]
        rest = np.maximum((read + self._row_bytes()) / rate, out - start - beside)
        moves = {Kind.move_out: np.minimum(out, start + rest)}
        if backward:
            home, weights = alone[Kind.move_back], alone[Kind.weights]
            moves[Kind.move_back] = home - profile["fused_hides_home"] * np.minimum(home, weights)
        return moves

    def _bytes(self, degree: int, backward: bool) -> dict[Kind, Floats]:
        profile, shape, codec = self.profile, self.case.shape, self.layout.codec
        value = shape.width * shape.value_bytes
        rows_out = self.crowd.tokens * traffic.share_reached(self.crowd, 1) * self.crowd.ranks / degree
        out_W = rows_out * np.ones_like(self.load_W)
        arrived_W, rows_W = rows_out * self.load_W, self.rows * self.load_W / degree
        copied = value / profile["copied_bytes_s"]
        host, pause = self._asking(backward)
        wire_W = self._wire(degree)
        coded = device.codec_seconds
        width = shape.width
        return {
            Kind.encode_out: host + out_W * copied + coded(profile, codec, "encode", out_W, width),
            Kind.move_out: wire_W + pause,
            Kind.decode_out: rows_W * copied + coded(profile, codec, "decode", arrived_W, width),
            Kind.encode_back: rows_W * copied + coded(profile, codec, "encode", arrived_W, width),
            Kind.move_back: wire_W,
            Kind.decode_back: out_W * copied + coded(profile, codec, "decode", out_W, width),
        }

    def _tiers(self, degree: int, backward: bool) -> dict[Kind, Floats]:
        """The seconds of every kind of task in two tiers. Rows of a chunk leave with the plan, once to a
        node. The exchange inside the node, by kernels if they can, is the second step of a move, for which a
        chunk waits when its rows have come."""
        profile, shape, codec = self.profile, self.case.shape, self.layout.codec
        value, width = shape.width * shape.value_bytes, shape.width
        size = min(self.crowd.ranks, self.case.fabric.node)
        tokens, nodes = self.crowd.tokens / degree, self.crowd.ranks / size
        leave_W = tokens * traffic.share_reached(self.crowd, size) * (nodes - 1) * np.ones_like(self.load_W)
        pool = tokens + float(leave_W[0])
        copied = value / profile["copied_bytes_s"]
        wire_W = self._sent(traffic.part(traffic.across(self.flow), degree))
        near_W = self._sent(traffic.part(traffic.inside(self.flow), degree))
        if self.kernels_inside:
            spread, summed = self._crossings(near_W, degree, beside=degree > 1)
        else:
            spread = summed = near_W + self.rows * self.load_W / degree * copied
        host, _ = self._asking(backward)
        coded = device.codec_seconds
        return {
            Kind.encode_out: host + leave_W * copied + coded(profile, codec, "encode", leave_W, width),
            Kind.move_out: wire_W,
            Kind.decode_out: spread + pool * copied + coded(profile, codec, "decode", leave_W, width),
            Kind.encode_back: summed + coded(profile, codec, "encode", leave_W, width),
            Kind.move_back: wire_W,
            Kind.decode_back: leave_W * copied + coded(profile, codec, "decode", leave_W, width),
        }


__all__ = [
    "Case",
    "Layout",
    "Outcome",
    "gradient_sync",
    "has_kernels",
    "kernels_inside",
    "parse_schedule",
    "predict",
    "why_not_kernels",
]
