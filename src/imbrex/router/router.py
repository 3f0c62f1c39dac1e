"""Router: the module that chooses the experts of every token."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from imbrex.contracts import Routing
from imbrex.kernels.gate.choose import why_not_fused
from imbrex.router.capacity import keep
from imbrex.router.chosen import choose_by_kernels, only
from imbrex.router.gates import Gate, choose
from imbrex.router.global_batch import GlobalBatch
from imbrex.router.logits import logits
from imbrex.router.losses import AuxLosses, auxiliary_losses
from imbrex.router.node import gate_by_kernels, is_one_node
from imbrex.router.sparsemixer import sparsemixer
from imbrex.runtime.members import member
from imbrex.runtime.tracing import autocast_on


class Router(nn.Module):
    """The gate of a layer: from tokens [T, D] to a `Routing`, losses included.

    weight: [num_experts, width], as `gate.weight` in Hugging Face checkpoints.
    e_score_correction_bias: float32 buffer [num_experts], only with `Gate.bias`.
    batch: the ranks over which losses and capacity are defined, so that their number changes neither.

    Logits and scores are float32 whatever the dtype of the tokens, also under autocast.
    """

    weight: Tensor
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        *,
        gate: Gate | None = None,
        losses: AuxLosses | None = None,
        batch: GlobalBatch | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.gate, self.losses = gate or Gate(), losses or AuxLosses()
        self.gate.check(num_experts, top_k)
        self.num_experts, self.top_k = num_experts, top_k
        self.choice = self.gate.choice(top_k)
        self.batch = batch or GlobalBatch()
        self.weight = nn.Parameter(torch.empty(num_experts, width, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if self.gate.bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.reset_parameters()

    kernels = True
    """Whether the gate's kernels may choose, if it has any."""

    @staticmethod
    def project(x_TD: Tensor, weight_ED: Tensor, num_sequences: int) -> Tensor:
        """Logits, float32 [T, E], of tokens of any dtype, `num_sequences` of equal length. An instance may be
        given another function of the same result, for instance one that sums its gradient in another order.
        """
        return logits(x_TD, weight_ED)

    @property
    def is_collective(self) -> bool:
        """Whether a call communicates over `batch`."""
        return self.batch.num_ranks > 1 and bool(self.losses.names or self.gate.capacity)

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(width), as `torch.nn.Linear`; the bias to zero.

        Drawn in float32 on the CPU: another dtype or device takes other numbers from the generator.
        """
        bound = 1 / math.sqrt(self.weight.shape[1])
        if not self.weight.is_meta:
            drawn = torch.empty(self.weight.shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound)
            with torch.no_grad():
                self.weight.copy_(drawn)
        if self.e_score_correction_bias is not None:
            nn.init.zeros_(self.e_score_correction_bias)

    def forward(
        self,
        x_TD: Tensor,
        *,
        num_sequences: int = 1,
        kept_TK: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Routing:
        """Routing of the tokens [T, D]; collective over `batch` if there are losses or a capacity.

        num_sequences: how many sequences of equal length the tokens are, for the sequence-level loss.
        kept_TK: bool; keep exactly these choices, as recorded in a `Routing`, whatever the capacity says.
        after: 0, of the operator that a compiled graph must run before any sum over ranks.

        Raises ValueError for shapes or dtypes that do not fit.
        """
        weight_ED = member(self, "weight")
        self._check(x_TD, weight_ED.shape[1], num_sequences, kept_TK)
        given_TK = kept_TK if self.gate.capacity is None else None
        if autocast_on(x_TD):
            with torch.autocast(x_TD.device.type, enabled=False):
                routed = self._route(x_TD, weight_ED, num_sequences, given_TK, after)
        else:
            routed = self._route(x_TD, weight_ED, num_sequences, given_TK, after)
        ids_TK, weights_TK, losses = routed
        if self.gate.capacity is not None and (kept_TK is None or self.is_collective):
            # A rank that is given its choices comes to the sums all the same: others may not be.
            chosen_TK = keep(ids_TK, weights_TK, self.num_experts, self.gate.capacity, self.batch)
            kept_TK = chosen_TK if kept_TK is None else kept_TK
        if given_TK is None and kept_TK is not None:
            ids_TK = only(kept_TK, ids_TK)
        return Routing(ids_TK=ids_TK, weights_TK=weights_TK, losses=losses, kept_TK=kept_TK)

    def _route(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        num_sequences: int,
        kept_TK: Tensor | None,
        after: Tensor | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Ids, -1 where `kept_TK` says so, and scaled weights [T, K], and the losses of all choices."""
        if not self._is_one_node(x_TD, weight_ED):
            logits_TE = self.project(x_TD, weight_ED, num_sequences)
            logits_TE = logits_TE if after is None else logits_TE + after
            return self._choose(logits_TE, num_sequences, kept_TK)
        bias_E = self.e_score_correction_bias if self.gate.bias else None
        of = self.losses.names, num_sequences, self.batch
        ids_TK, weights_TK, losses = gate_by_kernels(x_TD, weight_ED, bias_E, self.choice, *of)
        return ids_TK if kept_TK is None else only(kept_TK, ids_TK), weights_TK, losses

    def _is_one_node(self, x_TD: Tensor, weight_ED: Tensor) -> bool:
        """Whether kernels do all from tokens to choice: no noise, and no projection of the caller's."""
        if not (x_TD.is_cuda and self.kernels) or self.gate.score == "sparsemixer":
            return False
        plain = type(self).project is Router.project and "project" not in self.__dict__
        if not plain or (self.gate.noise and self.training):
            return False
        return is_one_node(x_TD, weight_ED, self.choice)

    def _choose(
        self, logits_TE: Tensor, num_sequences: int, kept_TK: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Ids, -1 where `kept_TK` says so, and scaled weights [T, K], and the losses of all choices."""
        gate, bias_E = self.gate, self.e_score_correction_bias
        noise = gate.noise if self.training else 0.0
        scores_TE = None
        if gate.score == "sparsemixer":
            ids_TK, weights_TK = sparsemixer(logits_TE, self.top_k, jitter=gate.jitter, noise=noise)
        else:
            if noise:
                logits_TE = logits_TE + noise * torch.randn_like(logits_TE)
            if self.kernels and why_not_fused(logits_TE, self.choice) is None:
                of = self.losses.names, num_sequences, self.batch
                return choose_by_kernels(logits_TE, bias_E, self.choice, *of, kept_TK)
            scores_TE, ids_TK, weights_TK = self.best(logits_TE)
        losses = self._losses(logits_TE, scores_TE, ids_TK, num_sequences) if self.losses.names else {}
        if losses and torch.compiler.is_compiling():
            ids_TK = _behind(next(iter(losses.values())), ids_TK)
        return only(kept_TK, ids_TK), weights_TK * gate.scale, losses

    def best(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores [T, E], and ids and weights [T, K] that are not scaled yet, by operators of torch. A class
        that chooses otherwise says that `kernels` are not to."""
        scores_TE = self._scores(logits_TE)
        return scores_TE, *choose(scores_TE, self.e_score_correction_bias, self.gate, self.top_k)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid() if self.gate.score == "sigmoid" else logits_TE.softmax(-1)

    def _losses(
        self, logits_TE: Tensor, scores_TE: Tensor | None, ids_TK: Tensor, num_sequences: int
    ) -> dict[str, Tensor]:
        probability_TE = self._scores(logits_TE) if scores_TE is None else scores_TE
        if self.gate.score == "sigmoid":
            probability_TE = probability_TE / (probability_TE.sum(-1, keepdim=True) + 1e-20)
        return auxiliary_losses(
            logits_TE,
            probability_TE,
            ids_TK,
            num_sequences=num_sequences,
            losses_needed=self.losses,
            batch=self.batch,
        )

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor, speed: float) -> None:
        """Moves the selection bias of every expert by `speed` towards balance (DeepSeek-V3, section 2.1.2).

        counts_E: choices of every expert over the global batch, the same on every rank. An expert above the
        mean loses `speed`, one below gains it.
        """
        if self.e_score_correction_bias is None:
            raise ValueError(
                "Router.update_bias: this gate has no selection bias; build it with Gate(bias=True)"
            )
        if counts_E.shape != (self.num_experts,):
            raise ValueError(
                f"Router.update_bias: counts of shape {tuple(counts_E.shape)}; pass one per expert, "
                f"[{self.num_experts}]"
            )
        counts_E = counts_E.to(self.e_score_correction_bias.device, torch.float64)
        self.e_score_correction_bias += speed * (counts_E.mean() - counts_E).sign().float()

    def _check(self, x_TD: Tensor, width: int, num_sequences: int, kept_TK: Tensor | None) -> None:
        shape = x_TD.shape
        if len(shape) != 2 or shape[1] != width or not x_TD.is_floating_point():
            raise ValueError(
                f"Router: tokens of shape {tuple(shape)} and {x_TD.dtype}; pass floating point [T, {width}]"
            )
        tokens = shape[0]
        if num_sequences < 1 or tokens % num_sequences:
            raise ValueError(
                f"Router: num_sequences={num_sequences} does not divide the {tokens} tokens of this rank; "
                "pass the number of sequences of equal length"
            )
        expected = (tokens, self.top_k)
        if kept_TK is not None and (kept_TK.shape != expected or kept_TK.dtype != torch.bool):
            raise ValueError(
                f"Router: kept_TK of shape {tuple(kept_TK.shape)} and {kept_TK.dtype}; pass bool "
                f"{list(expected)}, as recorded in Routing.kept_TK"
            )


def _behind(loss: Tensor, ids_TK: Tensor) -> Tensor:
    """The ids, computed from a loss as well, for a graph that drops what nobody reads: a sum over ranks that
    others, who are not compiled, wait in. No number is below minus infinity, which compilers do not know."""
    return ids_TK + (loss.detach() < -math.inf)
