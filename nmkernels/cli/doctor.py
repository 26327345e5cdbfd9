"""``python -m nmkernels doctor``: the versions, what this machine can do and why not the rest, which backend runs each op, a self test."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections import Counter
from importlib import metadata
from typing import Any

from .._version import __version__

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
    from .. import _capability
    from . import _selftest

    device = "cuda" if _capability.cuda_device().ok else "cpu"
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nmkernels runs without its compiled core")  # it is among the findings
        ops = _selftest.check_all(device)
    return {
        "nmkernels": __version__,
        "versions": _versions(),
        "capabilities": {name: {"ok": ok, "reason": reason} for name, (ok, reason) in _capability.probes().items()},
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
