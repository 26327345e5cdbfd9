"""Tidy rows: one measured value each, with its machine, versions, commit and date."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from nmkernels import capability

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """The 20th, 50th and 80th percentile of ``metric`` for ``provider`` running ``op``."""

    op: str
    provider: str
    pattern: str
    dtype: str
    shape: str
    metric: str
    p20: float
    p50: float
    p80: float
    machine: str
    versions: str
    commit: str
    date: str


def row(
    op: str,
    provider: str,
    metric: str,
    values: Sequence[float],
    *,
    pattern: str = "",
    dtype: str = "",
    shape: str = "",
    device: str = "cpu",
) -> Row:
    """A row of these samples, with this machine, the versions, the commit and today's date."""
    q = torch.quantile(torch.tensor(values, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    p20, p50, p80 = (float(f"{v:.6g}") for v in q)
    today = datetime.date.today().isoformat()
    return Row(op, provider, pattern, dtype, shape, metric, p20, p50, p80, machine(device), versions(), commit(), today)


def load(path: Path) -> list[dict[str, str]]:
    """The rows of one CSV as text; empty if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def save(lines: Iterable[Mapping[str, object]], names: Sequence[str], path: Path) -> None:
    """Write a CSV with these columns, replacing the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    os.replace(part, path)


Made = TypeVar("Made")


def typed(cls: type[Made], lines: Iterable[Mapping[str, str]]) -> list[Made]:
    """Rows of a dataclass of text and numbers from lines of text."""
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(cls)}  # type: ignore[arg-type]
    return [cls(**{name: kind(line[name]) for name, kind in kinds.items()}) for line in lines]


def fingerprints(path: Path) -> set[tuple[str, ...]]:
    """(op, pattern, dtype, shape, machine, commit) of every case in the CSV."""
    return {tuple(r[k] for k in ("op", "pattern", "dtype", "shape", "machine", "commit")) for r in load(path)}


def append(rows: Iterable[Row], path: Path) -> None:
    """Add ``rows`` to the CSV at ``path``; a row for the same case on the same machine replaces the old one."""
    new = [asdict(r) for r in rows]
    key = ("op", "provider", "pattern", "dtype", "shape", "metric", "machine")
    fresh = {tuple(str(r[k]) for k in key) for r in new}
    old = [r for r in load(path) if tuple(r[k] for k in key) not in fresh]
    save([*old, *new], [f.name for f in fields(Row)], path)


def machine(device: str = "cpu") -> str:
    """A readable name of the device; of a CPU with its threads, and the instruction set where ``NMKERNELS_ISA`` holds it to one."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields_of = dict(re.findall(r"(.+?)\s*: (.+)", cpuinfo.read_text().split("\n\n")[0]))
        model = fields_of.get("model name", model).strip()
        if not re.search(r"\d", model) and "cpu family" in fields_of:  # virtual machines leave the number out
            model += f" (family {fields_of['cpu family']}, model {fields_of['model']})"
    if held := os.environ.get("NMKERNELS_ISA"):
        model += f" held to {held}"
    return f"{model}, {torch.get_num_threads()} threads"


def device_of(machine: str) -> str:
    """The kind of device, cpu or cuda, of a machine by its name: a CPU's name ends with its threads."""
    return "cpu" if re.search(r", \d+ threads$", machine) else "cuda"


def slug(name: str) -> str:
    """``name`` as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> str:
    """The versions that affect a measurement; Triton's if torch can use a GPU."""
    cuda = f" cuda {torch.version.cuda}" if torch.version.cuda else ""
    triton = f" {capability.triton().reason}" if torch.cuda.is_available() and capability.triton().ok else ""
    return f"python {platform.python_version()} torch {torch.__version__}{cuda}{triton}"


@cache
def commit() -> str:
    """The short commit at the first call of this run, marked ``-dirty`` if the tree differs from it.

    Changes of the results and of the audit page do not count, since a run writes those.
    """
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results", ":(top,exclude)docs/pays.md"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
