"""``python -m nmkernels prune``: a Hugging Face folder to N:M in one shot, block by block, with perplexity before and after."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import capability
from ..export.card import own_class
from ..export.folders import check_out
from ..export.tensors import first_line
from ..ops.integers import BITS
from ..pattern import NMError, Pattern
from ..prune.base import resolve
from ..prune.progress import Progress
from . import by_text, positive, seed
from .samples import SHORTEST, draw, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder of save_pretrained, with safetensors files; only read")
    add_data_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder, which from_pretrained loads")
    parser.add_argument("--pattern", metavar="N:M", help="default 2:4")
    text = 'JSON with a pattern per layer: {name or wildcard: "N:M" or "dense"}, an earlier report.json, or what audit --json printed'
    parser.add_argument("--patterns", type=Path, metavar="FILE", help=f"{text}; layers that it does not name stay dense")
    text = "admm (default), sparsegpt, wanda, magnitude; with settings: 'admm(refit=0)'"
    parser.add_argument("--method", default="admm", metavar="NAME", help=text)
    parser.add_argument("--samples", type=positive, default=128, metavar="S", help="windows of text to calibrate on, default 128")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="windows in one forward pass, default 1")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of the choice of windows, default 0")
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
    parser.add_argument("--plot", action="store_true", help="draw the errors by layer, as error.png in DIR and its model card")
    parser.add_argument("--json", action="store_true", help="print report.json instead of a summary")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which text is used, how it is cut into windows of tokens, and whose code may do it."""
    text = 'text, JSON lines with "text", Arrow or Parquet, or token ids (.npy, .pt, .safetensors); a folder: all such files in it'
    parser.add_argument("--data", type=Path, required=True, metavar="FILE|FOLDER", help=f"{text}, or what datasets' save_to_disk wrote")
    text = 'the column, or key of JSON records, that has the text; default "text", or token ids in "input_ids" of a table'
    parser.add_argument("--text-column", metavar="NAME", help=text)
    text = "tokens of a window, default 2048, or the model's longest context if that is less"
    parser.add_argument("--length", type=positive, default=2048, metavar="L", help=text)
    text = "share at the end of the data for perplexity before and after, default 0.1; 0 measures none"
    parser.add_argument("--held-out", default="0.1", metavar="SHARE", help=text)
    text = "run the code that lies in MODEL_DIR, of a model or tokenizer that transformers does not know"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Prune the folder and print the summary; 0 done, 1 failed, 130 interrupted (the message says how to resume)."""
    folder = hugging_face("prune")
    if args.pattern and args.patterns:
        raise NMError("--pattern and --patterns both set the patterns; pass one of them.")
    pattern: Any = patterns_of(args.patterns) if args.patterns else Pattern(args.pattern or "2:4")
    method = by_text(resolve, args.method)
    if args.transposable:
        method = replace(method, transposable=True)
    check_out(args.model, args.out)
    kind, config = folder.class_of(args.model, folder.check_folder(args.model), args.trust_remote_code)
    device = args.device or ("cuda" if capability.cuda_device().ok else "cpu")
    try:
        with warnings.catch_warnings(), Progress(True) as step:
            # without the source line, which means nothing to the user of a command
            warnings.showwarning = lambda message, *_, **__: step.note(f"note: {message}")
            step(0, 1, f"reading {args.data}")
            batches, held_out, why = data_of(args, kind, config)
            done = folder.prune_folder(
                args.model, pattern, batches, args.out, skip=args.skip, method=method, device=device,
                dtype=None if args.dtype is None else getattr(torch, args.dtype), sequential=not args.no_sequential, permute=args.permute,
                values=args.values, group=args.group, dense_values=args.dense_values, held_out=held_out,
                trust_remote_code=args.trust_remote_code, plot=args.plot, progress=step,
            )  # fmt: skip
    except (NMError, KeyboardInterrupt) as stop:
        work = folder.work_folder(args.out)
        blocks = any((work / "units").glob("unit-*.safetensors"))
        return interrupted("prune", stop, f"Finished blocks are kept in {work}" if blocks else "")
    auto, _ = own_class(getattr(config, "auto_map", None), kind.__name__)
    opened = (auto, ", trust_remote_code=True") if auto else (kind.__name__, "")
    facts = json.loads((args.out / folder.REPORT).read_text())
    print(json.dumps(facts, indent=2) if args.json else summary(facts, args.out, opened, why, done.seconds))
    return 0


def interrupted(verb: str, stop: BaseException, kept: str) -> int:
    """Print why a command has ended early and, if something is ``kept``, how to resume; returns its exit status."""
    stopped = isinstance(stop, KeyboardInterrupt)
    print("\nStopped." if stopped else f"python -m nmkernels {verb}: error: {stop}", file=sys.stderr)
    if kept:
        again = shlex.join(["python", "-m", "nmkernels", *sys.argv[1:]])
        print(f"{kept}. To resume:\n  {again}", file=sys.stderr)
    return 130 if stopped else 1


def patterns_of(path: Path) -> dict[str, str]:
    """The pattern of each layer in a file: a plain table, a report of ``prune``, or an audit; NMError where it has none."""
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NMError(f"--patterns {path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise NMError(f"--patterns {path} is not JSON: {first_line(error)}.") from error
    layers, own = (found.get(key) if isinstance(found, dict) else None for key in ("layers", "patterns"))
    if isinstance(own, dict):
        found = own
    elif isinstance(layers, list):  # groups of equal layers
        found = {name: group["pattern"] for group in layers for name in group["names"] if group["sparse"]}
    elif isinstance(layers, dict):
        found = {name.partition("[")[0]: found.get("pattern") for name in layers}
    if not isinstance(found, dict) or not found or not all(isinstance(value, str) for value in found.values()):
        raise NMError(
            f'--patterns {path} has no pattern of a layer; write {{"*.mlp.*": "2:4", "*.self_attn.*": "4:8", "*": "dense"}}. The first '
            "name that fits counts."
        )
    return found


def hugging_face(verb: str) -> Any:
    """The module ``prune.folder``, with transformers, which is made quiet; NMError where it is not installed."""
    try:
        import transformers

        from ..prune import folder
    except ImportError as error:
        raise NMError(f"{verb} needs transformers 5, accelerate and safetensors: {error}.") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    return folder


def data_of(args: argparse.Namespace, kind: Any, config: Any) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], str]:
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
    if not causal(kind, config):
        held, why = 0.0, f"{kind.__name__} is not a causal language model"
    documents = read(args.data, args.text_column)
    tokenizer = _tokenizer(args.model, args.trust_remote_code) if any(isinstance(d, str) for d in documents) else None
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)]
    length = min([args.length, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    tokenize = None if tokenizer is None else lambda text: tokenizer(text, verbose=False)["input_ids"]
    windows, held_out = draw(documents, tokenize, samples=args.samples, length=length, seed=args.seed, share=held)
    if not why and not len(held_out):
        rows = all(isinstance(d, Tensor) and d.dim() == 2 for d in documents)  # which are windows of any length
        short = length < SHORTEST and not rows
        why = f"it takes windows of {SHORTEST} tokens, and these have {length}" if short else "the data is too short to hold some out"
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    return _batches(windows, args.batch, encoder_decoder), _batches(held_out, args.batch, encoder_decoder), why


def _batches(windows: Tensor, size: int, both: bool) -> list[dict[str, Tensor]]:
    """Batches for a model; ``both``: an encoder gets the first half of each window, and a decoder the second."""
    parts = [part for part in windows.split(size) if len(part)]
    if not both:
        return [{"input_ids": part} for part in parts]
    half = windows.shape[1] // 2
    return [{"input_ids": part[:, :half], "decoder_input_ids": part[:, half:]} for part in parts]


def _tokenizer(folder: Path, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any((folder / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
    except Exception as error:  # many types
        way = "; read it, and pass --trust-remote-code if you trust it" if "trust_remote_code" in str(error) else ""
        raise NMError(f"transformers cannot load the tokenizer of {folder}: {first_line(error)}{way}.") from error


def causal(kind: Any, config: Any) -> bool:
    """Whether models of the class ``kind`` predict the next token."""
    from transformers.models.auto import modeling_auto

    tables = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    names = [name for table in tables for value in table.values() for name in ((value,) if isinstance(value, str) else value)]
    return kind.__name__ in names or own_class(getattr(config, "auto_map", None), kind.__name__)[0] == "AutoModelForCausalLM"


def summary(facts: dict[str, Any], out: Path, opened: tuple[str, str], why: str, seconds: float) -> str:
    """What a run prints at its end."""
    data, ppl, size = facts["data"], facts["perplexity"], facts["bytes"]
    pruned, dense = len({name.partition("[")[0] for name in facts["layers"]}), facts["left dense"]
    patterns = ", ".join(sorted(set(facts["patterns"].values())))
    head = f"{facts['model']}: {pruned} layers pruned to {patterns} by {facts['method']} on {data['tokens']:,} tokens in {seconds:.0f} s."
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
    kind, options = opened
    parts.append(
        f"Written to {out}/ with a model card and report.json. To load it:\n\n  import nmkernels.integrations.hf\n"
        f'  from transformers import {kind}\n\n  model = {kind}.from_pretrained("{out}"{options})'
    )
    return "\n\n".join(parts)
