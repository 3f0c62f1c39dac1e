"""Kernels that place every row before any moves, and that choose replicas."""
