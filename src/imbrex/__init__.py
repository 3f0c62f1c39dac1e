"""Expert-parallel Mixture-of-Experts for PyTorch."""
