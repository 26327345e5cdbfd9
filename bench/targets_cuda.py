"""The speed targets on an NVIDIA GPU, stated for an H200.

Triton's kernels are the portable ones; their targets are cheap expansion of an operand for a vendor's GEMM, and a short call. 2:4 GEMMs of
many tokens on the sparse tensor cores have targets for ``wgmma.sp`` and for cuSPARSELt, of which the faster is chosen.
"""

from __future__ import annotations

from itertools import product

from .registry import Spec, Target

TRITON, CUDA = "nmkernels triton", "nmkernels cuda"
STREAM = (8192, 16384)
"""268 MB in 16 bits: five times the L2 of an H200, so that it is read from memory each time."""

LARGE, SQUARE = (14336, 4096), (4096, 4096)
"""117 MB in 16 bits, more than any current L2, and 34 MB."""

BF16 = "bfloat16"
COPY = "bandwidth of `copy_`"
SHARE = 0.85
ADAMW = "nm_masked_adamw_"
MANY = "nm_masked_adamw_(many)"
HOST_OPS = ("nm_mask", "nm_compress", "nm_linear")


def _streams() -> list[Target]:
    found = []
    packed = Spec("nm_compress", "2:4", BF16, *STREAM)
    rows, tokens = (Spec(op, "2:4", BF16, *STREAM) for op in ("nm_mvue_compress", "nm_mvue_compress(dim=0)"))
    one = Spec(ADAMW, "2:4", "float32", 4096, 11008)
    many = Spec(MANY, "2:4", "float32", 1024, 1024)
    found += [
        _share("compress", "compress, 2:4, bf16, 3.125 B per element", packed),
        _share("mvue", "mvue_compress along rows, 2:4, bf16, 3.125 B", rows),
        _share("mvue-tokens", "mvue_compress along tokens (packs gᵀ), 2:4, bf16, 3.125 B", tokens),
        _share("adamw", "MaskedAdamW, fp32, new mask, statistics, 28 B", one),
        _share("adamw-many", "MaskedAdamW, 48 weights of 1024×1024 at once, 28 B", many),
    ]
    both = (Spec(f"nm_pack({how})", "2:4", BF16, *STREAM) for how in ("both", "threshold", "mma.sp"))
    words = ("W and Wᵀ from one read, 4.25 B", "through the soft threshold, 3.125 B", "in mma.sp's order, 3.125 B")
    for spec, key, what in zip(both, ("both", "threshold", "layout"), words, strict=True):
        found.append(_share(f"pack-{key}", f"pack, 2:4, bf16, {what}", spec))
    return found


def _share(key: str, what: str, spec: Spec) -> Target:
    return Target(_key(CUDA, key), _what(CUDA, what), COPY, "share of copy", SHARE, (spec,), provider=CUDA)


def _key(by: str, key: str) -> str:
    return f"cuda-{key}" if by == CUDA else f"cuda-{by.removeprefix('nmkernels ')}-{key}"


def _what(by: str, what: str) -> str:
    return f"{what} ({by.removeprefix('nmkernels ')})"


def _linear(
    by: str, key: str, what: str, bound: float, pattern: str, tokens: tuple[int, ...], *sizes: tuple[int, int], stretch: float | None = None
) -> Target:
    specs = tuple(Spec("nm_linear", pattern, BF16, *size, t) for t, size in product(tokens, sizes))
    provider, what = f"{by}, scratch" if key == "scratch" else by, _what(by, f"linear {what}, {pattern}")
    return Target(_key(by, f"linear-{key}-{pattern}"), what, "cuBLAS", "x dense", bound, specs, stretch, provider=provider)


