"""Weights that mean something: the demo's text, the served model with its drafting block, some steps."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import imbrex
from imbrex.demo.corpus import Corpus
from imbrex.serve.attention import Span
from imbrex.serve.model import Decoder

BATCH, LENGTH = 16, 64
RATE = 2e-3
DRAFT_WEIGHT = 0.3
"""The share of the drafting block's loss (DeepSeek-V3, section 4.2: 0.3, then 0.1)."""


def losses(model: Decoder, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Mean nats of the next token, and of the one after it by the drafting block, of rows from their
    beginning. The block sees the model's row and the next token."""
    rows, length = len(tokens_BS), tokens_BS.shape[1] - 2
    span = Span(torch.zeros(rows, dtype=torch.int64, device=tokens_BS.device), length, 0)
    now, after, later = (tokens_BS[:, shift : shift + length] for shift in range(3))
    hidden_TD = model(now, span)
    main = F.cross_entropy(model.head(model.norm(hidden_TD)), after.flatten())
    if model.draft is None:
        return main, main.new_zeros(())
    drafted_TD = model.drafted(hidden_TD, after.flatten(), span, None)
    return main, F.cross_entropy(model.head(model.draft.norm(drafted_TD)), later.flatten())


def train(
    model: Decoder,
    corpus: Corpus,
    steps: int,
    group: dist.ProcessGroup | None,
    *,
    rate: float = RATE,
    begun: Callable[[int], object] = lambda step: None,
) -> dict[str, float]:
    """Train a model whose head is whole; the last step's losses. Every rank takes its share of a batch.
    begun: called with the number of every step before it."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    device, last = model.embedding.weight.device, {"loss": math.nan, "draft_loss": math.nan}
    model.train()
    for step in range(steps):
        begun(step)
        for part in optimizer.param_groups:
            part["lr"] = rate * min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        batch = corpus.batch(step, seed=0, batch=BATCH, length=LENGTH + 1)
        main, drafted = losses(model, batch[rank * BATCH // ranks : (rank + 1) * BATCH // ranks].to(device))
        optimizer.zero_grad(set_to_none=True)
        (main + DRAFT_WEIGHT * drafted).backward()
        imbrex.sync_gradients(model)
        imbrex.clip_grad_norm_(model, 1.0)
        optimizer.step()
        last = {"loss": main.item(), "draft_loss": drafted.item()}
    model.eval()
    return last
