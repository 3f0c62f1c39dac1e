"""Calls of DeepEP that are not offered here, each with its reason in one sentence."""

from __future__ import annotations

from typing import Any, NoReturn

INTERNODE = (
    "these calls write over RDMA through NVSHMEM, which imbrex does not use; dispatch and combine run over "
    "any process group, one that spans hosts included"
)
MASK = "no call goes on without one of the ranks of the group; a rank that does not answer is a RankLostError"
ELASTIC = (
    "remote caches, pipelines and gathers are no exchange of experts' tokens; of DeepEP V2 there are "
    "dispatch and combine"
)
ELASTIC_PARTS = (
    "engram_",
    "pp_",
    "agrs_",
    "create_agrs",
    "destroy_agrs",
    "all_gather",
    "get_engram",
    "get_pp",
)
EXPAND = (
    "rows come once to a rank; expert-major rows, one for every choice, are those of "
    "HybridEPBuffer.dispatch_with_permute"
)
LOCAL_BUFFER = "there is no communication buffer to look into: the transport owns its memory"


def refuse(name: str, reason: str) -> NoReturn:
    """Raise NotImplementedError: a call of that name is not offered, for this reason."""
    raise NotImplementedError(f"imbrex.adapters.deep_ep: {name} is not offered: {reason}")


class Calls:
    """The calls of `Buffer` that are not offered; each raises NotImplementedError."""

    def get_local_buffer_tensor(self, *args: Any, **options: Any) -> NoReturn:
        refuse("Buffer.get_local_buffer_tensor", LOCAL_BUFFER)

    def internode_dispatch(self, *args: Any, **options: Any) -> NoReturn:
        refuse("Buffer.internode_dispatch", INTERNODE)

    def internode_combine(self, *args: Any, **options: Any) -> NoReturn:
        refuse("Buffer.internode_combine", INTERNODE)

    def low_latency_update_mask_buffer(self, *args: Any, **options: Any) -> NoReturn:
        refuse("Buffer.low_latency_update_mask_buffer", MASK)

    def low_latency_query_mask_buffer(self, *args: Any, **options: Any) -> NoReturn:
        refuse("Buffer.low_latency_query_mask_buffer", MASK)

    def low_latency_clean_mask_buffer(self, *args: Any, **options: Any) -> NoReturn:
        refuse("Buffer.low_latency_clean_mask_buffer", MASK)
