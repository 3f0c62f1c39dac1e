"""Kernels that exchange rows over NVLink, and the host's side of them."""
