"""What the kernels must reach on an NVIDIA GPU, stated for an H200: those rows of the design's table that Triton can serve.

The others (2:4 products on the sparse tensor cores, both packings in one read, a feed-forward block) are the CUDA kernels'.
"""

from __future__ import annotations

from itertools import product

from .registry import Spec
from .target import Target

TRITON = "nmkernels triton"
STREAM = (8192, 16384)
"""268 MB in 16 bits: five times the L2 of an H200, so that reading it again reads memory."""

LARGE, SQUARE = (14336, 4096), (4096, 4096)
"""117 MB in 16 bits, more than any L2 of today, and 34 MB."""

BF16 = "bfloat16"
COPY = "bandwidth of `copy_`"
SHARE = 0.85
ADAMW = "nm_masked_adamw_"
MANY = "nm_masked_adamw_(many)"
HOST_OPS = ("nm_mask", "nm_compress", "nm_linear")


def _streams() -> list[Target]:
    def target(key: str, what: str, *specs: Spec, provider: str = TRITON) -> Target:
        return Target(f"cuda-{key}", what, COPY, "share of copy", SHARE, specs, provider=provider)

    packed = Spec("nm_compress", "2:4", BF16, *STREAM)
    rows, tokens = (Spec(op, "2:4", BF16, *STREAM) for op in ("nm_mvue_compress", "nm_mvue_compress(dim=0)"))
    one = Spec(ADAMW, "2:4", "float32", 4096, 11008)
    many = Spec(MANY, "2:4", "float32", 1024, 1024)
    return [
        target("compress", "compress, 2:4, bf16, 3.125 B per element", packed),
        target("mvue", "mvue_compress along rows, 2:4, bf16, 3.125 B", rows),
        target("mvue-tokens", "mvue_compress along tokens (packs gᵀ), 2:4, bf16, 3.125 B", tokens),
        target("adamw", "MaskedAdamW, fp32, new mask, statistics, 28 B", one),
        target("adamw-writes", "the same, writes W̃ in bf16, 30 B", one, provider=f"{TRITON}, writes W̃"),
        target("adamw-many", "MaskedAdamW, 48 weights of 1024×1024 at once, 28 B", many),
    ]


def _linear(key: str, what: str, bound: float, pattern: str, tokens: tuple[int, ...], *sizes: tuple[int, int]) -> Target:
    specs = tuple(Spec("nm_linear", pattern, BF16, *size, t) for t, size in product(tokens, sizes))
    provider = TRITON + {"many": ", in kernel", "scratch": ", scratch"}.get(key, "")
    return Target(f"cuda-linear-{key}-{pattern}", f"linear {what}, {pattern}", "cuBLAS", "x dense", bound, specs, provider=provider)


def _products() -> list[Target]:
    found = []
    for pattern, large, square in (("2:4", 1.5, 1.3), ("1:4", 2.7, 1.8), ("1:8", 4, 2.3)):
        found += [
            _linear("few", "bf16, 1 and 4 tokens, 117 MB", large, pattern, (1, 4), LARGE),
            _linear("few-square", "bf16, 1 and 4 tokens, 4096×4096", square, pattern, (1, 4), SQUARE),
        ]
    found.append(_linear("16", "bf16, 8 and 16 tokens", 1.3, "2:4", (8, 16), LARGE, SQUARE))
    for pattern in ("2:4", "1:4", "1:8"):
        found.append(_linear("many", "bf16, decompressed in the kernel, 1024 and 4096 tokens", 0.6, pattern, (1024, 4096), LARGE))
    for pattern in ("2:4", "1:4", "1:8"):
        found.append(_linear("scratch", "bf16, expanded to scratch, 4096 tokens", 0.9, pattern, (4096,), LARGE))
    return found


def _host() -> list[Target]:
    specs = tuple(Spec(f"host({op})", "2:4", BF16, 64, 64, 1 if op == "nm_linear" else 0) for op in HOST_OPS)
    layers = tuple(Spec("CompressedLinear", "2:4", BF16, *LARGE, t) for t in (1, 16, 256, 4096))
    keeps = "nmkernels CompressedLinear(keep_dense)"
    return [
        Target("cuda-host", "host cost of a call, µs", "a no-op op", "us beyond a no-op", 5, specs, None, False, TRITON),
        Target(
            "cuda-host-graph",
            "the same in a CUDA graph, µs",
            "a graph of torch's kernels",
            "us beyond torch's kernels",
            0.1,
            specs,
            None,
            False,
            f"{TRITON}, graph",
        ),
        Target(
            "cuda-layer",
            "CompressedLinear(keep_dense), 117 MB, 2:4",
            "time of `nn.Linear`",
            "time over dense",
            1.0,
            layers,
            None,
            False,
            keeps,
        ),
    ]


TARGETS: tuple[Target, ...] = (*_streams(), *_products(), *_host())
LIMITS = (Spec("copy", "", BF16, *STREAM), Spec("matmul", "", BF16, 8192, 8192, 8192))
