"""The error that a failed call of the exchange raises, from the words that its kernels leave on the host."""

from __future__ import annotations

from collections.abc import Sequence

from imbrex.kernels.exchange import layout as lay


class ExchangeError(RuntimeError):
    """A wait ran out or a peer gave up: says who missed what. The exchange cannot be used again."""


def raise_failure(statuses: Sequence[Sequence[int]], timeout: float) -> None:
    """Where one of the ranks' statuses says so; the rank that failed itself before one that a peer told."""
    failures = [status for status in statuses if status[0]]
    if not failures:
        return
    cause = min(failures, key=lambda status: status[0] == lay.CODES.index(lay.PEER_GAVE_UP))
    code, rank, peer, kind, phase, epoch, block, layer = cause
    where = f" of layer {layer - 1}" if layer else ""
    raise ExchangeError(
        f"exchange: rank {rank} in {lay.KINDS[kind]} call {epoch}{where} (block {block}): {lay.CODES[code]}, "
        f"waiting for {lay.PHASES[phase]} of rank {peer} (time-out {timeout} s); close this exchange and "
        f"make a new one"
    )
