"""The speed targets, as data, and whether the measured rows meet them.

Every target is a ratio, within one run, to what a user would otherwise run. ``python -m bench.run --targets`` measures exactly these
cases. Reasons for missed targets are written by hand in ``bench/results/missed.txt``, one line ``key: reason`` each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from . import targets_cuda
from .registry import ALLOWED, AMX, CPU, FASTEST, SHARE, SHORT, Instead, Spec, Target, Verdict
from .rows import RESULTS

REASONS = RESULTS / "missed.txt"


WEIGHT = (4096, 11008)
SQUARE = (4096, 4096)
BOTH = ("float32", "bfloat16")
TOKENS = (1, 16, 64, 256, 2048)

LINEAR: dict[tuple[str, str], tuple[float, ...]] = {
    ("float32", "2:4"): (1.75, 1.9, 1.5, 1.25, 1.1),
    ("float32", "1:4"): (3.3, 3.3, 2.6, 2.1, 1.8),
    ("float32", "1:8"): (5.5, 5.5, 4.2, 3.5, 3.0),
    ("bfloat16", "2:4"): (1.0, 1.0, 1.0, 1.0, 1.0),
    ("bfloat16", "1:4"): (2.3, 1.9, 1.7, 1.45, 1.2),
    ("bfloat16", "1:8"): (3.5, 2.0, 1.8, 1.5, 1.25),
}
"""Speed-up over the fastest dense GEMM, for each number of ``TOKENS``."""

STRETCH = {("float32", "2:4"): (1.85, 2.5, 1.8, 1.45, 1.35)}
WITH_AMX = {("bfloat16", "2:4"): (2.2, 1.5, 1.5, 1.3, 1.1)}
"""The bounds on CPUs that multiply bf16 tiles (AMX), instead of those above."""

SMALL = (128, 128)


def _streams() -> list[Target]:
    cases = {
        name: tuple(Spec(f"nm_{name}", "2:4", dtype, *WEIGHT) for dtype in BOTH) for name in ("mask", "prune", "compress", "soft_threshold")
    }
    by, new = f"{CPU}, new output", "share of clone"
    found = [Target(n, f"{n}, `out=`, 4096×11008", "bandwidth of `copy_`", "share of copy", 0.7, s, 0.9) for n, s in cases.items()]
    found += [Target(f"{n}-new", f"{n}, new output, 4096×11008", "rate of `clone()`", new, 1.2, s, provider=by) for n, s in cases.items()]
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


def _gemms() -> list[Target]:
    found = []
    for (dtype, pattern), bounds in LINEAR.items():
        for i, (tokens, bound) in enumerate(zip(TOKENS, bounds, strict=True)):
            goal = STRETCH[dtype, pattern][i] if (dtype, pattern) in STRETCH else None
            instead = Instead(WITH_AMX[dtype, pattern][i], "torch dense", AMX, 1) if (dtype, pattern) in WITH_AMX else None
            key = f"linear-{'bf16-' if dtype == 'bfloat16' else ''}{tokens}-{pattern}"
            what = f"linear {SHORT[dtype]}, {pattern}, 4096×4096, {tokens} token{'s' if tokens > 1 else ''}"
            specs = (Spec("nm_linear", pattern, dtype, *SQUARE, tokens),)
            found.append(Target(key, what, "the fastest dense GEMM of torch", FASTEST, bound, specs, goal, instead=instead))
    return found


def _integers() -> list[Target]:
    """Bounds for CPUs with AVX-512 VNNI, and one for the kernel of AVX2, which ``--isas avx2`` times."""
    pack8, pack4, own = "`_weight_int8pack_mm`", "`_weight_int4pack_mm_for_cpu`", "our 2:4 in bf16"

    def target(key: str, kind: str, pattern: str, tokens: int, against: str, metric: str, bound: float, isa: str = "") -> Target:
        what = f"linear bf16, {pattern} in {kind}{isa and ' with AVX2'}, 4096×4096, {tokens} token{'s' if tokens > 1 else ''}"
        specs = (Spec("nm_linear_integers", pattern, "bfloat16", *SQUARE, tokens),)
        return Target(f"{key}-{tokens}-{pattern}", what, against, metric, bound, specs, provider=f"{CPU}{isa}, {kind}")

    found = []
    for tokens, of_pack8, of_own, of_pack4 in ((1, 2.0, 1.6, 1.6), (4, 1.5, 1.3, 1.1), (16, 2.0, 1.2, 1.6)):
        found += [
            target("int8", "int8", "2:4", tokens, pack8, "x weight-only int8", of_pack8),
            target("int8-own", "int8", "2:4", tokens, own, "x 16 bits", of_own),
            target("int4", "int4", "2:4", tokens, pack4, "x weight-only int4", of_pack4),
        ]
    found.append(target("int8", "int8", "1:8", 1, pack8, "x weight-only int8", 5.0))
    return [*found, target("int8-avx2", "int8", "2:4", 1, pack8, "x weight-only int8", 1.5, " avx2")]


def _layers() -> list[Target]:
    sizes = ((1024, 1024), SQUARE)
    deployed = tuple(Spec("CompressedLinear", "2:4", dtype, *size, t) for dtype in BOTH for size in sizes for t in (1, 16, 256, 2048))
    # on a CPU without bf16 instructions, torch's bf16 gradients of larger layers take seconds
    steps = (("float32", sizes, (16, 256, 2048)), ("bfloat16", sizes[:1], (16, 256)))
    trained = tuple(Spec("SparseLinear", "2:4", dtype, *size, t) for dtype, some, tokens in steps for size in some for t in tokens)
    small = tuple(Spec("CompressedLinear", "2:4", "float32", *SMALL, t) for t in (1, 16))

    def target(key: str, what: str, bound: float, specs: tuple[Spec, ...]) -> Target:
        by = f"nmkernels {specs[0].op}"
        return Target(key, f"{what}, 2:4", "time of `nn.Linear`", "time over nn.Linear", bound, specs, None, False, by)

    return [
        target("layer", "CompressedLinear", 1.05, deployed),
        target("layer-small", "CompressedLinear 128×128, fp32", 1.1, small),
        target("layer-trained", "the layer in training, forward and backward", 1.05, trained),
    ]


def _models() -> list[Target]:
    """Whole steps with the defaults of each recipe; two of them have a higher target where the 2:4 GEMM itself is 1.5 times as fast."""
    step = Spec("train_step", "2:4", "float32", tokens=2048, model="GPT 1024x2")
    block = Spec("ffn", "2:4", "float32", 4096, 1024, 2048)
    found = []
    for spec, what, suffix in ((step, "transformer d=1024", ""), (block, "FFN 1024-4096-1024", ", step")):
        for recipe, name, bound in (("srste", "SR-STE", 1.0), ("sste", "S-STE", 1.0), ("fst", "FST", 1.1)):
            instead = Instead(0.85, "nmkernels, one GEMM", "x dense", 1.5) if recipe != "srste" else None
            words, against = f"training step, {what}, 2048 tokens, {name} 2:4", "time of the dense step, fused AdamW"
            key, by = f"{'step' if spec is step else 'ffn'}-{recipe}", f"nmkernels {recipe}{suffix}"
            found.append(Target(key, words, against, "time over dense", bound, (spec,), None, False, by, instead))
    text = Spec("generate", "2:4", "float32", tokens=16, model="GPT 1024x4")
    what, by = "generation, batch 1, d=1024, 2:4", "nmkernels CompressedLinear"
    return [*found, Target("generate", what, "dense model", "x dense", 1.3, (text,), provider=by)]


TARGETS: tuple[Target, ...] = (*_streams(), *_optimizer(), *_gemms(), *_integers(), *_layers(), *_models())
"""The targets of a CPU; those of a GPU are in ``targets_cuda``."""

LIMITS = (Spec("copy", "", "float32", *WEIGHT), Spec("matmul", "", "float32", 2048, 2048, 2048))
"""The limits of the machine, for the roofline."""


def of(device: str) -> tuple[Target, ...]:
    """The targets of this kind of device."""
    return targets_cuda.TARGETS if device.startswith("cuda") else TARGETS


def specs(device: str = "cpu") -> list[Spec]:
    """Every case of every target of a device, each once, and the machine's limits."""
    limits = targets_cuda.LIMITS if device.startswith("cuda") else LIMITS
    return [*dict.fromkeys(spec for target in of(device) for spec in target.specs), *limits]


