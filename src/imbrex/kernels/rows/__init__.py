"""Kernels that order, compact, expand and weigh rows on one GPU."""
