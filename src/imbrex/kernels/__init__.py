"""The only room that knows CUDA.

Importing this package imports neither cuda-core nor compiles anything; `unavailable()` tells whether the
kernels can run here, and in one sentence why not.
"""

from imbrex.kernels.jit import KernelError, unavailable

__all__ = ["KernelError", "unavailable"]
