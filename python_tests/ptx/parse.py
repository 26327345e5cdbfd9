"""PTX text to a list of instructions: as much of the language as LLVM writes for Triton."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIZES = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32}
SIZES |= {"f16x2": 32, "bf16x2": 32, "s16x2": 32, "u16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1}
"""Bits of every type."""


@dataclass(frozen=True)
class Instruction:
    """``@p op.mod.mod a, b, c``: a guard, and operands as nested tuples of names for ``{a, b}``."""

    name: str
    mods: tuple[str, ...]
    types: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: str
    text: str


@dataclass
class Kernel:
    """An entry point: its parameters in order, threads per block, registers' sizes, and code with labels."""

    name: str = ""
    params: dict[str, int] = field(default_factory=dict)
    threads: int = 0
    registers: dict[str, int] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def size(self, register: str) -> int:
        """Bits of a register, by its declared name or by its prefix."""
        return self.registers.get(register) or self.registers[register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    """The one kernel of a PTX module."""
    kernel = Kernel()
    body = False
    for line in text.splitlines():
        line = line.split("//")[0].strip()
        if found := re.match(r"\.visible \.entry (\w+)\(", line):
            kernel.name = found[1]
        elif found := re.match(r"\.param (?:\.align \d+ )?\.(\w+).* (\w+),?$", line):
            kernel.params[found[2]] = SIZES[found[1]]
        elif found := re.match(r"\.reqntid (\d+)", line):
            kernel.threads = int(found[1])
        elif line == "{" and kernel.threads:
            body = True
        elif body and (found := re.match(r"(\$?[\w$]+):$", line)):
            kernel.labels[found[1]] = len(kernel.code)
        elif line.startswith(".section"):
            break
        elif body:
            for statement in line.split(";"):
                _statement(kernel, statement.strip())
    return kernel


def _statement(kernel: Kernel, text: str) -> None:
    if text.startswith("{") and "}" not in text:
        text = text[1:].strip()
    if text in ("", "}", "{", ")") or (text.startswith(".") and not text.startswith(".reg")):
        return
    if found := re.match(r"\.reg \.(\w+)\s+(.*)$", text):
        for name in found[2].split(","):
            kernel.registers[name.strip().split("<")[0]] = SIZES[found[1]]
        return
    guard = ""
    if found := re.match(r"@(!?%?\w+)\s+(.*)$", text):
        guard, text = found[1], found[2]
    op, _, rest = " ".join(text.split()).partition(" ")
    name, *mods = op.split(".")
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    operands = tuple(tuple(x.strip() for x in part[1:-1].split(",")) if part[0] == "{" else part.strip() for part in parts)
    kernel.code.append(Instruction(name, tuple(mods), tuple(m for m in mods if m in SIZES), operands, guard, text))
