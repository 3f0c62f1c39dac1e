"""The experts' feed-forward network by kernels: bf16 and fp8, forward and backward."""

from imbrex.kernels.ffn.glue import clear_rows

__all__ = ["clear_rows"]
