"""Small int64 tensors on the host, whatever torch's default device and dtype: messages between ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def words(*values: int) -> Tensor:
    """The numbers as int64 [L] on the CPU, as `Transport.exchange_counts` takes them."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
