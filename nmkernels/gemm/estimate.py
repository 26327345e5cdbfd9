"""The estimate of how long each method of doing a GEMM takes."""

from __future__ import annotations

from typing import Any

import torch

from .. import capability

SPECIALIZED = {(2, 4), (1, 4), (2, 8), (1, 8), (4, 8)}


def kernel(p: Any) -> str:
    isa = capability.instruction_set()
    if p.dtype != torch.bfloat16 or isa not in ("avx512_bf16", "amx"):
        return "stored"
    pattern = p.n, p.m
    if isa == "amx":
        return "expanded in cache"
    if pattern not in SPECIALIZED or (p.role == "dgrad" and 8 * p.n <= p.m and p.tokens > 64):
        return "stored"
    return "expanded in cache" if p.role == "dgrad" or pattern == (4, 8) else "pairs"
