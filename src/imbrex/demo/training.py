"""One training step of the demo's language model, the same for every number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import imbrex
from imbrex.balancer import OnlineBalancer
from imbrex.contracts import Codec
from imbrex.demo import by_sequence
from imbrex.demo.corpus import Corpus
from imbrex.demo.model import BytesLM, BytesLMConfig
from imbrex.launch.factors import Factors, make_groups, new_group
from imbrex.observe import Observer
from imbrex.placement import contiguous, from_slots


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model's shape: a checkpoint fits only the same. expert_width: F; top_k: K."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_experts: int = 8
    top_k: int = 2
    expert_width: int = 192


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The settings of a training. batch: sequences in the global batch. length: bytes predicted by one.
    schedule: of every layer, by name."""

    steps: int = 200
    batch: int = 16
    length: int = 128
    seed: int = 0
    learning_rate: float = 2e-3
    clip: float = 1.0
    schedule: str = "serial"

    @property
    def losses(self) -> imbrex.AuxLosses | None:
        """The auxiliary losses of the run; `None` where a schedule has patience: over the global batch, a
        loss meets all ranks before a row moves, and patience would never begin."""
        return None if self.schedule.startswith("events(") else imbrex.AuxLosses(load_balance=0.01)

    def rate(self, step: int) -> float:
        """Learning rate of `step`: 20 steps of warm-up, then half a cosine down to a tenth."""
        warm = min(1.0, (step + 1) / 20)
        return self.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * step / max(1, self.steps)))


def make_model(
    shape: Shape,
    recipe: Recipe,
    factors: Factors,
    *,
    transport: str,
    codec: str | Codec | Mapping[str, str | Codec],
    timeout_s: float,
    observer: Observer,
    balancer: OnlineBalancer | None = None,
) -> BytesLM:
    """The language model; its parameters depend on the seed and not on the ranks. Every rank must call it.

    balancer: moves experts while the model trains; every rank then has a spare slot.
    """
    shares, copies = make_groups(factors, timeout_s)
    config = imbrex.MoEConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.expert_width,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
    )

    home = contiguous(shape.num_experts, factors.expert)
    spares = [[*home.local(rank), -1] for rank in range(factors.expert)]

    def make_moe(index: int) -> nn.Module:
        layer = imbrex.MoELayer(
            config,
            group=shares,
            tensor_parallel=factors.tensor,
            data_group=copies,
            transport=transport,
            codec=codec,
            schedule=recipe.schedule,
            losses=recipe.losses,
            placement=home if balancer is None else from_slots(spares, shape.num_experts),
            balancer=balancer,
            observer=observer,
            layer=index,
            timeout=timeout_s,
        )
        layer.gate.project = _project
        return layer

    torch.manual_seed(recipe.seed)
    dense = BytesLMConfig(
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        max_length=recipe.length,
    )
    return BytesLM(dense, make_moe)


class Trainer:
    """A model, its optimiser, and the batches of this rank. balancer: the model's."""

    def __init__(
        self,
        model: BytesLM,
        corpus: Corpus,
        recipe: Recipe,
        factors: Factors,
        *,
        rank: int,
        timeout_s: float,
        observer: Observer,
        balancer: OnlineBalancer | None = None,
    ) -> None:
        self.model, self.corpus, self.recipe, self.factors = model, corpus, recipe, factors
        self.rank, self.observer, self.device = rank, observer, next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
        self.balancer = balancer
        if balancer is not None:
            balancer.optimizer = self.optimizer
        experts = {id(parameter) for parameter in imbrex.expert_parameters(model)}
        self._experts = [p for p in model.parameters() if id(p) in experts]
        self._dense = [p for p in model.parameters() if id(p) not in experts]
        self._group = new_group(None, timeout_s) if factors.num_ranks > 1 else None
        self._held_out = corpus.held_out_batches(8, batch=recipe.batch, length=recipe.length)

    def step(self, step: int) -> Tensor:
        """Train on the global batch of `step`. This rank's sum of nats over its bytes, float64 scalar."""
        recipe, observer = self.recipe, self.observer
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        bytes_BS = self._mine(
            self.corpus.batch(step, seed=recipe.seed, batch=recipe.batch, length=recipe.length)
        )
        with observer.span("forward"):
            nats = self._nats(bytes_BS)
            share = self.factors.token_ranks / (recipe.batch * recipe.length)
            loss = nats * share + imbrex.aux_loss(self.model)
        with observer.span("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        with observer.span("gradients"):
            imbrex.sync_gradients(self.model, dense=False)
            by_sequence.average(self._dense, parts=self.factors.token_ranks, group=self._group)
            self._clip()
        with observer.span("optimizer"):
            self.optimizer.step()
        if self.balancer is not None:
            with observer.span("balance"):
                self.balancer.step()
        return nats.detach().double()

    def held_out_nats(self) -> Tensor:
        """This rank's sum of nats over its part of the held-out bytes, float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad(), self.observer.span("held_out"):
            for batch in self._held_out:
                total += self._nats(self._mine(batch)).double()
        return total

    @property
    def held_out_bytes(self) -> int:
        return self._held_out[..., 1:].numel()

    def _mine(self, bytes_BS: Tensor) -> Tensor:
        return bytes_BS[self.factors.slice(self.rank, len(bytes_BS))].to(self.device)

    def _nats(self, bytes_BS: Tensor) -> Tensor:
        logits_BSV = self.model(bytes_BS[:, :-1])
        nats = F.cross_entropy(logits_BSV.flatten(0, 1), bytes_BS[:, 1:].flatten(), reduction="none")
        return nats.view(len(bytes_BS), -1).sum(1).double().sum()

    def _clip(self) -> None:
        """Scale all gradients to a global norm of at most `clip`; every expert counts once."""
        squares = torch.stack([_square(self._dense, self.device), self._square_experts()])
        experts = squares[1].clone()
        if self.factors.num_ranks > 1:
            dist.all_reduce(experts, group=self._group)
        norm = (squares[0] + experts / self.factors.data).sqrt()
        scale = (self.recipe.clip / (norm + 1e-6)).clamp(max=1.0).float()
        for parameter in (*self._dense, *self._experts):
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def _square_experts(self) -> Tensor:
        layers = [module for module in self.model.modules() if isinstance(module, imbrex.MoELayer)]
        if not any(layer.placement.has_replicas for layer in layers):
            return _square(self._experts, self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for layer in layers:
            slots = layer.placement.slots
            share = [1 / max(slots.count(expert), 1) for expert in layer.experts.expert_ids]
            share_e = torch.tensor(share, dtype=torch.float64, device=self.device)
            for parameter in layer.experts.parameters():
                if parameter.grad is not None:
                    total += parameter.grad.double().square().flatten(1).sum(1) @ share_e
        return total


def _project(x_TD: Tensor, weight_ED: Tensor, num_sequences: int) -> Tensor:
    """The gate's logits [T, E]; its gradient is summed sequence by sequence."""
    x_SLD = x_TD.float().unflatten(0, (num_sequences, -1))
    return by_sequence.linear(x_SLD, weight_ED.float()).flatten(0, 1)


def _square(parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    """Sum of the squares of all gradients, float64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.double().square().sum()
    return total