def _gemms() -> list[Target]:
    found = []
    for key, what, bound, stretch, pattern, tokens in (
        ("one", "1 token", 1.6, 1.7, "2:4", (1,)),
        ("16", "4, 8 and 16 tokens", 1.4, 1.55, "2:4", (4, 8, 16)),
        ("one", "1 token", 4.5, 5, "1:8", (1,)),
        ("few", "1 and 4 tokens", 2.7, None, "1:4", (1, 4)),
        ("few", "4 tokens", 4, None, "1:8", (4,)),
    ):
        found.append(_linear(CUDA, key, f"bf16, {what}, 117 MB", bound, pattern, tokens, LARGE, stretch=stretch))
    for pattern, square in (("2:4", 1.3), ("1:4", 1.8), ("1:8", 2.3)):
        found.append(_linear(CUDA, "few-square", "bf16, 1 and 4 tokens, 4096×4096", square, pattern, (1, 4), SQUARE))
    found.append(_linear(CUDA, "16-square", "bf16, 8 and 16 tokens, 4096×4096", 1.3, "2:4", (8, 16), SQUARE))
    for pattern in ("2:4", "1:4", "1:8"):
        found.append(_linear(TRITON, "scratch", "bf16, expanded to scratch, 4096 tokens", 0.9, pattern, (4096,), LARGE))
    return found


STREAM_K = ((*LARGE, 1024), (*LARGE, 4096), (4096, 14336, 4096))
"""Out, in and tokens of GEMMs for which the plan estimates 0.93 to 0.97 of the time by stream-K, on an H100 and an H200."""


def _tensor_cores() -> list[Target]:
    """2:4 GEMMs of 1024 tokens and more; on Hopper they are bound by shared memory or power, which ``power_or_port`` distinguishes."""
    cube = Spec("nm_linear(cores)", "2:4", BF16, 8192, 8192, 8192)
    llama = tuple(Spec("nm_linear(cores)", "2:4", BF16, *size, t) for t in (1024, 4096, 16384) for size in (LARGE, (4096, 14336), SQUARE))
    wgrad = tuple(Spec("nm_linear_wgrad(cores)", "2:4", BF16, *size, t) for t in (4096, 16384) for size in (LARGE, SQUARE))
    words = (
        "2:4 GEMM, bf16, 8192³ and Llama-3-8B, 1024 to 16384 tokens",
        "weight gradient from a packed estimate, 4096 and 16384 tokens",
    )
    found = []
    searched = "nmkernels cusparselt, canonical, searched"
    for key, name, by in (("cuda-gemm-cusparselt", "cuSPARSELt, searched", searched), ("cuda-gemm-wgmma", "wgmma.sp", CUDA)):
        for end, what, specs in (("", words[0], (cube, *llama)), ("-wgrad", words[1], wgrad)):
            found.append(Target(key + end, f"{what} ({name})", "cuBLAS", "x dense", 1.2, specs, 1.3, provider=by))
    what, metric = "2:4 GEMM, bf16, the last wave divided along k, where the estimate has it pay", "x without stream-K"
    last_wave = tuple(spec for spec in llama if (spec.rows, spec.cols, spec.tokens) in STREAM_K)
    found.append(Target("cuda-gemm-stream-k", what, "`wgmma.sp` without", metric, 1.03, last_wave, provider=f"{CUDA}-stream-k"))
    return found


STEPS = (
    # whole steps with 4096 tokens, with 16384, and captured with 1024 columns: bounds and stretch goals. FST renews its masks every 40
    # steps, in a captured step not at all
    ("srste", "SR-STE", (1.07, 1.14), (1.10, 1.14), (1.0, 1.05)),
    ("sste", "S-STE", (1.13, 1.22), (1.19, 1.25), (1.0, 1.05)),
    ("fst", "FST", (1.18, 1.28), (1.26, 1.32), (1.0, 1.05)),
)
NARROW = (4096, 1024)


