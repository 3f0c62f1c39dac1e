"""The configuration object of DeepEP's first interface, which programs construct, compare and pass on."""

from __future__ import annotations

from dataclasses import dataclass

ROW_LABEL_BYTES = 512
"""Room for the choices, weights and scales of a row, in the size hint."""


@dataclass(frozen=True, slots=True)
class Config:
    """SMs of a call, and the tokens of its queues: sent at once, and waiting, over NVLink and over RDMA.

    imbrex has no such queues: the numbers are kept for programs that read or compare them.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of queues of this configuration: what a program passes as `num_nvl_bytes` and compares with
        it. Nothing of that size is allocated."""
        channels = max(self.num_sms // 2, 1)
        rows = channels * num_ranks * self.num_max_nvl_chunked_recv_tokens
        return rows * (hidden_bytes + ROW_LABEL_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: nothing crosses RDMA."""
        return 0


def tuned(num_sms: int, num_ranks: int) -> Config:
    """The configuration for a group of any size; there is nothing in it to tune."""
    if num_ranks < 1:
        raise ValueError(f"deep_ep: a group of {num_ranks} ranks; give the size of the group")
    return Config(num_sms=num_sms)
