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
from .instructions import PLAIN, SPECIAL
from .operands import Memory, read, write
from .parse import Instruction, Kernel

WARP = 32
SHARED = 232448
"""Bytes of shared memory a block has; filled with a pattern before each block, so that reading what nobody wrote shows."""


class Threads:
    """Threads that run together: their registers and where each of them is."""

    def __init__(self, kernel: Kernel, first: int, count: int, block: int, spaces: dict[str, Memory], params: dict[str, int]):
        self.kernel, self.spaces, self.params, self.shared = kernel, spaces, params, spaces["shared"].bytes[0]
        self.count, self.block = count, block
        self.tid = np.arange(first, first + count, dtype=np.uint32)
        self.registers: dict[str, np.ndarray] = {}
        self.at = np.zeros(count, dtype=np.int64)
        self.active = np.ones(count, dtype=bool)

    @property
    def done(self) -> bool:
        """Whether every thread has returned."""
        return bool((self.at >= len(self.kernel.code)).all())

    def run(self) -> None:
        """Up to the next barrier, which every thread must reach, or to the end."""
        code = self.kernel.code
        while not self.done:
            here = int(self.at.min())
            ins = code[here]
            self.active = self.at == here
            if ins.name in ("bar", "barrier") and ins.mods[0] != "warp":
                assert self.active.all() and not ins.guard, f"{ins.text}: some threads do not reach the barrier"
                self.at += 1
                return
            if ins.guard:
                guard = read(self, ins.guard.lstrip("!"), "pred") ^ ins.guard.startswith("!")
                self.at[self.active & ~guard] += 1
                self.active &= guard
                if not self.active.any():
                    continue
            self._step(ins)

    def _step(self, ins: Instruction) -> None:
        if ins.name == "bra":
            self.at[self.active] = self.kernel.labels[str(ins.operands[0])]
        elif ins.name == "ret":
            self.at[self.active] = len(self.kernel.code)
        elif ins.name in SPECIAL:
            self.at[self.active] += 1
        else:
            if ins.name in PLAIN:
                write(self, ins.operands[0], PLAIN[ins.name](self, ins))
            elif ins.name in EXCHANGE:
                EXCHANGE[ins.name](self, ins)
            else:
                raise NotImplementedError(f"no rule for {ins.text}")
            self.at[self.active] += 1


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
                    p.run()
