"""``python -m nmkernels convert``: a Hugging Face folder that another library has compressed or pruned, into one of this package."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ..export.convert import by_type, convert_folder, size_of, work_folder
from ..export.folders import read_config
from ..pattern import NMError
from ..prune.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder in a format of compressed-tensors (sparse-24-bitmask, marlin-24), or dense with N:M zeros; only read"
    parser.add_argument("model", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder, which from_pretrained loads")
    text = "float32 values, and a float32 model, where scales or 8-bit floating-point values would be rounded"
    parser.add_argument("--exact", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print report.json instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Convert the folder and print what was exact; 0 done, 1 failed, 130 interrupted (the message says how to resume)."""
    try:
        import transformers

        from ..prune.disk import class_of, on_meta
    except ImportError as error:
        raise NMError(f"convert needs transformers 5, accelerate and safetensors: {error}.") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind, settings = class_of(args.model, read_config(args.model))
    model = on_meta(args.model, kind, settings)
    try:
        with Progress(True) as step:
            facts = convert_folder(args.model, args.out, model, exact=args.exact, progress=step)
    except (NMError, KeyboardInterrupt) as stop:
        stopped = isinstance(stop, KeyboardInterrupt)
        print("\nStopped." if stopped else f"python -m nmkernels convert: error: {stop}", file=sys.stderr)
        if (work := work_folder(args.out)).exists():
            again = shlex.join(["python", "-m", "nmkernels", *sys.argv[1:]])
            print(f"Finished files are kept in {work}. To resume:\n  {again}", file=sys.stderr)
        return 130 if stopped else 1
    print(json.dumps(facts, indent=2) if args.json else summary(facts, args.out, kind.__name__))
    return 0


def summary(facts: dict[str, Any], out: Path, kind: str) -> str:
    """What a run prints at its end."""
    layers, left, size = facts["layers"], facts["left dense"], facts["bytes"]
    rounded = sum(row["error"] > 0 for row in (*layers.values(), *left.values()))
    exact = "all exact" if not rounded else f"{rounded} of them rounded"
    head = f"{facts['model']}: {len(layers)} layers were {facts['stored']}, {exact}; {size['before']:,} bytes, now {size['after']:,}."
    rows = [("layers", "", "was", "is", "error of the weights")]
    rows += [(name, str(count), was, becomes, size_of(error)) for name, count, was, becomes, error in by_type(facts)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    parts = [head, "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)]
    if left:
        reasons: dict[str, list[str]] = {}
        for name, row in left.items():
            reasons.setdefault(row["reason"], []).append(name)
        shown = (f"{', '.join(n[:3])}{f' and {len(n) - 3} more' if len(n) > 3 else ''} ({reason})" for reason, n in reasons.items())
        parts.append(f"Left dense: {'; '.join(shown)}.")
    parts += [f"{note[0].upper()}{note[1:]}." for note in facts["notes"]]
    if dropped := facts["dropped"]:
        parts.append(f"Not needed, and left out: {len(dropped)} tensors ({', '.join(dropped[:3])}{', ...' if len(dropped) > 3 else ''}).")
    if skipped := facts["not carried over"]:
        parts.append(f"Not carried over, since they hold the same weights: {', '.join(skipped)}.")
    parts.append(
        f"Written to {out}/ with a model card and report.json. To load it:\n\n  from transformers import {kind}\n\n"
        f'  model = {kind}.from_pretrained("{out}")'
    )
    return "\n\n".join(parts)
