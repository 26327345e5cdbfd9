"""``python -m nmkernels doctor``: the versions, what this machine can do and why not the rest, which backend runs each op, a self test.

The self test is one small call of every op, by the backend that would run it, against the reference.
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
from torch.utils._pytree import tree_map_only

from .. import capability, reference
from .. import ops as _ops  # noqa: F401 - registers the backends
from .._version import __version__
from ..dispatch import choose, implementations
from ..testing.compare import assert_equal_bits, assert_no_worse

ROWS, COLS, TOKENS, N, M = 32, 64, 8, 2, 4
ROUNDED = {"nm_linear", "nm_linear_dgrad", "nm_linear_wgrad"}  # compared with float64, as backends may round differently
SUMS = {"nm_soft_threshold_scale", "nm_masked_adamw_"}  # return sums that agree to 1e-6; what they update agrees to the bit
PACKAGES = ("numpy", "safetensors", "triton", "transformers", "accelerate", "lightning", "tqdm", "matplotlib", "tensorboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the findings; 0 when the self test agrees with the reference, 1 when not."""
    found = examine()
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0 if found["healthy"] else 1


def examine() -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain values: versions, capabilities, ops, self test, healthy."""
    device = "cuda" if capability.cuda_device().ok else "cpu"
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels runs without its compiled core")  # it is among the findings
        ops = {op: check(op, args, device) for op, args in samples().items()}
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


def samples() -> dict[str, tuple[Any, ...]]:
    """Arguments of every raw op, small enough that all of them together take well under a second."""
    gen = torch.Generator().manual_seed(0)

    def random(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=gen).masked_fill_(torch.rand(rows, cols, generator=gen) < 0.1, 0.0)

    p, g, m, w = (random(ROWS, COLS) for _ in range(4))
    x, y, square = random(TOKENS, COLS), random(TOKENS, ROWS), random(COLS, COLS)
    packed, seed = reference.compress(w, N, M), torch.tensor([7, 3])
    eight, scale, step, wide = torch.int8, torch.tensor(30.0), torch.tensor(1 / 30), random(64, 128)
    hyper = torch.tensor([1e-3, 0.9, 0.999, 1e-8, 0.1, 2e-4, 0.0, 0.0, 0.0], dtype=torch.float64)
    packs = [packed[0].bfloat16().zero_(), packed[1].clone(), torch.zeros(0), torch.zeros(0)]
    state: tuple[list[Tensor], ...] = [p], [g], [m], [w.abs()], [], [torch.tensor(4.0)], []
    return {
        "nm_mask": (w, N, M),
        "nm_prune": (w, N, M),
        "nm_transposable_mask": (w, N, M),
        "nm_compress": (w, N, M, None),
        "nm_decompress": (*packed, N, M, COLS),
        "nm_pack": (square, N, M, "transposable", None, None, torch.bfloat16, True, True, "wgmma.sp"),
        "nm_metadata": (reference.compress(square, N, M)[1], COLS, "mma.sp"),
        "nm_linear": (x, *packed, N, M, COLS, random(1, ROWS)[0]),
        "nm_linear_dgrad": (y, *packed, N, M, COLS),
        "nm_linear_wgrad": (*reference.compress(random(ROWS, TOKENS), N, M), N, M, TOKENS, x),
        "nm_soft_threshold": (w, N, M),
        "nm_soft_threshold_scale": (w, N, M),
        "nm_mvue": (w, N, M, -1, seed, "exact"),
        "nm_mvue_compress": (w, N, M, 0, seed, "exact"),
        "nm_quantize": (wide, scale, eight, True),
        "nm_quantize_pack": (wide, scale, eight),
        "nm_linear_quantized": (
            reference.quantize(wide, scale, eight, False),
            step,
            *reference.quantize_pack(wide, scale, eight),
            step,
            None,
            torch.float32,
            False,
            True,
        ),
        "nm_masked_adamw_": (*state, hyper, N, M, False, False, False, False, None, None, False, packs, "canonical"),
    }


def check(op: str, args: tuple[Any, ...], device: str = "cpu") -> dict[str, Any]:
    """One op: ``backend``, ``ok``, ``problem`` (empty when ok), ``declined`` (backend: reason)."""
    args = tree_map_only(Tensor, lambda x: x.to(device), args)
    found: dict[str, Any] = {"backend": None, "ok": False, "problem": ""}
    answers = {entry.backend: entry.supports(*args) for entry in implementations(op)}
    found["declined"] = {backend: reason for backend, (can, reason) in answers.items() if not can}
    # whatever a backend does wrong is a finding here, never a crash of the doctor
    try:
        chosen = choose(op, *args)
        found["backend"] = chosen.backend
        _compare(op, chosen.fn, args)
        found["ok"] = True
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    return found


@torch.no_grad()
def _compare(op: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    plain = next(i.fn for i in implementations(op) if i.backend == "reference")
    ours, theirs = (tree_map_only(Tensor, Tensor.clone, args) for _ in range(2))
    got, expected = fn(*ours), plain(*theirs)
    if op in ROUNDED:
        exact = plain(*(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args))
        assert_no_worse(got, expected, exact)
    elif op in SUMS:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0.0)
        assert_equal_bits(ours, theirs)
    else:
        assert_equal_bits(got, expected)


def _versions() -> dict[str, str | None]:
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
    good, count = sum(op["ok"] for op in found["ops"].values()), len(found["ops"])
    lines += ["", f"Self test: {good} of {count} ops agree with the reference ({found['selftest_seconds']:.1f} s)"]
    return "\n".join(lines if good == count else [*lines, f"{count - good} DO NOT: do not trust results; please report the lines above"])
