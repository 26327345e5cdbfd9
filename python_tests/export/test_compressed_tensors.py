"""compressed-tensors' folders: integers, steps and all other tensors are the model's, by a decoder of the tests and by the library."""

from __future__ import annotations

import json
import os
import re
import shutil
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nmkernels as nm
from nmkernels import cli
from nmkernels.cli.export import export_folder
from nmkernels.export import compressed_tensors as room
from nmkernels.export import save_compressed_tensors
from nmkernels.export.compressed_tensors import pack
from nmkernels.files import lock_file
from nmkernels.pattern import CheckpointError, RecipeError
from python_tests.integrations.folders import content, saved, write_tokenizer

np = pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers", minversion="5.0")

SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8}
SIZES |= {"max_position_embeddings": 64}
KV = {"num_key_value_heads": 4, "head_dim": 32}
MODELS = {
    "llama": ("LlamaForCausalLM", KV),
    "llama tied": ("LlamaForCausalLM", {**KV, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {**KV, "sliding_window": None}),
    "qwen3": ("Qwen3ForCausalLM", {**KV, "sliding_window": None}),
    "mistral": ("MistralForCausalLM", {**KV, "sliding_window": None}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 384, "word_embed_proj_dim": 256}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", KV),
    "phi": ("PhiForCausalLM", {}),
    "bert": ("BertForMaskedLM", {}),
}
CASES = [
    ("llama", "int4", None), ("llama tied", "int4", 32), ("qwen2", "int8", 64), ("qwen3", "int4", 64), ("mistral", "int8", None),
    ("opt", "int4", 0), ("gpt-neox", "int8", 32), ("gemma", "int4", 128), ("phi", "int8", 0), ("bert", "int4", 32),
]  # fmt: skip
BITS = {"int4": 4, "int8": 8}
WEIGHT_BITS = {"int4": 4.125, "int8": 8.125}
ALL = pytest.mark.parametrize(("name", "values", "group"), CASES, ids=[f"{name} {values}" for name, values, _ in CASES])


def pruned(name: str = "llama", dtype: torch.dtype = torch.bfloat16, filter_fn=None, **changed):
    """A tiny model whose linear layers are 2:4 and compressed, in floating point."""
    kind, settings = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**SIZES, **settings, **changed}))
    nm.sparsify_(model, "ste:2:4", filter_fn).finish(allow_unused=True)
    return nm.compress_(model).to(dtype).eval()


def rounded(name: str = "llama", values: str = "int4", group: int | None = None, dtype: torch.dtype = torch.bfloat16):
    return nm.compress_(pruned(name, dtype), values=values, group=group)


def layers_of(model) -> dict[str, nm.CompressedLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nm.CompressedLinear)}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}


def matched(about: dict, name: str) -> list[dict]:
    """The groups of the config that have the layer ``name``, with it the rules of the library: a name, or an expression from the start."""

    def fits(targets):
        return any(re.match(t[3:], name) is not None if t.startswith("re:") else t == name for t in targets)

    return [] if fits(about["ignore"]) else [group["weights"] for group in about["config_groups"].values() if fits(group["targets"])]


