"""Orders of a layer's tasks and what they take: pure arithmetic, no tensors moved."""
