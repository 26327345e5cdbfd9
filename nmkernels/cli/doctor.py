"""``python -m nmkernels doctor``: the versions, what this machine can do and why not the rest, which backend runs each op, a self test.

The self test is one small call of every op, by the backend that would run it, against the reference. ``--verify`` is every kernel, with
real sizes, in all dtypes, layouts and options.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import capability, reference
from .._version import __version__
from ..dispatch import choose, implementations
from ..ops import verify
from ..pattern import BackendError
from ..tuning.table import machine, versions
from .verify import run as verify_all

ROWS, COLS, TOKENS, N, M = 32, 64, 8, 2, 4
PACKAGES = ("numpy", "safetensors", "triton", "transformers", "accelerate", "lightning", "tqdm", "matplotlib", "tensorboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--verify", action="store_true", help="check every kernel against the reference, with real sizes; a report for an issue"
    )


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the findings; 0 when what was tested agrees with the reference, 1 when not."""
    if args.verify:
        return _verify(args.json)
    found = examine()
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0 if found["healthy"] else 1


def _device() -> str:
    return "cuda" if capability.cuda_device().ok else "cpu"


def _verify(as_json: bool) -> int:
    """Check every kernel, print what was found, and follow it from now on."""
    device = torch.device(_device())
    python = f"{platform.platform()}, python {platform.python_version()}"
    head = {"nmkernels": __version__, "machine": machine(device), "versions": versions(device.type), "python": python}
    say: Any = (lambda line: None) if as_json else partial(print, flush=True)  # a kernel may end the process
    say("\n  ".join([f"nmkernels {__version__} on {machine(device)}", versions(device.type), f"{python}\n"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels")
        found = verify_all(device, say)
    wrong = [row for row in found if row["wrong"]]
    if as_json:
        print(json.dumps({**head, "checks": found}, indent=2))
    elif not found:
        say("No kernel runs here but the reference: there is nothing to check. `python -m nmkernels doctor` says why.")
    elif wrong:
        say(f"\n{len(wrong)} of {len(found)} calls are WRONG; those kernels are switched off here. Please report the lines above.")
    else:
        say(f"\nAll {len(found)} calls are right.")
    return 1 if wrong else 0


def examine() -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain values: versions, capabilities, ops, self test, kernels checked at first use, healthy."""
    device = _device()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels(:| runs without its compiled core)")  # it is among the findings
        ops = {op: check(op, args, device) for op, args in samples().items()}
    return {
        "nmkernels": __version__,
        "versions": _versions(),
        "capabilities": {name: {"ok": ok, "reason": reason} for name, (ok, reason) in capability.probes().items()},
        "device": device,
        "forced_backend": os.environ.get("NMKERNELS_BACKEND") or None,
        "ops": ops,
        "checked": _checked(torch.device(device)),
        "selftest_seconds": round(time.perf_counter() - start, 3),
        "healthy": all(op["ok"] for op in ops.values()),
    }


def _checked(device: torch.device) -> dict[str, Any]:
    """What checks at first use found on this machine."""
    found: dict[str, str] = {}
    with suppress(BackendError):  # NMKERNELS_ISA cannot be followed, which is among the findings
        found = verify.known(device)
    switched_off = {name: wrong for name, wrong in found.items() if wrong}
    return {"enabled": verify.enabled(), "right": len(found) - len(switched_off), "switched_off": switched_off}


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
    there = tree_map_only(Tensor, lambda x: x.to(device), args)
    found: dict[str, Any] = {"backend": None, "ok": False, "problem": ""}
    answers = {entry.backend: entry.supports(*there) for entry in implementations(op)}
    found["declined"] = {backend: reason for backend, (can, reason) in answers.items() if not can}
    # whatever a backend does wrong is a finding here, never a crash of the doctor
    try:
        chosen = choose(op, *there)
        found["backend"] = chosen.backend
        found["problem"] = verify.examine(chosen, verify.truth(op, args), torch.device(device))
        found["ok"] = not found["problem"]
    except Exception as error:
        found["problem"] = f"{type(error).__name__}: {error}"
    return found


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
    lines += ["", *_checks(found["checked"])]
    good, count = sum(op["ok"] for op in found["ops"].values()), len(found["ops"])
    lines += ["", f"Self test: {good} of {count} ops agree with the reference ({found['selftest_seconds']:.1f} s)"]
    return "\n".join(lines if good == count else [*lines, f"{count - good} DO NOT: do not trust results; please report the lines above"])


def _checks(checked: dict[str, Any]) -> list[str]:
    """What is known of kernels from their first use on this machine."""
    if not checked["enabled"]:
        return [f"Kernels are not checked at first use: {verify.ENV}=0"]
    off = checked["switched_off"]
    lines = [f"Checked at first use on this machine: {checked['right']} kinds of calls right, {len(off)} switched off"]
    lines += [f"  {name}: {wrong}" for name, wrong in off.items()]
    return (
        lines if not off else [*lines, "  Please report the output of `python -m nmkernels doctor --verify`, which also checks them again"]
    )
