"""NVIDIA's cuSPARSELt as a backend: opened at run time where it is installed, plans kept, no algorithm used unchecked.

The ops take 16-bit weights in any packed form that is 2:4 at the same time; ``compress`` and ``matmul`` here are the library's GEMMs in
every layout and dtype that it has; ``search`` finds and stores the fastest right algorithm for a call. Importing opens nothing.

``NMKERNELS_CUSPARSELT`` names the library's file, if not the one of the pip wheel or of the system.
"""

from .algorithms import search_gemm
from .blobs import Blob
from .context import Algorithm, Problem
from .gemm import compress, matmul
from .linear import search

__all__ = ["Algorithm", "Blob", "Problem", "compress", "matmul", "search", "search_gemm"]
