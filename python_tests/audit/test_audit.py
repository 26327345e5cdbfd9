"""nm.audit on every kind of model: who is eligible, what is predicted, what is measured."""

import json
from dataclasses import asdict, fields

import pytest
import torch
from torch import nn

import nmkernels as nm
from examples.train_gpt.model import GPT, GPTConfig
from nmkernels.audit import pieces as measure
from nmkernels.audit.rules import speedup
from nmkernels.recipes.registry import find
from python_tests.audit.layer_zoo import Zoo

H200 = {"device": "H200", "dtype": "bfloat16"}


def gpt(device="cpu", **sizes):
    with torch.device(device):
        return GPT(GPTConfig(**{"width": 64, "layers": 2, "heads": 2, "context": 32, **sizes}))


def by_name(found):
    return {layer.name: layer for layer in found.layers}


def test_the_reasons_are_those_of_the_report():
    model = Zoo()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = by_name(nm.audit(model, 1024, "srste:2:4", **H200))
    assert [name for name, layer in found.items() if layer.sparse] == ["taken", "conv"]
    assert found["conv"].shape == (192, 64) and found["conv"].kind == "Conv1D"
    assert type(model.taken) is nn.Linear and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    linear = [e for e in nm.sparsify_(model, "srste:2:4").report.entries if e.linear]
    assert {e.name: (e.reason, e.sparse) for e in linear} == {name: (layer.why, layer.sparse) for name, layer in found.items()}
    dense = [layer for layer in found.values() if not layer.sparse and layer.tokens]
    assert all(speedup(layer.step) == speedup(layer.inference) == 1.0 and not layer.pattern for layer in dense)


def test_experts_need_experts_per_token():
    one = by_name(nm.audit(Zoo(), 1024, **H200))["experts.up"]
    assert one.tokens == 0 and not one.step and "rows=" in one.note
    some = by_name(nm.audit(Zoo(), 1024, rows={"experts": 0.25}, **H200))["experts.up"]
    assert (some.tokens, some.times) == (256, 4) and some.step


def test_the_filter_and_the_recipe_have_their_say():
    found = by_name(nm.audit(gpt(), 64, "srste:2:4", filter_fn=lambda module, name: "mlp" in name, **H200))
    assert {layer.why for name, layer in found.items() if "attn" in name} == {"not chosen by the filter"}
    assert by_name(nm.audit({"fc": (50, 64)}, 64, "fst", **H200))["fc"].why.startswith("out_features=50 is not a multiple of M=4")
    wide = by_name(nm.audit({"fc": (64, 1024)}, 64, "slope:2:4(max_aspect=4)", **H200))["fc"]
    assert wide.why == "its longer side is 16.0 times its shorter one" and not wide.sparse
    with pytest.raises(nm.ShapeError, match="leave it out|Leave it out"):
        nm.audit(Zoo(), filter_fn=lambda module, name: name == "odd", **H200)


def test_predictions_do_not_include_fp8():
    said = [any("FP8" in note for note in nm.audit(gpt(), 64, recipe, **H200).notes) for recipe in ("sste:2:4(fp8='paper')", "sste:2:4")]
    assert said == [True, False]
    assert not any("FP8" in note for note in nm.audit(gpt(), 64, **H200).notes)  # inference
    model = gpt()
    handle = nm.sparsify_(model, "sste:2:4(fp8='hybrid')")
    handle.attach(torch.optim.AdamW(model.parameters()))
    assert any("FP8" in note for note in nm.audit(model, 64, **H200).notes)


def test_equal_layers_are_one():
    found = nm.audit(gpt(layers=3), 64, **H200)
    first = found.layers[0]
    assert first.name == "blocks.*.attn.qkv" and first.times == 3 and first.names[2] == "blocks.2.attn.qkv"
    assert [len(layer.names) for layer in found.layers] == [3, 3, 3, 3, 1]
    assert sum(found.share(layer) for layer in found.layers) == pytest.approx(1)
    mixed = gpt(layers=3)
    mixed.blocks[1].mlp.fc.weight.requires_grad_(False)
    names = [layer.names for layer in nm.audit(mixed, 64, **H200).layers if "fc" in layer.name]
    assert names == [("blocks.0.mlp.fc", "blocks.2.mlp.fc"), ("blocks.1.mlp.fc",)]


