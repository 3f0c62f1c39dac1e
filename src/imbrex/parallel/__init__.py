"""Collective work besides exchanging rows: gradients synchronised, checkpoints of logical tensors."""
