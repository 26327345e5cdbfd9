"""A block of threads and the cluster it is in: registers, shared memory, barriers, and the operations under way."""

from __future__ import annotations

import itertools
import re
from random import Random
from typing import Any

import numpy as np

from .barriers import AGAIN, STAY, Mbarrier, Meeting, Wait
from .bulk import Groups
from .operands import UNSIGNED, WARP, Memory, Threads
from .order import Order, Shared, check
from .parse import Instruction, Kernel
from .wgmma import Group

RANK = 24
"""Shared memory of block ``r`` of a cluster has the addresses from ``r << RANK`` on, as ``mapa`` gives them."""


class Block:
    """One block (CTA)."""

    def __init__(self, cluster: Cluster, rank: int, index: int) -> None:
        self.cluster, self.rank, self.index = cluster, rank, index
        self.kernel, self.order, self.threads = cluster.kernel, cluster.order, cluster.block_threads
        self.warps = self.threads // WARP
        self.first_row = rank * self.warps
        self.tid = np.arange(self.threads, dtype=np.uint32)
        self.registers: dict[str, np.ndarray] = {}
        self.shared = Shared(self.order, cluster.shared_bytes, cluster.unit, f"the shared memory of block {index}")
        self.view = Memory({0: self.shared.bytes})
        self.mbarriers: dict[int, Mbarrier] = {}
        self.meetings: dict[int, Meeting] = {}
        self.stores: dict[int, Groups] = {}
        self.copies: dict[int, Groups] = {}
        self.groups = [Group(self, i) for i in range(-(-self.warps // 4))]
        self.registers_of = [min(255, 65536 // self.threads) // 8 * 8] * len(self.groups)
        """What a thread of each warpgroup may have: at first as many as the launch bounds leave (setmaxnreg)."""
        self.files: dict[tuple[str, ...], np.ndarray] = {}
        self.left = False

    def special(self, name: str) -> Any:
        """The value of a register that the machine gives, or of a variable's name; else None."""
        if (offset := self.kernel.shared.get(name)) is not None:
            return offset + (self.rank << RANK)
        if name == "global_smem":
            return self.kernel.static_shared + (self.rank << RANK)
        if (param := self.kernel.params.get(name)) is not None:
            return param[0]
        if name[0] != "%" or self.kernel.declares(name):
            return None
        known = {"%ctaid.x": self.index, "%nctaid.x": self.cluster.blocks_of_grid, "%cluster_ctarank": self.rank}
        if name not in known:
            raise NotImplementedError(f"no rule for {name}")
        return known[name]

    def new_register(self, name: str) -> np.ndarray:
        bits = self.kernel.size(name)
        made = np.zeros(self.threads, np.bool_ if bits == 1 else UNSIGNED[bits])
        self.registers[name] = made
        return made

    def file(self, names: tuple[str, ...]) -> np.ndarray:
        """Registers of 32 bits as one array ``[registers, threads]``, which they are parts of from now on."""
        if names not in self.files:
            whole = np.zeros((len(names), self.threads), np.uint32)
            for other in [o for o in self.files if not set(o).isdisjoint(names)]:
                del self.files[other]
            for i, name in enumerate(names):
                if name in self.registers:
                    whole[i] = self.registers[name]
                self.registers[name] = whole[i]
            self.files[names] = whole
        return self.files[names]

    def rows(self, t: Threads) -> slice:
        """The rows of these warps in the cluster's clocks."""
        return slice(self.first_row + t.first, self.first_row + t.last)

    def at(self, address: int, text: str) -> tuple[Block, int]:
        """The block that an address of shared memory is in, and the offset there."""
        rank = address >> RANK
        check(rank < len(self.cluster.blocks), "outside shared memory", f"{text}: address {address:#x}")
        block = self.cluster.blocks[rank]
        check(not block.left, "a block has left", f"{text}: block {block.index} of the cluster has ended")
        return block, address & ((1 << RANK) - 1)

    def named(self, offset: int) -> str:
        """An offset in shared memory as a variable and what is beyond it."""
        below = [(at, name) for name, at in self.kernel.shared.items() if at <= offset]
        at, name = max(below, default=(0, "0"))
        inner = re.search(r"E\d+([A-Za-z_]\w*)$", name)  # of a variable inside a function
        return f"{inner[1] if inner else name}+{offset - at}"

    def copies_of(self, row: int) -> Groups:
        if row not in self.copies:
            self.copies[row] = Groups(self.order.agent("cp.async", f"a cp.async of warp {row}", generic=True))
        return self.copies[row]


class Cluster:
    """Blocks that run together, and their asynchronous operations.

    ``mode``: "earliest": an operation happens at once, and the threads that a barrier releases run first. "latest": it happens when it is
    waited for, or nothing else can run, and its destination holds NaN until then. A number: at random, by that seed.
    """

    def __init__(
        self,
        kernel: Kernel,
        threads: int,
        shared_bytes: int,
        unit: int,
        memory: Memory,
        params: np.ndarray,
        blocks: int,
        size: int,
        mode: str | int,
        first: int,
        accumulator: int = 0,
    ) -> None:
        self.kernel, self.block_threads, self.shared_bytes, self.unit = kernel, threads, shared_bytes, unit
        self.accumulator = accumulator
        self.memory, self.params, self.blocks_of_grid, self.size = memory, params, blocks, size
        self.param_memory = Memory({0: params})
        self.eager, self.random = mode == "earliest", Random(mode) if isinstance(mode, int) else None
        self.order = Order(size * threads // WARP)
        self.threads = size * threads
        self.meeting = Meeting("the cluster's barrier")
        self.arrived: dict[int, int] = {}
        self.ended = 0
        """Phases of mbarriers that are over, so far."""
        self.pending: list[Any] = []
        self.uses: list[tuple[int, int, Block, str]] = []
        """Of other blocks' shared memory: row, time, block."""
        self.blocks = [Block(self, rank, first + rank) for rank in range(size)]
        self.running = [Threads(b, 0, b.warps, 0) for b in self.blocks]

    def refuses(self) -> bool:
        """Whether a try_wait that could succeed fails once."""
        return self.random.random() < 0.25 if self.random else not self.eager

    def begin(self, operation: Any) -> Any:
        """An operation is under way: it happens now, or is kept."""
        if self.eager:
            operation.finish()
        else:
            self.pending.append(operation)
        return operation

    def complete(self, operation: Any) -> None:
        """It is waited for: it happens now, if it has not."""
        if operation in self.pending:
            self.pending.remove(operation)
            operation.finish()

    def remote_use(self, row: int, of: Block, by: Block, text: str) -> None:
        """A warp uses another block's shared memory, which must not end before that block knows."""
        if of is not by:
            self.uses.append((row, int(self.order.seen[row, row + 1]), of, text))

    def replace(self, old: list[Threads], new: list[Threads]) -> None:
        at = self.running.index(old[0])
        for t in old:
            self.running.remove(t)
        self.running[at:at] = new

    def part_warps(self, t: Threads) -> None:
        """Let the warps of a group go their own ways."""
        pieces = [self.piece(t, w, w + 1) for w in t.warps]
        for piece in pieces:
            piece.alone = piece.pc
        self.replace([t], pieces)

    @staticmethod
    def piece(t: Threads, first: int, last: int, pc: int | None = None) -> Threads:
        """Some warps of a group."""
        made = Threads(t.block, first, last, t.pc if pc is None else pc)
        made.refused = t.refused
        if t.at is not None:
            at = t.at[WARP * (first - t.first) : WARP * (last - t.first)]
            if (at == at[0]).all():
                made.pc = int(at[0])
            else:
                made.at = at.copy()
        return made

    def gather(self, t: Threads, ins: Instruction) -> str:
        """Threads are at an instruction of whole warpgroups: join those of a warpgroup that are there, wait for the others."""
        borders = sorted({t.first, t.last} | {w for w in range(t.first, t.last + 1) if w % 4 == 0})
        if len(borders) > 2:
            self.replace([t], [self.piece(t, a, b) for a, b in itertools.pairwise(borders)])
            return AGAIN
        low = t.first // 4 * 4
        there = [o for o in self.running if o.block is t.block and low <= o.first < low + 4 and o.pc == t.pc and o.at is None]
        there = [o for o in there if o is t or (o.wait and o.wait.warpgroup)]
        if sum(o.last - o.first for o in there) == 4:
            self.replace(there, [Threads(t.block, low, low + 4, t.pc)])
            return AGAIN
        t.wait = Wait(lambda: False, lambda: f"the other warps of the warpgroup at {ins.text}", warpgroup=True)
        return STAY