def test_totals_are_amdahls():
    found = nm.audit({"fc": (8192, 8192), "lm_head": (8192, 8192)}, 8192, "srste:2:4", **H200)
    fc, _ = found.layers
    assert found.dense_share == pytest.approx(0.5)
    assert found.step == pytest.approx(2 / (1 + 1 / speedup(fc.step)))
    assert found.inference == pytest.approx(2 / (1 + 1 / speedup(fc.inference)))
    low, high = found.step_range
    assert low < found.step < high
    assert found.run == pytest.approx(found.step) and found.steps == 1.0
    rest = nm.audit({"fc": (8192, 8192)}, 8192, "srste:2:4", other=2 * 8192 * 8192, **H200)
    assert rest.inference == pytest.approx(found.inference, rel=1e-3) and rest.dense_share == pytest.approx(0.5, rel=1e-2)
    assert "and the rest" in str(rest) and "in layers that stay dense and in the rest" in str(rest)
    assert rest.share(rest.layers[0]) == pytest.approx(1 - rest.dense_share)


def test_a_mask_that_the_optimizer_holds_costs_no_pass_over_the_weight():
    """ASP multiplies the weight as it is; so it neither gains nor loses in a step, and has nothing to pack."""
    model = torch.nn.Sequential(torch.nn.Linear(4096, 4096, device="meta"))
    model[0].to_empty(device="cpu")
    by_name = nm.audit(model, 4096, "asp:2:4", **H200)
    nm.sparsify_(model, "asp:2:4")
    for found in (by_name, nm.audit(model, 4096, **H200)):
        (layer,) = found.layers
        assert [piece.name for piece in layer.step] == ["fprop", "dgrad", "wgrad"] and speedup(layer.step) == 1.0
        assert "packed" not in str(found) and found.inference > 1


def test_a_recipe_with_dense_steps():
    found = nm.audit({"fc": (4096, 4096)}, 8192, "fst:2:4(total_steps=600)", **H200)
    assert found.steps == pytest.approx(5 / 6) and found.recipe == "fst:2:4(total_steps=600)"
    assert found.run == pytest.approx(1 / (5 / 6 / found.step + 1 / 6))
    assert found.inference == 1.0, "it leaves a dense model"
    assert "83 % of the recipe's steps are sparse" in str(found)
    assert nm.audit({"fc": (4096, 4096)}, 8192, "fst:2:4(end=None)", **H200).inference > 1.2


@pytest.mark.parametrize("name", nm.recipes.names())
def test_every_recipe_is_understood(name):
    found = nm.audit({"a.fc": (2048, 1024), "a.down": (1024, 2048)}, 8192, f"{name}:2:4", **H200)
    dense = {"dense", "act24", "maskllm", "proxsparse"}
    assert (found.steps == 0) == (name in dense) and (found.step == 1.0) == (name in dense | {"asp"})
    assert ("so steps gain nothing" in str(found)) == (name in dense)
    packs = name == "layerwise" or "packed" in {f.name for f in fields(find(name))}
    assert (found.step > 1) == packs and (packs or not found.layers[0].sparse or found.step <= 1)
    assert (found.inference > 1.2) == (name not in {"dense", "act24", "fst", "slope"}), "slope leaves an adapter"


def test_meta_models_and_shapes_are_the_same():
    meta = nm.audit(gpt("meta"), 64, **H200)
    assert meta.layers == nm.audit(gpt(), 64, **H200).layers
    shapes = {name: tuple(m.weight.shape) for name, m in gpt("meta").named_modules() if isinstance(m, nn.Linear)}
    assert [layer.step for layer in nm.audit(shapes, 64, **H200).layers] == [layer.step for layer in meta.layers]


def test_sparse_models_have_their_own_rules():
    model = gpt(width=128)
    dense = nm.audit(model, 4096, "fst:2:4(end=None)", **H200)
    handle = nm.sparsify_(model, "fst:2:4(end=None, packed=auto)")
    found, given = nm.audit(model, 4096, **H200), nm.audit(handle, 4096, **H200)
    steps = [[layer.step for layer in each.layers] for each in (dense, found, given)]
    assert steps[0] == steps[1] == steps[2]
    assert given.recipe == dense.recipe == "fst:2:4(end=None)" and found.recipe == ""
    assert found.layers[0].sparse and found.layers[0].why == "2:4"
    with pytest.raises(nm.RecipeError, match="sparse already"):
        nm.audit(model, filter_fn=lambda module, name: True, **H200)
    model = gpt()
    handle = nm.sparsify_(model, "srste:2:4", lambda module, name: "mlp" in name)
    assert by_name(nm.audit(model, 64, **H200))["blocks.*.attn.qkv"].why == "left dense"
    assert by_name(nm.audit(handle, 64, **H200))["blocks.*.attn.qkv"].why == "not chosen by the filter"


