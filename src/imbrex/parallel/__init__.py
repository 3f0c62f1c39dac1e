"""Collective work besides exchanging rows: gradients synchronised, checkpoints of logical tensors."""

from imbrex.parallel import backward

__all__ = ["backward"]
