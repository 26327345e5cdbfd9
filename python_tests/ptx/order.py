"""Who may have seen what: every access to shared memory is compared with the earlier ones that no synchronisation puts before it.

Vector clocks, as race detectors have them. An agent is a warp, or what a warp starts and does not wait for: its cp.async copies, its bulk
stores, the wgmma of a warpgroup, the bulk copies that one mbarrier counts. A release (an arrive, a barrier) hands on what a warp has seen,
an acquire takes it over. So a missing wait is found whichever order the machine happens to run the warps in.

Generic stores are seen by the async proxy (wgmma, bulk copies) only after a fence by the writer: clocks of their own, ``fenced``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NEVER = 2**31 - 1
"""The time of a write that has not come yet."""

UNWAITED = "read before the wait"
UNFENCED = "not fenced for the async proxy"
UNDER_WGMMA = "overwritten under wgmma"
UNDER_STORE = "overwritten under a bulk store"
UNDER_READER = "overwritten before it was read"
RACE = "race"


class Hazard(AssertionError):
    """What a kernel does that the PTX ISA leaves undefined; the message begins with the hazard's name."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


def check(good: Any, name: str, text: str) -> None:
    """Raise a hazard unless ``good``."""
    if not good:
        raise Hazard(name, text)


class Order:
    """The clocks of a cluster. A warp's row is its number in the cluster; agent ``row + 1`` is the warp itself."""

    def __init__(self, warps: int) -> None:
        self.names = ["nobody", *(f"warp {i}" for i in range(warps))]
        self.kinds = ["nobody"] + ["warp"] * warps
        self.generic = np.ones(64 + 8 * warps, dtype=bool)
        """By agent: whether its writes go through the generic proxy."""
        self.seen = np.zeros((warps, len(self.generic)), dtype=np.int64)
        self.fenced = np.zeros_like(self.seen)
        self.rows = np.arange(warps)
        self.seen[self.rows, self.rows + 1] = 1

    def agent(self, kind: str, name: str, generic: bool = False) -> int:
        """A new agent; ``kind`` is cp.async, bulk load, bulk store or wgmma."""
        self.names.append(name)
        self.kinds.append(kind)
        number = len(self.names) - 1
        if number >= len(self.generic):
            more = len(self.generic)
            self.generic = np.concatenate([self.generic, np.ones(more, dtype=bool)])
            self.seen, self.fenced = (np.pad(x, ((0, 0), (0, more))) for x in (self.seen, self.fenced))
        self.generic[number] = generic
        return number

    def tick(self, rows: slice) -> None:
        """What these warps do from now on is later than what they hand on now."""
        mine = self.rows[rows]
        self.seen[mine, mine + 1] += 1

    def release(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """What these warps have seen so far, for others to acquire."""
        given = self.seen[rows].max(0), self.fenced[rows].max(0)
        self.tick(rows)
        return given

    def acquire(self, rows: slice, given: tuple[np.ndarray, np.ndarray]) -> None:
        size = len(given[0])
        np.maximum(self.seen[rows, :size], given[0], out=self.seen[rows, :size])
        np.maximum(self.fenced[rows, :size], given[1], out=self.fenced[rows, :size])

    def fence(self, rows: slice) -> None:
        """The generic writes of these warps, so far, become visible to the async proxy for all that is ordered after this."""
        mine = self.rows[rows]
        self.fenced[mine, mine + 1] = self.seen[mine, mine + 1]
        # copies by cp.async that a warp has waited for are generic writes of its own
        for agent, (kind, name) in enumerate(zip(self.kinds, self.names, strict=True)):
            if kind == "cp.async":
                row = int(name.split()[-1])
                if rows.start <= row < rows.stop:
                    self.fenced[row, agent] = self.seen[row, agent]
        self.tick(rows)


def joined(*given: tuple[np.ndarray, np.ndarray] | None) -> tuple[np.ndarray, np.ndarray]:
    """The union of what was released."""
    some = [g for g in given if g is not None]
    size = max(len(g[0]) for g in some)
    wide = [tuple(np.pad(x, (0, size - len(x))) for x in g) if len(g[0]) < size else g for g in some]
    return np.maximum.reduce([g[0] for g in wide]), np.maximum.reduce([g[1] for g in wide])


Where = slice | np.ndarray
"""Units of shared memory: a range, or one by one."""


class Shared:
    """A block's shared memory, and for each unit of it the last write and every agent's last read."""

    def __init__(self, order: Order, size: int, unit: int, name: str) -> None:
        self.order, self.unit, self.name = order, unit, name
        self.bytes = np.full(size, 0xCD, dtype=np.uint8)  # so that reading what nobody wrote shows
        units = -(-size // unit)
        self.writer = np.zeros(units, dtype=np.int16)
        self.when = np.zeros(units, dtype=np.int32)
        self.reads: dict[int, np.ndarray] = {}

    def units(self, offset: int, size: int) -> slice:
        """The units of a range of bytes."""
        return slice(offset // self.unit, -(-(offset + size) // self.unit))

    def spread(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """The units of accesses of ``size`` bytes each: ``[accesses, units of each]``."""
        return offsets[:, None] // self.unit + np.arange(max(size // self.unit, 1))

    def read_by_warps(self, rows: np.ndarray, units: np.ndarray, text: str) -> None:
        """Accesses ``[accesses, units]`` by the warps of those rows."""
        writer, when = self.writer[units], self.when[units]
        bad = self.order.seen[rows[:, None], writer] < when
        if bad.any():
            at = tuple(x[0] for x in np.nonzero(bad))
            self._unseen(int(writer[at]), f"warp {rows[at[0]]}", int(units[at]), text, False)
        for row in np.unique(rows):
            mine = units[rows == row] if rows[0] != rows[-1] else units
            self._note(int(row) + 1, mine, int(self.order.seen[row, row + 1]))

    def write_by_warps(self, rows: np.ndarray, units: np.ndarray, text: str, agents: np.ndarray | None = None, when: Any = None) -> None:
        """The same for writes, by the warps themselves or by ``agents`` of theirs at the time ``when``."""
        writer, before = self.writer[units], self.when[units]
        bad = self.order.seen[rows[:, None], writer] < before
        if bad.any():
            at = tuple(x[0] for x in np.nonzero(bad))
            self._unseen(int(writer[at]), f"warp {rows[at[0]]}", int(units[at]), text, True)
        for agent, last in self.reads.items():
            bad = self.order.seen[rows, agent][:, None] < last[units]
            if bad.any():
                at = tuple(x[0] for x in np.nonzero(bad))
                self._unread(agent, f"warp {rows[at[0]]}", int(units[at]), text)
        agents = rows + 1 if agents is None else agents
        self.writer[units] = agents[:, None]
        self.when[units] = (self.order.seen[rows, rows + 1] if when is None else when)[:, None]

    def read_async(self, agent: int, time: int, units: Where, given: tuple[np.ndarray, np.ndarray], text: str) -> None:
        """A read by the async proxy, of which those who start it have seen ``given``."""
        self._ready(units, given, self.order.names[agent], text, False)
        self._note(agent, units, time)

    def write_async(self, agent: int, units: slice, given: tuple[np.ndarray, np.ndarray], text: str) -> None:
        """A write by the async proxy begins: till ``written`` nobody may touch the range."""
        self._ready(units, given, self.order.names[agent], text, True)
        for reader, last in self.reads.items():
            if (bad := given[0][reader] < last[units]).any():
                self._unread(reader, self.order.names[agent], int(units.start + np.flatnonzero(bad)[0]), text)
        self.writer[units] = agent
        self.when[units] = NEVER

    def written(self, units: slice, time: int) -> None:
        """It has come."""
        self.when[units] = time

    def _note(self, agent: int, units: Where, time: int) -> None:
        if agent not in self.reads:
            self.reads[agent] = np.zeros(len(self.writer), dtype=np.int32)
        self.reads[agent][units] = time

    def _ready(self, units: Where, given: tuple[np.ndarray, np.ndarray], who: str, text: str, writes: bool) -> None:
        writer, when = self.writer[units], self.when[units]
        seen, fenced = given
        bad = seen[writer] < when
        if bad.any():
            at = np.flatnonzero(bad)[0]
            self._unseen(int(writer.flat[at]), who, self._unit(units, at), text, writes)
        bad = self.order.generic[writer] & (fenced[writer] < when)
        if bad.any():
            at = np.flatnonzero(bad)[0]
            what = f"{self.order.names[writer.flat[at]]} wrote byte {self._unit(units, at) * self.unit} of {self.name}"
            raise Hazard(
                UNFENCED, f"{what} without fence.proxy.async after it, and {who} {'overwrites' if writes else 'reads'} it ({text})"
            )

    @staticmethod
    def _unit(units: Where, at: Any) -> int:
        return int(units.start + at if isinstance(units, slice) else units.flat[at])

    def _unseen(self, writer: int, who: str, unit: int, text: str, writes: bool) -> None:
        what = f"{who} {'writes' if writes else 'reads'} byte {unit * self.unit} of {self.name}, which {self.order.names[writer]} writes"
        waited = self.order.kinds[writer] in ("bulk load", "cp.async")
        raise Hazard(UNWAITED if waited else RACE, f"{what}, and has not waited for it ({text})")

    def _unread(self, reader: int, who: str, unit: int, text: str) -> None:
        name = {"wgmma": UNDER_WGMMA, "bulk store": UNDER_STORE}.get(self.order.kinds[reader], UNDER_READER)
        raise Hazard(name, f"{who} writes byte {unit * self.unit} of {self.name}, which {self.order.names[reader]} may still read ({text})")
