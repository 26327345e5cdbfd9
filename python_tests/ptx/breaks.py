"""Single edits of a kernel's PTX that make it wrong, and what the machine is to report of each; those that any pipelined kernel allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .order import Hazard

PARITY = r"xor\.b32(\s+%r\d+, )(%r\d+), %r\d+;(?=\s+add)"
"""Where a consumer's or the producer's parity flips."""

COMMON: dict[str, tuple[str, Any, int, str]] = {
    "no commit": (r"wgmma\.commit_group\S*;", "", 0, "overwritten under wgmma|register in flight"),
    "wait_group 2 for 1": (r"(wgmma\.wait_group\S*) 1;", r"\1 2;", 0, "overwritten under wgmma|register in flight"),
    "no wgmma.fence": (r"wgmma\.fence\S*;", "", 0, "no wgmma.fence"),
    "no fence.proxy.async": (r"fence\.proxy\.async\S*;", "", 0, "not fenced for the async proxy"),
    "multicast to one block": (r"mov\.u16(\s+%rs\d+), 3;", r"mov.u16\1, 1;", 0, "deadlock|bytes differ"),
    "init not fenced": (r"fence\.mbarrier_init\S*;", "", 0, "mbarrier init not fenced"),
}
"""Name -> pattern, replacement, how often (0: everywhere, -1: at the last place), and what is to be reported."""


def distances_swapped(found: re.Match[str]) -> str:
    """A matrix descriptor's constant with its two distances swapped, signed where it was."""
    bits = int(found[1]) % (1 << 64)
    lead, stride = bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF
    made = (bits & ~(0x3FFF << 16) & ~(0x3FFF << 32)) | stride << 16 | lead << 32
    return str(made - (1 << 64) if made >> 63 else made)


def edited(code: str, pattern: str, replacement: Any, count: int) -> str:
    """``code`` with the edit; an edit that finds no place is an error of the test."""
    places = list(re.finditer(pattern, code))
    assert places, pattern
    for place in reversed(places[-1:] if count < 0 else places[: count or None]):
        new = replacement(place) if callable(replacement) else place.expand(replacement)
        code = code[: place.start()] + new + code[place.end() :]
    return code


def assert_reported(run: Callable[[str], bool], code: str, pattern: str, replacement: Any, count: int, expected: str) -> None:
    """``run`` of the edited code raises the hazard that is expected, or gives a wrong result where that is."""
    try:
        right = run(edited(code, pattern, replacement, count))
    except Hazard as hazard:
        assert re.match(expected, str(hazard)), str(hazard)
    else:
        assert not right and "wrong result" in expected
