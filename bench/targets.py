"""What the kernels must reach, as data: the speed tables of the design, and whether the measured rows meet them.

Every target is a ratio taken in one run against what a user would otherwise run. ``python -m bench.run --targets`` measures exactly these
cases. Why a target is missed is written by hand into ``bench/results/missed.txt``, one line ``key: reason`` each.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

from . import targets_cuda
from .registry import CPU, Spec, Target, Verdict
from .rows import RESULTS

REASONS = RESULTS / "missed.txt"


WEIGHT = (4096, 11008)
BOTH = ("float32", "bfloat16")
LAYERS = ((4096, 4096), (11008, 4096))


def _streams() -> list[Target]:
    found = []
    for name in ("mask", "prune", "compress", "soft_threshold"):
        specs = tuple(Spec(f"nm_{name}", "2:4", dtype, *WEIGHT) for dtype in BOTH)
        found.append(Target(name, f"{name}, `out=`, 4096×11008", "bandwidth of `copy_`", "share of copy", 0.7, specs, 0.9))
    for name in ("mask", "prune", "compress", "soft_threshold"):
        specs = tuple(Spec(f"nm_{name}", "2:4", dtype, *WEIGHT) for dtype in BOTH)
        fresh = f"{CPU}, new output"
        found.append(
            Target(f"{name}-new", f"{name}, new output, 4096×11008", "rate of `clone()`", "share of clone", 1.2, specs, provider=fresh)
        )
    for dtype, bound in (("float32", 0.35), ("bfloat16", 0.25)):
        specs = (Spec("nm_mvue_compress", "2:4", dtype, *WEIGHT),)
        what = f"mvue_compress, `out=`, 4096×11008, {dtype}"
        found.append(Target(f"mvue-{dtype}", what, "bandwidth of `copy_`", "share of copy", bound, specs, 0.5))
    return found


def _optimizer() -> list[Target]:
    specs = (Spec("nm_masked_adamw_", "2:4", "float32", *WEIGHT),)
    what = "MaskedAdamW step, SR-STE decay, new mask, statistics"
    return [
        Target("adamw", what, "time of `AdamW(fused=True)` alone", "time over fused AdamW", 1.25, specs, 1.05, higher=False),
        Target("adamw-eager", "the same", "`AdamW(fused=True)`, eager mask and decay", "x AdamW + eager mask", 15, specs),
    ]


def _linear(
    key: str, what: str, bound: float, pattern: str, tokens: Iterable[int], stretch: float | None = None, dtype: str = "float32"
) -> Target:
    specs = tuple(Spec("nm_linear", pattern, dtype, *size, t) for t, size in product(tokens, LAYERS))
    against = "`F.linear`" if dtype == "float32" else "the faster of dense bf16 and fp32"
    return Target(key, f"linear {what}, {pattern}", against, "x dense", bound, specs, stretch)


def _gemms() -> list[Target]:
    found = [_linear(f"linear-1-{p}", "fp32, batch 1", bound, p, (1,)) for p, bound in (("2:4", 3), ("1:4", 4.5), ("1:8", 7), ("1:16", 10))]
    found += [_linear("linear-4", "fp32, batch 4", 3.5, "2:4", (4,)), _linear("linear-16", "fp32, batch 16", 2, "2:4", (16,))]
    for pattern, bound, stretch in (("2:4", 1.4, 1.8), ("1:4", 2.5, 3.4), ("1:8", 4.5, 6)):
        found.append(_linear(f"linear-many-{pattern}", "fp32, batch 64 and 256", bound, pattern, (64, 256), stretch))
    for pattern, bound in (("2:4", 2.5), ("1:8", 5)):
        found.append(_linear(f"linear-bf16-{pattern}", "bf16, batch 1", bound, pattern, (1,), dtype="bfloat16"))
    return found


def _models() -> list[Target]:
    sizes = ((1024, 1024), (4096, 4096))
    specs = tuple(Spec("CompressedLinear", "2:4", dtype, *size, t) for dtype in BOTH for size in sizes for t in (1, 16, 256, 2048))
    time, dense = "time over dense", "time of `nn.Linear`"
    step, words = (
        Spec("train_step", "2:4", "float32", tokens=2048, model="GPT 1024x2"),
        Spec("generate", "2:4", "float32", tokens=16, model="GPT 1024x4"),
    )
    compressed = "nmkernels CompressedLinear"
    return [
        Target("layer", "CompressedLinear, any shape, 2:4", dense, time, 1.2, specs, 1.0, False, compressed),
        Target("layer-keep", "the same with `keep_dense=True`", dense, time, 1.0, specs, None, False, f"{compressed}(keep_dense)"),
        Target(
            "step",
            "training step, SR-STE 2:4, d=1024, 2048 tokens",
            "time of the dense step",
            time,
            1.05,
            (step,),
            None,
            False,
            "nmkernels srste",
        ),
        Target("generate", "generation, batch 1, d=1024, 2:4", "dense model", "x dense", 1.0, (words,), provider=compressed),
    ]


def _choices() -> list[Target]:
    """As many cases as tell whether a choice is ever worse than dense; each of them is measured anew before it is timed."""
    many = [("fprop", (1, 16, 64, 256)), ("dgrad", (64, 256)), ("wgrad", (256,))]
    sizes = ((1024, 1024), (3072, 768))
    return [
        Target(
            f"choice-{role}",
            f"{role} through the dispatcher, any shape, 2:4",
            "the dense GEMM" if role != "wgrad" else "the same estimate, dense",
            "x dense",
            1.0,
            tuple(Spec(f"choice({role})", "2:4", dtype, *size, t) for dtype in BOTH for size in sizes for t in tokens),
            provider="nmkernels through the dispatcher",
        )
        for role, tokens in many
    ]


TARGETS: tuple[Target, ...] = (*_streams(), *_optimizer(), *_gemms(), *_models(), *_choices())
"""Those of a CPU; a GPU's are in ``targets_cuda``."""

