"""Kernels that order, compact, expand and weigh rows on one GPU."""

from imbrex.kernels.rows.compact import Placed, index_rows, place_compact
from imbrex.kernels.rows.labels import pack_labels, read_labels

__all__ = ["Placed", "index_rows", "pack_labels", "place_compact", "read_labels"]
