"""PTX text to a list of instructions: as much of the language as LLVM writes for Triton and nvcc for CUDA C++ with inline assembly."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIZES = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32}
SIZES |= {"f16x2": 32, "bf16x2": 32, "s16x2": 32, "u16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1, "b128": 128}
SIZES |= {"e4m3": 8, "e5m2": 8}
"""Bits of every type."""

RESERVED = 1024
"""Bytes at the start of a block's shared memory that the system keeps on sm_90; a variable's alignment counts from address 0."""


@dataclass(frozen=True, eq=False)
class Instruction:
    """``@p op.mod.mod a, b, c``: a guard, and operands as nested tuples of names for ``{a, b}``."""

    name: str
    mods: tuple[str, ...]
    types: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]
    guard: str
    text: str
    words: frozenset[str]
    """Every word of the operands and the guard, registers among them."""


@dataclass
class Kernel:
    """An entry point: where its parameters lie, its shared memory, and code with labels."""

    name: str
    params: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and bytes of each parameter, in order."""
    threads: int = 0
    """Of a block, as ``.reqntid`` has them; 0: the launch says it."""
    most_threads: int = 1024
    shared: dict[str, int] = field(default_factory=dict)
    """Offsets of the block's variables in shared memory; the dynamic part comes last."""
    static_shared: int = RESERVED
    """Where the dynamic part begins."""
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    """Bits by a register's whole name, or by what comes before its number."""

    def declares(self, register: str) -> bool:
        return register in self.registers or register.rstrip("0123456789") in self.registers

    def size(self, register: str) -> int:
        """Bits of a register."""
        return self.registers.get(register) or self.registers[register.rstrip("0123456789")]


_WORD = r"[%$\w]+"


def entries(text: str) -> list[str]:
    """The names of a module's kernels."""
    return re.findall(rf"\.entry\s+({_WORD})", text)


def parse(text: str, name: str = "") -> Kernel:
    """One kernel of a PTX module: the one whose name contains ``name``.

    Raises:
        ValueError: there is no such kernel, more than one, or one without instructions.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = text.split("\n\t.section")[0].split("\n.section")[0]
    found = [m for m in re.finditer(rf"\.entry\s+({_WORD})\s*(?:\((.*?)\))?([^{{]*)\{{", text, re.S) if name in m[1]]
    if len(found) != 1:
        raise ValueError(f"{len(found)} of {len(entries(text))} kernels are called {name!r}: {', '.join(entries(text))[:400]} ...")
    kernel = Kernel(found[0][1])
    _header(kernel, found[0][2] or "", found[0][3])
    start = found[0].end()
    depth, end = 1, start
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            end = start + brace.start()
            break
    statements, scopes = _flat(text[start:end])
    variables = re.findall(r"^\s*(?:\.visible\s+)?(\.(?:extern\s+)?\.?shared[^;]*);", _outside(text), re.M)
    mentioned = set(re.findall(_WORD, text[start:end]))
    _shared(kernel, [v for v in variables if set(re.findall(_WORD, v)) & mentioned] + [s for _, s in statements if s.startswith(".shared")])
    for scope, statement in statements:
        if statement.endswith(":"):
            kernel.labels[_renamed(statement[:-1], scope, scopes)] = len(kernel.code)
        elif statement.startswith(".reg"):
            _registers(kernel, statement, scope, scopes)
        elif not statement.startswith("."):
            kernel.code.append(_instruction(_renamed(statement, scope, scopes)))
    if not kernel.code:
        raise ValueError(f"{kernel.name}: no instructions were found")
    return kernel


def _outside(text: str) -> str:
    """A module's text outside all braces."""
    kept, depth = [], 0
    for part in re.split(r"([{}])", text):
        depth += {"{": 1, "}": -1}.get(part, 0)
        if depth == 0 and part != "}":
            kept.append(part)
    return "".join(kept)


