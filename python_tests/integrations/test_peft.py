"""PEFT on N:M weights: what trains, what is saved, what a merge keeps, and what is refused before anything is changed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels.nn import SparseConv1D
from nmkernels.nn.adapter import adapter_of
from python_tests import moe
from python_tests.distributed.ranks import needs_gloo, on_ranks, raised
from python_tests.house.paths import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
import peft
import peft.utils.hotswap
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nmkernels.integrations import peft as P
from nmkernels.integrations.peft import MaskedLoraConfig, SparseLoraLinear

WORDS = 64
IDS = torch.arange(24).reshape(2, 12) * 7 % WORDS


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32)).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, n_positions=32, **drop)).eval()


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}


@functools.cache
def made(name: str, compressed: bool) -> nn.Module:
    model = MODELS[name]()
    nm.sparsify_(model, "asp:2:4").finish(allow_unused=True)
    return nm.compress_(model) if compressed else model


def base(name: str = "llama", compressed: bool = True) -> nn.Module:
    return copy.deepcopy(made(name, compressed))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def train(model: nn.Module, steps: int = 5, lr: float = 1e-2) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def tuned(model: nn.Module, config: Any = None, steps: int = 5, **options: Any) -> Any:
    """A model of peft with a trained adapter."""
    torch.manual_seed(1)
    config = config or LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    made = get_peft_model(model, config)
    train(made, steps)
    return made


def masked(**options: Any) -> MaskedLoraConfig:
    return MaskedLoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)


def layers_of(model: nn.Module) -> dict[str, SparseLoraLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLoraLinear)}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The N:M weights, dense and in the order of columns in which they are N:M, by layer; those of ``model`` without peft's names."""
    found = {}
    for name, m in model.named_modules():
        if isinstance(m, nm.CompressedLinear):
            found[name] = m.weight.dense()
        elif isinstance(m, nm.nn.NMWeight):
            found[name] = m.grouped.detach().clone()
    return {name.removeprefix("base_model.model.").removesuffix(".base_layer"): weight for name, weight in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-6 * b.abs().max().clamp(min=1))


EVERY = [
    ("llama", True),
    ("gpt2", False),
    pytest.param("llama", False, marks=pytest.mark.slow),
    pytest.param("gpt2", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "compressed"), EVERY)
def test_lora_trains_and_absorbed_equals_it(name: str, compressed: bool, tmp_path: Path) -> None:
    model = base(name, compressed)
    before, weights = logits(model), weights_of(model)
    lora = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM"))
    kinds = {type(m.base_layer) for m in layers_of(lora).values()}
    assert kinds == {nm.CompressedLinear if compressed else nm.SparseLinear if name == "llama" else SparseConv1D}
    assert {n.split(".")[-2] for n, p in lora.named_parameters() if p.requires_grad} == {"default"}
    assert torch.equal(logits(lora), before), "B is 0 at first"
    losses = train(lora, steps=10)
    assert losses[-1] < losses[0] - 0.1 and same(weights_of(lora), weights)
    after = logits(lora)
    assert not close(after, before)
    with lora.disable_adapter():
        assert torch.equal(logits(lora), before)
    absorbed = P.absorb(lora)
    assert close(logits(absorbed), after) and same(weights_of(absorbed), weights)
    assert not any("lora" in key for key in absorbed.state_dict()) and not hasattr(absorbed, "peft_config")
    ranks = {adapter_of(m)[0].shape[1] for m in absorbed.modules() if isinstance(m, (nm.CompressedLinear, nm.nn.NMWeight))}  # type: ignore[index]
    assert ranks == {4}
    if not compressed:
        nm.compress_(absorbed)
        assert close(logits(absorbed), after)
    nm.save_compressed(absorbed, tmp_path / "m.safetensors")
    assert close(logits(nm.load_compressed(MODELS[name](), tmp_path / "m.safetensors")), after)


@pytest.mark.parametrize(("name", "compressed"), EVERY)
def test_merging_lora_is_refused(name: str, compressed: bool) -> None:
    lora = tuned(base(name, compressed))
    state, after = copy.deepcopy(lora.state_dict()), logits(lora)
    key, layer = next(iter(layers_of(lora).items()))
    key = key.removeprefix("base_model.model.")
    weight = weights_of(lora)[key]
    update = 2.0 * layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight.detach()
    share = float((weight + update - nm.ops.prune(weight + update, "2:4")).norm() / update.norm())
    assert 0.3 < share < 0.75 and P.lost_by_merging(lora)[key] == pytest.approx(share, rel=1e-4)
    worst, lost = max(P.lost_by_merging(lora).items(), key=lambda item: item[1])
    for merge in (lora.merge_and_unload, lora.merge_adapter, lambda: lora.merge_and_unload(safe_merge=True)):
        with pytest.raises(
            nm.RecipeError, match=rf"would lose '{worst}': {lost:.0%} of the update's norm.*absorb.*MaskedLoraConfig.*prune"
        ):
            merge()
    with pytest.raises(nm.RecipeError, match=rf"a 2:4 weight dense.*would lose {share:.0%} of the update's norm"):
        layer.merge()
    assert same(lora.state_dict(), state) and torch.equal(logits(lora), after) and not layer.merged
    pruned = P.merge_and_prune(lora)
    assert all(nm.ops.is_nm(w, nm.Pattern("2:4")) for w in weights_of(pruned).values()) and not close(logits(pruned), after)
    assert torch.equal(weights_of(pruned)[key], nm.ops.prune(weight + update, "2:4"))