def quick(device: str) -> list[Spec]:
    """A handful: on a CPU mask, prune, compress and linear on one weight of 16 MB, and a copy; on a GPU the targets and more."""
    if device.startswith("cuda"):
        more = ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_transposable_mask")
        moving = [Spec(op, "2:4", "bfloat16", *targets_cuda.STREAM) for op in more]
        return list(dict.fromkeys((*specs(device), *moving, *targets_cuda.MORE)))
    streams = [Spec(op, "2:4", "float32", 1024, 4096) for op in ("nm_mask", "nm_prune", "nm_compress")]
    gemms = [Spec("nm_linear", "2:4", "float32", 1024, 4096, tokens) for tokens in (1, 16, 256)]
    return [*streams, *gemms, Spec("copy", "", "float32", 1024, 4096)]


def verdicts(rows: Iterable[dict[str, str]], device: str = "cpu", reasons: dict[str, str] | None = None) -> list[Verdict]:
    """Every target of a kind of device with its measurements on one machine."""
    rows = list(rows)
    why = load_reasons(machine=rows[0]["machine"] if rows else "") if reasons is None else reasons
    found = {tuple(r[k] for k in ("op", "provider", "pattern", "dtype", "shape", "metric")): float(r["p50"]) for r in rows}

    def values(t: Target, provider: str, *metrics: str) -> dict[Spec, float]:
        """For each case, the first of these metrics that it has."""
        keys = [(spec, (spec.op, provider, spec.pattern, spec.dtype, spec.shape, metric)) for spec in t.specs for metric in metrics[::-1]]
        return {spec: found[key] for spec, key in keys if key in found}

    result = []
    for t in of(device):
        if t.instead is not None:
            known = values(t, t.instead.provider, t.instead.metric)
            if len(known) == len(t.specs) and all(value >= t.instead.least for value in known.values()):
                t = replace(t, bound=t.instead.bound)
        measured = values(t, t.provider, t.metric)
        roofline, allowed = values(t, t.provider, SHARE, "share of copy"), values(t, t.provider, ALLOWED)
        result.append(Verdict(t, measured, why.get(t.key, ""), roofline, allowed if t.metric == FASTEST else {}))
    return result


def load_reasons(path: Path = REASONS, machine: str = "") -> dict[str, str]:
    """The lines ``key: reason`` of a machine: those before any heading, and those under a ``[heading]`` that is part of its name.

    Raises:
        ValueError: a key that no target has, so that a renamed target does not lose its reason.
    """
    if not path.exists():
        return {}
    keys, found, heading = {t.key for t in (*TARGETS, *targets_cuda.TARGETS)}, {}, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            heading = line.strip()[1:-1]
            continue
        # patterns have colons of their own: a key ends at the first colon that a space follows
        key, colon, reason = line.partition(": ")
        if not colon or key not in keys or not reason.strip():
            raise ValueError(f"{path.name}, line {number}: write 'key: reason' with a key of {', '.join(sorted(keys))}")
        if heading in machine:
            found[key] = reason.strip()
    return found
