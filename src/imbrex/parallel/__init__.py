"""What ranks do together besides exchanging rows: gradients synchronised, checkpoints of logical tensors."""
