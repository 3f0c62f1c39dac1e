"""What ranks do in the balancer's tests: layers whose popular experts change, with and without a balancer."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import imbrex
from imbrex.balancer import Mover, OnlineBalancer, Pace, online
from imbrex.balancer.migration import Change
from imbrex.balancer.peer_memory import PeerMover
from imbrex.balancer.renewal import DueLayer
from imbrex.contracts import Placement, RowForm
from imbrex.kernels.ffn.fp8 import quantise_experts
from imbrex.launch.factors import factorise, make_groups
from imbrex.placement import from_slots
from tests.ranks.pool import Ranks

SEED = 77
EAGER = Pace(layer_updates_per_iter=2, threshold=0.0, window=2, decay=0.5, max_moves=8, proposals=200, sure=0)
MOST_ITERATIONS = 300


def first_slots(world: int, experts: int) -> list[list[int]]:
    """Experts in order, and one replica a rank: of the expert at the same place one rank on."""
    per_rank = experts // world
    return [
        [*range(rank * per_rank, (rank + 1) * per_rank), ((rank + 1) % world) * per_rank]
        for rank in range(world)
    ]


class Model(nn.Module):
    """Layers one after the other, residual."""

    def __init__(
        self, ranks: Ranks, balancer, config: imbrex.MoEConfig, num_layers: int, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        tensor = options.get("tensor_parallel", 1)
        placement = from_slots(
            first_slots(ranks.world_size // tensor, config.num_experts), config.num_experts
        )
        self.layers = nn.ModuleList(
            imbrex.MoELayer(
                config, ranks.group, placement=placement, balancer=balancer, layer=3 + n, **options
            )
            for n in range(num_layers)
        )

    def forward(self, x_TD):
        for layer in self.layers:
            x_TD = x_TD + layer(x_TD)
        return x_TD


def tokens(rank: int, iteration: int, width: int, *, turn: int = 8) -> torch.Tensor:
    """Tokens around a direction that turns every few iterations, so that the popular experts change."""
    drawn = torch.Generator().manual_seed(SEED + 1000 * iteration + rank)
    turned = torch.Generator().manual_seed(iteration // turn)
    centre = torch.randn(width, generator=turned)
    return centre + torch.randn(6 + rank % 3, width, generator=drawn)


def numbers(iterations: int, balancer: OnlineBalancer | None, until: dict[str, int]) -> Iterator[int]:
    """Of iterations: that many, then until the tally says what it shall, which all ranks know alike, since a
    migration in the background has its own time."""
    for number in range(MOST_ITERATIONS):
        done = balancer is None or all(balancer.tally.values[name] >= n for name, n in until.items())
        if number >= iterations and done:
            return
        yield number


def infer(
    ranks: Ranks, config: imbrex.MoEConfig, iterations: int, pace: Pace | None, options: dict[str, Any]
) -> dict:
    """Outputs of every iteration, and what the balancer did. options: of the layers, `journal`, `until`,
    `policy`, the class of the balancer."""
    journal, until = options.pop("journal", None), options.pop("until", {})
    journal, policy = journal if ranks.rank == 0 else None, options.pop("policy", OnlineBalancer)
    balancer = None if pace is None else policy(pace, timeout=20, journal=journal)
    model = Model(ranks, balancer, config, 2, **options).eval()
    outputs, switched = [], 0
    source = 0 if options.get("transport") == "allreduce" else ranks.rank
    for iteration in numbers(iterations, balancer, until):
        with torch.no_grad():
            outputs.append(model(tokens(source, iteration, config.hidden_size)))
        if balancer is not None:
            switched += len(balancer.step())
    found = {"outputs": outputs, "switched": switched, "placements": [x.placement for x in model.layers]}
    if balancer is not None:
        balancer.settle()
        found |= {"tally": dict(balancer.tally.values), "metrics": balancer.metrics()}
        balancer.close()
    return found


def infer_two_steps_a_migration(ranks: Ranks, config: imbrex.MoEConfig, iterations: int, layers: int) -> set:
    """Numbers of the layers that switched where every migration is opened in one step, ended by the next and
    used in the one after, one layer a turn."""
    pace = replace(EAGER, layer_updates_per_iter=1)
    mover = type("Mover", (Unlucky,), {"slow_s": 0.01})
    balancer = OnlineBalancer(pace, timeout=20, mover=mover)
    model = Model(ranks, balancer, config, layers).eval()
    switched: list[int] = []
    for iteration in range(iterations):
        with torch.no_grad():
            model(tokens(ranks.rank, iteration, config.hidden_size, turn=2))
        if balancer._round is not None:
            balancer._round.future.exception()
        dist.barrier(ranks.group)
        switched += balancer.step()
    balancer.settle()
    balancer.close()
    return set(switched)


class Rotating(OnlineBalancer):
    """A policy of a user's own: the ranks' experts move on by one rank every time."""

    def renew(self, recent_HE: Any, placement: Placement, pace: Pace, *, whole_HE: Any) -> Placement | None:
        last = list(placement.local(placement.num_ranks - 1))
        others = [list(placement.local(rank)) for rank in range(placement.num_ranks - 1)]
        return from_slots([last, *others], placement.num_experts)


class Keeping(OnlineBalancer):
    """A policy that leaves every expert where it is."""

    def renew(self, recent_HE: Any, placement: Placement, pace: Pace, *, whole_HE: Any) -> None:
        return None


def keep_in_fp8(ranks: Ranks, config: imbrex.MoEConfig, iterations: int) -> tuple[int, bool]:
    """Layers switched; whether fp8 copies made before are those of the weights that are there now."""
    balancer = OnlineBalancer(EAGER, timeout=20)
    model = Model(ranks, balancer, config, 2).eval()
    experts = [cast("imbrex.MoELayer", layer).experts for layer in model.layers]
    kept = [one.quantised() for one in experts]
    switched = 0
    for iteration in numbers(iterations, balancer, {"switches": 2}):
        with torch.no_grad():
            model(tokens(ranks.rank, iteration, config.hidden_size, turn=2))
        switched += len(balancer.step())
    balancer.settle()
    balancer.close()
    same = True
    for one, copies in zip(experts, kept, strict=True):
        fresh = quantise_experts(one.gate_up_proj, one.down_proj)
        for old, new in zip(copies.tensors(), fresh.tensors(), strict=True):
            same &= torch.equal(old.view(torch.uint8), new.view(torch.uint8))
    return switched, same


def settle_often(ranks: Ranks, config: imbrex.MoEConfig, times: int) -> tuple[float, float, str]:
    """Migrations dropped and layers switched where each is settled at once, and why the balancer stopped."""
    balancer = OnlineBalancer(EAGER, timeout=20, most_failures=1)
    model = Model(ranks, balancer, config, 1).eval()
    for iteration in range(times):
        with torch.no_grad():
            model(tokens(ranks.rank, iteration, config.hidden_size))
        balancer.step()
        balancer.settle()
    balancer.close()
    tally = balancer.tally.values
    return tally["drops"], tally["switches"], balancer.stopped_because


def train(ranks: Ranks, config: imbrex.MoEConfig, iterations: int, pace: Pace | None, adam: bool) -> dict:
    """Outputs of a training run: AdamW with an epsilon that keeps it from blowing rounding up, or SGD."""
    balancer = None if pace is None else OnlineBalancer(pace, timeout=20)
    model = Model(ranks, balancer, config, 2)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
        if adam
        else torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    )
    return training_steps(ranks, model, optimizer, balancer, iterations, config.hidden_size)


def training_steps(
    ranks: Ranks,
    model: Model,
    optimizer: torch.optim.Optimizer,
    balancer: OnlineBalancer | None,
    iterations: int,
    width: int,
) -> dict:
    if balancer is not None:
        balancer.optimizer = optimizer
    """Two micro-batches and an evaluation an iteration, with a step of the balancer behind each. The first
    iteration gives all but the first data group no tokens."""
    data = cast("imbrex.MoELayer", model.layers[0]).ranks.data_group
    empty = data is not None and data.rank() > 0
    outputs, switched = [], 0
    for iteration in range(iterations):
        model.train()
        for part in (0, 1000):
            if part and balancer is not None:
                assert not balancer.step(), "the first micro-batch's gradients wait for the optimizer"
            x_TD = tokens(ranks.rank, part + iteration, width)
            y_TD = model(x_TD[:0] if empty and not iteration else x_TD)
            (y_TD**2).sum().div(100).backward()
            outputs.append(y_TD.detach())
        imbrex.sync_gradients(model)
        optimizer.step()
        if balancer is not None:
            switched += len(balancer.step())
        optimizer.zero_grad()
        # One is too few for a migration that begins, ends and is used in evaluations.
        for _ in range(4 if iteration == 1 else 1):
            with torch.no_grad():
                x_TD = tokens(ranks.rank, iteration, width)
                outputs.append(model.eval()(x_TD[:0] if empty and not iteration else x_TD))
            if balancer is not None:
                if balancer._round is not None:
                    balancer._round.future.exception()
                switched += len(balancer.step())
    if balancer is not None:
        balancer.close()
    return {"outputs": outputs, "switched": switched}


def train_in_two_groups(ranks: Ranks, config: imbrex.MoEConfig, iterations: int, pace: Pace | None) -> dict:
    """As `train`, on two groups of half the ranks that hold the same experts: `data_group`."""
    half = ranks.world_size // 2
    group, data_group = make_groups(factorise(ranks.world_size, expert=half), 20)
    inner = Ranks(rank=ranks.rank % half, world_size=half, group=group)
    balancer = None if pace is None else OnlineBalancer(pace, timeout=20)
    model = Model(inner, balancer, config, 2, data_group=data_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    found = training_steps(ranks, model, optimizer, balancer, iterations, config.hidden_size)
    return {**found, "placements": [x.placement for x in model.layers]}


class FileHeap:
    """Memory that ranks of one host share, where there is no GPU: stands in for `SymmetricHeap`."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        name = [f"/dev/shm/imbrex-test-{os.getpid()}-{time.time_ns()}"]
        dist.broadcast_object_list(name, group_src=0, group=group)
        self.path, self.nbytes, rank = name[0], nbytes, group.rank()
        size = nbytes * group.size()
        if rank == 0:
            with open(self.path, "wb") as file:
                file.truncate(size)
        dist.barrier(group)
        self.bytes = torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)
        dist.barrier(group)
        if rank == 0:
            os.unlink(self.path)

    def view(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        return self.bytes[rank * self.nbytes :][offset : offset + nbytes]

    def close(self, *, together: bool = True) -> None:
        self.bytes = self.bytes[:0]


def infer_by_peer_copies(ranks: Ranks, config: imbrex.MoEConfig, iterations: int, training: bool) -> dict:
    """As `infer`, weights written straight into the memory of the rank that wants them; every other migration
    asks for more room, so that the memory is made anew."""

    class Growing(PeerMover):
        def prepare(self, nbytes: int) -> None:
            super().prepare(nbytes + 4096 * (self.prepared // 2))
            self.prepared += 1

        prepared = 0

    def make(peers, device):
        return Growing(peers, device, ranks.group, make_heap=FileHeap)

    balancer = OnlineBalancer(EAGER, timeout=20, mover=make)
    model = Model(ranks, balancer, config, 2)
    model.train(training)
    if training:
        balancer.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    outputs, switched = [], 0
    for iteration in numbers(iterations, balancer, {"switches": 5}):
        with torch.no_grad():
            outputs.append(model(tokens(ranks.rank, iteration, config.hidden_size)))
        switched += len(balancer.step())
    balancer.settle()
    moved = balancer.tally.values["bytes_moved"]
    balancer.close()
    return {"outputs": outputs, "switched": switched, "moved": moved}


class WholeExperts(nn.Module):
    """Linear experts with weights -1, 0, 1: sums of whole tokens are exact in any order."""

    applies_weights = False
    forms = (RowForm.ROWS,)

    def __init__(self, expert_ids: tuple[int, ...], width: int) -> None:
        super().__init__()
        drawn = [torch.Generator().manual_seed(e) for e in expert_ids]
        rows = [torch.randint(-1, 2, (width, width), generator=g) for g in drawn]
        self.weight = nn.Parameter(torch.stack(rows).float())
        self.copied = self.weight.detach().clone()

    def weights_written(self, slots):
        """Bring the copy up to date where the balancer says."""
        self.copied[slots] = self.weight.detach()[slots]

    def forward(self, dispatched):
        rows = dispatched.rows_RD.split(dispatched.counts_e.tolist())
        return torch.cat([r @ w for r, w in zip(rows, self.weight, strict=True)])


class EighthsGate(nn.Module):
    """A router whose weights are multiples of 1/8."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate, self.losses, self.is_collective = gate, gate.losses, gate.is_collective

    def forward(self, *arguments, **options):
        routing = self.gate(*arguments, **options)
        return replace(routing, weights_TK=(routing.weights_TK * 8).round() / 8)


def infer_exactly(
    ranks: Ranks, config: imbrex.MoEConfig, switches: int, pace: Pace, num_layers: int, transport: str
) -> dict:
    """Layers that each see the same whole tokens, all rebalanced in every step, as in training, until that
    many have switched; how many numbers of their outputs are not what all experts on one rank give, to the
    bit."""
    balancer = OnlineBalancer(pace, timeout=20)
    slots = from_slots(first_slots(ranks.world_size, config.num_experts), config.num_experts)
    everything = WholeExperts(tuple(range(config.num_experts)), config.hidden_size).weight.detach()
    layers = []
    for number in range(num_layers):
        torch.manual_seed(SEED + number)
        experts = WholeExperts(slots.local(ranks.rank), config.hidden_size)
        layer = imbrex.MoELayer(
            config,
            ranks.group,
            placement=slots,
            balancer=balancer,
            layer=number,
            experts=experts,
            transport=transport,
        )
        setattr(layer, "gate", EighthsGate(layer.gate))  # noqa: B010 (not the type declared)
        layers.append(layer)
    balancer.optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()])
    wrong, switched = 0, 0
    source = 0 if transport == "allreduce" else ranks.rank
    for iteration in numbers(0, balancer, {"switches": switches}):
        x_TD = (4 * tokens(source, iteration, config.hidden_size, turn=1)).round()
        for layer in layers:
            with torch.no_grad():
                y_TD = layer(x_TD)
            ids_TK, weights_TK = layer.routing.ids_TK, layer.routing.weights_TK
            rows_TKD = torch.einsum("td,tkdf->tkf", x_TD, everything[ids_TK])
            wrong += int((y_TD != (rows_TKD * weights_TK[..., None]).sum(1)).sum())
        switched += len(balancer.step())
    balancer.settle()
    balancer.close()
    stale = sum(int((layer.experts.copied != layer.experts.weight).sum()) for layer in layers)
    return {"wrong": wrong, "switched": switched, "stale": stale}


class Unlucky(Mover):
    """Rank 1's migrations fail, die or take their time, by their number; `slow_steps` of the model, however
    fast it runs, where who runs it counts them in `steps`."""

    failing: tuple[int, ...] = ()
    deadly: tuple[int, ...] = ()
    slow_s = 0.0
    slow_steps = 0
    steps = 0

    def move(self, number, changes):
        unlucky = self.peers.expert_rank == 1
        if unlucky and number in self.deadly:
            os._exit(1)
        arrived = super().move(number, changes)
        if unlucky:
            time.sleep(self.slow_s)
            first, until = self.steps, time.monotonic() + 10
            while self.steps < first + self.slow_steps and time.monotonic() < until:
                time.sleep(0.001)
            if number in self.failing:
                raise ConnectionError("cut off")
        return arrived


def infer_unlucky(
    ranks: Ranks,
    config: imbrex.MoEConfig,
    iterations: int,
    patience: int,
    luck: dict[str, Any],
    until: dict[str, int],
) -> dict:
    """As `infer`; placements before every iteration, and the layers switched after it."""
    mover = type("Mover", (Unlucky,), dict(luck))
    balancer = OnlineBalancer(EAGER, timeout=20, mover=mover, patience=patience)
    model = Model(ranks, balancer, config, 2).eval()
    outputs, switched, placements, late = [], [], [], set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in numbers(iterations, balancer, until):
            placements.append([layer.placement for layer in model.layers])
            with torch.no_grad():
                outputs.append(model(tokens(ranks.rank, iteration, config.hidden_size)))
            # Time for a migration to end, as a larger model would take.
            time.sleep(0.01)
            switched.append(balancer.step())
            late.add(balancer.tally.values["late"])
            mover.steps += 1
        balancer.settle()
    balancer.close()
    said = [str(w.message) for w in caught if "balancer" in str(w.message)]
    found = {"outputs": outputs, "switched": switched, "placements": placements, "said": said}
    found |= {"late": late}
    return found | {"stopped": balancer.stopped_because, "tally": dict(balancer.tally.values)}


class Complaints:
    """Things that a balancer cannot do."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.x = ranks, torch.randn(4, 8)

    def layer(self, balancer: OnlineBalancer, **options: Any) -> imbrex.MoELayer:
        config = imbrex.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
        return imbrex.MoELayer(config, self.ranks.group, balancer=balancer, **options)

    def train_with(self, optimizer: Any, **options: Any) -> None:
        balancer = OnlineBalancer(**options)
        made = self.layer(balancer)
        balancer.optimizer = None if optimizer is None else optimizer(made.parameters())
        made(self.x).sum().backward()
        imbrex.sync_gradients(made)
        if balancer.optimizer is not None:
            balancer.optimizer.step()
        balancer.step()

    def backward_after_a_switch(self) -> None:
        balancer = Rotating(EAGER)
        made = self.layer(balancer)
        balancer.optimizer = torch.optim.SGD(made.parameters())
        loss = made(self.x).sum()
        assert balancer.step()
        loss.backward()

    def another_plan(self) -> str:
        """Rank 1 leaves the placement as it is; what the balancer says as it stops."""
        policy = Rotating if self.ranks.rank == 0 else Keeping
        balancer = policy(EAGER, timeout=2)
        made = self.layer(balancer)
        balancer.optimizer = torch.optim.SGD(made.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                made(self.x)
                balancer.step()
        return balancer.stopped_because

    def half_in_training(self) -> None:
        balancer = OnlineBalancer()
        self.layer(balancer, layer=0).eval()
        self.layer(balancer, layer=1)
        balancer.step()

    def unequal_plans(self) -> str:
        """Rank 1 alone plans something; switches, and what the balancer says as it stops."""

        def plan(wishes: list[DueLayer], *_: object) -> list[Change]:
            (due,) = wishes
            new = from_slots([[2, 3], [0, 1]], 4)
            mine = Change(layer=due.layer, old=due.placement, new=new, tensors=due.tensors)
            return [mine] if self.ranks.rank == 1 else []

        mover = type("Mover", (Mover,), {"move": lambda *_: {}})
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(online, "plan", plan)
            balancer = OnlineBalancer(EAGER, timeout=2, mover=mover)
            made = self.layer(balancer).eval()
            for _ in numbers(0, balancer, {"stopped": 1}):
                with torch.no_grad():
                    made(self.x)
                balancer.step()
        return f"{balancer.tally.values['switches']} switches: {balancer.stopped_because}"

    def closed(self) -> None:
        balancer = OnlineBalancer()
        balancer.close()
        self.layer(balancer)

    def odd_experts(self) -> None:
        experts = WholeExperts((0, 1), 8)
        experts.register_buffer("shared", torch.zeros(3))
        self.layer(OnlineBalancer(), experts=experts)


def complain(ranks: Ranks, case: str) -> str:
    """What a balancer says about something it cannot do."""
    made = Complaints(ranks)
    cases: dict[str, Any] = {
        "bytes": lambda: made.layer(OnlineBalancer(max_bytes_per_iter=100)),
        "pace": lambda: made.layer(OnlineBalancer(Pace(decay=0.5 + 0.1 * ranks.rank))),
        "no optimizer": lambda: made.train_with(None),
        "state": lambda: made.train_with(torch.optim.Adam, max_bytes_per_iter=1000),
        "adafactor": lambda: made.train_with(torch.optim.Adafactor),
        "another optimizer": lambda: made.train_with(lambda _: torch.optim.SGD([nn.Parameter(made.x)])),
        "experts": made.odd_experts,
        "backward": made.backward_after_a_switch,
        "twice": lambda: OnlineBalancer().attach(made.layer(OnlineBalancer())),
        "closed": made.closed,
        "plan": made.another_plan,
        "half in training": made.half_in_training,
        "unequal plans": made.unequal_plans,
    }
    try:
        return cases[case]()
    except (ValueError, RuntimeError) as error:
        return str(error)