def test_compressed_models_only_infer():
    model = gpt(width=128)
    nm.sparsify_(model, "srste:2:4").finish(allow_unused=True)
    finished = nm.audit(model, 16, **H200)
    assert all(not layer.step for layer in finished.layers if layer.sparse)
    nm.compress_(model)
    found = nm.audit(model, 16, **H200)
    assert found.step is None and found.inference is not None and found.run is None
    assert not any(layer.step for layer in found.layers), "nor are its dense layers trained"
    assert found.layers[0].kind == "CompressedLinear" and found.layers[0].sparse and found.layers[0].why == "2:4"
    assert "Inference with 16 tokens" in str(found) and found.as_dict()["step"] is None
    assert nm.audit(model, 64, measure=False, device="H200").layers[0].dtype == "float32"


def test_frozen_weights_have_no_wgrad():
    model = gpt().requires_grad_(False)
    pieces = [p.name for layer in nm.audit(model, 512, **H200).layers for p in layer.step]
    assert "wgrad" not in pieces and "estimate" not in pieces and "fprop" in pieces


def test_json_has_everything():
    found = nm.audit(gpt(), 64, "srste:2:4", timer=lambda task: 1e-3, device="cpu")
    read = json.loads(json.dumps(found.as_dict()))
    assert read["tokens"] == 64 and read["recipe"] == "srste:2:4" and len(read["layers"]) == 5
    fprop = read["layers"][0]["measured_step"]["pieces"][0]
    assert fprop == {"name": "fprop", "dense": 1e-3, "used": 1e-3, "form": "dense"}
    assert read["measured_step"] == found.measured_step
    assert read["layers"][0]["advice"] == [asdict(each) for each in found.layers[0].advice]


def test_names_of_devices(monkeypatch):
    for unknown in ("quux", "H200 PCIe", *(["cuda"] if not torch.cuda.is_available() else [])):
        with pytest.raises(nm.RecipeError, match="A100, H100, H200"):
            nm.audit(gpt(), device=unknown)
    if not torch.cuda.is_available():
        with pytest.raises(nm.RecipeError, match="'cuda:0' is a GPU of this machine, and torch can use none here"):
            nm.audit(gpt(), device="cuda:0")
    assert measure.find_device("h200", torch.device("cpu"))[0].name == "H200 SXM"
    assert measure.find_device("NVIDIA H100 80GB HBM3", torch.device("cpu"))[0].name == "H100 SXM"
    if not torch.cuda.is_available():
        assert measure.find_device("A100", torch.device("cpu"))[1] is None, "not here, so nothing is measured"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    assert measure.find_device("H200", torch.device("cpu"))[1] == torch.device("cuda")
    assert measure.find_device("cuda", torch.device("cpu"))[0].name == "H200 SXM"
    assert measure.find_device("A100", torch.device("cpu"))[1] is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA L40S")
    assert measure.find_device("cuda:0", torch.device("cpu")) == ("NVIDIA L40S", torch.device("cuda:0")), "to be measured"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"tokens": 0}, "tokens=0 must be a whole number"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"other": -1.0}, "other=-1.0 must be a finite number"),
        ({"budget": float("inf")}, "budget=inf"),
        ({"dtype": "quux"}, "dtype='quux'"),
        ({"recipe": "quux"}, "no recipe is called 'quux'"),
        ({"rows": {"quux": 2}}, "rows names 'quux'"),
        ({"model": nn.ReLU()}, "audit: the model has no linear layer"),
    ],
)
def test_bad_arguments_are_refused(words, match):
    with pytest.raises(nm.RecipeError, match=match):
        nm.audit(**{"model": gpt(), "device": "H200", **words})


def test_an_adapter_costs_its_two_gemms():
    layer = nm.audit({"fc": (4096, 4096)}, 8192, "slope:2:4(rank=64)", **H200).layers[0]
    fprop, adapter = layer.inference
    assert adapter.name == "adapter" and adapter.dense == 0
    assert adapter.used == pytest.approx(2 * 8192 * (4096 + 64) * 2 / (0.85 * 4.8e12), rel=0.3)
    assert speedup(layer.inference) < speedup((fprop,)) and "adapter" not in [p.name for p in layer.step]
    model = nn.Sequential(nn.Linear(64, 128))
    handle = nm.sparsify_(model, nm.recipes.SLoPe("2:4", total_steps=10, rank=4))
    assert [p.name for p in nm.audit(model, 32, **H200).layers[0].inference] == ["fprop", "adapter"]
    handle.finish(allow_unused=True)
    nm.compress_(model)
    found = nm.audit(model, 32, device="cpu", timer=lambda task: 1e-3)
    assert [p.name for p in found.layers[0].inference] == ["fprop", "adapter"] == [p.name for p in found.layers[0].measured_inference]
