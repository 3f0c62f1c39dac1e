"""The gate in one kernel: from logits to experts and weights."""