def _header(kernel: Kernel, params: str, directives: str) -> None:
    at = 0
    for each in params.split(","):
        if not (found := re.search(rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+.*?({_WORD})\s*(?:\[(\d+)\])?\s*$", each.strip(), re.S)):
            continue
        size = SIZES[found[2]] // 8 * int(found[4] or 1)
        align = int(found[1]) if found[1] and ".ptr" not in each else SIZES[found[2]] // 8
        at = -(-at // align) * align
        kernel.params[found[3]] = (at, size)
        at += size
    for word, sizes in re.findall(r"\.(reqntid|maxntid)\s+([\d, ]+)", directives):
        count = 1
        for size in sizes.split(","):
            count *= int(size)
        kernel.most_threads = count
        if word == "reqntid":
            kernel.threads = count


def _shared(kernel: Kernel, variables: list[str]) -> None:
    at = RESERVED
    for dynamic in (False, True):
        for text in variables:
            found = re.search(rf"\.align\s+(\d+)\s+\.(\w+)\s+({_WORD})\s*(?:\[(\d*)\])?", text)
            assert found, f"no rule for {text}"
            if (found[4] == "") == dynamic:
                at = -(-at // int(found[1])) * int(found[1])
                kernel.shared[found[3]] = at
                at += 0 if dynamic else SIZES[found[2]] // 8 * int(found[4] or 1)
    kernel.static_shared = at


def _flat(body: str) -> tuple[list[tuple[tuple[int, ...], str]], dict[int, set[str]]]:
    """Statements and labels, each with the scopes around it, and what each scope declares."""
    statements: list[tuple[tuple[int, ...], str]] = []
    scopes: dict[int, set[str]] = {}
    inside: list[int] = []
    for part in body.split(";"):
        rest = part.strip()
        while rest:
            if rest[0] == "{":
                inside.append(len(scopes))
                scopes[inside[-1]] = set()
                rest = rest[1:].strip()
            elif rest[0] == "}":
                inside.pop()
                rest = rest[1:].strip()
            elif found := re.match(r"([$\w]+):(?!:)\s*", rest):
                statements.append((tuple(inside), found[1] + ":"))
                if inside:
                    scopes[inside[-1]].add(found[1])
                rest = rest[found.end() :]
            else:
                # a directive without a semicolon, such as .loc, is a line of its own
                if found := re.match(r"\.(?:loc|file)\b[^\n]*(?:\n|$)", rest):
                    rest = rest[found.end() :].strip()
                    continue
                statement = " ".join(rest.split())
                statements.append((tuple(inside), statement))
                if inside and statement.startswith(".reg"):
                    scopes[inside[-1]].update(x.strip() for x in statement.split(None, 2)[2].split(","))
                break
    return statements, scopes


def _renamed(statement: str, inside: tuple[int, ...], scopes: dict[int, set[str]]) -> str:
    """The names of inner scopes made unique: inline assembly declares the same ones again and again."""
    for scope in reversed(inside):
        if scopes[scope]:
            op, blank, rest = statement.partition(" ") if not statement.startswith("@") else ("", "", statement)
            local = scopes[scope]
            rest = re.sub(rf"(?<![.:\w%$]){_WORD}", lambda m, s=scope, of=local: f"{m[0]}_in{s}" if m[0] in of else m[0], rest)  # type: ignore[misc]
            statement = op + blank + rest if blank or not op else (f"{op}_in{scope}" if op in local else op)
    return statement


def _registers(kernel: Kernel, statement: str, inside: tuple[int, ...], scopes: dict[int, set[str]]) -> None:
    _, type_, names = statement.split(None, 2)
    for name in names.split(","):
        kernel.registers[_renamed("x " + name.strip().split("<")[0], inside, scopes)[2:]] = SIZES[type_[1:]]


def _instruction(text: str) -> Instruction:
    guard, whole = "", text
    if found := re.match(rf"@(!?{_WORD})\s+(.*)$", text):
        guard, text = found[1], found[2]
    op, _, rest = text.partition(" ")
    name, *mods = op.split(".")
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    operands = tuple(tuple(x.strip() for x in part[1:-1].split(",")) if part[0] == "{" else part.strip() for part in parts)
    words = frozenset(re.findall(_WORD, rest)) | {guard.lstrip("!")}
    return Instruction(name, tuple(mods), tuple(m for m in mods if m in SIZES), operands, guard, whole, words)
