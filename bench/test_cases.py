"""The cases under pytest-benchmark: ``pytest bench --benchmark-only``, narrowed with ``-k "linear and 2:4"``.

Every provider of a case is one benchmark, and the case is their group. They do not alternate here, so their ratios are less reliable
than those of ``python -m bench.run``. By default the quick cases run; set ``NMKERNELS_BENCH=targets`` or ``all`` for more.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import pytest
import torch

from . import cases, runner, targets
from .registry import Ask, Spec, Work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def chosen() -> list[Spec]:
    """The cases that ``NMKERNELS_BENCH`` names."""
    which = os.environ.get("NMKERNELS_BENCH", "quick")
    if which not in ("quick", "targets", "all"):
        raise pytest.UsageError(f"NMKERNELS_BENCH={which!r} is unknown; choose quick, targets or all.")
    return targets.quick(DEVICE) if which == "quick" else targets.specs() if which == "targets" else cases.select(Ask())


@lru_cache(maxsize=1)
def gated(spec: Spec) -> Work:
    """The case, built once for all its providers, with our results checked."""
    work = cases.build(spec, DEVICE)
    runner.gate(work)
    return work


@pytest.mark.parametrize("who", ["ours", "torch"])
@pytest.mark.parametrize("spec", chosen(), ids=str)
def test_case(spec: Spec, who: str, benchmark: Any) -> None:
    """Time the provider that users get, and the first one that it is compared with."""
    work = gated(spec)
    name = work.providers[0].name if who == "ours" or not work.ratios else work.ratios[0].against[0]
    p = next(p for p in work.providers if p.name == name)
    if who == "ours" and not name.startswith("nmkernels"):
        pytest.skip("a limit of the machine, measured with torch")
    benchmark.group, benchmark.extra_info["provider"] = str(spec), name

    def call() -> None:
        p.call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    with p.under():
        benchmark(call)
