"""``doctor --verify``: check every kernel against the reference, with sizes of real layers and with those of the check at first use.

The results are recorded: kernels that are wrong are switched off on this machine; those that are right are switched on again if they were
off, and are not checked again at first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from ..dispatch import Impl, implementations
from ..ops import verify
from ..testing.calls import made, small, table

SIZES = {"cpu": (512, 1024), "cuda": (1024, 4096)}
"""Rows and columns of the weights, by device: multiples of the tiles of every layout."""


def run(device: torch.device, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Check every call on every backend that can run it; one dict per check. ``say`` is called with a line for each op and backend."""
    checks: list[dict[str, Any]] = []
    worst: dict[str, str] = {}
    for op, kinds in table(*SIZES[device.type]).items():
        start, rows = time.perf_counter(), len(checks)
        hosts: list[tuple[int, ...]] = [(), tuple(verify.HOST[op])] if op in verify.HOST and device.type != "cpu" else [()]
        for kind, on_host in product(kinds, hosts):
            args = made(op, kind)
            on_device = verify.placed(args, device, on_host)
            entries = [i for i in implementations(op) if verify.concerned(i, device) and i.can(*on_device)[0]]
            truths = [verify.truth(op, args), verify.truth(op, small(op, kind))] if entries else []
            for entry in entries:
                name = verify.family(entry, on_device)
                call, wrong = _first_wrong(entry, truths, device, on_host)
                worst[name] = worst.get(name) or wrong
                checks.append({"op": op, "backend": entry.backend, "call": call, "wrong": wrong})
        verify.record(worst)
        for backend in dict.fromkeys(row["backend"] for row in checks[rows:]):
            results = [row for row in checks[rows:] if row["backend"] == backend]
            bad = [row for row in results if row["wrong"]]
            seconds = time.perf_counter() - start
            say(f"  {op:<24}{backend:<12}{len(results) - len(bad):>4} of {len(results):>3} calls right  ({seconds:.1f} s)")
            for row in bad:
                say(f"    WRONG: {row['call']}: {row['wrong']}")
    return checks


def _first_wrong(entry: Impl, truths: list[verify.Truth], device: torch.device, on_host: tuple[int, ...]) -> tuple[str, str]:
    """(call, problem) of the first call with a wrong result; (the first call, "") if all are right."""
    for true in truths:
        if entry.can(*verify.placed(true.args, device, on_host))[0]:
            wrong = verify.examine(entry, true, device, on_host)
            if wrong:
                return verify.words(true.op, true.args), wrong
    return verify.words(truths[0].op, truths[0].args), ""