@pytest.mark.parametrize(("name", "compressed"), EVERY)
def test_masked_adapter_merges_and_unmerges_exactly(name: str, compressed: bool) -> None:
    model = base(name, compressed)
    before, weights = logits(model), weights_of(model)
    lora = tuned(model, masked())
    after = logits(lora)
    assert not close(after, before) and same(weights_of(lora), weights)
    for key, layer in layers_of(lora).items():
        weight, update = weights[key.removeprefix("base_model.model.")], layer.update("default")
        assert bool(update.any()) and not bool(update[weight == 0].any())
        assert torch.equal(layer.get_delta_weight("default"), update.t() if layer.fan_in_fan_out else update)
    assert set(P.lost_by_merging(lora).values()) == {0.0}
    lora.merge_adapter()
    assert close(logits(lora), after) and all(nm.ops.is_nm(w, nm.Pattern("2:4")) for w in weights_of(lora).values())
    lora.unmerge_adapter()
    assert torch.equal(logits(lora), after) and same(weights_of(lora), weights)
    lora.merge_adapter()
    with lora.disable_adapter():
        assert torch.equal(logits(lora), before), "disabled, peft unmerges"
    merged = lora.merge_and_unload()
    assert close(logits(merged), after) and all(nm.ops.is_nm(w, nm.Pattern("2:4")) for w in weights_of(merged).values())
    if not compressed:
        nm.compress_(merged)
        assert close(logits(merged), after)


def test_a_masked_adapter_with_a_bias_of_its_own() -> None:
    lora = tuned(base("gpt2"), masked(lora_bias=True))
    layer = next(iter(layers_of(lora).values()))
    after, bias = logits(lora), layer.base_layer.bias.detach().clone()
    lora.merge_adapter(safe_merge=True)
    assert close(logits(lora), after) and not torch.equal(layer.base_layer.bias, bias)
    lora.unmerge_adapter()
    assert torch.equal(logits(lora), after) and torch.equal(layer.base_layer.bias, bias)
    layer.lora_B["default"].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert not layer.merged and torch.equal(layer.base_layer.bias, bias)


@pytest.mark.parametrize("compressed", [True, False])
def test_dense_layer_has_the_weight_and_bias_of_the_base_layer(compressed: bool) -> None:
    layer = next(iter(layers_of(get_peft_model(base("gpt2", compressed), LoraConfig(r=2))).values()))
    dense = P.DenseBase(layer).get_base_layer()
    assert torch.equal(dense.weight, layer.weight_and_order()[0].t()) and torch.equal(dense.bias, layer.base_layer.bias)
    assert not any(p.requires_grad for p in dense.parameters())
    assert compressed or dense.weight.data_ptr() == layer.base_layer.weight.data_ptr()


def test_masked_adapter_gradient_equals_equation() -> None:
    layer = tuned(base(), masked(), steps=1).base_model.model.model.layers[0].mlp.down_proj.double()
    x = torch.randn(3, 64, dtype=torch.float64)
    weight, a, b = layer.base_layer.weight.dense(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    want = x @ (weight + 2.0 * (b @ a) * (weight != 0)).t()
    torch.testing.assert_close(layer(x), want)
    g = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(layer(x), (a, b), g), torch.autograd.grad(want, (a, b), g))


def test_an_adapter_is_loaded_by_what_is_in_its_folder_alone(tmp_path: Path) -> None:
    """In a process that nothing was registered in by hand; see below for processes of their own."""
    lora, other = tuned(base()), tuned(base(), masked())
    lora.save_pretrained(tmp_path / "plain")
    other.save_pretrained(tmp_path / "masked")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "plain")
    assert torch.equal(logits(loaded), logits(lora)) and loaded.peft_config["default"].inference_mode
    assert close(logits(PeftModel.from_pretrained(base(compressed=False), tmp_path / "plain")), logits(lora)), "or beside the dense layout"
    loaded.load_adapter(tmp_path / "masked", "second")
    loaded.set_adapter("second")
    assert torch.equal(logits(loaded), logits(other)) and type(loaded.peft_config["second"]) is MaskedLoraConfig
    plain = base()
    plain.load_adapter(str(tmp_path / "masked"))  # transformers' own
    assert torch.equal(logits(plain), logits(other))
    absorbed = P.absorb(plain)
    assert absorbed is plain and close(logits(plain), logits(other)) and not layers_of(plain)
    plain.save_pretrained(tmp_path / "absorbed")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "absorbed")), logits(plain))
    with pytest.raises(ValueError, match="quantized with NMConfig but you are passing a BitsAndBytesConfig"):
        quantized = transformers.BitsAndBytesConfig(load_in_8bit=True)
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "absorbed", quantization_config=quantized)
    assert json.loads((tmp_path / "masked" / "adapter_config.json").read_text())["nm_masked"] is True
    late = PeftModel.from_pretrained(base(), tmp_path / "masked", low_cpu_mem_usage=True, is_trainable=True)
    assert torch.equal(logits(late), logits(other))
    losses = train(late, 3)
    assert losses[-1] < losses[0]


