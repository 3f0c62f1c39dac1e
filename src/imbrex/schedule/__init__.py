"""Schedules of a layer's tasks, and the time they take: pure arithmetic, no tensors are moved."""
