"""Hugging Face models: saved by ``save_pretrained``, loaded by ``from_pretrained``, and dense ones pruned on the way."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.export.card import CARD, patterns_of
from nmkernels.pattern import CheckpointError, PatternError, RecipeError
from nmkernels.testing import equal_bits
from python_tests.export.editing import edited, parts
from python_tests.house.paths import ROOT

transformers = pytest.importorskip("transformers", minversion="5.0")
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

from nmkernels.integrations.hf import NMConfig, NMQuantizer, mark_  # noqa: E402

transformers.logging.disable_progress_bar()

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
TOKENS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {**SMALL, **TOKENS, "num_key_value_heads": 2}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MOE = {**DECODER, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "llama-tied": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2LMHeadModel",
        {**TOKENS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "bert": ("BertForMaskedLM", {**SMALL, **DRY, "vocab_size": 64}),
    "vit": ("ViTForImageClassification", {**SMALL, **DRY, "image_size": 16, "patch_size": 8, "num_labels": 4}),
    "resnet": (
        "ResNetForImageClassification",
        {"num_channels": 3, "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2], "layer_type": "basic", "num_labels": 4},
    ),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
    "qwen-moe": ("Qwen2MoeForCausalLM", MOE),
    "gpt-oss": ("GptOssForCausalLM", {**DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
IDS = torch.arange(3, 15).reshape(2, 6)


def built(name: str, **keywords: Any) -> Any:
    kind = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    return kind(kind.config_class(**{**MODELS[name][1], **keywords})).eval()


def inputs(name: str) -> dict[str, Tensor]:
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), "labels": torch.tensor([1, 3])}
    return {"input_ids": IDS, "labels": IDS}


def logits(model: nn.Module, name: str = "llama") -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs(name)).logits
    return found


def trained(model: Any, name: str, recipe: Any = "ste:2:4", steps: int = 2) -> Any:
    """Trained a little, finished, and not compressed yet."""
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs(name)).loss.backward()
        optimizer.step()
    return handle.finish(allow_unused=True)


def compressed(name: str, recipe: Any = "ste:2:4", **keywords: Any) -> Any:
    return nm.compress_(trained(built(name, **keywords), name, recipe))


def loaded(folder: Path, auto: Any = AutoModelForCausalLM, **keywords: Any) -> Any:
    """The model in ``folder``, of which transformers reports nothing missing, unexpected or of another shape."""
    model, info = auto.from_pretrained(folder, output_loading_info=True, **keywords)
    assert not any(info.values()), info
    return model


def same_state(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(equal_bits(a[key], b[key]) for key in a)


def packed(model: nn.Module) -> dict[str, Any]:
    kinds = nm.CompressedLinear, nm.nn.experts.CompressedStack  # and convolutions
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A compressed Llama and the folder that it was saved to; neither is to be changed."""
    model, folder = compressed("llama"), tmp_path_factory.mktemp("llama") / "sparse-llama"
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def copied(llama: tuple[Any, Path], tmp_path: Path) -> Path:
    """The folder again, to be damaged."""
    for path in llama[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


# ---- out and in again


@pytest.mark.parametrize(("name", "size"), [("llama", "1GB"), ("llama-tied", "20KB"), ("gpt2", "20KB")])
def test_saved_and_loaded_it_is_the_same_model(name: str, size: str, tmp_path: Path) -> None:
    model = compressed(name)
    model.save_pretrained(tmp_path / "a", max_shard_size=size)
    assert (len(list((tmp_path / "a").glob("*.safetensors"))) > 1) == (size == "20KB")
    again = loaded(tmp_path / "a")
    assert packed(again).keys() == packed(model).keys() and same_state(again, model)
    assert equal_bits(logits(again), logits(model)) and not again.training
    again.save_pretrained(tmp_path / "b", max_shard_size=size)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == sorted(p.name for p in (tmp_path / "a").iterdir())
    for path in (tmp_path / "a").glob("*.safetensors"):
        assert load_file(path).keys() == load_file(tmp_path / "b" / path.name).keys()
        assert parts(path)[1] == parts(tmp_path / "b" / path.name)[1]
    assert equal_bits(logits(loaded(tmp_path / "b")), logits(model))
    if name == "llama-tied":
        assert again.lm_head.weight is again.model.embed_tokens.weight


WIDE = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 8192}


def with_dense_integers(values: str = "int8", name: str = "llama-tied", dtype: torch.dtype = torch.float32) -> Any:
    """A model whose embeddings hold most weights, with int4 in its body and integers in embeddings and head."""
    model = built(name, **WIDE if name.startswith("llama") else {"n_embd": 128, "vocab_size": 2048}).to(dtype)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    nm.compress_(model, values="int4")
    return nm.compress_(model, values=values, dense=["lm_head", "wpe"] if name == "gpt2" else ["embed_tokens", "lm_head"])


@pytest.mark.parametrize(("name", "values", "size"), [("llama-tied", "int8", "1GB"), ("gpt2", "int4", "200KB"), ("llama", "int4", "1GB")])
def test_embeddings_and_heads_of_integers(name: str, values: str, size: str, tmp_path: Path) -> None:
    """The same logits as of a dense model with the decoded weights; tied ones are one set of integers, in memory and in the file."""
    model, tied = with_dense_integers(values, name), name != "llama"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.values is head.values) == tied
    model.tie_weights()
    dense = nm.densify_(copy.deepcopy(model))
    assert (dense.get_output_embeddings().weight is dense.get_input_embeddings().weight) == tied
    dense.tie_weights()
    assert equal_bits(dense.get_input_embeddings().weight, embedding.dense())
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "a", max_shard_size=size)
    stored = {key for path in (tmp_path / "a").glob("*.safetensors") for key in load_file(path)}
    assert ("lm_head.values" in stored) != tied and not any(key.endswith(("embed_tokens.indices", "lm_head.indices")) for key in stored)
    again = loaded(tmp_path / "a")
    assert (again.get_input_embeddings().values is again.get_output_embeddings().values) == tied
    assert same_state(again, model) and equal_bits(logits(again), logits(model))
    assert torch.equal(again.generate(IDS, max_new_tokens=4), model.generate(IDS, max_new_tokens=4))
    card = (tmp_path / "a" / CARD).read_text()
    assert "are 2:4 sparse and stored compressed by nmkernels, with values in int4, a step" in card and f"{values}, a step" in card
    NMQuantizer(NMConfig("2:4", values="int4", layers=config_of(tmp_path / "a")["layers"]), pre_quantized=True).validate_environment()
    again.save_pretrained(tmp_path / "b", max_shard_size=size)
    assert equal_bits(logits(loaded(tmp_path / "b")), logits(model))
    fresh = nm.load_compressed(built(name, **WIDE if name != "gpt2" else {"n_embd": 128, "vocab_size": 2048}), tmp_path / "a")
    assert equal_bits(logits(fresh), logits(model))
    again.dequantize()
    assert same_state(again, dense) and "quantization_config" not in again.config.to_dict()


