"""``python -m nmkernels doctor``: the versions, what this machine can do and why not the rest, which backend runs each op, a self test.

One small call of every op, by the backend that would run it, against the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from .. import ops as _ops  # noqa: F401 - registers the backends
from .._version import __version__
from ..dispatch import choose, implementations
from ..testing.compare import assert_equal_bits, assert_no_worse

ROWS, COLS, TOKENS, N, M = 32, 64, 8, 2, 4
ROUNDED = {"nm_linear", "nm_linear_dgrad", "nm_linear_wgrad"}
"""Ops whose backends may round differently: judged against float64 instead of bit by bit."""
SUMS_RTOL = 1e-6
"""Sums over a tensor agree to this relative error across devices."""


def check_all(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """For every op: the backend that runs it, whether it agrees with the reference, and why other backends declined."""
    return {op: check(op, device) for op in SAMPLES}


def check(op: str, device: str = "cpu") -> dict[str, Any]:
    """One op: ``backend``, ``ok``, ``problem`` (empty when ok), ``declined`` (backend: reason)."""
    gen = torch.Generator().manual_seed(0)
    args = _move(SAMPLES[op](gen), device)
    found: dict[str, Any] = {"backend": None, "ok": False, "problem": "", "declined": {}}
    for entry in implementations(op):
        can, reason = entry.supports(*args)
        if not can:
            found["declined"][entry.backend] = reason
    # whatever a backend does wrong is a finding here, never a crash of the doctor
    try:
        chosen = choose(op, *args)
        found["backend"] = chosen.backend
        _compare(op, chosen.fn, args)
        found["ok"] = True
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    return found


def _compare(op: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    reference = next(i.fn for i in implementations(op) if i.backend == "reference")
    ours, theirs = _copy(args), _copy(args)
    with torch.no_grad():
        got, expected = fn(*ours), reference(*theirs)
        if op in ROUNDED:
            exact = reference(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
            return assert_no_worse(got, expected, exact)
    if op in {"nm_soft_threshold_scale", "nm_masked_adamw_"}:
        torch.testing.assert_close(got, expected, rtol=SUMS_RTOL, atol=0.0)
        # what was updated in place must still agree to the bit
        return assert_equal_bits(ours, theirs)
    assert_equal_bits(got, expected)


def _weight(gen: torch.Generator, *shape: int) -> Tensor:
    w = torch.randn(*(shape or (ROWS, COLS)), generator=gen)
    return w.masked_fill_(torch.rand(w.shape, generator=gen) < 0.1, 0.0)


def _packed(gen: torch.Generator, rows: int = ROWS, cols: int = COLS) -> tuple[Tensor, Tensor]:
    from .. import reference

    return reference.compress(_weight(gen, rows, cols), N, M)


def _seed() -> Tensor:
    return torch.tensor([7, 3], dtype=torch.int64)


def _adamw(gen: torch.Generator) -> tuple[Any, ...]:
    p, g, m = (_weight(gen) for _ in range(3))
    hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.1, 2e-4, 0.0, 0.0, 0.0], dtype=torch.float64)
    state: tuple[list[Tensor], ...] = [p], [g], [m], [_weight(gen).abs()], [], [torch.tensor(4.0)], []
    rows = torch.zeros(ROWS, COLS * N // M).bfloat16(), torch.zeros(ROWS, COLS * N // M // 4, dtype=torch.uint8)
    packs = [*rows, torch.zeros(0), torch.zeros(0)]
    return *state, hyper, N, M, False, False, False, False, None, None, False, packs, "canonical"


Sample = Callable[[torch.Generator], tuple[Any, ...]]

SAMPLES: dict[str, Sample] = {
    "nm_mask": lambda gen: (_weight(gen), N, M),
    "nm_prune": lambda gen: (_weight(gen), N, M),
    "nm_transposable_mask": lambda gen: (_weight(gen), N, M),
    "nm_compress": lambda gen: (_weight(gen), N, M, None),
    "nm_decompress": lambda gen: (*_packed(gen), N, M, COLS),
    "nm_pack": lambda gen: (_weight(gen, COLS, COLS), N, M, "transposable", None, None, torch.bfloat16, True, True, "wgmma.sp"),
    "nm_metadata": lambda gen: (_packed(gen, COLS, COLS)[1], COLS, "mma.sp"),
    "nm_linear": lambda gen: (_weight(gen, TOKENS, COLS), *_packed(gen), N, M, COLS, _weight(gen, ROWS)),
    "nm_linear_dgrad": lambda gen: (_weight(gen, TOKENS, ROWS), *_packed(gen), N, M, COLS),
    "nm_linear_wgrad": lambda gen: (*_packed(gen, ROWS, TOKENS), N, M, TOKENS, _weight(gen, TOKENS, COLS)),
    "nm_soft_threshold": lambda gen: (_weight(gen), N, M),
    "nm_soft_threshold_scale": lambda gen: (_weight(gen), N, M),
    "nm_mvue": lambda gen: (_weight(gen), N, M, -1, _seed(), "exact"),
    "nm_mvue_compress": lambda gen: (_weight(gen), N, M, 0, _seed(), "exact"),
    "nm_masked_adamw_": _adamw,
}
"""Arguments of the raw op, small enough that all of them together take well under a second."""


def _move(tree: Any, device: str) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.to(device), tree)


def _copy(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.clone(), tree)


PACKAGES = ("numpy", "safetensors", "triton", "transformers", "accelerate", "lightning", "tqdm", "matplotlib", "tensorboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the findings; 0 when the self test agrees with the reference, 1 when not."""
    found = examine()
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0 if found["healthy"] else 1


