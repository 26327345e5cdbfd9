"""``python -m nmkernels audit``: the table of ``nm.audit``, how much N:M sparsity speeds up a model on a device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from .. import capability
from ..audit import audit
from ..audit.rules import by_name
from ..audit.shapes import MODELS, byte_gpt, model_shapes
from ..pattern import NMError
from . import by_text, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default="gpt2", metavar="M", help=f"{', '.join(MODELS)}, or WIDTHxBLOCKS of a byte GPT; default gpt2")
    what.add_argument("--shapes", nargs="+", metavar="OUTxIN", help="layers of these shapes instead, such as 14336x4096 4096x14336")
    text = "tokens of one forward pass, batch times sequence; default 8192"
    parser.add_argument("--tokens", type=positive, default=8192, metavar="T", help=text)
    parser.add_argument("--device", metavar="D", help="A100, H100, H200 (predicted if absent), cpu, cuda; default: a GPU if torch has one")
    parser.add_argument("--recipe", default="sste", metavar="NAME[:N:M]", help="training recipe, default sste")
    parser.add_argument("--pattern", metavar="N:M", help="default 2:4, or the recipe's")
    parser.add_argument("--dtype", metavar="D", help="bfloat16, float16, float32; default bfloat16 on GPUs, float32 on a CPU")
    parser.add_argument("--accumulate", type=positive, default=1, metavar="K", help="forward passes per optimizer step, default 1")
    parser.add_argument("--no-measure", action="store_true", help="predict only (a CPU is still measured, for a second)")
    parser.add_argument("--budget", type=float, default=60.0, metavar="S", help="approximate seconds for measuring; default 60")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Audit the model and print the table; returns 0. Wrong arguments raise ``NMError``."""
    model, rows = _model(args)
    device = args.device or ("cuda" if capability.cuda_device().ok else "cpu")
    recipe = args.recipe
    if args.pattern is not None:
        if ":" in recipe:
            raise NMError(f"audit: --recipe {recipe} and --pattern {args.pattern} both set the pattern; pass one of them.")
        recipe = f"{recipe}:{args.pattern}"
    report = audit(
        model,
        args.tokens,
        by_text(by_name, recipe),
        device=device,
        dtype=args.dtype or ("float32" if device == "cpu" else "bfloat16"),
        accumulate=args.accumulate,
        rows=rows,
        measure=not args.no_measure,
        budget=args.budget,
        progress=None if args.json or not sys.stderr.isatty() else lambda i, n, what: print(f"{i + 1} of {n}: {what}", file=sys.stderr),
    )
    print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if args.json else report)
    return 0


def _model(args: argparse.Namespace) -> tuple[Any, Mapping[str, float]]:
    """(the model or the shapes of its layers, the rows per token of layers for which that is not 1)."""
    if args.shapes:
        counts = [args.shapes[:i].count(word) for i, word in enumerate(args.shapes)]
        return {word + (f" #{n + 1}" if n else ""): _sizes(word) for word, n in zip(args.shapes, counts, strict=True)}, {}
    if args.model[:1].isdigit():
        return byte_gpt(*_sizes(args.model)).module(), {}
    try:
        spec = model_shapes(args.model)
    except NMError as error:
        raise NMError(f"{error} Or pass WIDTHxBLOCKS, or --shapes.") from None
    return spec.module(), spec.rows


def _sizes(word: str) -> tuple[int, int]:
    sizes = word.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise NMError(f"audit: {word!r} is not a shape; write two sizes such as 4096x11008.")
    return int(sizes[0]), int(sizes[1])
