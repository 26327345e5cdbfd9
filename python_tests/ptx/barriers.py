"""Where warps meet: mbarriers, named barriers, the barrier of a cluster, and the rendezvous of a warpgroup (PTX ISA 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .operands import WARP, Threads, address, lanes, read, write
from .order import Hazard, check, joined
from .parse import Instruction

if TYPE_CHECKING:
    from .block import Block

STAY, STOP, AGAIN = "stay", "stop", "again"
"""What an instruction's rule may return: wait here; go to the next and let others run; the threads diverged, choose again."""

Clocks = tuple[np.ndarray, np.ndarray]


@dataclass
class Wait:
    """What threads wait for: whether it is over, in words, and what they do when it is."""

    over: Callable[[], bool]
    words: Callable[[], str]
    finish: Callable[[Threads], None] = lambda t: None
    warpgroup: bool = False
    """Whether it is for the other warps of a warpgroup; the machine joins them."""


@dataclass
class Meeting:
    """A named barrier, or a cluster's: how many have come, and what they have seen."""

    name: str
    expected: int = 0
    came: int = 0
    turn: int = 0
    clocks: Clocks | None = None
    before: Clocks | None = None
    who: list[str] = field(default_factory=list)

    def wait(self, turn: int) -> Wait:
        """Till that turn is over."""
        return Wait(
            lambda: self.turn > turn,
            lambda: f"{self.name}: {self.came} of {self.expected} threads came: {', '.join(self.who)}",
            lambda t: t.block.order.acquire(t.block.rows(t), self.before),  # type: ignore[arg-type]
        )

    def arrive(self, t: Threads, threads: int, expected: int, clocks: Clocks, text: str) -> None:
        alike = self.came == 0 or self.expected == expected
        check(alike, "wrong count", f"{self.name}: {text} names {expected} threads, others {self.expected}")
        self.expected = expected
        self.came += threads
        check(self.came <= expected, "wrong count", f"{self.name}: {self.came} threads came, {expected} are expected ({t.name}, {text})")
        self.clocks = joined(self.clocks, clocks)
        self.who.append(t.name)
        if self.came == expected:
            self.turn, self.came, self.before, self.clocks, self.who = self.turn + 1, 0, self.clocks, None, []


@dataclass(eq=False)
class Mbarrier:
    """An mbarrier object; ``phase`` counts the phases that are over."""

    block: Block
    offset: int
    count: int
    made: tuple[int, int]
    """Who initialised it and when: an agent and its time."""
    fenced: bool = False
    """Whether the one who initialised it has fenced that for the async proxy and other blocks."""
    pending: int = 0
    tx: int = 0
    phase: int = 0
    agent: int = 0
    clocks: Clocks | None = None
    before: Clocks | None = None

    @property
    def name(self) -> str:
        return f"mbarrier {self.block.named(self.offset)} of block {self.block.index}"

    def end_phase(self, text: str) -> None:
        """If everything has come."""
        check(abs(self.tx) < 1 << 20, "tx overflow", f"{self.name}: tx-count {self.tx} ({text})")
        if self.pending:
            return
        more = f"{self.name}: {-self.tx} bytes more came than phase {self.phase} expects ({text})"
        check(self.tx >= 0, "bytes differ from expect_tx", more)
        if self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.before = joined(self.before, self.clocks)
            size = max(len(self.before[0]), self.agent + 1)
            self.before = joined(self.before, (np.zeros(size, np.int64), np.zeros(size, np.int64)))
            self.before[0][self.agent] = self.phase
            self.clocks = None
            self.block.cluster.ended += 1

    def arrive(self, count: int, clocks: Clocks, text: str) -> None:
        full = f"{self.name} of count {self.count}: phase {self.phase} has them all ({text})"
        check(self.pending >= count, "more arrivals than count", full)
        self.pending -= count
        self.clocks = joined(self.clocks, clocks)
        self.end_phase(text)

    def complete(self, size: int, text: str) -> None:
        """Bytes have come."""
        self.tx -= size
        self.end_phase(text)

    def wait(self, phase: int) -> Wait:
        """Till the end of that phase; the try_wait runs again and acquires."""

        def words() -> str:
            missing = f"{self.pending} of {self.count} arrivals and {self.tx} bytes are missing"
            return f"{self.name}: phase {phase} (parity {phase & 1}); {missing} in phase {self.phase}"

        return Wait(lambda: self.phase > phase, words)

    def use(self, rows: slice, text: str, remote: bool) -> None:
        """Whether its initialisation is visible to these warps, or to the async proxy and other blocks."""
        agent, time = self.made
        seen = (self.block.order.seen[rows, agent] >= time).all()
        check(seen, "mbarrier used before its init is visible", f"{self.name}: no barrier after mbarrier.init ({text})")
        check(self.fenced or not remote, "mbarrier init not fenced", f"{self.name}: no fence.mbarrier_init or fence.proxy.async ({text})")


