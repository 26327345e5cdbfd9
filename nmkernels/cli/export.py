"""``python -m nmkernels export``: a compressed Hugging Face folder as one of compressed-tensors, layer by layer."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..export.card import CARD, ENCODING, HEADING, METHOD, integers_of, patterns_of
from ..export.compressed_tensors import Packed, check_table, write_pack_quantized
from ..export.folders import CONFIG, carry_over, check_complete, check_out
from ..export.plan import BUFFERS, announce, check_filled
from ..export.safetensors import opened
from ..export.stream import SHARD
from ..export.tensors import INDEX, parse, shortened, weight_files
from ..ops import Compressed
from ..pattern import CheckpointError, NMError, Pattern

VERB = "export"
SECTION = f"""{HEADING}

{{weights}}. nmkernels has written them in compressed-tensors' format `pack-quantized`{{zeros}} ({{integers}}):
vLLM, SGLang and transformers (with compressed-tensors) open it.
"""
ALSO = "generation_config.json", "report.json"
"""Files that pruning writes itself and an export copies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder of nmkernels with int8 or int4 values; only read")
    parser.add_argument("out", type=Path, metavar="OUT", help="new folder, in compressed-tensors' format pack-quantized")


def run(args: argparse.Namespace) -> int:
    """Export the folder and print the summary."""
    print(export_folder(args.model, args.out))
    return 0


def export_folder(source: Path, out: Path, shard: int = SHARD) -> str:
    """Write the compressed model in ``source`` to ``out`` as ``save_compressed_tensors`` does, with one layer at a time in memory.

    Returns a summary. ``shard``: bytes of one file.

    Raises:
        CheckpointError: a folder is not what it should be, damaged, or cannot be written. ``out`` is then as it was.
        RecipeError: a layer has no form in the format.
    """
    try:
        import transformers

        from ..prune.disk import class_of, on_meta
    except ImportError as error:
        raise NMError(f"export needs transformers 5, accelerate and safetensors: {error}.") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = _config(source)
    check_out(source, out)
    contents, table = opened(source)
    kind, settings = class_of(source, config)
    model = on_meta(source, kind, settings)
    modules = dict(model.named_modules(remove_duplicate=False))
    announced = announce(source, modules, table)
    check_table(table, VERB)
    layers = {name: _read(source, name, entry, announced[modules[name], "weight"][1], contents.tensors) for name, entry in table.items()}
    check_complete(source, model, {**contents.tensors, **{f"{name}.weight": modules[name].get_parameter("weight") for name in layers}})
    left: list[str] = []

    def describe(work: Path) -> dict[str, Any]:
        left.extend(carry_over(source, work, {*weight_files(source), INDEX}))
        for name in ALSO:
            if (source / name).is_file():
                shutil.copyfile(source / name, work / name)
        patterns = patterns_of(table)
        weights = f"Weights of this model are {', '.join(patterns)} sparse" if patterns else "Weights of this model are integers"
        zeros = ", with the zeros in place" if patterns else ""
        section = SECTION.format(weights=weights, zeros=zeros, integers="; ".join(integers_of(table)))
        card = work / CARD
        if card.is_file():
            text = card.read_text(**ENCODING)
            text = re.sub(rf"^{HEADING}\n.*?(?=^## |\Z)", lambda _: section + "\n", text, flags=re.MULTILINE | re.DOTALL)
            card.write_text(text, **ENCODING)
        return config

    dtype = str(config.get("dtype", config.get("torch_dtype")))
    write_pack_quantized(out, model, layers, contents.tensors, dtype, describe, shard)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    others = sorted(name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in layers)
    name, kinds = source.resolve().name, "; ".join(integers_of(table))
    lines = [f"{name}: {len(layers)} layers written to {out}/ as pack-quantized ({kinds}), {size:,} bytes."]
    if others:
        lines.append(f"Left dense: {', '.join(others[:3])}{f' and {len(others) - 3} more' if len(others) > 3 else ''}.")
    if left:
        lines.append(f"Not carried over, since they hold other weights: {', '.join(left)}.")
    return "\n".join([*lines, f"To serve it: vllm serve {out}"])


def _read(source: Path, name: str, entry: dict[str, Any], layer: Any, tensors: dict[str, Tensor]) -> Packed:
    """Take the checked weight of a layer out of ``tensors``; ``layer`` has its buffers without data."""
    parts = {part: tensors.pop(f"{name}.{part}") for part in BUFFERS if f"{name}.{part}" in tensors}
    missing = {part for part in layer._buffers if part not in parts and part not in layer._non_persistent_buffers_set}
    weight: Any = None
    if not missing:
        rows, cols = entry["shape"]
        indices = parts.get("indices", torch.empty(rows, 0, dtype=torch.uint8))  # dense integers have none
        try:
            weight = Compressed(parts["values"], indices, Pattern(entry["pattern"]), (rows, cols), parts["step"])
        except NMError as error:
            raise CheckpointError(f"{source}: layer {name!r} is damaged: {error}") from error
    check_filled(name, layer, parts, missing)
    return Packed(weight, parts.get("columns"))


def _config(source: Path) -> dict[str, Any]:
    """``config.json`` of a folder that nmkernels has compressed."""
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise CheckpointError(f"{source} {what}; pass a folder that save_pretrained of a compressed model, or prune, has written.")
    if not (source / CONFIG).is_file():
        raise CheckpointError(f"{source} has no {CONFIG}; pass a folder that save_pretrained of a compressed model, or prune, has written.")
    try:
        config: dict[str, Any] = parse((source / CONFIG).read_bytes())
        about = config.get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source / CONFIG} is damaged ({shortened(error)}).") from error
    if about is None:
        raise CheckpointError(f"{source} is a dense model; python -m nmkernels prune {source} --values int4 prunes and rounds it first.")
    method = about.get("quant_method") if isinstance(about, dict) else about
    if method != METHOD:
        raise CheckpointError(f"{source} is in the format of {shortened(method)}; only models compressed by nmkernels are exported.")
    return config
