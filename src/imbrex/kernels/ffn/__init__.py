"""The experts' feed-forward network by kernels: bf16 and fp8, forward and backward."""