IMPORTS = {
    "first": "import nmkernels.integrations.hf\nimport peft, transformers",
    "last": "import peft, transformers\nimport nmkernels.integrations.hf",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "order"), list(zip(MODELS, IMPORTS, strict=True)))
def test_an_adapter_is_loaded_in_another_process(name: str, order: str, tmp_path: Path) -> None:
    base(name).save_pretrained(tmp_path / "base")
    lora = tuned(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    want = logits(lora)
    lora.save_pretrained(tmp_path / "adapter")
    P.absorb(lora).save_pretrained(tmp_path / "absorbed")
    torch.save((IDS, want), tmp_path / "want.pt")
    code = f"""
{IMPORTS[order]}
import os, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
os.chdir({str(tmp_path)!r})
ids, want = torch.load("want.pt")
given = AutoModelForCausalLM.from_pretrained("base")
given.load_adapter("adapter")
models = {{
    "base, PeftModel": peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter"),
    "base, load_adapter": given,
    "the adapter's folder": AutoModelForCausalLM.from_pretrained("adapter"),
    "AutoPeftModel": peft.AutoPeftModelForCausalLM.from_pretrained("adapter"),
    "absorbed": AutoModelForCausalLM.from_pretrained("absorbed"),
}}
for name, model in models.items():
    with torch.no_grad():
        far = (model.eval()(input_ids=ids).logits - want).abs().max()
    assert far < 1e-6 if name == "absorbed" else far == 0, (name, far)
print("equal")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr


@pytest.mark.parametrize("compressed", [True, False])
def test_all_linear_and_targets_find_the_sparse_layers(compressed: bool) -> None:
    model = base("gpt2", compressed)
    names = [f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert P.targets(model) == names
    lora = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    assert lora.base_model.targeted_module_names == names and P.targets(lora.base_model.model) == names
    lora.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    assert all(set(m.lora_A) == {"default", "second"} for m in layers_of(lora).values())
    assert lora.peft_config["default"].fan_in_fan_out is True
    by_list = get_peft_model(base("gpt2", compressed), LoraConfig(r=2, target_modules=names[:1]))
    assert [name.removeprefix("base_model.model.") for name in layers_of(by_list)] == names[:1]
    default = get_peft_model(base("gpt2", compressed), LoraConfig(r=2))
    assert [name.removeprefix("base_model.model.") for name in layers_of(default)] == names[:1], "peft's own choice for GPT-2"


def test_dense_layers_of_the_model_take_peft_own_layers() -> None:
    model = llama()
    nm.sparsify_(model, "asp:2:4", filter_fn=lambda m, name: "mlp" in name).finish(allow_unused=True)
    lora = tuned(nm.compress_(model), masked())
    kinds = {name.split(".")[-2]: type(m).__module__.split(".")[0] for name, m in lora.named_modules() if name.endswith("_proj")}
    assert kinds == {"mlp": "nmkernels", "self_attn": "peft"}
    after = logits(lora)
    assert set(P.lost_by_merging(lora)) == {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")}
    assert close(logits(P.absorb(copy.deepcopy(lora))), after) and close(logits(lora.merge_and_unload()), after)


@pytest.mark.parametrize(
    ("name", "compressed", "options"),
    [
        ("llama", True, {"use_dora": True}),
        pytest.param("gpt2", False, {"use_dora": True, "use_rslora": True}, marks=pytest.mark.slow),
        pytest.param("gpt2", True, {"use_dora": True, "lora_dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("llama", False, {"use_dora": True}, marks=pytest.mark.slow),
        pytest.param("llama", True, {"use_rslora": True, "lora_dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("gpt2", True, {"lora_bias": True, "lora_dropout": 0.2}, marks=pytest.mark.slow),
        pytest.param("llama", True, {"rank_pattern": {"mlp.*": 2}, "alpha_pattern": {"q_proj": 32}}, marks=pytest.mark.slow),
        pytest.param("llama", True, {"init_lora_weights": "orthogonal"}, marks=pytest.mark.slow),
    ],
)
def test_variants_train_are_loaded_and_absorbed(name: str, compressed: bool, options: dict[str, Any], tmp_path: Path) -> None:
    model = base(name, compressed)
    before, weights = logits(model), weights_of(model)
    lora = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options))
    if options.get("init_lora_weights") != "orthogonal":
        assert close(logits(lora), before)
    losses = train(lora, 10)
    assert losses[-1] < losses[0] - 0.1 and same(weights_of(lora), weights)
    layer, x = next(iter(layers_of(lora).values())), torch.randn(3, 32)
    torch.testing.assert_close(nn.functional.linear(x, *layer.merged_weight(["default"])), layer(x))
    after = logits(lora)
    lora.save_pretrained(tmp_path)
    assert close(logits(PeftModel.from_pretrained(base(name, compressed), tmp_path)), after)
    with pytest.raises(nm.RecipeError, match="absorb"):
        lora.merge_and_unload()
    absorbed = P.absorb(lora)
    assert close(logits(absorbed), after) and all(nm.ops.is_nm(w, nm.Pattern("2:4")) for w in weights_of(absorbed).values())
    assert same(weights_of(absorbed), weights) != bool(options.get("use_dora")), "DoRA scales rows"
    assert close(logits(nm.densify_(absorbed)), after)


def test_several_adapters(tmp_path: Path) -> None:
    lora = tuned(base())
    first = logits(lora)
    lora.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    lora.set_adapter("b")
    train(lora, 3)
    second = logits(lora)
    lora.set_adapter("default")
    assert torch.equal(logits(lora), first)
    lora.base_model.set_adapter(["default", "b"])
    both = logits(lora)
    assert not close(both, first) and not close(both, second)
    absorbed = P.absorb(copy.deepcopy(lora))
    assert close(logits(absorbed), both)
    assert adapter_of(absorbed.model.layers[0].mlp.down_proj)[0].shape[1] == 6  # type: ignore[index]
    assert close(logits(P.absorb(copy.deepcopy(lora), ["b"])), second), "those that are named"
    lora.add_weighted_adapter(["default", "b"], [1.0, 1.0], "sum", combination_type="cat")
    lora.set_adapter("sum")
    assert close(logits(lora), both)
    with pytest.raises(nm.RecipeError, match="adapter 'sum' would make 7 2:4 weights dense"):
        lora.merge_and_unload(adapter_names=["sum"])
    lora.delete_adapter("sum")
    lora.set_adapter("default")
    assert torch.equal(logits(lora), first)
    again = P.absorb(tuned(P.absorb(lora)))
    assert adapter_of(again.model.layers[0].mlp.down_proj)[0].shape[1] == 8, "beside the one that the layer has"  # type: ignore[index]


def test_masked_and_other_adapters_together() -> None:
    lora = tuned(base(), masked())
    weights, first = weights_of(lora), logits(lora)
    lora.add_adapter("plain", LoraConfig(r=4, target_modules="all-linear"))
    lora.set_adapter("plain")
    train(lora, 3)
    lora.base_model.set_adapter(["default", "plain"])
    both = logits(lora)
    with pytest.raises(nm.RecipeError, match="would lose"):
        lora.merge_adapter()
    with pytest.raises(nm.pattern.OptionError, match="are masked .* and some are not"):
        lora.add_weighted_adapter(["default", "plain"], [1.0, 1.0], "sum", combination_type="cat")
    lora.merge_adapter(adapter_names=["default"])
    assert close(logits(lora), first)
    key, layer = next(iter(layers_of(lora).items()))
    weight, update = layer.base_layer.weight.dense(), layer.update("plain")
    share = float((weight + update - nm.ops.prune(weight + update, "2:4")).norm() / update.norm())
    for names in (None, ["plain"]):  # what is merged counts once
        assert P.lost_by_merging(lora, names)[key.removeprefix("base_model.model.")] == pytest.approx(share, rel=1e-4)
    assert set(P.lost_by_merging(lora, ["default"]).values()) == {0.0}
    worst, most = max(P.lost_by_merging(lora).items(), key=lambda item: item[1])
    with pytest.raises(nm.RecipeError, match=f"would lose '{worst}': {most:.0%} of"):
        lora.merge_adapter()
    with pytest.raises(nm.RecipeError, match="would lose"):
        layers_of(lora)["base_model.model.model.layers.0.mlp.up_proj"].merge(adapter_names=["plain"])
    assert close(logits(lora), first), "the one that was merged still is"
    lora.unmerge_adapter()
    assert same(weights_of(lora), weights) and torch.equal(logits(lora), both)
    assert close(logits(P.absorb(lora)), both)


@pytest.mark.parametrize("compressed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_slope_adapters_are_exported_and_loaded_by_peft_alone(compressed: bool, tmp_path: Path) -> None:
    model = llama()
    recipe = nm.recipes.SLoPe("2:4", total_steps=4, rank=2, start=1)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    for _ in range(4):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(nm.RecipeError, match="still in training; call handle.finish"):
        P.export_adapter(model, tmp_path)
    handle.finish()
    if compressed:
        nm.compress_(model)
    want = logits(model.eval())
    other = next(m for m in model.modules() if adapter_of(m) is not None)
    wide = other.nm_left.new_zeros(32, 1)  # one of another rank
    nm.nn.adapter.set_adapter(
        other, torch.cat([other.nm_left.detach(), wide], 1), torch.cat([other.nm_right.detach(), wide.t()]) * 1.5, 32, 32
    )
    assert close(logits(model), want)
    assert P.export_adapter(model, tmp_path / "a", task_type="CAUSAL_LM") == tmp_path / "a"
    assert torch.equal(logits(model), logits(model)) and adapter_of(other) is not None, "the model stays"
    P.export_adapter(model, tmp_path / "b", remove=True)
    assert not any("nm_" in key for key in model.state_dict()) and not close(logits(model), want)
    for folder in ("a", "b"):
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / folder)
        assert close(logits(loaded), want)
        assert len(layers_of(loaded)) == 7 and {m.r["default"] for m in layers_of(loaded).values()} == {2, 3}
    assert isinstance(PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "a"), peft.PeftModelForCausalLM)
    with pytest.raises(nm.RecipeError, match="no layer has its own adapter"):
        P.export_adapter(model, tmp_path / "c")
    with pytest.raises(nm.RecipeError, match="has peft adapters"):
        P.export_adapter(loaded, tmp_path / "c")


@pytest.mark.slow
def test_an_absorbed_adapter_is_exported_as_what_it_was(tmp_path: Path) -> None:
    lora = tuned(base("gpt2"))
    after = logits(lora)
    model = P.absorb(lora)
    P.export_adapter(model, tmp_path, remove=True)
    assert close(logits(PeftModel.from_pretrained(model, tmp_path)), after)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"init_lora_weights": "pissa"}, "moves a part of the weight into the adapter"),
    ({"init_lora_weights": "pissa_niter_4"}, "moves a part of the weight"),
    ({"init_lora_weights": "olora"}, "moves a part of the weight"),
    ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "moves a part of the weight"),
    ({"init_lora_weights": "mica"}, "a variant of LoRA that N:M weights do not support"),
    ({"use_qalora": True}, "are for quantized weights"),
    ({"kasa_config": peft.KasaConfig()}, "kasa_config is a variant"),
    (
        {"target_parameters": ["q_proj.weight"], "target_modules": []},
        "would parametrize 'q_proj.weight'.*a (SparseLinear|CompressedLinear) and.*peft.targets",
    ),
    ({"modules_to_save": ["up_proj"]}, "modules_to_save='up_proj' includes"),
    ({"modules_to_save": ["mlp"]}, "modules_to_save='mlp' includes 'model.layers.0.mlp.gate_proj'"),
]


@pytest.mark.parametrize("compressed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_refused_is_so_before_anything_is_changed(compressed: bool) -> None:
    model = base(compressed=compressed)
    kinds = [type(m) for m in model.modules()]
    for options, words in REFUSED:
        with pytest.raises(nm.pattern.OptionError, match=words):
            get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))
        assert [type(m) for m in model.modules()] == kinds, options
    with pytest.raises(nm.pattern.OptionError, match="MaskedLoraConfig cannot be combined with use_dora"):
        get_peft_model(model, masked(use_dora=True))
    lora = tuned(model)
    with pytest.raises(nm.pattern.OptionError, match="moves a part of the weight"):
        lora.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    with pytest.raises(nm.pattern.OptionError, match="modules_to_save='mlp' includes 'model.layers.0.mlp.gate_proj'"):
        lora.add_adapter("third", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mlp"]))


def test_layers_in_training_and_models_without_peft_are_refused() -> None:
    model = llama()
    handle = nm.sparsify_(model, nm.recipes.STEP("2:4", total_steps=10))
    with pytest.raises(nm.RecipeError, match=r"'model.layers.0.self_attn.q_proj' is still in training.*handle.finish\(\)"):
        get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    handle.finish(allow_unused=True)
    for verb in (P.absorb, P.merge_and_prune, P.lost_by_merging):
        with pytest.raises(nm.RecipeError, match="the model has no peft adapters"):
            verb(model)


def test_absorb_refuses_before_changing_anything() -> None:
    lora = tuned(base(), lora_bias=True)
    with pytest.raises(
        nm.RecipeError, match=r"'model.layers.0.self_attn.q_proj' cannot absorb .* has a bias \(lora_bias=True\), and the layer has none"
    ):
        P.absorb(lora)
    lora = tuned(base(), LoraConfig(r=2, target_modules="all-linear", alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"), steps=0)
    with pytest.raises(nm.RecipeError, match="an activated LoRA"):
        P.absorb(lora)
    lora = tuned(base(), masked())
    lora.merge_adapter()
    with pytest.raises(nm.RecipeError, match="unmerge_adapter"):
        P.absorb(lora)
    dora = P.absorb(tuned(base()))
    with pytest.raises(nm.pattern.OptionError, match="has its own low-rank adapter"):
        get_peft_model(dora, LoraConfig(r=2, target_modules="all-linear", use_dora=True))


def test_unsupported_peft_methods_are_refused() -> None:
    conv = nn.Sequential(nn.Conv2d(16, 16, 3))
    nm.sparsify_(conv, "asp:2:4").finish(allow_unused=True)
    with pytest.raises(nm.pattern.OptionError, match=r"LORA does not support '0', a SparseConv2d"):
        get_peft_model(conv, LoraConfig(r=2, target_modules=["0"]))
    for model, kind in ((base(), "CompressedLinear"), (base("gpt2", compressed=False), "SparseConv1D")):
        names = P.targets(model)[:1]
        for config in (peft.IA3Config(target_modules=names, feedforward_modules=[]), peft.LoHaConfig(r=2, target_modules=names)):
            with pytest.raises(nm.pattern.OptionError, match=rf"does not support '{names[0]}', a {kind}. LoRA .*prompt methods"):
                get_peft_model(model, config)
        assert P.targets(model)[:1] == names and not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules())


@pytest.mark.slow
def test_every_method_of_peft_works_or_is_refused_in_words() -> None:
    """On a compressed model: either the layers are not touched, or it is LoRA, or the refusal names the layer."""
    words, others = [], []
    for kind, config_class in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items():
        if not hasattr(config_class, "target_modules") or kind in (peft.PeftType.LORA, peft.PeftType.XLORA):
            continue
        if not issubclass(peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(kind, object), peft.tuners.tuners_utils.BaseTuner):
            others.append(kind.value)
            continue
        options = {"feedforward_modules": []} if kind == peft.PeftType.IA3 else {"total_step": 10} if kind == peft.PeftType.ADALORA else {}
        model = base()
        with pytest.raises(nm.pattern.OptionError, match=rf"{kind.value} does not support 'model.layers.0.self_attn.q_proj'"):
            get_peft_model(model, config_class(target_modules=["q_proj"], **options))
        words.append(kind.value)
    assert len(words) > 15, (words, others)


def test_peft_methods_on_finished_layers() -> None:
    model = base(compressed=False)
    ia3 = get_peft_model(model, peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]))
    train(ia3, 3)
    after = logits(ia3)
    merged = ia3.merge_and_unload()
    assert close(logits(merged), after) and close(logits(nm.compress_(merged)), after), "IA3 scales rows or columns: still 2:4"
    loha = get_peft_model(base(compressed=False), peft.LoHaConfig(r=2, target_modules=["q_proj"]))
    train(loha, 2)
    for merge in (loha.merge_and_unload, loha.merge_adapter):
        with pytest.raises(
            nm.RecipeError, match=r"merging loha into the N:M weight of 'model.layers.0.self_attn.q_proj' would make it dense"
        ):
            merge()


def test_a_head_that_is_trained_along_and_biases(tmp_path: Path) -> None:
    lora = tuned(base("gpt2"), LoraConfig(r=4, target_modules="all-linear", bias="all", modules_to_save=["ln_f"], task_type="CAUSAL_LM"))
    after = logits(lora)
    lora.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(base("gpt2"), tmp_path)), after)
    first = layers_of(lora)["base_model.model.transformer.h.0.attn.c_attn"]
    assert first.bias.requires_grad and bool(first.bias.any())
    assert close(logits(P.absorb(lora)), after)


@pytest.mark.parametrize("compressed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_bfloat16_base_with_a_float32_adapter(compressed: bool) -> None:
    model = base(compressed=compressed).to(torch.bfloat16)
    weights = weights_of(model)
    lora = tuned(model)
    assert {p.dtype for p in lora.parameters() if p.requires_grad} == {torch.float32} and logits(lora).dtype == torch.bfloat16
    after = logits(lora)
    absorbed = P.absorb(lora)
    assert {p.dtype for p in absorbed.parameters()} == {torch.bfloat16} and same(weights_of(absorbed), weights)
    assert (logits(absorbed).float() - after.float()).abs().max() < 0.02
    exact = tuned(base(compressed=compressed).to(torch.bfloat16), masked())
    after = logits(exact)
    assert (logits(exact.merge_and_unload()).float() - after.float()).abs().max() < 0.02
    float32 = tuned(base(compressed=compressed))
    with torch.autocast("cpu", torch.bfloat16):
        y = float32(input_ids=IDS, labels=IDS)
        y.loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in float32.parameters() if p.requires_grad)


def test_generation_and_batches_of_several_adapters() -> None:
    lora = tuned(base())
    lora.add_adapter("b", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(IDS)}
    with torch.no_grad():
        mixed = lora(input_ids=IDS, adapter_names=["default", "b"]).logits
        assert close(mixed[0], logits(lora)[0])
        lora.set_adapter("b")
        assert close(mixed[1], logits(lora)[1])
        lora.set_adapter("default")
        tokens = lora.generate(input_ids=IDS, **options)
        after = logits(lora).argmax(-1)[:, -1]
    assert tokens.shape == (2, 16) and torch.equal(tokens[:, 12], after)
    absorbed = P.absorb(lora)
    assert torch.equal(absorbed.generate(input_ids=IDS, **options), tokens)


def test_copies_pickles_and_checkpointed_gradients() -> None:
    lora = tuned(base(), masked())
    after = logits(lora)
    assert torch.equal(logits(copy.deepcopy(lora)), after)
    assert torch.equal(logits(pickle.loads(pickle.dumps(lora))), after)
    lora.train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            lora.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            lora.enable_input_require_grads()
        lora(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append([p.grad.clone() for p in lora.parameters() if p.requires_grad])
        lora.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize(("name", "values"), [("llama", "int4"), ("gpt2", "int8")])
def test_lora_trains_on_integers_and_is_absorbed_but_not_merged(name: str, values: str, tmp_path: Path) -> None:
    def fresh() -> nn.Module:
        return nm.compress_(base(name), values=values)

    state = {key: t.clone() for key, t in fresh().state_dict().items()}
    model = get_peft_model(fresh(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    losses = train(model, 8)
    assert losses[-1] < losses[0] - 0.1 and {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    own = {key.removeprefix("base_model.model.").replace(".base_layer", ""): t for key, t in model.state_dict().items()}
    assert all(torch.equal(own[key], t) for key, t in state.items()), "the base is frozen"
    before, layer = logits(model), next(iter(layers_of(model).values()))
    for merge in (model.merge_and_unload, model.merge_adapter, layer.merge, lambda: P.merge_and_prune(model)):
        with pytest.raises(nm.RecipeError, match=f"the weight has {values} values.*rounded again.*absorb"):
            merge()
        assert torch.equal(logits(model), before) and not any(one.merged for one in layers_of(model).values())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(fresh(), tmp_path)), before)
    for odd in (tuned(fresh(), masked(), 2), tuned(fresh(), None, 2, use_dora=True)):
        changed = logits(odd)
        with pytest.raises(nm.RecipeError, match=f"changes the weight.*whose {values} values would have to be rounded again"):
            P.absorb(odd)
        assert torch.equal(logits(odd), changed)
    absorbed = P.absorb(model)
    torch.testing.assert_close(logits(absorbed), before, rtol=1e-4, atol=1e-4)
    assert all(m.weight.kind == values for m in absorbed.modules() if isinstance(m, nm.CompressedLinear))


@pytest.mark.parametrize("compressed", [True, False])
def test_columns_in_another_order_are_merged_and_absorbed(compressed: bool) -> None:
    torch.manual_seed(0)
    c, order = nm.ops.compress(torch.randn(16, 32), "2:4"), torch.randperm(32)
    model = nn.Sequential(nn.Linear(32, 32), nm.CompressedLinear(c, torch.zeros(16), columns=order))
    if not compressed:
        layer = nm.nn.swap.make_sparse_(nn.Linear(32, 16), "2:4")
        layer.finish(model[1].dense(), order)
        model[1] = layer
    x = torch.randn(5, 32)
    for config in (
        MaskedLoraConfig(r=2, target_modules=["1"], init_lora_weights=False),
        LoraConfig(r=2, target_modules=["1"], init_lora_weights=False),
    ):
        lora = get_peft_model(copy.deepcopy(model), config)
        want = lora(x).detach()
        assert not close(want, model(x).detach())
        if isinstance(config, MaskedLoraConfig):
            lora.merge_adapter()
            assert close(lora(x).detach(), want) and torch.equal(lora.base_model.model[1].base_layer.columns.int(), order.int())
            lora.unmerge_adapter()
        assert close(P.absorb(lora)(x).detach(), want)


def test_compress_or_decompress_under_an_adapter() -> None:
    lora = tuned(base(compressed=False))
    after = logits(lora)
    nm.compress_(lora)
    assert {type(m.base_layer) for m in layers_of(lora).values()} == {nm.CompressedLinear} and close(logits(lora), after)
    assert close(logits(P.absorb(lora)), after)
    lora = tuned(base(compressed=False))
    nm.densify_(lora)
    assert close(logits(lora.merge_and_unload()), after), "dense layers are merged as ever"


def test_sparsify_skips_existing_lora_adapters() -> None:
    lora = get_peft_model(llama(), LoraConfig(r=16, target_modules="all-linear"))
    handle = nm.sparsify_(lora, "asp:2:4")
    assert len(handle.layers) == 7 and all(name.endswith("_proj.base_layer") for name in handle.layers)
    assert not any("lora_" in entry.name for entry in handle.report.entries)
    with pytest.raises(nm.RecipeError, match="merging lora into the N:M weight of 'model.layers.0.self_attn.q_proj' would make it dense"):
        lora.merge_and_unload()
    headed = get_peft_model(
        nn.ModuleDict({"head": nn.Linear(64, 64), "body": nn.Linear(64, 64)}), LoraConfig(r=16, target_modules=["head", "body"])
    )
    assert list(nm.sparsify_(headed, "asp:2:4").layers) == ["base_model.model.body.base_layer"]


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("kind", moe.KINDS)
def test_lora_on_a_mixture_skips_experts(kind: str, compressed: bool) -> None:
    model = moe.tiny(kind)
    nm.sparsify_(model, "asp:2:4").finish(allow_unused=True)
    if compressed:
        nm.compress_(model)
    stack = "gate_up_proj"
    for options in (
        # peft 0.21 counts experts among all-linear for these two
        {"target_modules": "all-linear"} if kind in ("mixtral", "qwen3_moe") else {"target_parameters": [stack]},
        {"target_parameters": [f"mlp.experts.{stack}"]},
        {"target_parameters": [f"experts.{stack}"], "target_modules": ["q_proj"]},
    ):
        with pytest.raises(
            nm.pattern.OptionError, match=r"would parametrize '.*(gate_up|down)_proj'.*Experts with N:M weights do not support LoRA"
        ):
            get_peft_model(model, LoraConfig(r=2, **options))
        assert not any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules())
    ids = moe.tokens()[0]
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=P.targets(model), init_lora_weights=False)).eval()
    assert {name.rpartition(".")[2] for name in layers_of(lora)} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    with torch.no_grad():
        want = lora(ids).logits
        assert close(P.absorb(lora)(ids).logits, want)


@pytest.mark.slow
def test_mixed_adapters() -> None:
    model = peft.PeftMixedModel(base(compressed=False), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), "a")
    assert layers_of(model)
    with pytest.raises(nm.RecipeError, match="would lose"):
        model.merge_and_unload()


@pytest.mark.slow
def test_compiled_without_a_graph_break() -> None:
    for config in (None, masked()):
        lora = tuned(base(), config)
        want = logits(lora)
        torch._dynamo.reset()
        assert close(logits(torch.compile(lora, backend="eager", fullgraph=True)), want)
        gradients = []
        for model in (lora.train(), torch.compile(lora, backend="aot_eager", fullgraph=True)):
            model(input_ids=IDS, labels=IDS).loss.backward()
            gradients.append([p.grad.clone() for p in lora.parameters() if p.requires_grad])
            lora.zero_grad()
        assert all(close(a, b) for a, b in zip(*gradients, strict=True))


def split_over_ranks() -> dict[str, Any]:
    """What training on two ranks leaves, how far it is from one process, and what is said of what cannot be done there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def built(config: Any, compressed: bool) -> Any:
        model = base(compressed=compressed)
        torch.manual_seed(1)
        return get_peft_model(model, config)

    def trained(model: nn.Module) -> list[Tensor]:
        train(model, 3)
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters() if p.requires_grad]

    found: dict[str, Any] = {}
    for compressed in (True, False):
        for config in (LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"), masked()):
            want = trained(built(config, compressed))
            sharded = built(config, compressed)
            for layer in sharded.base_model.model.model.layers:
                fully_shard(layer)
            fully_shard(sharded)
            for model in (nn.parallel.DistributedDataParallel(built(config, compressed)), sharded):
                far = max(float((a - b).abs().max()) for a, b in zip(trained(model), want, strict=True))
                found[f"{type(model).__name__} {compressed} {type(config).__name__}"] = far
    found["merge"], found["absorb"] = raised(sharded.merge_adapter), raised(lambda: P.absorb(sharded))
    model = nn.Sequential(nn.Linear(32, 32))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    nm.sparsify_(model, "asp:2:4").finish(allow_unused=True)
    found["finished"] = raised(lambda: get_peft_model(model, LoraConfig(r=2, target_modules=["0"])))
    nm.compress_(model)
    found["compressed"] = raised(lambda: get_peft_model(model, LoraConfig(r=2, target_modules=["0"])))
    return found


@pytest.mark.slow
@needs_gloo
def test_adapters_on_two_ranks(tmp_path: Path) -> None:
    found = on_ranks(2, split_over_ranks, tmp_path)[0]
    for what in ("merge", "absorb"):
        assert "sharded. Save the adapter (model.save_pretrained) and load it with the base model in one process" in found.pop(what)
    for what in ("finished", "compressed"):
        assert "layer '0' is split over ranks" in found.pop(what)
    assert len(found) == 8 and max(found.values()) < 1e-6, found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["svd", "ties_svd", "linear", "ties", "dare_linear"])
