"""The hand-written CUDA kernels as a backend, for NVIDIA GPUs from compute capability 8.0 on.

The same functions are a second backend, ``cuda-emulated``, where the package was built with NMKERNELS_EMULATOR=1: there the device code
runs on CPU tensors. It is a test instrument, is never chosen by itself and is in no wheel.
"""

from . import adamw, compress, groups, linear, mvue, quantize

__all__ = ["adamw", "compress", "groups", "linear", "mvue", "quantize"]
