"""Blocks of threads walking through a kernel: registers are arrays with one element a thread.

Threads that branch apart run one program counter at a time, the lowest first, which is where compiled loops and ifs meet again. With
``warps_apart`` each warp (four, if wgmma is there) runs alone up to the next barrier, the last first: a missing barrier then shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .exchange import EXCHANGE
from .instructions import PLAIN
from .operands import Memory, Threads, read, write
from .parse import Kernel

WARP = 32
SHARED = 232448
"""Bytes of shared memory a block has; filled with a pattern before each block, so that reading what nobody wrote shows."""


def _run(t: Threads) -> None:
    """Up to the next barrier, which every thread must reach, or to the end."""
    code = t.kernel.code
    while not t.done:
        here = int(t.at.min())
        ins = code[here]
        t.active = t.at == here
        if ins.name in ("bar", "barrier") and ins.mods[0] != "warp":
            assert t.active.all() and not ins.guard, f"{ins.text}: some threads do not reach the barrier"
            t.at += 1
            return
        if ins.guard:
            guard = read(t, ins.guard.lstrip("!"), "pred") ^ ins.guard.startswith("!")
            t.at[t.active & ~guard] += 1
            t.active &= guard
            if not t.active.any():
                continue
        if ins.name == "bra":
            t.at[t.active] = t.kernel.labels[str(ins.operands[0])]
            continue
        if ins.name == "ret":
            t.at[t.active] = len(code)
            continue
        if ins.name in PLAIN:
            write(t, ins.operands[0], PLAIN[ins.name](t, ins))
        elif ins.name in EXCHANGE:
            EXCHANGE[ins.name](t, ins)
        else:
            raise NotImplementedError(f"no rule for {ins.text}")
        t.at[t.active] += 1


def execute(kernel: Kernel, blocks: Iterable[int], args: Sequence[Any], tensors: Sequence[Tensor] = (), warps_apart: bool = False) -> None:
    """Run blocks of a kernel on CPU tensors and ints, given in the order of its parameters (what it takes as constants left out).

    Args:
        tensors: further memory that the kernel may touch, for addresses that it reads from a table.
    """
    memory = Memory.of([a for a in args if isinstance(a, Tensor)] + list(tensors))
    values = [a.data_ptr() if isinstance(a, Tensor) else int(a) for a in args]
    values += [0] * (len(kernel.params) - len(values))  # scratch memory, which no kernel here asks for
    assert len(values) == len(kernel.params), f"{kernel.name} takes {len(kernel.params)} arguments, {len(values)} given"
    params = dict(zip(kernel.params, values, strict=True))
    together = 4 * WARP if any(ins.name == "wgmma" for ins in kernel.code) else WARP
    step = together if warps_apart else kernel.threads
    with np.errstate(all="ignore"):
        for block in blocks:
            spaces = {"global": memory, "shared": Memory({0: np.full(SHARED, 0xCD, dtype=np.uint8)})}
            parts = [Threads(kernel, i, step, block, spaces, params) for i in reversed(range(0, kernel.threads, step))]
            while not all(p.done for p in parts):
                for p in parts:
                    _run(p)
