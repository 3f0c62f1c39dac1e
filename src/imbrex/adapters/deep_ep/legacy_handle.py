"""Values that pass between the calls of a legacy `Buffer`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DispatchHandle(tuple):
    """A tuple that `combine` and a cached dispatch need: six tensors, in DeepEP's order and with one channel.

    rank_prefix_matrix int32 [W, W]: rows that ranks 0..i send to rank j. channel_prefix_matrix int32 [W, 1]:
    rows sent to every rank. recv_channel_prefix_matrix int32 [W, 1]: zeros. recv_src_idx int32 [N]: token of
    every row on its source rank. is_token_in_rank bool [T, W]. send_head int32 [T, W]: place among the rows
    for a rank, or -1.
    """

    route: Any


def make_handle(
    wanted_TW: Tensor, rows_WW: Tensor, route: Any, sources_N: Tensor, heads: Tensor, rank: int
) -> DispatchHandle:
    device = wanted_TW.device
    sent = rows_WW[rank][:, None].int().to(device)
    prefix = rows_WW.cumsum(0, dtype=torch.int32).to(device)
    handle = DispatchHandle((prefix, sent, torch.zeros_like(sent), sources_N, wanted_TW, heads))
    handle.route = route
    return handle
