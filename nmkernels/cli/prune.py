"""``python -m nmkernels prune``: a Hugging Face folder to N:M in one shot, block by block, with perplexity before and after."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import capability
from ..ops.integers import BITS
from ..pattern import NMError, Pattern
from ..prune.base import resolve
from ..prune.data import first_line
from . import positive
from .samples import draw, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder of save_pretrained, with safetensors files; only read")
    text = 'text, JSON lines with "text", or token ids (.npy, .pt, .safetensors); a folder: all such files in it'
    parser.add_argument("--data", type=Path, required=True, metavar="FILE|FOLDER", help=text)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder, which from_pretrained loads")
    parser.add_argument("--pattern", default="2:4", metavar="N:M", help="default 2:4")
    text = "admm (default), sparsegpt, wanda, magnitude; with settings: 'admm(refit=0)'"
    parser.add_argument("--method", default="admm", metavar="NAME", help=text)
    parser.add_argument("--samples", type=positive, default=128, metavar="S", help="windows of text to calibrate on, default 128")
    text = "tokens of a window, default 2048, or the model's longest context if that is less"
    parser.add_argument("--length", type=positive, default=2048, metavar="L", help=text)
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="windows in one forward pass, default 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of windows, default 0")
    text = "share at the end of the data for perplexity before and after, default 0.1; 0 measures none"
    parser.add_argument("--held-out", default="0.1", metavar="SHARE", help=text)
    parser.add_argument("--device", metavar="D", help="where blocks are computed: cuda, cpu; default a GPU if torch has one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights; default as in the files")
    text = "layers that stay dense: names, parts of names between dots, shell wildcards"
    parser.add_argument("--skip", "--keep-dense", nargs="+", default=[], metavar="NAME", help=text)
    parser.add_argument("--no-sequential", action="store_true", help="take all inputs from the dense model; faster, and a little worse")
    parser.add_argument("--transposable", action="store_true", help="masks that are N:M for W and its transpose")
    parser.add_argument("--values", choices=sorted(BITS), help="round the kept weights to integers of 8 or 4 bits")
    parser.add_argument("--group", type=int, metavar="COLUMNS", help="that share a step; default 128 for int4, a row for int8")
    text = "integers for embeddings, output heads and linear layers that stay dense"
    parser.add_argument("--dense-values", choices=sorted(BITS), help=text)
    parser.add_argument("--permute", action="store_true", help="first reorder hidden channels where that does not change the model")
    parser.add_argument("--json", action="store_true", help="print report.json instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Prune the folder and print the summary; 0 done, 1 failed, 130 interrupted (the message says how to resume)."""
    folder = _hugging_face()
    pattern, method = Pattern(args.pattern), resolve(args.method)
    if args.transposable:
        method = replace(method, transposable=True)
    folder.check_out(args.model, args.out)
    kind, config = folder.class_of(args.model, folder.check_folder(args.model))
    batches, held_out, why = _data(args, kind, config)
    device = args.device or ("cuda" if capability.cuda_device().ok else "cpu")
    try:
        with warnings.catch_warnings(), progress() as step:
            # without the source line, which means nothing to the user of a command
            warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr, flush=True)
            done = folder.prune_folder(
                args.model, pattern, batches, args.out, skip=args.skip, method=method, device=device,
                dtype=None if args.dtype is None else getattr(torch, args.dtype), sequential=not args.no_sequential, permute=args.permute,
                values=args.values, group=args.group, dense_values=args.dense_values, held_out=held_out, progress=step,
            )  # fmt: skip
    except (NMError, KeyboardInterrupt) as stop:
        stopped = isinstance(stop, KeyboardInterrupt)
        print("\nStopped." if stopped else f"python -m nmkernels prune: error: {stop}", file=sys.stderr)
        work = folder.work_folder(args.out)
        if any((work / "units").glob("unit-*.safetensors")):
            again = shlex.join(["python", "-m", "nmkernels", *sys.argv[1:]])
            print(f"Finished blocks are kept in {work}. To resume:\n  {again}", file=sys.stderr)
        return 130 if stopped else 1
    facts = json.loads((args.out / folder.REPORT).read_text())
    print(json.dumps(facts, indent=2) if args.json else summary(facts, args.out, kind.__name__, why, done.seconds))
    return 0


def _hugging_face() -> Any:
    try:
        import transformers

        from ..prune import folder
    except ImportError as error:
        raise NMError(f"prune needs transformers 5, accelerate and safetensors: {error}.") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    return folder


