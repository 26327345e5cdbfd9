"""Clusters of blocks walking through a kernel: warps with their own program counters, run together while they are at the same place."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from .barriers import AGAIN, STAY, STOP
from .block import Cluster
from .bulk import Copy, check_left
from .exchange import EXCHANGE, space_of
from .instructions import PLAIN
from .operands import WARP, Memory, Threads, read, write
from .order import Hazard
from .parse import RESERVED, SIZES, Instruction, Kernel
from .wgmma import Product

MOST_SHARED = 232448 + RESERVED
LONG = 20000
"""Instructions after which others run even if nothing stops a warp: it may poll memory."""

Rule = tuple[Instruction, str, Any, str, bool, tuple[str, ...], frozenset[str]]


def _program(kernel: Kernel) -> list[Rule]:
    """For each instruction: its kind, rule, guard, whether that is negated, and the registers that a wgmma uses too."""
    async_registers: set[str] = set()
    for ins in kernel.code:
        if ins.name == "wgmma" and ins.mods[0] == "mma_async":
            d, a, _, meta = ins.operands[:4]
            async_registers.update(d, a if isinstance(a, tuple) else ())
            async_registers.update({str(meta)} if "sp" in ins.mods else ())
    program = []
    for ins in kernel.code:
        kind = "bra" if ins.name == "bra" else "ret" if ins.name in ("ret", "exit") else "plain" if ins.name in PLAIN else "exchange"
        rule = kernel.labels.get(str(ins.operands[0])) if kind == "bra" else PLAIN.get(ins.name) or EXCHANGE.get(ins.name)
        watched = () if ins.name == "wgmma" else tuple(ins.words & async_registers)
        writes: frozenset[str] = frozenset()
        if ins.operands and ins.name not in ("st", "cp", "bar", "bra"):
            writes = frozenset(ins.operands[0] if isinstance(ins.operands[0], tuple) else str(ins.operands[0]).split("|"))
        program.append((ins, kind, rule, ins.guard.lstrip("!"), ins.guard.startswith("!"), watched, writes))
    return program


def _unit(kernel: Kernel) -> int:
    """The finest grain in which the kernel's instructions access shared memory, in bytes, at most 4."""
    sizes = [SIZES[i.types[-1]] // 8 for i in kernel.code if i.name in ("ld", "st") and space_of(i) in ("shared", "generic") and i.types]
    return min([4, *sizes])


class Machine:
    """Runs one cluster."""

    def __init__(self, cluster: Cluster, program: list[Rule]) -> None:
        self.cluster, self.program, self.end = cluster, program, len(program)

    def run(self) -> None:
        cluster = self.cluster
        while cluster.running:
            if not (ready := self._ready()):
                if not self._progress():
                    self._stuck()
                continue
            if cluster.random:
                for operation in [o for o in cluster.pending if cluster.random.random() < 0.2]:
                    cluster.complete(operation)
                self._step(cluster.random.choice(ready), int(cluster.random.expovariate(1 / 60)) + 1)
            else:
                self._step(ready[0] if cluster.eager else ready[-1], LONG)
        self._leave()

    def _ready(self) -> list[Threads]:
        """Threads that can go on, those first that have just been released; neighbours at the same place are joined."""
        released, ready = [], []
        for t in self.cluster.running:
            if t.wait is None:
                ready.append(t)
            elif t.wait.over():
                t.wait.finish(t)
                t.wait = None
                released.append(t)
        found = released + ready
        if len(found) > 1:
            joined = self._join(set(found))
            if joined:
                released = [t for t in released if t in self.cluster.running]
                found = released + [t for t in self.cluster.running if t.wait is None and t not in released]
        return found

    def _join(self, ready: set[Threads]) -> bool:
        """Warps next to each other at the same place run together again."""
        running, changed, i = self.cluster.running, False, 0
        running.sort(key=lambda t: (t.block.rank, t.first))
        while i + 1 < len(running):
            a, b = running[i], running[i + 1]
            near = a.block is b.block and a.last == b.first and (not self.cluster.random or a.first // 4 == b.first // 4)
            same = a.at is None and b.at is None and a.pc == b.pc and a.alone != a.pc != b.alone
            if near and same and a in ready and b in ready:
                both = Threads(a.block, a.first, b.last, a.pc)
                if a.refused == b.refused:
                    both.refused = a.refused
                running[i : i + 2] = [both]
                ready.add(both)
                changed = True
                continue
            i += 1
        return changed

    def _progress(self) -> bool:
        """Nothing can run: let something that is under way happen."""
        under_way = [o for o in self.cluster.pending if not isinstance(o, Product)]
        pending = [o for o in under_way if isinstance(o, Copy)] or under_way
        if not pending:
            return False
        self.cluster.complete(self.cluster.random.choice(pending) if self.cluster.random else pending[0])
        return True

    def _stuck(self) -> None:
        running = self.cluster.running
        waits = "\n  ".join(f"{t.name} waits for {t.wait.words()}" for t in running)
        raise Hazard("half a warpgroup" if all(t.wait.warpgroup for t in running) else "deadlock", f"nothing can run:\n  {waits}")

    def _leave(self) -> None:
        """The end: of what is under way only stores to global memory may be left."""
        for operation in list(self.cluster.pending):
            if isinstance(operation, (Copy, Product)):
                raise Hazard("left before wait", f"the cluster ends while {operation.text} is under way")
            self.cluster.complete(operation)
        for row, time, block, text in self.cluster.uses:
            seen = self.cluster.order.seen[block.first_row : block.first_row + block.warps, row + 1].max()
            if seen < time:
                raise Hazard("a block may leave too early", f"block {block.index} does not wait for {text} of warp {row} of the cluster")

    def _end(self, t: Threads) -> None:
        """Threads have returned."""
        block = t.block
        self.cluster.running.remove(t)
        check_left(block, block.tid[t.part])
        for number in range(t.first // 4, -(-t.last // 4)):
            block.groups[number].check_left()
        if not any(o.block is block for o in self.cluster.running):
            for operation in self.cluster.pending:
                if isinstance(operation, Copy) and operation.block is block:
                    raise Hazard("left before wait", f"block {block.index} ends while {operation.text} writes its shared memory")
            block.left = True

    def _step(self, t: Threads, most: int) -> None:
        """Run threads till something stops them, or for so many instructions."""
        program, end, block = self.program, self.end, t.block
        for _ in range(most):
            if t.at is None:
                here = t.pc
                t.active = t.all
            else:
                here = int(t.at.min())
                t.active = t.at == here
            if here >= end:
                self._end(t)
                return
            ins, kind, rule, guard, negated, watched, writes = program[here]
            if watched:
                for number in range(t.first // 4, -(-t.last // 4)):
                    block.groups[number].use(watched, writes, ins.text)
            if guard:
                given = np.broadcast_to(read(t, guard, "pred"), (t.count,))
                holds = (t.active & ~given) if negated else (t.active & given)
                if kind == "bra":
                    if not self._branch(t, here, holds, rule):
                        return
                    continue
                if not holds.any():
                    self._advance(t, here)
                    continue
                whole = t.active
                if not holds.all():
                    t.active = holds
            elif kind == "bra":
                if t.at is None:
                    t.pc = rule
                else:
                    t.at[t.active] = rule
                    self._meet(t)
                continue
            if kind == "plain":
                write(t, ins.operands[0], rule(t, ins))
            elif kind == "ret":
                if t.at is None and t.active.all():
                    t.pc = end
                else:
                    t.at = np.full(t.count, here + 1) if t.at is None else t.at
                    t.at[t.active] = end
                    rest = (whole & ~t.active) if guard else ~t.all
                    t.at[rest] = here + 1
                    self._meet(t)
                continue
            elif rule is None:
                raise NotImplementedError(f"no rule for {ins.text}")
            else:
                state = rule(t, ins)
                if state is not None:
                    if state in (STAY, AGAIN):
                        return
                    assert state == STOP
                    if guard:
                        t.active = whole
                    self._advance(t, here)
                    return
            if guard:
                t.active = whole
            self._advance(t, here)

    def _advance(self, t: Threads, here: int) -> None:
        if t.at is None:
            t.pc = here + 1
        else:
            t.at[t.at == here] = here + 1
            self._meet(t)

    @staticmethod
    def _meet(t: Threads) -> None:
        assert t.at is not None
        low = t.at[0]
        if (t.at == low).all():
            t.pc, t.at = int(low), None

    def _branch(self, t: Threads, here: int, taken: np.ndarray, target: int) -> bool:
        """Whether the same threads go on together."""
        if t.at is not None:
            t.at[t.active & ~taken] = here + 1
            t.at[taken] = target
            self._meet(t)
            return True
        if not taken.any():
            t.pc = here + 1
            return True
        if taken.all():
            t.pc = target
            return True
        by_warp = taken.reshape(-1, WARP)
        some, every = by_warp.any(1), by_warp.all(1)
        if (some == every).all():  # warps part whole
            borders = [0, *(np.flatnonzero(np.diff(some.astype(np.int8))) + 1), len(some)]
            pieces = [(a, b, target if some[a] else here + 1) for a, b in itertools.pairwise(borders)]
            self.cluster.replace([t], [Cluster.piece(t, t.first + int(a), t.first + int(b), pc) for a, b, pc in pieces])
            return False
        t.at = np.where(taken, target, here + 1)
        return True


def execute(
    kernel: Kernel,
    blocks: int,
    args: Sequence[Any],
    tensors: Sequence[Tensor] = (),
    mode: str | int = "earliest",
    threads: int = 0,
    cluster: int = 1,
    shared: int | None = None,
    accumulator: int = 0,
) -> None:
    """Run blocks of a kernel on CPU tensors, given in the order of its parameters (what it takes as constants left out).

    Args:
        blocks: of the grid, along x.
        args: tensors, ints, floats as bytes, or bytes for structs and tensor maps.
        tensors: further memory that the kernel may touch, for addresses that it reads from a table or a tensor map.
        mode: see ``Cluster``.
        threads: of a block, where the kernel does not say it.
        cluster: blocks of a cluster, along x.
        shared: bytes of dynamic shared memory; default all that there is.
        accumulator: bits in which a wgmma of fp8 adds, cut off and not rounded; 0: float64, rounded once. Hopper's are said to be about 14
            (DeepSeek-V3 report, section 3.3.2), of dense operands; of sparse ones nobody has said.

    Raises:
        Hazard: what the kernel does is undefined.
        ValueError: the launch has no threads, or does not fit the kernel.
    """
    threads = kernel.threads or threads
    if threads <= 0 or threads % WARP or threads > kernel.most_threads:
        raise ValueError(f"{kernel.name}: {threads} threads of a block; at most {kernel.most_threads}, and whole warps")
    if not kernel.code:
        raise ValueError(f"{kernel.name} has no instructions")
    memory = Memory.of([a for a in args if isinstance(a, Tensor)] + list(tensors))
    params = _parameters(kernel, args)
    size = MOST_SHARED if shared is None else kernel.static_shared + shared
    if size > MOST_SHARED:
        raise ValueError(f"{kernel.name}: {shared} bytes of dynamic shared memory")
    size = -(-size // 16) * 16
    program, unit = _program(kernel), _unit(kernel)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, cluster):
            made = Cluster(kernel, threads, size, unit, memory, params, blocks, cluster, mode, first, accumulator)
            Machine(made, program).run()


def _parameters(kernel: Kernel, args: Sequence[Any]) -> np.ndarray:
    """The bytes of parameters; scratch memory, which no kernel of Triton here asks for, is 0."""
    if len(args) > len(kernel.params):
        raise ValueError(f"{kernel.name} takes {len(kernel.params)} parameters, {len(args)} given")
    made = np.zeros(max([at + size for at, size in kernel.params.values()], default=0), np.uint8)
    for (at, size), value in zip(kernel.params.values(), args, strict=False):
        if isinstance(value, Tensor):
            value = value.data_ptr()
        data = bytes(value) if isinstance(value, (bytes, bytearray)) else (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if len(data) != size:
            raise ValueError(f"{kernel.name}: {len(data)} bytes for a parameter of {size}")
        made[at : at + size] = np.frombuffer(data, np.uint8)
    return made
