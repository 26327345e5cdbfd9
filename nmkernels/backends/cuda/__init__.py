"""The CUDA backend: hand-written kernels for NVIDIA GPUs of compute capability 8.0 or newer.

If the package was built with NMKERNELS_EMULATOR=1, a second backend, ``cuda-emulated``, runs the same device code on CPU tensors. It is for
tests only: it is never chosen automatically and not included in wheels.
"""

from . import adamw, adamw_pack, compress, groups, integers, linear, mvue, quantize

__all__ = ["adamw", "adamw_pack", "compress", "groups", "integers", "linear", "mvue", "quantize"]
