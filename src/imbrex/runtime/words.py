"""Numbers on the host, whatever torch's default device and dtype: what ranks tell each other."""

from __future__ import annotations

import torch
from torch import Tensor


def words(*values: int) -> Tensor:
    """int64 [L], as `Transport.exchange_counts` takes them."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
