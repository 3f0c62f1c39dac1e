"""Calls of DeepEP that the doors do not lead to, each with its reason in one sentence."""

from __future__ import annotations

from typing import Any, NoReturn

INTERNODE = (
    "these calls write over RDMA through NVSHMEM, which imbrex does not use; dispatch and combine run over "
    "any process group, one that spans hosts included"
)
MASK = "no call goes on without one of the ranks of the group; a rank that does not answer is a RankLostError"
ELASTIC = (
    "it is the interface of DeepEP V2, and only the legacy Buffer and HybridEPBuffer are there; use one of "
    "these"
)
LOCAL_BUFFER = "there is no communication buffer to look into: the transport owns its memory"


def refuse(name: str, reason: str) -> NoReturn:
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


class ElasticBuffer:
    """DeepEP V2. The name exists so that programs that import it start; every use raises
    NotImplementedError."""

    def __init__(self, *args: Any, **options: Any) -> None:
        refuse("ElasticBuffer", ELASTIC)

    @staticmethod
    def get_buffer_size_hint(*args: Any, **options: Any) -> NoReturn:
        refuse("ElasticBuffer.get_buffer_size_hint", ELASTIC)

    @staticmethod
    def capture() -> NoReturn:
        refuse("ElasticBuffer.capture", ELASTIC)
