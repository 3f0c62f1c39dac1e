"""Dispatch and combine measured beside NCCL."""
