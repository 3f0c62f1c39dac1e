"""Collective work besides exchanging rows: gradients synchronised, checkpoints of logical tensors."""

from typing import TYPE_CHECKING

from imbrex.parallel import backward

if TYPE_CHECKING:  # it imports most of a second of torch's: `imbrex.parallel.checkpoint` is for who wants it
    from imbrex.parallel import checkpoint

__all__ = ["backward", "checkpoint"]