LIMITS = (Spec("copy", "", "float32", *WEIGHT), Spec("matmul", "", "float32", 2048, 2048, 2048))
"""What the machine can do at most, for the roofline."""


def of(device: str) -> tuple[Target, ...]:
    """The targets of this kind of device."""
    return targets_cuda.TARGETS if device.startswith("cuda") else TARGETS


def specs(device: str = "cpu") -> list[Spec]:
    """Every case of every target of a device, each once, and the machine's limits."""
    limits = targets_cuda.LIMITS if device.startswith("cuda") else LIMITS
    return [*dict.fromkeys(spec for target in of(device) for spec in target.specs), *limits]


def quick(device: str) -> list[Spec]:
    """A handful: on a CPU mask, prune, compress and linear on one weight of 16 MB, and a copy; on a GPU the targets and more streams."""
    if device.startswith("cuda"):
        more = ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_transposable_mask")
        return [*specs(device), *(Spec(op, "2:4", "bfloat16", *targets_cuda.STREAM) for op in more)]
    streams = [Spec(op, "2:4", "float32", 1024, 4096) for op in ("nm_mask", "nm_prune", "nm_compress")]
    gemms = [Spec("nm_linear", "2:4", "float32", 1024, 4096, tokens) for tokens in (1, 16, 256)]
    return [*streams, *gemms, Spec("copy", "", "float32", 1024, 4096)]


def verdicts(rows: Iterable[dict[str, str]], device: str = "cpu", reasons: dict[str, str] | None = None) -> list[Verdict]:
    """Every target of a kind of device beside the rows of one machine."""
    why = load_reasons() if reasons is None else reasons
    found = {tuple(r[k] for k in ("op", "provider", "pattern", "dtype", "shape", "metric")): float(r["p50"]) for r in rows}
    result = []
    for t in of(device):
        keys = {spec: (spec.op, t.provider, spec.pattern, spec.dtype, spec.shape, t.metric) for spec in t.specs}
        result.append(Verdict(t, {spec: found[key] for spec, key in keys.items() if key in found}, why.get(t.key, "")))
    return result


def load_reasons(path: Path = REASONS) -> dict[str, str]:
    """The lines ``key: reason``; ``ValueError`` for a key that no target has, so that a renamed target does not lose its reason."""
    if not path.exists():
        return {}
    keys, found = {t.key for t in (*TARGETS, *targets_cuda.TARGETS)}, {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        # patterns have colons of their own: a key ends at the first colon that a space follows
        key, colon, reason = line.partition(": ")
        if not colon or key not in keys or not reason.strip():
            raise ValueError(f"{path.name}, line {number}: write 'key: reason' with a key of {', '.join(sorted(keys))}")
        found[key] = reason.strip()
    return found
