"""``python -m nmkernels finetune``: what ``prune`` wrote, trained on with its masks held, with or without its dense model as a teacher."""

from __future__ import annotations

import argparse
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch

from .. import capability
from ..export.folders import check_out
from ..pattern import NMError
from ..prune.progress import Progress
from . import positive, seed
from .prune import add_data_arguments, causal, data_of, hugging_face, interrupted

TESTS = 64
"""Held-out windows, at most."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder that prune wrote; only read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder, of the same kind")
    add_data_arguments(parser)
    text = "the dense model: train towards its output distribution (KL divergence) and not towards the text"
    parser.add_argument("--teacher", type=Path, metavar="DENSE_DIR", help=text)
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="optimizer steps, default 300")
    parser.add_argument("--batch", type=positive, default=8, metavar="B", help="windows in a step, default 8")
    text = "the highest learning rate, default 1e-5; it rises for a tenth of the steps and then falls to zero"
    parser.add_argument("--lr", type=float, default=1e-5, metavar="R", help=text)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the choice and order of windows, default 0")
    parser.add_argument("--device", metavar="D", help="cuda or cpu; default a GPU if torch has one")
    text = "of the computations, default bfloat16 on a GPU; weights and optimizer stay float32, and the folder has the dtype of MODEL_DIR"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=text)
    text = "steps after which a checkpoint is written, default 50, and every five minutes"
    parser.add_argument("--save-every", type=positive, default=50, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print report.json instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Fine-tune the folder and print the summary; 0 done, 1 failed, 130 interrupted (the message says how to resume)."""
    hugging_face("finetune")
    from ..prune import disk, finetune, folder

    if not (math.isfinite(args.lr) and args.lr > 0):
        raise NMError(f"--lr {args.lr} must be a number above 0.")
    check_out(args.model, args.out)
    kind, settings = disk.class_of(args.model, finetune.check_compressed(args.model), args.trust_remote_code)
    if not causal(kind, settings):
        raise NMError(f"{kind.__name__} is not a causal language model; train it in Python, see the guide Prune a pretrained model.")
    device = folder.check_device(args.device or ("cuda" if capability.cuda_device().ok else "cpu"))
    half = args.dtype == "bfloat16" if args.dtype else device.type == "cuda"
    try:
        with warnings.catch_warnings(), Progress(True) as step:
            warnings.showwarning = lambda message, *_, **__: step.note(f"note: {message}")
            step(0, 1, f"reading {args.data}")
            args.samples = args.steps * args.batch
            batches, tests, why = data_of(args, kind, settings)
            facts = finetune.finetune_folder(
                args.model, torch.cat([batch["input_ids"] for batch in batches]), args.out,
                tests=[batch["input_ids"] for batch in tests][: -(-TESTS // args.batch)], teacher=args.teacher, steps=args.steps,
                batch=args.batch, lr=args.lr, seed=args.seed, device=device, bfloat16=half, save_every=args.save_every,
                trust_remote_code=args.trust_remote_code, progress=step,
            )  # fmt: skip
    except (NMError, KeyboardInterrupt) as stop:
        work = folder.work_folder(args.out, "finetune")
        return interrupted("finetune", stop, f"The last checkpoint is in {work}" if (work / finetune.CHECKPOINT).is_file() else "")
    print(json.dumps(facts, indent=2) if args.json else summary(facts, args.out, why))
    return 0


def summary(facts: dict[str, Any], out: Path, why: str) -> str:
    """What a run prints at its end."""
    ppl, loss = facts["perplexity"], facts["loss"]
    parts = [f"{facts['model']}: {facts['steps']} steps with the masks held, loss {loss['first']:.3f} to {loss['last']:.3f}."]
    if ppl is None:
        parts.append(f"Perplexity was not measured: {why}.")
    else:
        parts.append(
            f"Perplexity on {facts['held_out']['tokens']:,} held-out tokens: {ppl['before']:.3f} before, {ppl['after']:.3f} after."
        )
    if facts["values"]:
        parts.append(f"Values were rounded to {', '.join(facts['values'])} again.")
    return "\n".join([*parts, f"Written to {out}/ with a model card and report.json."])
