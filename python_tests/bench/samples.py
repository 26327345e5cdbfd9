"""Cases small enough for tests, and a way to break an op."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.registry import Spec
from nmkernels import dispatch

STAMP = '"AMD, 2 threads",torch 2.13.0,abc1234,2026-11-21\n'
HEAD = "op,provider,pattern,dtype,shape,metric,p20,p50,p80,machine,versions,commit,date\n"

SMALL = (
    Spec("nm_mask", "2:4", "float32", 16, 32),
    Spec("nm_prune", "1:8", "bfloat16", 16, 32),
    Spec("nm_compress", "2:4", "float32", 16, 32),
    Spec("nm_soft_threshold", "4:8", "float32", 16, 32),
    Spec("nm_decompress", "2:8", "float32", 16, 32),
    Spec("nm_transposable_mask", "2:4", "float32", 16, 32),
    Spec("nm_transposable_mask", "1:4", "float32", 16, 16),
    Spec("nm_mvue_compress", "2:4", "float32", 16, 32),
    Spec("nm_mvue_compress(dim=0)", "2:4", "bfloat16", 16, 32),
    Spec("nm_pack(both)", "2:4", "float32", 16, 32),
    Spec("nm_pack(threshold)", "2:4", "bfloat16", 16, 32),
    Spec("nm_pack(mma.sp)", "2:4", "bfloat16", 16, 64),
    Spec("nm_masked_adamw_", "2:4", "float32", 16, 32),
    Spec("nm_masked_adamw_", "1:4", "bfloat16", 16, 32),
    Spec("nm_masked_adamw_(many)", "2:4", "float32", 16, 32),
    Spec("host(nm_mask)", "2:4", "float32", 16, 32),
    Spec("host(nm_compress)", "2:4", "bfloat16", 16, 32),
    Spec("host(nm_linear)", "2:4", "float32", 16, 32, 1),
    Spec("nm_linear", "2:4", "float32", 16, 32, 3),
    Spec("nm_linear", "1:4", "bfloat16", 16, 32, 20),
    Spec("nm_linear_dgrad", "2:4", "float32", 16, 32, 3),
    Spec("nm_linear_wgrad", "2:4", "float32", 16, 32, 8),
    Spec("nm_linear(mma.sp)", "2:4", "bfloat16", 32, 64, 20),
    Spec("nm_linear_wgrad(mma.sp)", "2:4", "bfloat16", 16, 24, 128),
    Spec("CompressedLinear", "2:4", "float32", 16, 32, 3),
    Spec("calls", "2:4", "float32", 16, 32, 3),
    Spec("effective_weight", "2:4", "float32", 16, 32, 3),
    Spec("effective_weight(step)", "2:4", "float32", 16, 32, 3),
    Spec("ffn", "2:4", "float32", 64, 32, 20),
    Spec("ffn", "2:4", "bfloat16", 64, 128, 20),
    Spec("choice(fprop)", "2:4", "float32", 16, 32, 3),
    Spec("choice(dgrad)", "2:4", "bfloat16", 16, 32, 20),
    Spec("choice(wgrad)", "2:4", "float32", 16, 32, 8),
    Spec("train_step", "2:4", "float32", tokens=32, model="GPT 64x1"),
    Spec("generate", "2:4", "float32", tokens=4, model="GPT 64x1"),
    Spec("copy", "", "float32", 16, 32),
    Spec("matmul", "", "float32", 16, 32, 16),
)
"""At least one case of every op of the registry."""


@contextmanager
def broken(op: str, wrong: Callable[..., Any], priority: int = 99, alone: bool = False) -> Iterator[None]:
    """``op`` runs ``wrong`` inside, through the dispatcher, as a backend of its own; with a low priority only where asked for.

    ``alone``: beside the reference it is the only backend.
    """
    before = {name: list(entries) for name, entries in dispatch._impls.items()}
    if alone:
        dispatch._impls[op] = [entry for entry in before[op] if entry.backend == "reference"]
    dispatch.impl(op, backend="broken", priority=priority)(wrong)
    try:
        yield
    finally:
        dispatch._impls.clear()
        dispatch._impls.update(before)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