def examine() -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain values: versions, capabilities, ops, self test, healthy."""
    from .. import capability

    pass

    device = "cuda" if capability.cuda_device().ok else "cpu"
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels runs without its compiled core")  # it is among the findings
        ops = check_all(device)
    return {
        "nmkernels": __version__,
        "versions": _versions(),
        "capabilities": {name: {"ok": ok, "reason": reason} for name, (ok, reason) in capability.probes().items()},
        "device": device,
        "forced_backend": os.environ.get("NMKERNELS_BACKEND") or None,
        "ops": ops,
        "selftest_seconds": round(time.perf_counter() - start, 3),
        "healthy": all(op["ok"] for op in ops.values()),
    }


def _versions() -> dict[str, str | None]:
    import torch

    # torch's own word: unlike the package's metadata it names the build
    versions: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _text(found: dict[str, Any]) -> str:
    versions = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines = [f"nmkernels {found['nmkernels']}", *(f"  {v}" for v in versions), "", "What works here"]
    lines += [f"  {'yes' if c['ok'] else 'no ':<4}{name:<15}{c['reason']}" for name, c in found["capabilities"].items()]
    forced = f", NMKERNELS_BACKEND={found['forced_backend']}" if found["forced_backend"] else ""
    lines += ["", f"Which backend runs each op, float32 on {found['device']}{forced}"]
    said = Counter(item for op in found["ops"].values() for item in op["declined"].items())
    for name, op in found["ops"].items():
        declined = "; ".join(f"{other}: {why}" for other, why in op["declined"].items() if said[other, why] == 1)
        lines.append(f"  {name:<24}{op['backend'] or 'none':<11}{'ok' if op['ok'] else 'WRONG: ' + op['problem']}")
        lines += [f"{'':<26}{declined}"] if declined else []
    lines += [f"  {other} declined {times} of them: {why}" for (other, why), times in said.items() if times > 1]
    good = sum(op["ok"] for op in found["ops"].values())
    verdict = "all agree with the reference" if found["healthy"] else f"{len(found['ops']) - good} DO NOT"
    lines += ["", f"Self test: {good} of {len(found['ops'])} ops agree with the reference ({found['selftest_seconds']:.1f} s)"]
    return "\n".join(lines if found["healthy"] else [*lines, f"{verdict}: do not trust results; please report the lines above"])