def _blocks() -> list[Target]:
    """A feed-forward block: forward and backward by the gain that one sparse GEMM allows for the plan's three, and whole steps."""
    specs = tuple(Spec("ffn", "2:4", BF16, *size, t) for t in (4096, 16384) for size in (LARGE, NARROW))
    whole, share, dense = "forward+backward", "share of what one GEMM allows", "dense with `AdamW(fused=True)`"
    found = []
    for name, words, bound in (("sste", "S-STE: 3/(1 + 2/r)", 0.97), ("fst", "FST: r", 0.95)):
        what = f"FFN {whole}, bf16, 2:4, {words}, r the ratio of one GEMM"
        found.append(Target(f"cuda-ffn-{name}", what, "r in the same run", share, bound, specs, provider=f"nmkernels {name}, {whole}"))
    for name, words, *bounds in STEPS:
        some, many, narrow = bounds
        for key, (bound, stretch), size, tokens, op, end in (
            ("step", some, LARGE, 4096, "ffn", ""),
            ("step-16384", many, LARGE, 16384, "ffn", ""),
            ("captured", narrow, NARROW, 4096, "ffn(captured)", " (captured)"),
        ):
            what = f"whole training step, FFN {size[1]}-{size[0]}-{size[1]}, {tokens} tokens{end and ', in a CUDA graph'}: {words}"
            against = f"{dense}{end and ', captured too'}"
            case = (Spec(op, "2:4", BF16, *size, tokens),)
            provider = f"nmkernels {name}, step{end}"
            found.append(Target(f"cuda-ffn-{name}-{key}", what, against, "x dense", bound, case, stretch, provider=provider))
    return found


def _host() -> list[Target]:
    specs = tuple(Spec(f"host({op})", "2:4", BF16, 64, 64, 1 if op == "nm_linear" else 0) for op in HOST_OPS)
    layers = tuple(Spec("CompressedLinear", "2:4", BF16, *LARGE, t) for t in (1, 16, 256, 4096))
    keeps = "nmkernels CompressedLinear(keep_dense)"
    what = "CompressedLinear(keep_dense), 117 MB, 2:4"
    found = [Target("cuda-layer", what, "time of `nn.Linear`", "time over nn.Linear", 1.0, layers, None, False, keeps)]
    whole = (Spec("host(nm_linear)", "2:4", BF16, 64, 64, 16),)
    for by, cases in ((TRITON, specs), (CUDA, specs), ("nmkernels cusparselt", whole)):
        what, call, replay = _what(by, "host cost of a call, µs"), "us beyond a no-op", "us beyond torch's kernels"
        graph = _what(by, "the same in a CUDA graph, µs")
        found += [
            Target(_key(by, "host"), what, "a no-op op", call, 5, cases, None, False, by),
            Target(_key(by, "host-graph"), graph, "a graph of torch's kernels", replay, 0.1, cases, None, False, f"{by}, graph"),
        ]
    return found


TARGETS: tuple[Target, ...] = (*_streams(), *_gemms(), *_tensor_cores(), *_blocks(), *_host())
LIMITS = (Spec("copy", "", BF16, *STREAM), Spec("matmul", "", BF16, 8192, 8192, 8192))

FFN_TOKENS = (1, 16, 512, 4096, 8192)
MORE = (
    *(Spec("nm_linear(cores)", "2:4", BF16, *size, t) for t in FFN_TOKENS for size in (LARGE, (4096, 14336))),
    *(Spec("llama_ffn", "2:4", BF16, *LARGE, t) for t in FFN_TOKENS),
    Spec("host(nm_linear(cores))", "2:4", BF16, 64, 64, 16),
    Spec("power_or_port", "2:4", BF16, 8192, 8192, 8192),
    Spec("nm_linear_quantized", "2:4", BF16, 8192, 8192, 8192),
    *(Spec("nm_linear_quantized", "2:4", BF16, *size, 4096) for size in (LARGE, (4096, 14336))),
    *(Spec("nm_linear_integers", "2:4", BF16, *size, t) for t in (1, 4, 16) for size in (LARGE, SQUARE)),
    *(Spec(op, "2:4", BF16, *LARGE, 4096) for op in ("ffn(captured)", "ffn(bf16 weights)")),
    *(Spec(f"model_step({name})", "2:4", BF16, tokens=4096, model="Llama-3-8B x4") for name, *_ in STEPS),
    *(Spec(f"model_step(captured {name})", "2:4", BF16, tokens=4096, model="GPT-2-medium x4") for name, *_ in STEPS),
    *(Spec("decode", "2:4", BF16, tokens=t, model="Llama-3-8B x4") for t in (1, 16)),
)
"""Cases that ``make gpu`` measures in addition to the targets: Llama-3-8B's FFN, its GEMMs and its step; the host cost of a call; what
bounds 2:4 GEMMs; the same GEMMs in 8 bits; few tokens with integer weights; steps with weights in bfloat16 and in a CUDA graph; and whole
models."""