def test_a_head_is_tied_to_an_embedding_of_integers_that_was_saved_without_it(tmp_path: Path) -> None:
    model = with_dense_integers()
    model.save_pretrained(tmp_path / "a")
    body = loaded(tmp_path / "a", AutoModel)
    assert equal_bits(body.embed_tokens(IDS), model.model.embed_tokens(IDS))
    body.save_pretrained(tmp_path / "b")
    again = loaded(tmp_path / "b")
    assert again.lm_head.values is again.model.embed_tokens.values and equal_bits(logits(again), logits(model))
    for dtype in (torch.bfloat16, torch.float32):
        again.to(dtype)
        assert again.lm_head.values is again.model.embed_tokens.values and again.model.embed_tokens(IDS).dtype == dtype


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_integers_of_embeddings_can_be_offloaded(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for name in ("llama-tied", "llama"):
        model = with_dense_integers(name=name)
        model.save_pretrained(tmp_path / name)
        options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
        with torch.no_grad():
            again = AutoModelForCausalLM.from_pretrained(tmp_path / name, **options)
            assert equal_bits(again(IDS).logits, logits(model))
            if name == "llama":
                again = AutoModelForCausalLM.from_pretrained(tmp_path / name, **options, offload_buffers=True)
                assert equal_bits(again(IDS).logits, logits(model)) and again.model.embed_tokens.values.is_meta
                continue
        with pytest.raises(CheckpointError, match="an output head shares the integers of an embedding that device_map offloads"):
            AutoModelForCausalLM.from_pretrained(tmp_path / name, **options, offload_buffers=True)


@pytest.mark.parametrize("values", ["int8", "int4"])
def test_a_folder_is_as_small_as_in_theory(values: str, tmp_path: Path) -> None:
    """Bits per weight as in the guide to integers; what else there is, norms, names and steps of rows, takes less than 5 %."""
    config = built("llama-tied", **WIDE)
    pruned = sum(p.numel() for name, p in config.named_parameters() if name.endswith("proj.weight"))
    embedded, bits = config.model.embed_tokens.weight.numel(), {"int8": 8, "int4": 4.125}[values]
    with_dense_integers(values, dtype=torch.bfloat16).save_pretrained(tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    theory = (pruned * 3.125 + embedded * bits) / 8
    assert embedded > pruned and theory < size < 1.05 * theory, (size, theory)


def test_config_and_metadata_match_save_compressed(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = llama
    nm.save_compressed(model, tmp_path / "m.safetensors")
    table = json.loads(parts(tmp_path / "m.safetensors")[1]["layers"])
    about, metadata = config_of(folder), parts(folder / "model.safetensors")[1]
    assert about["layers"] == table and json.loads(metadata["layers"]) == table and about["quant_method"] == "nmkernels"
    assert table["model.layers.1.mlp.down_proj"] == {"pattern": "2:4", "shape": [32, 64], "dtype": "float32", "layout": "linear"}
    first = parts(folder / "model.safetensors")[0]["model.layers.0.mlp.down_proj.weight"]
    assert first.shape == (0,), "stops those who do not know compressed weights"
    assert type(model.config.quantization_config) is NMConfig and patterns_of(model.config.quantization_config.layers) == ["2:4"]


def test_a_save_compressed_file_with_a_config(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, _ = llama
    model.config.save_pretrained(tmp_path)
    nm.save_compressed(model, tmp_path / "model.safetensors")
    again = loaded(tmp_path)
    assert same_state(again, model)
    again.save_pretrained(tmp_path / "b", save_original_format=True)
    assert same_state(loaded(tmp_path / "b"), model)


@pytest.mark.parametrize(("name", "size"), [("llama-tied", "1GB"), ("gpt2", "20KB")])
def test_load_compressed_reads_the_folder_and_the_file(name: str, size: str, tmp_path: Path) -> None:
    model = compressed(name)
    model.save_pretrained(tmp_path / "a", max_shard_size=size)
    with torch.device("meta"):
        empty = built(name)
    for fresh in (built(name), *([empty] if name == "gpt2" else [])):  # rotary frequencies are no part of a file
        assert nm.load_compressed(fresh, tmp_path / "a") is fresh
        assert equal_bits(logits(fresh), logits(model)) and fresh.lm_head.weight is fresh.get_input_embeddings().weight
        fresh.save_pretrained(tmp_path / "b")
        assert equal_bits(logits(loaded(tmp_path / "b")), logits(model)), "what load_compressed made is marked too"
    if size == "1GB":
        assert same_state(nm.load_compressed(built(name), tmp_path / "a" / "model.safetensors"), model)
    else:
        one = next((tmp_path / "a").glob("*.safetensors"))
        with pytest.raises(CheckpointError, match="the file lacks"):
            nm.load_compressed(built(name), one)


def test_a_wrong_folder_is_refused(copied: Path) -> None:
    def refused(message: str) -> None:
        model = built("llama")
        with pytest.raises(CheckpointError, match=message):
            nm.load_compressed(model, copied)
        assert not packed(model) and model.config.to_dict().get("quantization_config") is None

    whole = copied / "model.safetensors"
    edited(whole, lambda tensors, _: tensors.pop("model.layers.0.mlp.up_proj.values"))
    refused("layer 'model.layers.0.mlp.up_proj': the file lacks its values")
    edited(whole, lambda _, metadata: metadata.pop("layers"))
    refused("not one that nm.save_compressed wrote, or save_pretrained of a compressed model")
    whole.unlink()
    refused("has neither model.safetensors nor model.safetensors.index.json")
    index = copied / "model.safetensors.index.json"
    for text in ("", "[]", *(json.dumps({"weight_map": files}) for files in ([], {}, {"a": "../m.safetensors"}, {"a": [1]}))):
        index.write_text(text)
        refused("model.safetensors.index.json is damaged")
    for number in "12":
        save_file({"a": torch.zeros(1)}, copied / number, {"n": number})
    index.write_text('{"weight_map": {"a": "1", "b": "2"}}')
    refused("does not belong to")
    index.write_text('{"weight_map": {"a": "1", "b": "3"}}')
    refused("3 cannot be read")


# ---- adapters, orders of inputs, damage: what must not go unnoticed


def test_adapters_and_orders_of_inputs_are_announced(tmp_path: Path) -> None:
    for i, recipe in enumerate([nm.recipes.SLoPe("2:4", total_steps=2, rank=4, start=0.5), nm.recipes.get("complementary:2:4")]):
        model = compressed("llama", recipe)
        model.save_pretrained(tmp_path / str(i))
        entries = config_of(tmp_path / str(i))["layers"].values()
        assert {e.get("rank") for e in entries} == ({None} if i else {4}) and any("columns" in e for e in entries) == bool(i)
        again = loaded(tmp_path / str(i))
        assert equal_bits(logits(again), logits(model)) and same_state(again, model)
        assert any(layer.order is not None for layer in packed(again).values()) == bool(i)
        assert same_state(nm.load_compressed(built("llama"), tmp_path / str(i)), model)


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t[f"{LAYER}.indices"].fill_(255), "the indices of a group do not increase"),
        (lambda t: t[f"{LAYER}.indices"].zero_(), "the indices of a group do not increase"),
        (lambda t: t[f"{LAYER}.indices"][5, 3].fill_(0xE1), "the indices of a group do not increase"),
        (lambda t: t.pop(f"{LAYER}.indices"), "the file lacks its indices"),
        (lambda t: t.pop(f"{LAYER}.values"), "the file lacks its values"),
        (lambda t: t.update({f"{LAYER}.values": t[f"{LAYER}.values"].int()}), "values are torch.int32"),
    ],
)
@pytest.mark.parametrize("reader", [loaded, lambda folder: nm.load_compressed(built("llama"), folder)])
def test_damaged_indices_and_absent_parts_are_refused(edit: Callable[..., object], message: str, reader: Any, copied: Path) -> None:
    if reader is not loaded and "int32" in message:
        message = "the file has values torch.int32 .*; its entry in the metadata says torch.float32"
    edited(copied / "model.safetensors", lambda tensors, _: edit(tensors))
    with pytest.raises(CheckpointError, match=f"layer '{LAYER}': {message}"):
        reader(copied)


def test_damaged_orders_and_absent_adapters_are_refused(tmp_path: Path) -> None:
    model = compressed("llama", "complementary:2:4")
    nm.nn.adapter.set_adapter(model.get_submodule(LAYER), torch.randn(32, 3), torch.randn(3, 64), 64, 32)
    for key, message in ((f"{LAYER}.columns", "is not a permutation of 32"), (f"{LAYER}.nm_right", "the file lacks its nm_right")):
        model.save_pretrained(tmp_path)
        edited(tmp_path / "model.safetensors", lambda t, _, key=key: t[key].zero_() if "columns" in key else t.pop(key))
        with pytest.raises(CheckpointError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda q: q["layers"][LAYER].update(shape=[32, 64]),
            CheckpointError,
            r"the file's weight is \(32, 64\) \(out, in\), the model's \(64",
        ),
        (lambda q: q["layers"][LAYER].update(layout="conv1d"), CheckpointError, "the file holds a conv1d layer, the model a linear"),
        (lambda q: q["layers"][LAYER].update(pattern="5:4"), CheckpointError, "its entry in the metadata is damaged"),
        (lambda q: q["layers"][LAYER].update(rank=0), CheckpointError, "rank 0 and columns False"),
        (lambda q: q["layers"][LAYER].update(values="int8", group=[]), CheckpointError, r"damaged: values 'int8' and group \[\]"),
        (lambda q: q["layers"][LAYER].update(values=["int8"]), CheckpointError, r"damaged: values \['int8'\] and group None"),
        (lambda q: q["layers"][LAYER].update(values="int8", group=0), CheckpointError, "values are torch.float32|lacks its step"),
        (lambda q: q["layers"][LAYER].update(columns=1), CheckpointError, "rank None and columns 1"),
        (lambda q: q["layers"].update({LAYER: 3}), CheckpointError, "its entry in the metadata is damaged"),
        (lambda q: q["layers"].update({"model.norm": q["layers"][LAYER]}), CheckpointError, "the model a LlamaRMSNorm"),
        (lambda q: q.update(layers=[]), CheckpointError, "layers is not a dict"),
        (lambda q: q.update(layers={}), CheckpointError, "has none of the compressed layers"),
        (lambda q: q.update(version=99), CheckpointError, "version 99; this one reads up to .*: upgrade nmkernels"),
        (lambda q: q.update(version="1"), CheckpointError, "version 1"),
        (lambda q: q.update(colour="red"), TypeError, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: Callable[..., object], error: type[Exception], message: str, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    change(config["quantization_config"])
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(copied)


def test_another_pattern_is_refused(llama: tuple[Any, Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # transformers: the checkpoint's configuration is the one used
        with pytest.raises(PatternError, match=r"NMConfig\('1:4'\): the checkpoint is already compressed, as 2:4"):
            loaded(llama[1], quantization_config=NMConfig("1:4"))
        for given in (NMConfig("2:4", keep_dense=True), NMConfig(keep_dense=True)):
            model = loaded(llama[1], quantization_config=given)
            assert all(layer.keep_dense for layer in packed(model).values())
            assert equal_bits(logits(model), logits(llama[0]))


# ---- integers


@pytest.fixture(scope="module", params=[("int8", None), ("int4", 16)], ids=["int8", "int4"])
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Llama with integers as values and the folder that it was saved to; neither is to be changed."""
    values, group = request.param
    model, folder = nm.compress_(trained(built("llama"), "llama"), values=values, group=group), tmp_path_factory.mktemp("llama") / "rounded"
    model.save_pretrained(folder)
    return model, folder


def test_integers_are_the_same_from_a_folder(rounded: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = rounded
    again, kind = loaded(folder), packed(model)["model.layers.0.mlp.up_proj"].weight.kind
    assert same_state(again, model) and equal_bits(logits(again), logits(model))
    new = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(again.generate(IDS, **new), model.generate(IDS, **new))
    about, metadata = config_of(folder), parts(folder / "model.safetensors")[1]
    entry = about["layers"]["model.layers.1.mlp.down_proj"]
    assert about["version"] == 5 and metadata["version"] == "5" and json.loads(metadata["layers"]) == about["layers"]
    assert (entry["values"], entry["group"], entry["dtype"]) == (kind, 16 if kind == "int4" else 0, "float32")
    assert f"2:4 sparse and stored compressed by nmkernels, with values in {kind}, a step per" in (folder / CARD).read_text()
    again.save_pretrained(tmp_path / "b", max_shard_size="10KB")
    assert same_state(loaded(tmp_path / "b"), model) and same_state(nm.load_compressed(built("llama"), tmp_path / "b"), model)
    model.config.save_pretrained(tmp_path)
    nm.save_compressed(model, tmp_path / "model.safetensors")
    assert same_state(loaded(tmp_path), model)


def test_integers_in_other_dtypes_offloaded_and_dequantized(rounded: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = rounded
    half = loaded(folder, dtype=torch.bfloat16)
    assert same_state(half, copy.deepcopy(model).to(torch.bfloat16)) and {layer.dtype for layer in packed(half).values()} == {
        torch.bfloat16
    }
    assert half.model.layers[0].mlp.up_proj.step.dtype == model.model.layers[0].mlp.up_proj.step.dtype == torch.bfloat16
    torch.testing.assert_close(logits(half).float(), logits(model), rtol=0, atol=1e-2)
    for offload_buffers in (False, True):
        split = {**ON_CPU, "model.layers.1": "disk"}
        again = loaded(folder, device_map=split, offload_folder=tmp_path, offload_buffers=offload_buffers)
        assert again.model.layers[1].mlp.up_proj.step.is_meta == offload_buffers
        assert equal_bits(logits(again), logits(model))
    dense = {name: layer.dense() for name, layer in packed(model).items()}
    plain = loaded(folder).dequantize()
    assert not packed(plain) and all(equal_bits(plain.get_submodule(name).weight.detach(), weight) for name, weight in dense.items())


def test_a_float_config_keeps_its_version(llama: tuple[Any, Path]) -> None:
    assert config_of(llama[1])["version"] == 4, "which earlier releases read"
    assert NMConfig("2:4").to_dict() == {"quant_method": "nmkernels", "version": 4, "pattern": "2:4", "skip": [], "keep_dense": False}
    about = NMConfig("2:4", values="int4", group=64).to_dict()
    assert (about["version"], about["values"], about["group"]) == (5, "int4", 64) and NMConfig(**about).to_dict() == about


@pytest.mark.parametrize(("values", "group"), [("int8", None), ("int4", 16)])
def test_a_dense_checkpoint_is_rounded_as_compress_would(
    values: str, group: int | None, dense_folders: dict[str, Path], tmp_path: Path
) -> None:
    config = NMConfig("2:4", values=values, group=group)
    for name in ("llama", "gpt2"):
        model, by_hand = loaded(dense_folders[name], quantization_config=config), loaded(dense_folders[name])
        nm.sparsify_(by_hand, "ste:2:4").finish(allow_unused=True)
        assert same_state(model, nm.compress_(by_hand, values=values, group=group)) and equal_bits(logits(model), logits(by_hand))
        new = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
        text = model.generate(IDS, **new)
        assert text.shape == (len(IDS), IDS.shape[1] + 4) and torch.equal(text, by_hand.generate(IDS, **new))
        model.save_pretrained(tmp_path / name)
        again = loaded(tmp_path / name)
        assert same_state(again, model) and torch.equal(again.generate(IDS, **new), text)
    quantizer = NMQuantizer(config, pre_quantized=False)
    quantizer.update_dtype(torch.bfloat16)
    assert quantizer.quantized_element_size == {"int8": 5 / 8, "int4": 3 / 8 + 2 / 16}[values]


def test_other_integers_than_the_checkpoint_has_are_refused(
    llama: tuple[Any, Path], dense_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = nm.compress_(trained(built("llama"), "llama"), values="int4", group=16)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # transformers: the checkpoint's configuration is the one used
        for folder, given, said in [
            (tmp_path, NMConfig(values="int8"), "with values in int4, a step per 16 columns. Leave values out; prune the checkpoint"),
            (tmp_path, NMConfig(values="int4", group=8), "with values in int4, a step per 16 columns"),
            (tmp_path, NMConfig(values="int4", group=0), "with values in int4, a step per 16 columns"),
            (llama[1], NMConfig(values="int8"), "with values in floating point. Leave values out; nm.compress_"),
            (dense_folders["llama"], NMConfig("2:4", values="int4", group=24), "layer 'model.layers.0.*group=24 does not divide"),
        ]:
            with pytest.raises(nm.ops.OptionError, match=said):
                loaded(folder, quantization_config=given)
        for same in (NMConfig(values="int4"), NMConfig("2:4", values="int4", group=16), NMConfig()):
            assert same_state(loaded(tmp_path, quantization_config=same), model)
    for arguments, said in (({"values": "int5"}, "values='int5' is unknown"), ({"group": 32}, "group=32 is for values")):
        with pytest.raises(nm.ops.OptionError, match=said):
            NMConfig("2:4", **arguments)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["model.layers.1.mlp.up_proj.step"].fill_(torch.nan), "a step is NaN or infinite"),
        (lambda t: t.pop("model.layers.1.mlp.up_proj.step"), "the file lacks its step"),
    ],
)
def test_damaged_steps_are_refused(rounded: tuple[Any, Path], edit: Callable[..., object], message: str, tmp_path: Path) -> None:
    for path in rounded[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edited(tmp_path / "model.safetensors", lambda tensors, _: edit(tensors))
    split = {"device_map": {**ON_CPU, "model.layers.1": "disk"}, "offload_folder": tmp_path / "off", "offload_buffers": True}
    offloaded = lambda folder: AutoModelForCausalLM.from_pretrained(folder, **split)  # noqa: E731
    for read in (AutoModelForCausalLM.from_pretrained, lambda folder: nm.load_compressed(built("llama"), folder), offloaded):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path)


@pytest.mark.parametrize("name", ["qwen-moe", pytest.param("mixtral", marks=pytest.mark.slow), "gpt-oss"])
def test_experts_become_integers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built(name).save_pretrained(tmp_path / "dense")
    model, ids = built(name), torch.randint(0, 64, (4, 8, 32), generator=torch.Generator().manual_seed(0))
    nm.prune_(model, "2:4", [{"input_ids": row} for row in ids], method="wanda", values="int4").finish(allow_unused=True)
    nm.compress_(model).save_pretrained(tmp_path / "pruned")
    config = NMConfig("2:4", values="int8")
    nearest = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    want = built(name)
    nm.sparsify_(want, "ste:2:4").finish(allow_unused=True)
    assert same_state(nearest, nm.compress_(want, values="int8"))
    nearest.save_pretrained(tmp_path / "nearest")
    for folder, saved, values in (("pruned", model, "int4"), ("nearest", nearest, "int8")):
        again = loaded(tmp_path / folder)
        assert {m.weight.kind for m in packed(again).values()} == {values} and same_state(again, saved)
        assert config_of(tmp_path / folder)["version"] == 8 and parts(tmp_path / folder / "model.safetensors")[1]["version"] == "8"
        assert f"with values in {values}, a step per " in (tmp_path / folder / "README.md").read_text()
        half = loaded(tmp_path / folder, dtype=torch.float16)
        assert {m.dtype for m in packed(half).values()} == {torch.float16} and logits(half).isfinite().all()
        got = logits(again)
        assert equal_bits(got, logits(saved))
        torch.testing.assert_close(logits(nm.densify_(again)), got, rtol=0, atol=1e-5)
    with pytest.raises(nm.ops.OptionError, match="already compressed, with values in int4"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", quantization_config=config)
    damaged = "model.layers.1.mlp.experts.nm_down_proj.step"
    path = edited(tmp_path / "pruned" / "model.safetensors", lambda tensors, _: tensors[damaged].fill_(torch.inf))
    with pytest.raises(CheckpointError, match="layer 'model.layers.1.mlp.experts.down_proj': a step is NaN or infinite"):
        AutoModelForCausalLM.from_pretrained(path.parent)
    monkeypatch.setattr("nmkernels.integrations.hf.VERSION", 7)
    with pytest.raises(CheckpointError, match="format version 8; this one reads up to 7"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nearest")


# ---- devices, dtypes, and what else is done with a loaded model


ON_CPU = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"), "cpu")


def test_dtypes(llama: tuple[Any, Path]) -> None:
    for dtype in (torch.bfloat16, torch.float16, "auto"):
        model = loaded(llama[1], dtype=dtype)
        want = torch.float32 if dtype == "auto" else dtype
        assert {t.dtype for name, t in model.state_dict().items() if not name.endswith("indices")} == {want}
        assert same_state(model, copy.deepcopy(llama[0]).to(want))
        torch.testing.assert_close(logits(model).float(), logits(llama[0]), rtol=0, atol=1e-2)
    for cast in ("half", "float"):
        with pytest.raises(ValueError, match=f"{cast}.* is not supported for quantized model"):
            getattr(model, cast)()
    assert {t.dtype for t in model.to(torch.float16).parameters()} == {torch.float16}


def test_device_maps(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = llama
    for device_map in ("cpu", "auto", {"": "cpu"}):
        assert equal_bits(logits(loaded(folder, device_map=device_map)), logits(model))
    for offload_buffers in (False, True):
        again = loaded(folder, device_map={**ON_CPU, "model.layers.1": "disk"}, offload_folder=tmp_path, offload_buffers=offload_buffers)
        layer = again.model.layers[1].mlp.up_proj
        assert layer.values.is_meta == layer.indices.is_meta == offload_buffers and again.model.layers[1].input_layernorm.weight.is_meta
        assert equal_bits(logits(again), logits(model))
        if offload_buffers:
            with pytest.raises(RecipeError, match="has an offloaded weight"):
                again.dequantize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers: there must be enough memory
            again.save_pretrained(tmp_path / "again")
        assert same_state(loaded(tmp_path / "again"), model)


def test_damage_is_found_in_what_is_left_on_disk(copied: Path, tmp_path: Path) -> None:
    edited(copied / "model.safetensors", lambda tensors, _: tensors["model.layers.1.mlp.up_proj.indices"].zero_())
    with pytest.raises(CheckpointError, match="up_proj': the indices of a group do not increase"):
        loaded(copied, device_map={**ON_CPU, "model.layers.1": "disk"}, offload_folder=tmp_path, offload_buffers=True)


def test_generate(llama: tuple[Any, Path]) -> None:
    model = loaded(llama[1])
    new = {"max_new_tokens": 4, "do_sample": False}
    mask = torch.ones_like(IDS)
    assert torch.equal(model.generate(IDS, attention_mask=mask, **new), llama[0].generate(IDS, attention_mask=mask, **new))


@pytest.mark.slow
def test_compiled_in_one_graph(llama: tuple[Any, Path], rounded: tuple[Any, Path]) -> None:
    for _, folder in (llama, rounded):
        model = loaded(folder)
        with torch.no_grad():
            y = torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS).logits
        torch.testing.assert_close(y, logits(model))


def test_a_model_without_its_head_and_with_another_one(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = llama
    base = AutoModel.from_pretrained(folder)
    with torch.no_grad():  # as in logits: how a GEMM is done may depend on it
        last = model.lm_head(base(input_ids=IDS).last_hidden_state)
    assert len(packed(base)) == len(packed(model)) and equal_bits(last, logits(model))
    base.save_pretrained(tmp_path)
    assert all(name.startswith("layers.") for name in config_of(tmp_path)["layers"])
    head, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"} and not info["unexpected_keys"] and len(packed(head)) == len(packed(model))
    # the inner model of one that was compressed is saved as what it is
    inner = copy.deepcopy(model).model
    inner.save_pretrained(tmp_path / "inner")
    assert same_state(loaded(tmp_path / "inner", AutoModel), base)


def test_what_is_split_over_ranks_is_refused(llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = copy.deepcopy(llama[0])
    monkeypatch.setattr("nmkernels.integrations.hf.CompressedPart", nm.CompressedLinear)
    with pytest.raises(RecipeError, match="tensor parallelism has split the compressed layers. nm.save_compressed"):
        model.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    config.distributed_config = object()
    with pytest.raises(RecipeError, match=r"cannot be split over devices while loading.*\n?.*nm.load_compressed"):
        NMQuantizer(config.quantization_config)._process_model_before_weight_loading(SimpleNamespace(config=config))


def test_copies_and_pickles_are_saved_for_themselves(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, buffer = llama[0], io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for i, other in enumerate((copy.deepcopy(model), torch.load(buffer, weights_only=False))):
        with torch.no_grad():
            other.lm_head.weight.zero_()
        other.save_pretrained(tmp_path / str(i))
        assert not loaded(tmp_path / str(i)).lm_head.weight.any() and model.lm_head.weight.any()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dequantize_gives_the_dense_model(name: str, tmp_path: Path) -> None:
    model = compressed(name)
    model.save_pretrained(tmp_path / "a")
    dense = loaded(tmp_path / "a").dequantize()
    finished = trained(built(name), name)
    nm.densify_(finished)
    assert same_state(dense, finished) and [type(m) for m in dense.modules()] == [type(m) for m in finished.modules()]
    assert not dense.is_quantized and "quantization_config" not in dense.config.to_dict() and "save_pretrained" not in vars(dense)
    dense.save_pretrained(tmp_path / "dense")
    assert not (tmp_path / "dense" / CARD).exists() and "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()
    assert same_state(loaded(tmp_path / "dense"), dense)
    assert dense.half().dtype == torch.float16
    assert {p.dtype for p in loaded(tmp_path / "a").dequantize(torch.bfloat16).parameters()} == {torch.bfloat16}
    handle = nm.sparsify_(dense.float(), "srste:2:4")  # and trains on
    assert len(handle.layers) == len(packed(model))


def test_dequantize_folds_adapters_and_orders(tmp_path: Path) -> None:
    model = compressed("llama", "complementary:2:4")
    nm.nn.adapter.set_adapter(model.get_submodule(LAYER), torch.randn(32, 3), torch.randn(3, 64), 64, 32)
    before = logits(model)
    torch.testing.assert_close(logits(model.dequantize()), before, rtol=1e-5, atol=1e-6)


def test_marks_come_and_go(llama: tuple[Any, Path]) -> None:
    model = llama[0]
    for part in (model, model.model):
        assert part.is_quantized and type(part.hf_quantizer) is NMQuantizer and part.quantization_method == "nmkernels"
    assert model.hf_quantizer.is_trainable and model.hf_quantizer.is_compileable and model.config._is_quantized
    plain = built("llama")
    mark_(plain)
    assert "hf_quantizer" not in vars(plain) and "save_pretrained" not in vars(plain)
    wrapped = nn.Sequential(trained(built("llama"), "llama"))
    nm.compress_(wrapped)
    assert wrapped[0].is_quantized
    nm.densify_(wrapped)
    assert not wrapped[0].is_quantized and not packed(wrapped) and getattr(wrapped[0], "hf_quantizer", None) is None


def test_models_of_one_config_stay_apart(tmp_path: Path) -> None:
    config = built("llama").config
    student, teacher, base = (
        make(config) for make in (transformers.LlamaForCausalLM, transformers.LlamaForCausalLM, transformers.LlamaModel)
    )
    nm.compress_(trained(student, "llama"))
    own = student.config
    assert own is not config and own is student.model.config is student.model.layers[0].self_attn.config
    student.set_attn_implementation("eager")  # reaches all that read it
    assert student.model.layers[0].self_attn.config._attn_implementation == "eager"
    for name, model in (("teacher", teacher), ("base", base), ("student", student)):
        model.save_pretrained(tmp_path / name)
    assert not packed(loaded(tmp_path / "teacher")) and not packed(AutoModel.from_pretrained(tmp_path / "base"))
    assert same_state(loaded(tmp_path / "student"), student)
    nm.compress_(trained(teacher, "llama").model)  # a part, whose config the saved model has
    teacher.save_pretrained(tmp_path / "whole")
    assert same_state(loaded(tmp_path / "whole"), teacher)


def test_saving_with_another_quantizer_is_refused() -> None:
    model = trained(built("llama"), "llama")
    model.hf_quantizer = object()
    with pytest.warns(UserWarning, match="compressed layers and the quantizer object, which does not know them"):
        nm.compress_(model)


@pytest.mark.slow
def test_trainer_requires_adapters(llama: tuple[Any, Path], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(tmp_path, report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="fine-tuning on purely quantized models"):
        transformers.Trainer(loaded(llama[1]), arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_experts_on_disk_and_damaged(name: str, tmp_path: Path) -> None:
    model, auto = compressed(name), getattr(transformers, MODELS[name][0])
    model.save_pretrained(tmp_path / "a")
    entry = config_of(tmp_path / "a")["layers"]["model.layers.1.mlp.experts.down_proj"]
    assert entry["layout"] == ("experts" if name == "mixtral" else "experts_t") and len(entry["shape"]) == 3
    on_disk = {"device_map": {**ON_CPU, "model.layers.1": "disk"}, "offload_folder": tmp_path / "disk"}
    for offload_buffers in (False, True):
        again = loaded(tmp_path / "a", auto, offload_buffers=offload_buffers, **on_disk)
        assert again.model.layers[1].mlp.experts.stacks["down_proj"].values.is_meta == offload_buffers
        assert equal_bits(logits(again), logits(model))
    built(name).save_pretrained(tmp_path / "dense")
    pruned = [loaded(tmp_path / "dense", auto, quantization_config=NMConfig("2:4"), **keywords) for keywords in ({}, on_disk)]
    assert equal_bits(*map(logits, pruned))
    some = loaded(tmp_path / "dense", auto, quantization_config=NMConfig("2:4", skip="experts"))
    assert len(packed(some)) == len(packed(model)) - 4
    edited(tmp_path / "a" / "model.safetensors", lambda t, _: t["model.layers.1.mlp.experts.nm_down_proj.indices"].zero_())
    for keywords in ({}, {**on_disk, "offload_buffers": True}):
        with pytest.raises(CheckpointError, match="layer 'model.layers.1.mlp.experts.down_proj': the indices of a group do not increase"):
            loaded(tmp_path / "a", auto, **keywords)


# ---- dense checkpoints


@pytest.fixture(scope="module")
def dense_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, size in (("llama", "20KB"), ("gpt2", "1GB")):
        folders[name] = tmp_path_factory.mktemp(name)
        built(name).save_pretrained(folders[name], max_shard_size=size)
    return folders


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("gpt2", torch.bfloat16)])
def test_a_dense_checkpoint_is_pruned_as_sparsify_would(
    name: str, dtype: torch.dtype, dense_folders: dict[str, Path], tmp_path: Path
) -> None:
    given = NMConfig("1:4")
    model = loaded(dense_folders[name], quantization_config=given, dtype=dtype)
    by_hand = loaded(dense_folders[name], dtype=dtype)
    handle = nm.sparsify_(by_hand, "ste:1:4")
    assert {e.name: e.reason for e in model.hf_quantizer.report.entries} == {e.name: e.reason for e in handle.report.entries}
    handle.finish(allow_unused=True)
    nm.compress_(by_hand)
    assert same_state(model, by_hand) and equal_bits(logits(model), logits(by_hand))
    assert given.layers == {}, "what the user gave is his"
    model.save_pretrained(tmp_path)
    assert same_state(loaded(tmp_path), model)


def test_layers_to_skip_and_options(dense_folders: dict[str, Path]) -> None:
    config = NMConfig("2:4", skip=["o_proj", "layers.0", "*.up_*"], keep_dense=True)
    model = loaded(dense_folders["llama"], quantization_config=config)
    names = {name.removeprefix("model.layers.1.") for name in packed(model)}
    assert names == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"}
    assert all(layer.keep_dense for layer in packed(model).values())
    reasons = {e.name: e.reason for e in model.hf_quantizer.report.entries}
    assert reasons["model.layers.1.self_attn.o_proj"] == "named in skip" and reasons["lm_head"] == "output head"


def test_a_dense_checkpoint_on_disk_and_planned_for(dense_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = dense_folders["llama"]
    config = NMConfig("2:4")
    some = loaded(folder, quantization_config=config, device_map={**ON_CPU, "model.layers.1": "disk"}, offload_folder=tmp_path)
    assert equal_bits(logits(some), logits(loaded(folder, quantization_config=config, device_map="auto")))
    quantizer = NMQuantizer(config, pre_quantized=False)
    assert quantizer.quantized_element_size is None
    quantizer.update_dtype(torch.bfloat16)
    assert quantizer.quantized_element_size == 1.125, "half of the values, and two bits for each"
    assert NMQuantizer(config, pre_quantized=True).quantized_element_size is None


def test_what_cannot_be_pruned_is_refused(dense_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = dense_folders["llama"]
    with pytest.raises(PatternError, match=r'the checkpoint is dense; pass the pattern to prune it to, NMConfig\("2:4"\)'):
        loaded(folder, quantization_config=NMConfig())
    with pytest.raises(PatternError):
        NMConfig("5:4")
    with pytest.raises(RecipeError, match="(?s)no layer of LlamaForCausalLM can be made 2:4 sparse.*named in skip"):
        loaded(folder, quantization_config=NMConfig("2:4", skip="*"))
    model = built("llama")
    for wrong, config in ((float("nan"), NMConfig("2:4")), (65504.0, NMConfig("2:4", values="int8"))):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 3] = wrong
        model.save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="conversion"):
            loaded(tmp_path, quantization_config=config, dtype=torch.float16)
    assert loaded(tmp_path, quantization_config=config).dtype == torch.float32, "where 65504 is not too large"


def test_layers_that_the_checkpoint_lacks_stay_dense(dense_folders: dict[str, Path], tmp_path: Path) -> None:
    model = built("llama")
    state = {key: value for key, value in model.state_dict().items() if key != "model.layers.0.mlp.up_proj.weight"}
    model.save_pretrained(tmp_path, state_dict=state)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=NMConfig("2:4"), output_loading_info=True)
    assert info["missing_keys"] == {"model.layers.0.mlp.up_proj.weight"} and type(again.model.layers[0].mlp.up_proj) is nn.Linear
    assert len(packed(again)) == 13 and logits(again).isfinite().all()


# ---- model cards


def test_model_card(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = llama
    text = (folder / CARD).read_text()
    assert text.startswith("---\n") and "- nmkernels" in text and "library_name: transformers" in text
    assert "pip install nmkernels" in text and 'LlamaForCausalLM.from_pretrained("sparse-llama")' in text and "2:4 sparse" in text
    (tmp_path / CARD).write_text("---\nlicense: mit\ntags:\n- llama\n---\n\n# Mine\n\nWords.\n")
    for _ in range(2):
        model.save_pretrained(tmp_path)
        card = (tmp_path / CARD).read_text()
        assert card.count("## N:M sparse weights") == 1 and "# Mine\n\nWords." in card and "license: mit" in card
        assert re.search(r"tags:\n- llama\n- nmkernels\n", card)
    for broken in ("---\ntags: [a\n---\n\nWords.\n", "Words.\n", ""):
        (tmp_path / CARD).write_text(broken)
        model.save_pretrained(tmp_path)
        card = (tmp_path / CARD).read_text()
        assert broken.strip() in card and "pip install nmkernels" in card


def test_what_is_pushed_has_the_card_too(llama: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import hub

    model, pushed = copy.deepcopy(llama[0]), {}

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("---\ntags:\n- other\n---\n\nOf the hub.\n")

    def upload(self: Any, folder: str, *args: Any, **keywords: Any) -> None:
        pushed.update({path.name: path.read_bytes() for path in Path(folder).iterdir()})

    def card(repo: str, tags: list[str], **keywords: Any) -> Card:
        assert tags == ["nmkernels"]
        return Card()

    monkeypatch.setattr(hub, "hf_api", lambda: SimpleNamespace(create_repo=lambda *a, **k: SimpleNamespace(repo_id="me/model")))
    monkeypatch.setattr(hub, "create_and_tag_model_card", card)
    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    model.push_to_hub("me/model")
    assert b"Of the hub." in pushed[CARD] and b"pip install nmkernels" in pushed[CARD] and b"- nmkernels" in pushed[CARD]
    assert {"config.json", "model.safetensors"} <= pushed.keys()


# ---- other processes

LOAD = """
import sys
if sys.argv[2] == "before":
    import nmkernels.integrations.hf
import torch, transformers
if sys.argv[2] == "after":
    import nmkernels.integrations.hf
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(input_ids=torch.arange(3, 15).reshape(2, 6)).logits.detach(), sys.argv[3])
"""


def test_initialisation_skips_compressed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compressed("mixtral")
    model.save_pretrained(tmp_path)
    block = type(next(m for m in model.modules() if hasattr(m, "experts")))
    kind = transformers.MixtralPreTrainedModel
    own = kind._init_weights

    def initialise(self: Any, module: nn.Module) -> None:  # as Qwen3-Omni's does
        own(self, module)
        if isinstance(module, block):
            transformers.initialization.normal_(module.experts.gate_up_proj)

    monkeypatch.setattr(kind, "_init_weights", initialise)
    assert equal_bits(logits(loaded(tmp_path), "mixtral"), logits(model, "mixtral"))


def ran(*arguments: Any, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_loads_with_imports_in_either_order(order: str, llama: tuple[Any, Path], tmp_path: Path) -> None:
    done = ran("-c", LOAD, llama[1], order, tmp_path / "y")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "y"), logits(llama[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_process_without_nmkernels_refuses_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed(name).save_pretrained(tmp_path)
    monkeypatch.setenv("NMKERNELS_AUTOLOAD", "0")
    done = ran("-c", LOAD, tmp_path, "never", tmp_path / "y")
    assert done.returncode == 1 and "Unknown quantization type, got nmkernels" in done.stderr
    assert "MISMATCH" in done.stderr and "ignore_mismatched_sizes" in done.stderr


@pytest.mark.slow
def test_the_fine_tuning_example(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    text, out = tmp_path / "text.txt", tmp_path / "sparse"
    text.write_text("Sparse weights are read once and multiplied often. " * 40)
    done = ran("examples/hf_finetune.py", "--text", text, "--out", out, "--steps", "3", "--context", "32")
    assert done.returncode == 0, done.stderr
    assert "14 of 15 linear layers sparse" in done.stdout
    done = ran("-c", LOAD, out, "before", tmp_path / "y")
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "y").isfinite().all()


# ---- every model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_finish_compress_save_load(name: str, tmp_path: Path) -> None:
    model = nm.compress_(trained(built(name), name, "srste:2:4", steps=10).eval())
    model.save_pretrained(tmp_path / "a", max_shard_size="30KB")
    auto = getattr(transformers, MODELS[name][0])
    again = loaded(tmp_path / "a", auto)
    assert packed(again).keys() == packed(model).keys() and len(packed(model)) >= 7
    assert same_state(again, model) and equal_bits(logits(again, name), logits(model, name))
    assert same_state(nm.load_compressed(built(name), tmp_path / "a"), model)
    built(name).save_pretrained(tmp_path / "dense")
    pruned = loaded(tmp_path / "dense", auto, quantization_config=NMConfig("2:4"))
    by_hand = loaded(tmp_path / "dense", auto)
    handle = nm.sparsify_(by_hand, "ste:2:4")
    assert {e.name: e.reason for e in pruned.hf_quantizer.report.entries} == {e.name: e.reason for e in handle.report.entries}
    handle.finish(allow_unused=True)
    assert same_state(pruned, nm.compress_(by_hand))
    dense = again.dequantize()
    torch.testing.assert_close(logits(dense, name), logits(model, name))
    assert not packed(dense) and dense.state_dict().keys() == built(name).state_dict().keys()
    nm.save_compressed(model, tmp_path / "a" / "model.safetensors")  # which comes before the shards
    assert same_state(loaded(tmp_path / "a", auto), model)