def _data(args: argparse.Namespace, kind: Any, config: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], str]:
    """(calibration batches, held-out batches, why there are none of the latter)."""
    if getattr(kind, "main_input_name", "input_ids") != "input_ids":
        raise NMError(
            f"{kind.__name__} takes {kind.main_input_name} and not text; pass batches of them to nmkernels.prune.folder.prune_folder."
        )
    try:
        held = float(args.held_out)
    except ValueError:
        held = -1.0
    if not 0 <= held <= 0.5:
        raise NMError(f"--held-out {args.held_out} is not a share from 0 to 0.5.")
    why = "" if held else "--held-out 0"
    if not _causal(kind):
        held, why = 0.0, f"{kind.__name__} is not a causal language model"
    documents = read(args.data)
    tokenizer = _tokenizer(args.model) if any(isinstance(d, str) for d in documents) else None
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)]
    length = min([args.length, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    tokenize = None if tokenizer is None else lambda text: tokenizer(text, verbose=False)["input_ids"]
    windows, held_out = draw(documents, tokenize, samples=args.samples, length=length, seed=args.seed, share=held)
    if not why and not len(held_out):
        why = "the data is too short to hold some out"
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    return _batches(windows, args.batch, encoder_decoder), _batches(held_out, args.batch, encoder_decoder), why


def _batches(windows: Tensor, size: int, both: bool) -> list[dict[str, Tensor]]:
    """Batches for a model; ``both``: an encoder gets the first half of each window, and a decoder the second."""
    parts = [part for part in windows.split(size) if len(part)]
    if not both:
        return [{"input_ids": part} for part in parts]
    half = windows.shape[1] // 2
    return [{"input_ids": part[:, :half], "decoder_input_ids": part[:, half:]} for part in parts]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # many types
        raise NMError(f"transformers cannot load the tokenizer of {folder}: {first_line(error)}.") from error


def _causal(kind: Any) -> bool:
    from transformers.models.auto import modeling_auto

    tables = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = [name for table in tables for value in table.values() for name in ((value,) if isinstance(value, str) else value)]
    return kind.__name__ in names


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar for each stage where a terminal and tqdm are there, else a line for each step, on stderr."""
    bar: Any = None
    stage, start, first = "", 0.0, 0

    def step(done: int, total: int, what: str) -> None:
        nonlocal bar, stage, start, first
        now, _, detail = what.partition(" ")
        if now != stage or (bar is not None and done < bar.n):
            if bar is not None:
                bar.close()
            stage, start, first, bar = now, time.monotonic(), done, _bar(now, total)
        if bar is not None:
            bar.set_postfix_str(detail, refresh=False)
            bar.update(done - bar.n)
            bar.refresh()
        elif done < total:
            left = f", {(time.monotonic() - start) / (done - first) * (total - done):.0f} s left" if done > first else ""
            print(f"{stage} {detail} ({done + 1} of {total}{left})", file=sys.stderr, flush=True)

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()


def _bar(stage: str, total: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc=stage, unit="step", file=sys.stderr, dynamic_ncols=True)


def summary(facts: dict[str, Any], out: Path, kind: str, why: str, seconds: float) -> str:
    """What a run prints at its end."""
    data, ppl, size = facts["data"], facts["perplexity"], facts["bytes"]
    pruned, dense = len({name.partition("[")[0] for name in facts["layers"]}), facts["left dense"]
    head = (
        f"{facts['model']}: {pruned} layers pruned to {facts['pattern']} by {facts['method']} on {data['tokens']:,} tokens in "
        f"{seconds:.0f} s."
    )
    rows = [("", "dense", "pruned", "ratio")]
    if ppl is not None:
        ratio = ppl["pruned"] / ppl["dense"]
        rows.append((f"perplexity, {facts['held_out']['tokens']:,} tokens", f"{ppl['dense']:.3f}", f"{ppl['pruned']:.3f}", f"{ratio:.3f}"))
    rows.append(("bytes", f"{size['dense']:,}", f"{size['compressed']:,}", f"{size['compressed'] / size['dense']:.3f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    parts = [head, "\n".join("  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]).rstrip() for row in rows)]
    if why:
        parts.append(f"Perplexity was not measured: {why}.")
    if facts["error by layer"]:
        wide = max(map(len, facts["error by layer"]))
        lines = [f"  {name.ljust(wide)}  {100 * error:6.2f} %" for name, error in facts["error by layer"].items()]
        parts.append("\n".join(["error of the layers' outputs, mean", *lines]))
    if dense:
        reasons: dict[str, list[str]] = {}
        for name, reason in dense.items():
            reasons.setdefault(reason, []).append(name)
        shown = (
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} ({reason})"
            for reason, names in reasons.items()
        )
        parts.append(f"Left dense: {'; '.join(shown)}.")
    if integers := facts.get("dense values"):
        parts.append(f"Dense layers in {integers['values']}: {', '.join(integers['layers'])}.")
    if skipped := facts["not carried over"]:
        parts.append(f"Not carried over, since they hold the dense weights: {', '.join(skipped)}.")
    parts.append(
        f"Written to {out}/ with a model card and report.json. To load it:\n\n  import nmkernels.integrations.hf\n"
        f'  from transformers import {kind}\n\n  model = {kind}.from_pretrained("{out}")'
    )
    return "\n\n".join(parts)
