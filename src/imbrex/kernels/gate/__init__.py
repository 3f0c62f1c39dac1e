"""The gate: logits of few tokens, and in one kernel from logits to experts and weights."""
