"""The compiled CPU core as a backend: float32, bfloat16 and float16 in C++, bit-equal to the reference.

The core takes pointers, so inputs that are not contiguous are copied first (except by AdamW, which supports row strides). Kernels run on
``torch.get_num_threads()`` threads; the number of threads does not change the result.
"""

from . import adamw, groups, integers, linear, mvue

__all__ = ["adamw", "groups", "integers", "linear", "mvue"]
