"""Hugging Face folders in compressed-tensors' format ``pack-quantized``: dense integers with the zeros in place.

vLLM, SGLang and transformers (where compressed-tensors is installed) open them. A layer ``fqn`` with integers of ``bits`` 4 or 8 is::

    fqn.weight_packed   int32 (out, ⌈in · bits / 32⌉): integer + 2^(bits - 1), the earlier column in the lower bits, spare bits 0
    fqn.weight_scale    bfloat16 (out, groups): the steps; a weight is integer · step
    fqn.weight_shape    int64 [out, in]

``quantization_config`` in ``config.json`` has a group for each kind of integers, "group" with its size or "channel" for a step per row; its
layers are ``targets``. Dense linear layers are in ``ignore``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..files import lock_file, sync, writing
from ..layouts import CONV1D, CONV2D, EMBEDDING, LINEAR
from ..nn.compressed import CompressedPart
from ..nn.weight import NMWeight
from ..ops import Compressed
from ..ops.integers import BITS
from ..pattern import CheckpointError, RecipeError
from ..shards import is_sharded
from .folders import CONFIG, check_out
from .plan import BUFFERS
from .safetensors import HUGGING_FACE, table
from .stream import SHARD, ShardWriter
from .tensors import plain_modules, plain_state, sparse_layers

VERB = "save_compressed_tensors"
DENSE = "nm.save_dense(model, path) writes dense weights with zeros, which any program reads"
ROUND = 'nm.compress_(model, values="int4") or "int8" rounds them'
KINDS = {CONV1D: "a Conv1D of transformers", CONV2D: "a convolution"}


class Packed(NamedTuple):
    """A compressed weight ``(out, in)`` with integers, and the order of its columns if they are not in that of the inputs."""

    weight: Compressed
    columns: Tensor | None


def save_compressed_tensors(model: nn.Module, folder: str | os.PathLike[str], max_shard_size: int = SHARD) -> None:
    """Write a transformers model with int8 or int4 values to a folder that vLLM, SGLang and transformers with compressed-tensors open.

    The format is compressed-tensors' ``pack-quantized``: dense integers in which the N:M zeros are in place, 8 or 4 bits for each weight,
    and a bfloat16 step for each group or row. Integers and steps are those of the model, bit for bit, so weights are exactly those of
    ``nm.densify_``; the speed is that of dense weights with so many bits. Other tensors are written as they are. Add tokenizer files as
    with ``save_pretrained``; ``python -m nmkernels export`` copies a folder with all its files.

    Args:
        model: whose linear layers ``nm.compress_(model, values="int4")``, or ``"int8"``, has rounded; layers may differ, or be dense.
        folder: new or empty. It appears when it is complete.
        max_shard_size: bytes of one safetensors file; more are split.

    Programs cast steps to the dtype in ``config.json``. It is bfloat16, in which steps are exact, also for a float32 model, whose other
    tensors stay float32 in the file; and float16 for a float16 model if all steps are exact in it.

    Raises:
        RecipeError: a layer has floating-point values, or something that the format lacks: an adapter, experts, a Conv1D, reordered inputs
            with steps for groups; or a step is not exact in float16. The message says what to do.
        CheckpointError: the folder holds something, or cannot be written.
    """
    out = Path(folder)
    inner: Any = plain_modules(model)[""]
    check_out(None, out)
    layers, state = _of_model(inner)

    def describe(work: Path) -> dict[str, Any]:
        if inner.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(inner, work, config=inner.config)
        if inner.can_generate():
            inner.generation_config.save_pretrained(work)
        config: dict[str, Any] = json.loads(inner.config.to_json_string())
        return {**config, "architectures": [type(inner).__name__]}

    write_pack_quantized(out, inner, layers, state, str(inner.dtype).removeprefix("torch."), describe, max_shard_size)


def _of_model(model: Any) -> tuple[dict[str, Packed], dict[str, Tensor]]:
    """(the compressed layers of a transformers model by name, its other tensors without those tied to others)."""
    try:
        from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict
    except ImportError as error:
        raise RecipeError(f"{VERB} needs transformers 5: {error}.") from error
    if hasattr(model, "peft_config"):
        raise RecipeError(f"{VERB}: the model has adapters of peft, for which the format has no place; merge or remove them first.")
    if not isinstance(model, PreTrainedModel):
        raise RecipeError(f"{VERB}: {type(model).__name__} is not a model of transformers, and the folder needs its config.json; {DENSE}.")
    layers: dict[str, Any] = sparse_layers(model)
    for name, layer in layers.items():
        if isinstance(layer, NMWeight):
            raise RecipeError(f'{VERB}: layer {name!r} is not compressed; call handle.finish() and nm.compress_(model, values="int4").')
        if isinstance(layer, CompressedPart):
            raise RecipeError(f"{VERB}: tensor parallelism has split layer {name!r}; nm.save_compressed, and load into a plain model.")
    check_table(table(layers))
    state = plain_state(model)
    away = next((name for name, t in state.items() if t.is_meta or is_sharded(t)), None)
    if away is not None:
        raise CheckpointError(f"{VERB}: {away!r} is offloaded or sharded; load the whole model into memory.")
    taken = {f"{name}.{part}" for name in layers for part in BUFFERS}
    ignored = set(model._keys_to_ignore_on_save or ())
    others = remove_tied_weights_from_state_dict({name: t for name, t in state.items() if name not in taken | ignored}, model)
    return {name: Packed(layer.weight, layer.order) for name, layer in layers.items()}, others


def check_table(about: Mapping[str, Mapping[str, Any]], verb: str = VERB) -> None:
    """RecipeError if a layer in a table of ``save_compressed`` has no form in ``pack-quantized``, with the way out."""
    if not about:
        raise RecipeError(f'{verb}: no layer is compressed; prune the model, and call nm.compress_(model, values="int4").')
    for name, entry in about.items():
        layout, group, problem = entry["layout"], entry.get("group"), ""
        if layout == EMBEDDING:
            problem = "is an embedding with integers, and the format is for nn.Linear only; leave it out of dense="
            problem += " (prune without --dense-values)"
        elif layout != LINEAR:
            problem = f"is {KINDS.get(layout, 'a stack of experts')}, and the format is for nn.Linear only; {DENSE}"
        elif "rank" in entry:
            problem = f"has a low-rank adapter, for which the format has no place; {DENSE}, the adapter folded in"
        elif "values" not in entry:
            problem = f"has floating-point values; {ROUND}, and {DENSE}"
        elif entry.get("columns") and group:
            problem = f"reorders its inputs, and groups of {group} are then not adjacent; round with a step per row (int8), or {DENSE}"
        if problem:
            raise RecipeError(f"{verb}: layer {name!r} {problem}.")


def write_pack_quantized(
    out: Path,
    model: Any,
    layers: Mapping[str, Packed],
    others: Mapping[str, Tensor],
    dtype: str,
    describe: Callable[[Path], dict[str, Any]],
    shard: int = SHARD,
) -> None:
    """Write the folder ``out``, one layer at a time; the tensors may be views of mapped files.

    ``model``: transformers' model, also without data. ``dtype``: the model's. ``describe``: writes the files that are not weights into a
    folder, and returns the configuration, in which dtype and quantization are then set.
    """
    kinds = {name: (BITS[c.weight.kind], c.weight.group) for name, c in layers.items()}
    entry = quantization_config(kinds, model)
    dtype = _served_dtype(dtype, layers)
    with torch.device("meta"):
        tensors = {f"{name}.{end}": t for name, c in layers.items() for end, t in _announced(c.weight, kinds[name][0]).items()}
    with appearing(out) as work:
        writer = ShardWriter(work, {**tensors, **others}, {"format": HUGGING_FACE}, shard)
        try:
            for name, packed in layers.items():
                for end, tensor in _parts(packed, kinds[name][0]).items():
                    writer.write(f"{name}.{end}", tensor)
            for name, tensor in others.items():
                writer.write(name, tensor)
            writer.close()
        finally:
            writer.abandon()
        with writing(work):
            config = {**describe(work), "dtype": dtype, "quantization_config": entry}
            config.pop("torch_dtype", None)  # its name in older folders
            (work / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def quantization_config(kinds: Mapping[str, tuple[int, int]], model: Any) -> dict[str, Any]:
    """The entry of ``config.json`` for layers of ``model`` with (bits, group) by name; its other linear layers are ignored."""
    modules, groups = plain_modules(model), {}
    for number, kind in enumerate(sorted(set(kinds.values()))):
        bits, group = kind
        weights = {
            "num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "observer": "minmax",
            "strategy": "group" if group else "channel", "group_size": group or None,
        }  # fmt: skip
        targets = _targets({name for name in kinds if kinds[name] == kind}, model, modules)
        groups[f"group_{number}"] = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    dense = {name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in kinds}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "config_groups": groups,
        "ignore": _targets(dense, model, modules), "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def _targets(names: set[str], model: Any, modules: Iterable[str]) -> list[str]:
    """What matches the modules ``names`` of ``model``, and no others: regular expressions, one for layers whose names differ in numbers.

    They begin after the name of the model's body, so that they match without its head and under another one too; layers that a program
    does not find would have random weights. Programs know the parts of a model with several bodies by other names, and map plain names.
    """
    if getattr(model.config, "sub_configs", None):
        return sorted(names)
    others, found = [name for name in modules if name not in names], []
    alike: dict[str, list[tuple[str, str]]] = {}

    def unique(part: str) -> bool:
        return not any(re.fullmatch(rf"(.*\.)?{part}", name) for name in others)

    for name in sorted(names):
        part = re.escape(name.removeprefix(f"{model.base_model_prefix}."))
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^\\])", r"\\d+", part), []).append((part, name))
    for together, apart in alike.items():
        for part, name in [(together, "")] if unique(together) else apart:
            found.append(rf"re:(.*\.)?{part}$" if unique(part) else name)
    return found


def _served_dtype(dtype: str, layers: Mapping[str, Packed]) -> str:
    """The dtype that programs are to compute in; they cast steps to it, so it has to hold them."""
    served, other = ("float16", "bfloat16") if dtype == "float16" else ("bfloat16", "float16")
    for name, (weight, _) in layers.items():
        assert weight.step is not None
        if not torch.equal(weight.step.to(getattr(torch, served)).float(), weight.step.float()):
            raise RecipeError(f"{VERB}: {served} cannot hold a step of layer {name!r}; call model.to(torch.{other}) first.")
    return served


def _announced(weight: Compressed, bits: int) -> dict[str, Tensor]:
    """The tensors of a layer by the ends of their names, without data."""
    assert weight.step is not None
    rows, cols = weight.shape
    packed, shape = torch.empty(rows, -(-cols * bits // 32), dtype=torch.int32), torch.empty(2, dtype=torch.int64)
    return {"weight_packed": packed, "weight_scale": torch.empty_like(weight.step, device="meta"), "weight_shape": shape}


def _parts(packed: Packed, bits: int) -> dict[str, Tensor]:
    """The tensors of a layer by the ends of their names."""
    weight, columns = packed
    assert weight.step is not None
    # 16-bit floating point holds all integers of 8 bits
    plain = Compressed(weight.values, weight.indices, weight.pattern, weight.shape, torch.ones_like(weight.step))
    integers = plain.dense(torch.bfloat16).to(torch.int8)
    if columns is not None:
        integers = integers.index_select(1, columns.long().argsort())
    return {"weight_packed": pack(integers, bits), "weight_scale": weight.step, "weight_shape": torch.tensor(weight.shape)}


def pack(integers: Tensor, bits: int) -> Tensor:
    """int8 ``(rows, cols)`` -> int32 ``(rows, ⌈cols · bits / 32⌉)``: integer + 2^(bits - 1), the earlier in the lower bits, spare bits 0.

    Example:
        >>> [hex(word) for word in pack(torch.tensor([[-8, 7, 0]], dtype=torch.int8), 4).flatten().tolist()]
        ['0x8f0']
    """
    half = 1 << (bits - 1)
    offset = (integers.view(torch.uint8) + half) & (2 * half - 1)  # modulo 2^bits, which is what two's complement needs
    offset = F.pad(offset, (0, -offset.shape[1] % (32 // bits)))
    if bits == 4:
        offset = offset[:, ::2] | offset[:, 1::2] << 4
    return offset.contiguous().view(torch.int32)  # bytes of a word are in the order of the columns: safetensors is little-endian


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``out`` in one step if nothing is raised. One process at a time; what a killed one left goes."""
    out = Path(os.path.abspath(out))
    home = out.parent / f".{out.name}.nmkernels-export"
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
    lock = lock_file(home / ".lock", "another folder")
    try:
        check_out(None, out)  # another process may have finished meanwhile
        work = home / out.name
        with writing(home):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
        yield work
        with writing(out):
            for file in work.iterdir():
                sync(file)
            sync(work)
            os.replace(work, out)
            sync(out.parent)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        os.close(lock)
