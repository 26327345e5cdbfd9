"""A backend that uses NVIDIA's cuSPARSELt, loaded at run time if it is installed.

The ops support 16-bit weights of any pattern that is also 2:4. ``compress`` and ``matmul`` offer the library's GEMMs in all its layouts and
dtypes, and ``search`` finds and stores the fastest correct algorithm for a call. Every algorithm is checked before it is used. Importing
this package does not load the library.

``NMKERNELS_CUSPARSELT`` is the path of the library; by default that of the pip wheel or the system.
"""

from .algorithms import search_gemm
from .blobs import Blob
from .context import Algorithm, Matmul
from .gemm import compress, matmul
from .linear import search

__all__ = ["Algorithm", "Blob", "Matmul", "compress", "matmul", "search", "search_gemm"]
