"""Kernels that move rows and multiply in one launch."""
