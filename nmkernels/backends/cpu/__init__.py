"""The compiled CPU core as a backend: float32, bfloat16 and float16 in C++, bit-equal to the reference.

The core takes pointers, so inputs that are not contiguous are copied first (AdamW works on strides in place). Every
kernel runs on ``torch.get_num_threads()`` threads and gives the same bits for any number of them.
"""

from . import adamw, groups, linear, mvue, quantize

__all__ = ["adamw", "groups", "linear", "mvue", "quantize"]
