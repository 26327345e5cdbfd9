"""``python -m nmkernels bench``: time the operations on this machine. The options live here, the measurements beside the package.

``bench/`` is a folder of the source tree and not of the installed package; an installed package says so and how to get it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ..pattern import NMError

HOME = Path(__file__).resolve().parents[2]
"""The source tree, where this package runs from one (a checkout, or an editable install)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb, which are also those of ``python -m bench.run``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--targets", action="store_true", help="only the cases of the speed targets, and whether they are met (minutes)")
    what.add_argument("--quick", action="store_true", help="only a handful of cases (seconds; on a GPU those of the targets, minutes)")
    parser.add_argument("--op", nargs="+", metavar="OP", help="only these: linear, nm_mask, 'mvue*', CompressedLinear, train_step, ...")
    said = "weights: 4096x11008, or of a model: gpt2, llama3-8b, vit-l, bert-large:fc"
    parser.add_argument("--shapes", nargs="+", metavar="S", help=said)
    parser.add_argument("--pattern", nargs="+", metavar="N:M", help="patterns, such as 2:4 1:8")
    parser.add_argument("--dtype", nargs="+", metavar="D", help="fp32, bf16, fp16")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T", help="tokens of the GEMMs, such as 1 16 256")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; by default a GPU if torch has one")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of torch and of the kernels")
    parser.add_argument("--isas", nargs="+", metavar="ISA", help="CPU: time these instruction sets too, or all (portable, avx2, ...)")
    parser.add_argument("--seconds", type=float, metavar="S", help="time to spend on each case, about")
    parser.add_argument("--resume", action="store_true", help="leave out cases that the file has from this commit and machine")
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="I", help="begin with the I-th case of --list")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of lines")
    parser.add_argument("--out", type=Path, metavar="CSV", help="file to add rows to, by default bench/results/<machine>.csv")


def run(args: argparse.Namespace) -> int:
    """Find the measurements and run them; 0 all timed, 1 a result was wrong or a case failed, 130 interrupted."""
    return int(measurements(HOME).execute(args))


def measurements(home: Path) -> Any:
    """The module ``bench.run`` of the source tree at ``home``; ``NMError`` where there is none."""
    if not (home / "bench" / "registry.py").is_file():
        raise NMError(
            "the measurements are not part of the installed package; they are the folder bench/ of the source tree. "
            "Get the sources, run `pip install -e '.[bench]'` there, and then this command again, or `python -m bench.run` in that folder."
        )
    # first, because another module of that name may be installed or in the present folder
    sys.path.insert(0, str(home))
    return importlib.import_module("bench.run")