def test_weighted_sums_of_adapters_leave_the_weights_alone(how: str) -> None:
    for config in (LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), masked()):
        lora = tuned(base(compressed=False), config, steps=2)
        weights = weights_of(lora)
        lora.add_adapter("b", dataclasses.replace(config, init_lora_weights=False))
        lora.add_weighted_adapter(["default", "b"], [0.5, 0.5], "c", combination_type=how, density=0.5)
        lora.set_adapter("c")
        after = logits(lora)
        assert same(weights_of(lora), weights) and not close(after, logits(base()))
        assert close(logits(P.absorb(copy.deepcopy(lora))), after)
        if config.__class__ is MaskedLoraConfig:
            assert close(logits(lora.merge_and_unload()), after)
        else:
            with pytest.raises(nm.RecipeError, match="would lose"):
                lora.merge_and_unload()


@pytest.mark.slow
def test_other_peft_features_with_lora(tmp_path: Path) -> None:
    lora = tuned(base())
    after, before = logits(lora), logits(base())
    lora.save_pretrained(tmp_path)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}

    swapped = get_peft_model(base(), LoraConfig(**options, init_lora_weights=False))
    peft.utils.hotswap.hotswap_adapter(swapped, tmp_path, "default", torch_device="cpu")
    assert torch.equal(logits(swapped), after)

    by_variance = get_peft_model(base(), LoraConfig(**options, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)))
    peft.initialize_lora_eva_weights(by_variance, [{"input_ids": IDS}] * 3, show_progress_bar=False)
    losses = train(by_variance, 5)
    assert losses[-1] < losses[0] - 0.1 and same(weights_of(by_variance), weights_of(base()))

    activated = logits(get_peft_model(base(), LoraConfig(**options, init_lora_weights=False, alora_invocation_tokens=[7, 14])))
    assert torch.equal(activated[0, 0], before[0, 0]) and not close(activated[0, 1:], before[0, 1:]), "from the second token on"

    model = base()
    model.config.use_cache = False
    experts = {"0": str(tmp_path), "1": str(tmp_path)}
    mixed = get_peft_model(model, peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters=experts))
    assert close(logits(mixed), after), "a mixture of one adapter with itself"

    prepared = peft.prepare_model_for_kbit_training(base().to(torch.bfloat16))
    assert {m.values.dtype for m in prepared.modules() if isinstance(m, nm.CompressedLinear)} == {torch.bfloat16}
    ready = get_peft_model(prepared, LoraConfig(**options)).train()
    with pytest.raises(nm.DtypeError, match=r"x is torch.float32, the weight torch.bfloat16; cast one of them, or use torch.autocast"):
        ready(input_ids=IDS)  # it makes everything else float32
    with torch.autocast("cpu", torch.bfloat16):
        ready(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in ready.parameters() if p.requires_grad)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_heads_of_integers_are_adapted_and_embeddings_are_constants() -> None:
    def model() -> nn.Module:
        return nm.compress_(gpt2(), values="int8", dense=["lm_head"])  # and the embedding that is tied to it

    lora = get_peft_model(model(), LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    losses = train(lora, 5)
    assert losses[-1] < losses[0] and type(lora.base_model.model.lm_head) is SparseLoraLinear
    for options, match in (
        ({"target_modules": ["wte"]}, "LORA does not support 'transformer.wte', a CompressedEmbedding"),
        ({"modules_to_save": ["wte"]}, "includes 'transformer.wte', an embedding of integers, which are constants"),
        ({"trainable_token_indices": [1]}, "would train rows of 'transformer.wte', an embedding of integers"),
    ):
        with pytest.raises(nm.NMError, match=match):
            get_peft_model(model(), LoraConfig(**{"r": 4, "target_modules": ["lm_head"], "task_type": "CAUSAL_LM", **options}))