def barrier_at(t: Threads, shared_address: int, text: str, remote: bool = False) -> Mbarrier:
    """The mbarrier at an address, of which ``remote`` says that a bulk copy counts its bytes on it."""
    block, offset = t.block.at(shared_address, text)
    barrier = block.mbarriers.get(offset)
    check(barrier, "no mbarrier", f"{t.name}: {text} at {block.named(offset)} of block {block.index}, where none was initialised")
    assert barrier
    barrier.use(t.block.rows(t), text, remote or block is not t.block)
    return barrier


def mbarrier(t: Threads, ins: Instruction) -> Any:
    what = ins.mods[0]
    if what == "try_wait":
        return _wait(t, ins)
    if what == "init":
        return _init(t, ins)
    places = ins.operands[1:]
    assert what == "arrive" and ins.operands[0] == "_", f"no rule for {ins.text}"
    where = address(t, str(places[0]), "shared")
    amount = np.broadcast_to(read(t, places[1], "u32") if len(places) > 1 else np.asarray(1), (t.count,))
    ended = t.block.cluster.ended
    for warp in range(t.count // WARP):
        active = np.flatnonzero(t.active[WARP * warp : WARP * (warp + 1)]) + WARP * warp
        if not active.size:
            continue
        row = t.block.rows(t).start + warp
        clocks = t.block.order.release(slice(row, row + 1))
        for lane in active:
            barrier = barrier_at(t, int(where[lane]), ins.text)
            t.block.cluster.remote_use(row, barrier.block, t.block, ins.text)
            if "expect_tx" in ins.mods:
                barrier.tx += int(amount[lane])
                check(abs(barrier.tx) < 1 << 20, "tx overflow", f"{barrier.name}: tx-count {barrier.tx} ({ins.text})")
            barrier.arrive(1 if "expect_tx" in ins.mods else int(amount[lane]), clocks, ins.text)
    return STOP if t.block.cluster.ended > ended and t.block.cluster.eager else None


def _init(t: Threads, ins: Instruction) -> None:
    order = t.block.order
    count = np.broadcast_to(read(t, ins.operands[1], "u32"), (t.count,))
    for lane in np.flatnonzero(t.active):
        block, offset = t.block.at(int(address(t, str(ins.operands[0]), "shared")[lane]), ins.text)
        check(offset % 8 == 0, "alignment", f"{ins.text} at {offset}, no multiple of 8")
        check(offset not in block.mbarriers, "mbarrier initialised twice", f"{t.name}: {ins.text} at {block.named(offset)}")
        row = t.block.rows(t).start + int(lane) // WARP
        barrier = Mbarrier(block, offset, int(count[lane]), (row + 1, int(order.seen[row, row + 1])), pending=int(count[lane]))
        block.mbarriers[offset] = barrier
        barrier.agent = order.agent("bulk load", f"a bulk copy that {barrier.name} counts")
        units = block.shared.units(offset, 8)
        block.shared.bytes[offset : offset + 8] = 0xBA
        block.shared.write_by_warps(np.array([row]), np.arange(units.start, units.stop)[None], ins.text)


def _wait(t: Threads, ins: Instruction) -> Any:
    assert "parity" in ins.mods, f"no rule for {ins.text}"
    target, place, parity_of = ins.operands[:3]
    where = address(t, str(place), "shared")[t.active]
    parity = np.broadcast_to(read(t, parity_of, "b32"), (t.count,))[t.active]
    if t.first + 1 < t.last and ((where != where[0]).any() or (parity != parity[0]).any()):
        t.block.cluster.part_warps(t)
        return AGAIN
    check((where == where[0]).all() and (parity == parity[0]).all(), "divergent wait", f"{t.name}: {ins.text}")
    barrier = barrier_at(t, int(where[0]), ins.text)
    check(barrier.block is t.block, "wait on a remote mbarrier", f"{t.name}: {ins.text}")
    check(parity[0] in (0, 1), "parity", f"{t.name}: {ins.text} with parity {parity[0]}")
    phase = barrier.phase if barrier.phase & 1 == parity[0] else barrier.phase - 1
    key = (barrier, phase, ins)
    if barrier.phase > phase:
        if key != t.refused and t.block.cluster.refuses():
            t.refused = key
            write(t, target, np.zeros((), bool))
            return None
        t.refused = ()
        write(t, target, np.ones((), bool))
        if barrier.before is not None:
            t.block.order.acquire(t.block.rows(t), barrier.before)
        return None
    if t.refused == key or t.at is not None:
        if t.first + 1 < t.last and t.at is not None:
            t.block.cluster.part_warps(t)
            return AGAIN
        t.wait = barrier.wait(phase)
        return STAY
    t.refused = key
    write(t, target, np.zeros((), bool))
    return None


def bar(t: Threads, ins: Instruction) -> Any:
    """bar.sync, bar.arrive, barrier.cluster and bar.warp.sync."""
    if "warp" in ins.mods:
        return None
    if "cluster" in ins.mods:
        return _cluster(t, ins)
    numbers = lanes(t, ins.operands[0], "u32")
    counts = lanes(t, ins.operands[1] if len(ins.operands) > 1 else str(t.block.threads), "u32")
    alike = t.at is None and t.active.all() and (numbers == numbers[0, 0]).all() and (counts == counts[0, 0]).all()
    if not alike and t.first + 1 < t.last:
        t.block.cluster.part_warps(t)
        return AGAIN
    present = t.active if t.at is None else t.active | (t.at >= len(t.block.kernel.code))
    same = (numbers == numbers[0, 0]).all() and (counts == counts[0, 0]).all()
    check(present.all() and same, "divergent barrier", f"{t.name}: some threads do not reach {ins.text}")
    expected = int(counts[0, 0])
    check(expected % WARP == 0, "wrong count", f"{t.name}: {ins.text} names {expected} threads")
    number = int(numbers[0, 0])
    check(number < 16, "wrong count", f"{t.name}: {ins.text} names barrier {number}")
    meeting = t.block.meetings.setdefault(number, Meeting(f"barrier {number} of block {t.block.index}"))
    waits = "arrive" not in ins.mods
    if waits and t.count > expected:  # groups of warps that use one barrier in turn
        t.block.cluster.part_warps(t)
        return AGAIN
    turn = meeting.turn
    meeting.arrive(t, t.count, expected, t.block.order.release(t.block.rows(t)), ins.text)
    if waits:
        t.wait = meeting.wait(turn)
        return STOP
    return None


def _cluster(t: Threads, ins: Instruction) -> Any:
    meeting = t.block.cluster.meeting
    if t.at is not None and t.first + 1 < t.last:
        t.block.cluster.part_warps(t)
        return AGAIN
    if "arrive" in ins.mods:
        clocks = t.block.order.release(t.block.rows(t))
        for row in range(t.block.rows(t).start, t.block.rows(t).stop):
            check(row not in t.block.cluster.arrived, "barrier.cluster", f"{t.name} arrives twice without a wait ({ins.text})")
            t.block.cluster.arrived[row] = meeting.turn
        if "relaxed" in ins.mods:
            clocks = (np.zeros_like(clocks[0]), np.zeros_like(clocks[1]))
        meeting.arrive(t, t.count, t.block.cluster.threads, clocks, ins.text)
        return None
    rows = range(t.block.rows(t).start, t.block.rows(t).stop)
    turns = {t.block.cluster.arrived.pop(row, None) for row in rows}
    if None in turns:
        raise Hazard("barrier.cluster", f"{t.name} waits without having arrived ({ins.text})")
    assert len(turns) == 1
    t.wait = meeting.wait(turns.pop())  # type: ignore[arg-type]
    return STOP


def warpgroup(t: Threads, ins: Instruction) -> Any:
    """None when whole warpgroups are here together, else what the rule must return."""
    if not (t.at is None and t.active.all()) and t.first + 1 < t.last:
        t.block.cluster.part_warps(t)
        return AGAIN
    check(t.active.all(), "divergent warpgroup", f"{t.name}: some threads do not reach {ins.text}")
    if t.first % 4 == 0 and t.last % 4 == 0:
        return None
    return t.block.cluster.gather(t, ins)