def numbers(words: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """The integers in int32 words, read bit by bit."""
    lone = np.unpackbits(words.numpy().astype("<i4").view(np.uint8), axis=1, bitorder="little").astype(np.int64)
    each = lone.reshape(len(lone), -1, bits) @ (1 << np.arange(bits))
    assert not each[:, cols:].any(), "spare bits"
    return torch.from_numpy(each[:, :cols] - (1 << bits - 1)).float()


def decoded(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(float32 weights by layer, all other tensors), as the config describes them."""
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (about["quant_method"], about["format"], about["quantization_status"]) == ("compressed-tensors", "pack-quantized", "compressed")
    tensors, weights = tensors_of(folder), {}
    for name in [key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")]:
        (args,) = matched(about, name)
        assert args["symmetric"] and args["type"] == "int"
        words, scale, shape = (tensors.pop(f"{name}.weight_{end}") for end in ("packed", "scale", "shape"))
        rows, cols = shape.tolist()
        group = args["group_size"] or cols
        assert (words.dtype, scale.dtype, shape.dtype) == (torch.int32, torch.bfloat16, torch.int64)
        assert scale.shape == (rows, cols // group) and args["strategy"] == ("channel" if args["group_size"] is None else "group")
        weights[name] = numbers(words, args["num_bits"], cols) * scale.float().repeat_interleave(group, 1)
    return weights, tensors


def same_model(folder: Path, model) -> None:
    """``folder`` holds the weights of ``model``, its other tensors but those tied to them, and says which linear layers are dense."""
    weights, others = decoded(folder)
    layers, state = layers_of(model), model.state_dict()
    assert weights.keys() == layers.keys()
    for name, layer in layers.items():
        assert torch.equal(weights[name], layer.dense(torch.float32)), name
    for key, tensor in others.items():
        assert torch.equal(tensor, state[key]) and tensor.dtype == state[key].dtype, key
    inside = {f"{name}.{part}" for name in layers for part in ("values", "indices", "step", "columns")}
    held = {t.data_ptr() for key, t in state.items() if key in others}
    assert all(key in others or state[key].data_ptr() in held for key in state.keys() - inside)
    about = json.loads((folder / "config.json").read_text())["quantization_config"]
    for name, module in model.named_modules():  # under every name that they have with another head, or none
        for other in (name, name.removeprefix(f"{model.base_model_prefix}."), f"another.{name}"):
            assert len(matched(about, other)) == (name in layers), other
            ignored = matched({"ignore": [], "config_groups": {"": {"targets": about["ignore"], "weights": {}}}}, other)
            assert len(ignored) == isinstance(module, nn.Linear), other


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cols", [1, 3, 8, 13])
def test_packing(bits, cols):
    integers = torch.randint(-(1 << bits - 1), 1 << bits - 1, (40, cols), dtype=torch.int8)
    words = pack(integers, bits)
    assert words.shape == (40, -(-cols * bits // 32)) and words.dtype == torch.int32
    assert torch.equal(numbers(words, bits, cols), integers.float())


@ALL
def test_a_model_is_written_bit_for_bit(tmp_path, name, values, group):
    model, out = rounded(name, values, group), tmp_path / "new" / "out"
    save_compressed_tensors(model, out)
    same_model(out, model)
    weights, others = decoded(out)
    assert ("lm_head.weight" in others) == (name == "llama") if name.startswith("llama") else True
    if values == "int4":  # what makes int4 special: steps of both signs, and -8
        state = tensors_of(out)
        assert any(bool((t < 0).any()) for key, t in state.items() if key.endswith("weight_scale"))
        assert any(int(numbers(state[f"{n}.weight_packed"], 4, w.shape[1]).min()) == -8 for n, w in weights.items())
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["architectures"] == [MODELS[name][0]] and os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == ["out"] and (out / "generation_config.json").exists() == (name != "bert")


def test_size(tmp_path):
    for values, group in (("int4", 128), ("int8", 128)):
        model = rounded("llama", values, group)
        for layer in layers_of(model).values():
            assert layer.weight.group == 128
        save_compressed_tensors(model, tmp_path / values)
        elements = sum(layer.out_features * layer.in_features for layer in layers_of(model).values())
        rest = sum(t.nbytes for t in decoded(tmp_path / values)[1].values())
        size = sum(path.stat().st_size for path in (tmp_path / values).glob("*.safetensors"))
        assert size <= 1.01 * (WEIGHT_BITS[values] / 8 * elements + rest)


def test_layers_of_every_kind(tmp_path):
    """Dense, int8 and int4 in groups and per row; for both, some rows hold only one group."""
    model = pruned(filter_fn=lambda module, name: not name.endswith(("v_proj", "lm_head")))
    kinds = {"q_proj": ("int4", 32), "k_proj": ("int8", None), "o_proj": ("int4", 256), "gate_proj": ("int8", 64)}
    for name, layer in layers_of(model).items():
        layer.round_(nm.ops.quantize_values(layer.weight, *kinds.get(name.rpartition(".")[2], ("int4", 128))))
    save_compressed_tensors(model, tmp_path / "out")
    same_model(tmp_path / "out", model)
    about = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    found = {
        (g["weights"]["num_bits"], g["weights"]["strategy"], g["weights"]["group_size"]): {t.rpartition(".")[2] for t in g["targets"]}
        for g in about["config_groups"].values()
    }
    assert found == {
        (4, "channel", None): {"o_proj$"}, (4, "group", 32): {"q_proj$"}, (4, "group", 128): {"up_proj$", "down_proj$"},
        (8, "channel", None): {"k_proj$"}, (8, "group", 64): {"gate_proj$"},
    }  # fmt: skip
    assert about["ignore"] == [r"re:(.*\.)?lm_head$", r"re:(.*\.)?layers\.\d+\.self_attn\.v_proj$"]
    # blocks that differ have expressions of their own
    model = pruned()
    for name, layer in layers_of(model).items():
        weight = nm.ops.quantize_values(layer.weight, "int8" if ".0." in name else "int4", 64)
        model.set_submodule(name, nm.CompressedLinear(weight, dtype=torch.bfloat16))
    save_compressed_tensors(model, tmp_path / "by block")
    same_model(tmp_path / "by block", model)


def test_what_names_layers_names_no_others():
    def targets(*names: str, sub_configs=()) -> list[str]:
        model = types.SimpleNamespace(config=types.SimpleNamespace(sub_configs=sub_configs), base_model_prefix="body")
        every = {"", "body", "body.a.0.x", "body.a.1.x", "body.b.a.0.x", "0", "body.c+", "headc+"}
        return room._targets(set(names), model, every)

    assert targets("0", "body.b.a.0.x", "body.c+") == [r"re:(.*\.)?\d+$", r"re:(.*\.)?b\.a\.\d+\.x$", r"re:(.*\.)?c\+$"]
    assert targets("body.a.0.x", "body.a.1.x", "body.b.a.0.x") == [r"re:(.*\.)?a\.\d+\.x$", r"re:(.*\.)?b\.a\.\d+\.x$"]
    assert targets("body.a.0.x", "body.a.1.x") == ["body.a.0.x", r"re:(.*\.)?a\.1\.x$"]
    assert targets("body.b.a.0.x", "body.a.1.x", sub_configs=("text",)) == ["body.a.1.x", "body.b.a.0.x"]


def test_reordered_inputs_with_a_step_per_row(tmp_path):
    model = rounded(values="int8")
    old = model.model.layers[0].mlp.up_proj
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    model.model.layers[0].mlp.up_proj = nm.CompressedLinear(old.weight, columns=order, dtype=torch.bfloat16)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.dense(), old.dense())
    save_compressed_tensors(model, tmp_path / "out")
    same_model(tmp_path / "out", model)


def test_files_are_split(tmp_path):
    model = rounded("llama tied")
    save_compressed_tensors(model, tmp_path / "out", max_shard_size=150_000)
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 160_000 for file in files)
    assert set(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"].values()) == {
        f.name for f in files
    }
    same_model(tmp_path / "out", model)


def test_dtypes(tmp_path):
    save_compressed_tensors(model := rounded(dtype=torch.float32), tmp_path / "float32")
    same_model(tmp_path / "float32", model)
    assert json.loads((tmp_path / "float32" / "config.json").read_text())["dtype"] == "bfloat16"
    save_compressed_tensors(model := rounded(dtype=torch.float16), tmp_path / "float16")
    same_model(tmp_path / "float16", model)
    assert json.loads((tmp_path / "float16" / "config.json").read_text())["dtype"] == "float16"
    model.model.layers[1].mlp.up_proj.step.view(-1)[3] = 1.9e-7
    with pytest.raises(RecipeError, match=r"float16 cannot hold a step of layer '.*1\.mlp\.up_proj'; call model\.to\(torch\.bf"):
        save_compressed_tensors(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def with_layer(layer) -> nn.Module:
    model = rounded()
    model.model.layers[0].mlp.up_proj = layer
    return model


def weight_of(values=None, group=None):
    c = nm.ops.compress(torch.randn(384, 256), "2:4")
    return c if values is None else nm.ops.quantize_values(c, values, group)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    return nm.compress_(model, values="int4")


def with_experts() -> nn.Module:
    sizes = {**SIZES, **KV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    return nm.compress_(model, values="int4")


def dense() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **KV})).to(torch.bfloat16).eval()


def in_training() -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))
    nm.sparsify_(model, "ste:2:4")
    return model


def with_peft() -> nn.Module:
    model = rounded()
    model.peft_config = {"default": None}
    return model


def on_meta() -> nn.Module:
    return rounded().to("meta")


REFUSED = {
    "floating point": (
        pruned,
        r"q_proj' has floating-point values; nm.compress_\(model, values=\"int4\"\)",
    ),
    "adapter": (
        lambda: with_layer(nm.CompressedLinear(weight_of("int4", 32), adapter=(torch.randn(256, 2), torch.randn(2, 384)))),
        r"up_proj' has a low-rank adapter, .*nm.save_dense",
    ),
    "reordered groups": (
        lambda: with_layer(nm.CompressedLinear(weight_of("int4", 32), columns=torch.randperm(256))),
        r"up_proj' reorders its inputs, and groups of 32 are then not adjacent",
    ),
    "Conv1D": (gpt2, r"layer 'transformer.h.0.attn.c_attn' is a Conv1D of transformers, .*nm.save_dense"),
    "embedding": (
        lambda: nm.compress_(rounded(), values="int8", dense=["embed_tokens"]),
        r"embed_tokens' is an embedding with integers, .*; leave it out of dense= \(prune without --dense-values\)",
    ),
    "experts": (with_experts, r"experts.\w+' is a stack of experts, .*nm.save_dense"),
    "training": (in_training, r"is not compressed; call handle.finish\(\)"),
    "dense": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), r"no layer is compressed"),
    "other models": (lambda: nn.Sequential(nm.CompressedLinear(weight_of("int4", 32))), r"Sequential is not a model of transformers"),
    "adapters of peft": (with_peft, r"has adapters of peft, .* merge or remove them first"),
    "offloaded": (on_meta, r"is offloaded or sharded; load the whole model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_format_lacks_is_refused(tmp_path, case):
    build, why = REFUSED[case]
    with pytest.raises((RecipeError, CheckpointError), match=why):
        save_compressed_tensors(build(), tmp_path / "out")
    assert not os.listdir(tmp_path)


def test_wrappers_are_looked_through(tmp_path):
    model = rounded()
    save_compressed_tensors(nn.DataParallel(model), tmp_path / "out")
    same_model(tmp_path / "out", model)


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    model, out = rounded(), tmp_path / "out"
    work = tmp_path / ".out.nmkernels-export"

    def full(*args):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(room.ShardWriter, "close", full)
        with pytest.raises(OSError, match="No space"):
            save_compressed_tensors(model, out)
    with monkeypatch.context() as patch:
        patch.setattr(room.os, "replace", full)
        with pytest.raises(CheckpointError, match=r"out could not be written: No space"):
            save_compressed_tensors(model, out)
    assert not os.listdir(tmp_path)
    # what a killed process leaves does not matter, and a running one is not disturbed
    (work / "out").mkdir(parents=True)
    (work / "out" / "model.safetensors").write_bytes(b"half")
    (work / "out" / "left.json").write_bytes(b"half")
    handle = lock_file(work / ".lock", "another")
    with pytest.raises(CheckpointError, match="is in use"):
        save_compressed_tensors(model, out)
    os.close(handle)
    out.mkdir()  # an empty folder is fine
    save_compressed_tensors(model, out)
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors"] and os.listdir(tmp_path) == ["out"]
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds other files \(config.json, generation_config.json, model.safetensors\); pass a new"):
        save_compressed_tensors(model, out)
    with pytest.raises(CheckpointError, match="is not a folder"):
        save_compressed_tensors(model, out / "config.json")
    assert content(tmp_path) == before


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A compressed folder with all that a folder has; no test changes it."""
    home = tmp_path_factory.mktemp("export") / "llama"
    rounded("llama tied").save_pretrained(home)
    write_tokenizer(home)
    (home / "report.json").write_text("{}")
    (home / "model.gguf").write_text("the same weights")
    (home / "README.md").write_text((home / "README.md").read_text() + "\n## How it was pruned\n\nWith ça.\n", encoding="latin-1")
    return home


def test_a_folder_is_exported(folder, tmp_path, capsys):
    before, out = content(folder), tmp_path / "out"
    assert cli.main(["export", str(folder), str(out)]) == 0
    said = capsys.readouterr().out
    assert f"llama: 14 layers written to {out}/ as pack-quantized (int4, a step per 128 columns), " in said
    assert "Left dense: lm_head." in said and "Not carried over, since they hold other weights: model.gguf." in said
    assert f"vllm serve {out}" in said
    save_compressed_tensors(rounded("llama tied"), tmp_path / "same")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "same" / name).read_bytes(), name
    assert len(transformers.AutoTokenizer.from_pretrained(out)("w1 w2")["input_ids"]) == 2
    assert (out / "report.json").exists() and not (out / "model.gguf").exists()
    card = (out / "README.md").read_text(encoding="latin-1")
    assert card.count("## N:M sparse weights") == 1 and "pack-quantized" in card and "With ça." in card and "stored compressed" not in card
    assert content(folder) == before
    # what is there is not overwritten
    assert cli.main(["export", str(folder), str(out)]) == 1
    assert f"error: {out} holds a finished result; pass a new folder" in capsys.readouterr().err


def test_a_folder_of_many_files_is_exported(tmp_path):
    model = rounded("bert", "int8")
    model.save_pretrained(tmp_path / "model", max_shard_size="150KB")
    export_folder(tmp_path / "model", tmp_path / "out", shard=200_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3 and len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    same_model(tmp_path / "out", model)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_folder_with_dense_integers_is_exported(tmp_path, sparse):
    """They have no indices, in the file and in the format."""
    model = nm.compress_(rounded() if sparse else dense(), values="int8", dense=["lm_head", *([] if sparse else ["mlp", "self_attn"])])
    model.save_pretrained(tmp_path / "model")
    export_folder(tmp_path / "model", tmp_path / "out")
    same_model(tmp_path / "out", model)
    weights, _ = decoded(tmp_path / "out")
    assert len(weights) == 15 and bool((weights["lm_head"] == 0).float().mean() < 0.1)
    save_compressed_tensors(model, tmp_path / "same")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "same" / "model.safetensors").read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Weights of this model are {'2:4 sparse' if sparse else 'integers'}. " in card and ("zeros" in card) == sparse
    damaged(tmp_path / "model", lambda tensors, about: tensors.pop("lm_head.values"))
    with pytest.raises(CheckpointError, match="layer 'lm_head': the file lacks its values"):
        export_folder(tmp_path / "model", tmp_path / "other")


def test_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    said = capsys.readouterr().out
    assert "vLLM, SGLang and transformers" in said and "MODEL_DIR" in said and "pack-quantized" in said


def damaged(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(folder / "model.safetensors", "pt") as file:
        about = file.metadata()
    change(tensors, about)
    save_file(tensors, folder / "model.safetensors", about)


Q, EMBED = "model.layers.0.self_attn.q_proj", "model.embed_tokens.weight"
WRONG = {
    "missing": (lambda f: shutil.rmtree(f), "does not exist; pass a folder that save_pretrained"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config damaged": (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
    "activation": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace('"silu"', '"nope"')),
        "transformers cannot build a LlamaForCausalLM as ",
    ),
    "norm lost": (lambda f: damaged(f, lambda t, _: t.pop("model.norm.weight")), "lacks 'model.norm.weight', which LlamaForCausalLM has"),
    "short embedding": (
        lambda f: damaged(f, lambda t, _: t.update({EMBED: t[EMBED][:50].clone()})),
        f"{EMBED!r} has shape (50, 256) in the files, and (96, 256) in a",
    ),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "truncated"),
    "step missing": (lambda f: damaged(f, lambda t, a: t.pop(f"{Q}.step")), f"layer '{Q}': the file lacks its step"),
    "step of another size": (
        lambda f: damaged(f, lambda t, a: t.update({f"{Q}.step": torch.ones(256, 5, dtype=torch.bfloat16)})), f"layer '{Q}' is damaged: ",
    ),
    "step infinite": (lambda f: damaged(f, lambda t, a: t[f"{Q}.step"].fill_(float("inf"))), "a step is NaN or infinite"),
    "indices wrong": (lambda f: damaged(f, lambda t, a: t[f"{Q}.indices"].fill_(0)), "do not increase"),
    "values missing": (lambda f: damaged(f, lambda t, a: t.pop(f"{Q}.values")), f"layer '{Q}': the file lacks its values"),
    "another pattern": (lambda f: damaged(f, lambda t, a: a.update(layers=a["layers"].replace("2:4", "1:4"))), "is damaged: "),
    "a layer that the model lacks": (
        lambda f: damaged(f, lambda t, a: a.update(layers=a["layers"].replace("0.mlp.up", "0.mlp.down"))), "has the name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_damaged_folders_are_refused(folder, tmp_path, capsys, case):
    source, (change, why) = tmp_path / "model", WRONG[case]
    shutil.copytree(folder, source)
    change(source)
    before = content(tmp_path)
    assert cli.main(["export", str(source), str(tmp_path / "out")]) == 1
    assert why in capsys.readouterr().err
    assert content(tmp_path) == before


def test_folders_of_other_formats_are_refused_by_name(folder, tmp_path, capsys):
    def refused(source: Path, out: Path = tmp_path / "out") -> str:
        assert cli.main(["export", str(source), str(out)]) == 1
        return capsys.readouterr().err

    saved(tmp_path / "dense", layers=1)
    assert "dense is a dense model; python -m nmkernels prune" in refused(tmp_path / "dense")
    export_folder(folder, tmp_path / "there")
    assert "there is in the format of compressed-tensors; only" in refused(tmp_path / "there")
    assert "is a file; pass a folder" in refused(folder / "config.json")
    pruned().save_pretrained(tmp_path / "float")
    assert "q_proj' has floating-point values; nm.compress_(model" in refused(tmp_path / "float")
    gpt2().save_pretrained(tmp_path / "gpt2")
    assert "is a Conv1D of transformers" in refused(tmp_path / "gpt2")
    assert "is inside the model's folder" in refused(folder, folder / "out")
    assert not (tmp_path / "out").exists()


# ---- the library, which CI lacks


@ALL
def test_the_library_decodes_the_same_weights_and_transformers_computes_the_same(tmp_path, name, values, group):
    pytest.importorskip("compressed_tensors", minversion="0.15", reason="compressed-tensors is not installed")
    model = rounded(name, values, group)
    model.save_pretrained(tmp_path / "nm")
    export_folder(tmp_path / "nm", tmp_path / "out", shard=300_000)
    equal_in_the_library(tmp_path / "nm", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_in_the_library(tmp_path, dtype):
    pytest.importorskip("compressed_tensors", minversion="0.15", reason="compressed-tensors is not installed")
    rounded("mistral", dtype=dtype).save_pretrained(tmp_path / "nm")
    export_folder(tmp_path / "nm", tmp_path / "out")
    equal_in_the_library(tmp_path / "nm", tmp_path / "out", dtype)
    equal_in_the_library(tmp_path / "nm", tmp_path / "out", torch.bfloat16)


def test_layers_of_every_kind_in_the_library(tmp_path):
    pytest.importorskip("compressed_tensors", minversion="0.15", reason="compressed-tensors is not installed")
    model = pruned("qwen3", filter_fn=lambda module, name: not name.endswith(("v_proj", "lm_head")))
    kinds = {"q_proj": ("int4", 32), "k_proj": ("int8", None), "o_proj": ("int4", 256), "gate_proj": ("int8", 64)}
    for name, layer in layers_of(model).items():
        layer.round_(nm.ops.quantize_values(layer.weight, *kinds.get(name.rpartition(".")[2], ("int4", 128))))
    nm.integrations.hf.mark_(model)
    model.save_pretrained(tmp_path / "nm")
    save_compressed_tensors(model, tmp_path / "out")
    equal_in_the_library(tmp_path / "nm", tmp_path / "out")
    # the body alone, and with another head, have its weights and not random ones
    for cls in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        other, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert set(info["missing_keys"]) == ({"score.weight"} if hasattr(other, "score") else set())


@torch.no_grad()
def equal_in_the_library(ours: Path, theirs: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """The weights after the library's decompressor, and the logits after transformers', are those of the dense model with zeros."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = json.loads((theirs / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    dense = nm.densify_(cls.from_pretrained(ours, dtype=torch.float32)).to(dtype).eval()
    stored, tool = tensors_of(theirs), BaseCompressor.get_value_from_registry("pack-quantized")
    count = 0
    for name in [key.removesuffix(".weight_packed") for key in stored if key.endswith(".weight_packed")]:
        (args,) = matched(config["quantization_config"], name)
        parts = {key.removeprefix(f"{name}."): t for key, t in stored.items() if key.startswith(f"{name}.weight_")}
        parts["weight_scale"] = parts["weight_scale"].to(dtype)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        assert torch.equal(tool.decompress(parts, scheme)["weight"], dense.get_submodule(name).weight), name
        count += 1
    assert count >= 8
    other, info = cls.from_pretrained(theirs, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    dense = nm.densify_(cls.from_pretrained(ours, dtype=dtype)).eval() if dtype != torch.float32 else dense
    ids = torch.randint(4, 96, (2, 16), generator=torch.Generator().manual_seed(0))
    a, b = dense(ids).logits, other.eval()(ids).logits
    assert torch.equal(a, b) and a.abs().max() > 0 and nm.ops.is_nm(dense.get_submodule(name).weight, "2:4")
