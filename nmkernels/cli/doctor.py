"""``python -m nmkernels doctor``: versions, what works on this machine and why the rest does not, the backend of each op, a self test.

The self test compares one small call of every op, on the backend that would run it, with the reference. ``--verify`` does that for every
kernel, with real sizes, in all dtypes, layouts and options. ``--choice`` times layers as they are by default against dense ones.
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
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import capability
from .._version import __version__
from ..dispatch import choose, implementations
from ..ops import verify
from ..pattern import BackendError
from ..testing.calls import samples
from ..timing.table import machine, versions
from . import choice
from .verify import run as verify_all

PACKAGES = ("numpy", "safetensors", "triton", "transformers", "accelerate", "lightning", "tqdm", "matplotlib", "tensorboard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--verify", action="store_true", help="check every kernel against the reference, with real sizes; a report for an issue"
    )
    either.add_argument(
        "--choice",
        nargs="?",
        const="some",
        choices=("some", "all"),
        help="time layers with their defaults against nn.Linear, some thirty in under a minute, or all in minutes; a report for an issue",
    )


def run(args: argparse.Namespace) -> int:
    """Examine this machine and print the result; 0 if every op agrees with the reference, else 1."""
    device = torch.device("cuda" if capability.cuda_device().ok else "cpu")
    if not (args.verify or args.choice):
        report = examine(device)
        print(json.dumps(report, indent=2) if args.json else _text(report))
        return 0 if report["healthy"] else 1
    say: Any = (lambda line: None) if args.json else partial(print, flush=True)  # flush: a kernel may crash the process
    python = f"{platform.platform()}, python {platform.python_version()}"
    head = {"nmkernels": __version__, "machine": machine(device), "versions": versions(device.type), "python": python}
    say(f"nmkernels {__version__} on {head['machine']}\n  {head['versions']}\n  {python}\n")
    report = _verify(device, say) if args.verify else _choice(device, args.choice == "all", say)
    if args.json:
        print(json.dumps({**head, **report}, indent=2))
    return int(any(row["wrong"] for row in report.get("checks", ())))


def _choice(device: torch.device, everything: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Time the cells of ``choice``."""
    threads, rows = torch.get_num_threads(), []
    say(f"Layers at {choice.PATTERN} as they are by default, {threads} threads\n\n{choice.HEADER}")
    for cell in choice.cells(device, everything):
        rows.append(choice.compare(cell, device))
        say(choice.text(rows[-1]))
    say(f"\n{choice.verdict(rows)}")
    return {"threads": threads, "cells": rows}


def _verify(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Check every kernel, and use the results from now on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels")
        checks = verify_all(device, say)
    wrong = sum(bool(row["wrong"]) for row in checks)
    if not checks:
        say("Only the reference runs on this machine, so there is nothing to check. `python -m nmkernels doctor` says why.")
    elif wrong:
        say(f"\n{wrong} of {len(checks)} calls are WRONG; their kernels are switched off here. Please report the lines above.")
    else:
        say(f"\nAll {len(checks)} calls are right.")
    return {"checks": checks}


def examine(device: torch.device) -> dict[str, Any]:
    """Everything that ``doctor`` shows, as plain values."""
    start = time.perf_counter()
    # torch.__version__ names the build (+cpu, +cu126), which the package metadata does not
    installed: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform(), "torch": torch.__version__}
    for name in PACKAGES:
        installed[name] = None
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels(:| runs without its compiled core)")  # reported below
        ops = {op: check(op, args, device.type) for op, args in samples().items()}
    verdicts: dict[str, str] = {}  # of the checks at first use
    with suppress(BackendError):  # NMKERNELS_ISA names an instruction set that this CPU lacks, which capabilities report
        verdicts = verify.known(device)
    switched_off = {name: wrong for name, wrong in verdicts.items() if wrong}
    return {
        "nmkernels": __version__,
        "versions": installed,
        "capabilities": {name: {"ok": ok, "reason": reason} for name, (ok, reason) in capability.probes().items()},
        "device": device.type,
        "forced_backend": os.environ.get("NMKERNELS_BACKEND") or None,
        "ops": ops,
        "checked": {"enabled": verify.enabled(), "right": len(verdicts) - len(switched_off), "switched_off": switched_off},
        "selftest_seconds": round(time.perf_counter() - start, 3),
        "healthy": all(op["ok"] for op in ops.values()),
    }


def check(op: str, args: tuple[Any, ...], device: str = "cpu") -> dict[str, Any]:
    """Check one op. ``backend``: which runs it; ``ok``; ``problem``: "" if ok; ``declined``: why each other backend cannot run it."""
    on_device = tree_map_only(Tensor, lambda x: x.to(device), args)
    result: dict[str, Any] = {"backend": None, "ok": False, "problem": ""}
    support = {entry.backend: entry.supports(*on_device) for entry in implementations(op)}
    result["declined"] = {backend: reason for backend, (can, reason) in support.items() if not can}
    # an error of a backend is reported; it must not crash the doctor
    try:
        chosen = choose(op, *on_device)
        result["backend"] = chosen.backend
        result["problem"] = verify.examine(chosen, verify.truth(op, args), torch.device(device))
        result["ok"] = not result["problem"]
    except Exception as error:
        result["problem"] = f"{type(error).__name__}: {error}"
    return result


def _text(report: dict[str, Any]) -> str:
    versions = [f"{name} {version or 'not installed'}" for name, version in report["versions"].items()]
    lines = [f"nmkernels {report['nmkernels']}", *(f"  {v}" for v in versions), "", "What works here"]
    lines += [f"  {'yes' if c['ok'] else 'no ':<4}{name:<15}{c['reason']}" for name, c in report["capabilities"].items()]
    forced = f", NMKERNELS_BACKEND={report['forced_backend']}" if report["forced_backend"] else ""
    lines += ["", f"Which backend runs each op, float32 on {report['device']}{forced}"]
    count, reasons = len(report["ops"]), Counter(item for op in report["ops"].values() for item in op["declined"].items())
    for name, op in report["ops"].items():
        declined = "; ".join(f"{other}: {why}" for other, why in op["declined"].items() if reasons[other, why] == 1)
        lines.append(f"  {name:<24}{op['backend'] or 'none':<11}{'ok' if op['ok'] else 'WRONG: ' + op['problem']}")
        lines += [f"{'':<26}{declined}"] if declined else []
    lines += [f"  {other} cannot run {times} of these {count} ops: {why}" for (other, why), times in reasons.items() if times > 1]
    lines += ["", *_checks(report["checked"])]
    good = sum(op["ok"] for op in report["ops"].values())
    lines += ["", f"Self test: {good} of {count} ops agree with the reference ({report['selftest_seconds']:.1f} s)"]
    return "\n".join(lines if good == count else [*lines, f"{count - good} DO NOT: do not trust results; please report the lines above"])


def _checks(checked: dict[str, Any]) -> list[str]:
    """Lines on the checks of kernels at first use on this machine."""
    if not checked["enabled"]:
        return [f"Kernels are not checked at first use: {verify.ENV}=0"]
    off = checked["switched_off"]
    lines = [f"Checked at first use on this machine: {checked['right']} kinds of calls right, {len(off)} switched off"]
    lines += [f"  {name}: {wrong}" for name, wrong in off.items()]
    return lines + ["  Please report the output of `python -m nmkernels doctor --verify`, which also checks them again"] * bool(off)
