"""``prune_``: the same as pruning layer after layer by hand, whatever the model is like; and a model that is untouched if it fails."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import nmkernels as nm
from nmkernels import ops
from nmkernels.nn import SparseLinear
from nmkernels.pattern import Pattern
from nmkernels.prune import OneShot, SparseGPT, prune_
from nmkernels.prune.data import call
from nmkernels.prune.solve import solve
from python_tests import moe
from python_tests.prune.families import built, inputs_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 2 tokens per input feature")
P = Pattern("2:4")
LINEAR = SparseGPT(damping=0.01)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def rows(count=3, *shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*(shape or (40, 32)), generator=g) for _ in range(count)]


def weights(model):
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different


@torch.no_grad()
def prune_by_hand(model, steps, data, method, sequential=True, call=lambda model, batch: model(batch)):
    """Groups of layers, one after the other, on their inputs in whole passes; without ``sequential``, on those of the dense model."""

    def run():
        for batch in data:
            call(model, batch)

    dense = inputs_of(model, run, [name for names in steps for name in names])
    for names in steps:
        seen = inputs_of(model, run, names) if sequential else dense
        for name in names:
            layer, h, tokens = model.get_submodule(name), 0, 0
            h = torch.zeros(layer.in_features, layer.in_features)
            for x in seen[name]:
                x = x.reshape(-1, x.shape[-1])
                h.addmm_(x.t(), x)
                tokens += len(x)
            layer.weight.copy_(solve(method, layer.weight, h / tokens, tokens, P)[0].dense())


# ---- the same as by hand


@pytest.mark.parametrize("sequential", [True, False])
def test_a_model_without_blocks(sequential):
    model, other = mlp(), mlp()
    handle = prune_(model, P, rows(), method=LINEAR, sequential=sequential)
    prune_by_hand(other, [["0"], ["3"], ["5"]], rows(), LINEAR, sequential)
    assert_same(weights(model), weights(other))
    assert list(handle.report.pruned) == ["0", "3", "5"] and handle.report.pruned["5"].tokens == 120
    assert "pruned by sparsegpt(damping=0.01) on 3 batches" in str(handle.report)


@pytest.mark.parametrize("sequential", [True, False])
def test_llama_block_by_block(sequential):
    (model, data), (other, _) = built("llama"), built("llama")
    prune_(model, P, data, method=LINEAR, sequential=sequential)
    names = {kind: [n for n, m in other.named_modules() if isinstance(m, nn.Linear) and f"layers.{kind}." in n] for kind in range(3)}
    call = lambda model, batch: model(**batch, use_cache=False)  # noqa: E731
    prune_by_hand(other, list(names.values()), data, LINEAR, sequential, call)
    assert_same(weights(model), weights(other))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Layer(nn.Module):
    def __init__(self, width, inplace=False):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp, self.inplace = nn.Sequential(nn.Linear(width, 64), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(64, width)), inplace

    def forward(self, x):
        if self.inplace:
            x += self.attention(self.norm(x))
            x += self.mlp(x)
            return x
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class ViT(nn.Module):
    """As torchvision's: blocks in an nn.Sequential, a convolution as stem, and a head."""

    def __init__(self, depth=3, inplace=False, width=32, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.stem, self.token = nn.Conv2d(4, width, 2, 2), nn.Parameter(torch.zeros(1, 1, width))
        self.layers = nn.Sequential(*(Layer(width, inplace) for _ in range(depth)))
        self.inplace, self.tail, self.head = inplace, nn.Linear(width, 48), nn.Linear(48, 16)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        if self.inplace:
            for layer in self.layers:
                x = layer(x)
                x *= 1.1  # into the block's own output
        else:
            x = self.layers(x)
        return self.head(self.tail(x[:, 0]))


def images(count=3):
    return rows(count, 2, 4, 8, 8)


BLOCKS = ["attention.qkv", "attention.out", "mlp.0", "mlp.3"]


@pytest.mark.parametrize("inplace", [False, True])
def test_blocks_in_a_sequential_and_blocks_that_write_into_what_they_get(inplace, caplog):
    caplog.set_level("INFO", "nmkernels.prune")
    model, other = ViT(inplace=inplace).train(), ViT(inplace=inplace).eval()
    seen = []
    prune_(model, P, images(), lambda m, n: n != "stem", method=LINEAR, progress=lambda done, total, what: seen.append((done, total, what)))
    steps = [[f"layers.{i}.{name}" for name in BLOCKS] for i in range(3)]
    prune_by_hand(other, [*steps, ["tail"], ["head"]], images(), LINEAR)
    assert_same(weights(model), weights(other))
    assert seen == [(i, 5, name) for i, name in enumerate(("layers.0", "layers.1", "layers.2", "tail", "head"))] + [(5, 5, "done")]
    assert model.training and all(m.training for m in model.modules())
    assert "layers.2 (3 of 5" in caplog.text and "earlier blocks" not in caplog.text


def test_convolutions_of_a_stem_are_pruned():
    model = ViT()
    handle = prune_(model, P, images(), lambda m, n: n in ("stem", "layers.1.mlp.0"), method="wanda")
    assert list(handle.report.pruned) == [*handle.layers] == ["stem", "layers.1.mlp.0"]
    assert handle.report.pruned["stem"].tokens == 3 * 2 * 16
    assert ops.is_nm(model.stem.weight.detach().permute(0, 2, 3, 1).reshape(32, -1), P)


def test_inference_mode():
    model, other = mlp(), mlp()
    with torch.inference_mode():
        handle = prune_(model, P, rows(), method=LINEAR)
    prune_(other, P, rows(), method=LINEAR)
    assert_same(weights(model), weights(other))
    handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model(rows()[0]).sum().backward()


def test_a_compiled_model_runs_without_its_graphs():
    model, other = ViT(), ViT()
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    prune_(torch.compile(model, backend=backend), P, images(), method=LINEAR)
    prune_(other, P, images(), method=LINEAR)
    assert_same(weights(model), weights(other))
    assert not calls


# ---- what is pruned


class Rare(nn.Module):
    """Only later batches reach ``rare``; nothing reaches ``spare``, and ``direct`` is read without being called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.rare, self.spare, self.direct = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        y = F.linear(self.body(x), self.direct.weight)
        return self.rare(y) if len(x) < 40 else y


def test_layers_that_are_not_called_are_pruned_by_magnitude():
    model, other, data = Rare(), Rare(), [*rows(2), *rows(4, 30, 32)]
    handle = prune_(model, P, data, method=LINEAR)
    pruned = handle.report.pruned
    for name in ("spare", "direct"):
        weight = other.get_submodule(name).weight
        assert torch.equal(model.get_submodule(name).weight, weight * ops.mask(weight, P))
        assert pruned[name].note == "magnitude: no tokens reached it" and pruned[name].tokens == 0 and pruned[name].error is None
    assert pruned["rare"].tokens == 120 and pruned["rare"].error < pruned["rare"].wanda


def test_filters():
    model, data = built("llama")
    before = weights(model)
    handle = prune_(model, P, data, lambda m, n: n in ("model.layers.1.mlp.up_proj", "lm_head"), method="wanda")
    changed = {key for key, value in weights(model).items() if not torch.equal(value, before[key])}
    assert changed == {"model.layers.1.mlp.up_proj.weight", "lm_head.weight"} == {f"{name}.weight" for name in handle.report.pruned}
    with pytest.raises(nm.RecipeError, match="no layer of the model can be made 2:4 sparse"):
        prune_(mlp(), P, rows(), lambda m, n: False)


def test_sparse_linear_layers():
    torch.manual_seed(0)
    model = nn.Sequential(SparseLinear(32, 64, pattern="2:4"), nn.GELU(), nn.Linear(64, 32))
    before = weights(model)
    with pytest.raises(ZeroDivisionError):
        prune_(model, P, rows(), progress=lambda done, total, what: 1 / (1 - done))
    out = model(rows()[0])
    assert_same(before, weights(model))
    handle = prune_(model, P, rows(), method="sparsegpt")
    want = F.linear(F.gelu(F.linear(rows()[0], model[0].weight, model[0].bias)), model[2].weight, model[2].bias)
    assert torch.allclose(model(rows()[0]), want, atol=1e-5) and not torch.allclose(out, want, atol=1e-2)
    assert set(handle.layers) == {"0", "2"} and ops.is_nm(model[0].weight.detach(), P)


def test_experts():
    data = [torch.randn(60, 16, dtype=torch.float64) for _ in range(2)]
    stacked, apart = moe.mixture(), moe.mixture(apart=True)
    call = lambda model, x: model(x, 2)  # of three experts one gets no token  # noqa: E731
    handle = prune_(stacked, P, data, method=LINEAR, forward=call)
    other = prune_(apart, P, data, method=LINEAR, sequential=False, forward=call)
    for e in range(3):
        for name, own in (("gate_up_proj", "first"), ("down_proj", "last")):
            got, want = handle.report.pruned[f"experts.{name}[{e}]"], other.report.pruned[f"experts.{own}.{e}"]
            assert got.tokens == want.tokens == (120 if e < 2 else 0) and got.note == want.note
            assert torch.allclose(stacked.experts.get_parameter(name)[e], apart.experts.get_submodule(own)[e].weight, rtol=1e-7, atol=1e-9)
    assert handle.report.pruned["experts.down_proj[2]"].note == "magnitude: no tokens reached it"


def test_experts_with_few_tokens_are_listed():
    model, data = moe.tiny("qwen3_moe", layers=2).eval(), moe.tokens(2)
    with pytest.warns(UserWarning, match="got fewer than 2 tokens per input feature"):
        handle = prune_(model, P, [{"input_ids": ids} for ids in data])
    assert all(row.error is None or row.error <= row.wanda for row in handle.report.pruned.values())
    assert len(handle.report.pruned) == 2 * (4 + 2 * moe.EXPERTS)


# ---- data


def test_forms_of_data():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    results = []
    _, data = built("llama")
    ids = [batch["input_ids"] for batch in data]
    forms = (
        data,
        ids,
        [(x,) for x in ids],
        [[x] for x in ids],
        (batch for batch in data),
        torch.utils.data.DataLoader(torch.cat(ids), batch_size=2),
        [transformers.BatchEncoding({"input_ids": x}) for x in ids],
        torch.stack(ids),
        [x.tolist() for x in ids],
        [{"input_ids": x.tolist(), "text": ["one", "two"]} for x in ids],
        [x.numpy() for x in ids],
        # a dataset, whose rows are samples
        [{"input_ids": row, "id": 3, "text": "one"} for x in ids for row in x.tolist()],
        [{"input_ids": row} for x in ids for row in x],
        [row for x in ids for row in x],
    )
    for form in forms:
        model, _ = built("llama")
        handle = prune_(model, P, form, method="wanda", forward=without_id)
        results.append((weights(model), handle.report.remark.split()[-1]))
    for got, _ in results[1:]:
        assert got.keys() == results[0][0].keys() and all(torch.equal(got[key] == 0, value == 0) for key, value in results[0][0].items())
    assert results[6][1] == results[0][1], "the digest is that of the tensors"

    def reused():
        buffer = torch.empty_like(ids[0])
        for x in ids:
            yield buffer.copy_(x)

    model, _ = built("llama")
    prune_(model, P, reused(), method="wanda")
    assert_same(results[0][0], weights(model))


def without_id(model, batch):
    return call(model, {k: v for k, v in batch.items() if k != "id"} if isinstance(batch, dict) else batch)


UNUSABLE = {
    "none": ([], "data has no batch"),
    "an empty iterator": (iter(()), "data has no batch"),
    "one mapping": ({"input": rows()[0]}, r"data is a single batch, input float32 \(40, 32\); pass \[data\]"),
    "one tensor": (rows()[0], r"data is a single batch, float32 \(40, 32\); pass \[data\], or its parts, data.split"),
    "one array": (rows()[0].numpy(), "data is a single batch"),
    "a path": ("calibration.txt", "data is the text 'calibration.txt', and must be batches of what the model takes: tokenized text"),
    "None": (None, "data is None, and must be batches"),
    "a number": (3, "data is a int, and must be batches"),
    "texts": (["hello", "world"], "batch 1 of data is text. Such as .tokenizer"),
    "lists of texts": ([["hello", "world"]], "batch 1 of data is text"),
    "text alone": ([{"text": "hello", "label": "x"}], "batch 1 of data has text only .'text', 'label'"),
    "rows of two lengths": ([[[1, 2], [3]]], "batch 1 of data has a list that is not a matrix .* with an attention_mask"),
    "another width": (
        [torch.ones(4, 7)],
        r"the model cannot run batch 1 of data, float32 \(4, 7\): RuntimeError: mat1 and mat2 .* forward=lambda",
    ),
    "a later one": ([torch.ones(4, 32), {"y": torch.ones(4, 32)}], r"cannot run batch 2 of data, y float32 \(4, 32\): TypeError: .*'y'"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_data_that_cannot_be_used(what):
    data, said = UNUSABLE[what]
    model = mlp()
    with pytest.raises(nm.RecipeError, match=said):
        prune_(model, P, data)
    assert_same(weights(model), weights(mlp()))


def test_errors_of_the_user_s_forward_are_not_changed():
    def forward(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="^mine$"):
        prune_(mlp(), P, rows(), forward=forward)


@pytest.mark.parametrize(
    ("key", "value", "said"), [("weight", math.nan, "NaN or infinite"), ("weight", math.inf, "NaN or infinite"), ("bias", math.nan, "NaN;")]
)
def test_a_weight_that_is_not_finite_is_named(key, value, said):
    model = mlp()
    model[3].get_parameter(key).data.view(-1)[3] = value
    with pytest.raises(nm.RecipeError, match=f"the weight '3.{key}' has 1 elements that are {said}"):
        prune_(model, P, rows())


def test_padding_of_a_tuple_is_left_out():
    ids = [batch["input_ids"] for batch in built("llama")[1]]
    mask = torch.ones_like(ids[0])
    mask[:, 7:] = 0
    found = []
    for data in ([(x, mask) for x in ids], [{"input_ids": x, "attention_mask": mask} for x in ids]):
        model, _ = built("llama")
        report = prune_(model, P, data, method="wanda").report
        found.append((weights(model), {row.tokens for row in report.pruned.values()}))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == {3 * 2 * 7}


def test_names_of_blocks():
    (model, data), (other, _), (third, _) = (built("llama") for _ in range(3))
    prune_(model, P, data, method="wanda")
    prune_(other, P, data, method="wanda", blocks=["model.layers"])
    assert_same(weights(model), weights(other))
    seen = []
    prune_(third, P, data, method="wanda", blocks=[], progress=lambda done, total, what: seen.append(what))
    assert len(seen) == 3 * 4 + 1 and not all(
        torch.equal(a, b) for a, b in zip(weights(model).values(), weights(third).values(), strict=True)
    )
    for names in (["model.layer"], ["model.layers.0.self_attn.q_proj"]):
        with pytest.raises(nm.RecipeError, match=f"no module '{names[0]}' with children"):
            prune_(built("llama")[0], P, data, blocks=names)


# ---- errors


def state_of(model):
    return {
        name: (m.training, set(m.__dict__), m.__dict__.get("forward"), len(m._forward_hooks), len(m._forward_pre_hooks), type(m))
        for name, m in model.named_modules()
    } | {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}


class Failing(OneShot):
    left: int = 0
    error: BaseException = ZeroDivisionError()

    def solve(self, w, h, pattern):
        Failing.left -= 1
        if Failing.left < 0:
            raise Failing.error
        mask = self.mask(w, pattern)
        return w * mask, mask


@pytest.mark.parametrize("where", ["forward", "solve", "progress", "load"])
@pytest.mark.parametrize(("kept", "error"), [(False, ZeroDivisionError()), (True, KeyboardInterrupt())], ids=["memory", "folder"])
def test_the_model_is_untouched_after_an_error(tmp_path, where, kept, error, monkeypatch):
    from nmkernels.prune.results import Results

    model = ViT().train()
    model.layers[0].eval()
    model.tail.bias.requires_grad_(False)
    own = model.layers[1].forward
    model.layers[1].forward = lambda x: own(x)
    model.layers[0].register_forward_hook(lambda module, args, output: None)
    before, state = weights(model), state_of(model)
    load = Results.load
    for moment in (0, 4, 9):
        left = moment

        def count(*args):
            nonlocal left
            left -= 1
            if left < 0:
                raise error

        options = {"method": "magnitude"}
        if where == "forward":
            options["forward"] = lambda model, batch: (count(), model(batch))[1]
        elif where == "progress":
            options["progress"] = lambda done, total, what: count()
            left = min(moment, 4)
        elif where == "solve":
            Failing.left, Failing.error, options["method"] = moment, error, Failing()
        else:
            monkeypatch.setattr(Results, "load", lambda *args: (count(), load(*args))[1])
        with pytest.raises(type(error)):
            prune_(model, P, images(), folder=tmp_path / str(moment) if kept else None, **options)
        assert_same(before, weights(model))
        assert state_of(model) == state
        assert torch.is_autocast_cache_enabled() and torch.is_grad_enabled()


def test_what_is_refused():
    model = mlp()
    prune_(model, P, rows(), method="magnitude").finish(allow_unused=True)
    nm.compress_(model)
    with pytest.raises(nm.RecipeError, match="it is compressed already"):
        prune_(model, P, rows())
    model = mlp()
    nm.sparsify_(model, "srste:2:4")
    with pytest.raises(nm.RecipeError, match="an optimizer is attached|is in sparse training"):
        prune_(model, P, rows())
    flat = type("FullyShardedDataParallel", (nn.Sequential,), {})(mlp())
    with pytest.raises(nm.RecipeError, match="weights are sharded"):
        prune_(flat, P, rows())


@pytest.mark.parametrize(
    "device", ["meta", "foo", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="is one"))]
)
def test_devices_that_cannot_be_used(device):
    model = ViT()
    before = weights(model)
    with pytest.raises(nm.RecipeError, match=f"device '{device}' cannot be used here: "):
        prune_(model, P, images(), device=device)
    assert_same(before, weights(model))


def test_a_device_for_a_model_without_blocks(monkeypatch):
    prune_(mlp(), P, rows(), method="magnitude", device="cpu")
    monkeypatch.setattr("nmkernels.prune.prune.check_device", torch.device)
    model = mlp()
    with pytest.raises(
        nm.RecipeError, match=r"blocks are computed one at a time, and the model has none. Move it there, by model\.to\('meta'\)"
    ):
        prune_(model, P, rows(), device="meta")
    assert not next(model.parameters()).is_meta


# ---- accelerate


def test_models_that_accelerate_has_dispatched(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    other, data = built("llama")
    prune_(other, P, data, method="wanda")
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    parts |= {f"model.layers.{i}": "cpu" for i in range(3)}
    for how in ("offload", "dispatch"):
        model, _ = built("llama")
        if how == "offload":
            accelerate.cpu_offload(model, torch.device("cpu"))
            assert next(model.parameters()).is_meta
        else:
            accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True)
        with pytest.warns(UserWarning, match="accelerate's hooks were removed"):
            handle = prune_(model, P, data, method="wanda")
        assert_same(weights(model), weights(other))
        assert not any(hasattr(m, "_hf_hook") for m in model.modules()) and handle.layers
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(nm.RecipeError, match="offloaded weights to disk.*prune MODEL_DIR"):
        transformers = pytest.importorskip("transformers")
        places = {**parts, "model.layers.1": "disk"}
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "off")
        prune_(model, P, data)


# ---- afterwards


def test_masks_are_held_in_training():
    model, data = built("llama")
    handle = prune_(model, P, data, method="sparsegpt")
    zeros = {name: layer.weight == 0 for name, layer in handle.layers.items()}
    optimizer = handle.attach(torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = weights(model)
    for batch in data:
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    for name, layer in handle.layers.items():
        assert not layer.weight[zeros[name]].any() and not torch.equal(layer.weight, before[f"{name}.weight"])
    handle.finish()
    model.eval()
    with torch.no_grad():
        want = model(**data[0]).logits
        assert torch.allclose(nm.compress_(model)(**data[0]).logits, want, atol=1e-5)


@pytest.mark.parametrize(("values", "group"), [("int8", None), ("int4", 32)])
def test_values_are_those_of_the_report_and_of_compress(values, group):
    """The report has the error of the weight that ``compress_`` stores, and the model that is fine-tuned before that the pruned floats."""
    dense, model, floats, data = mlp(), mlp(), mlp(), rows()
    handle, other = prune_(model, P, data, method="wanda", values=values, group=group), prune_(floats, P, data, method="wanda")
    # later ones get other inputs
    assert torch.equal(model[0].weight, floats[0].weight) and ops.is_nm(model[3].weight.detach(), P)
    assert f"values={values}" in repr(model) and f"compressed values are {values}" in str(handle.report)
    assert "rounded" in str(handle.report) and "rounded" not in str(other.report)
    handle.finish(allow_unused=True)
    nm.compress_(model)
    x = torch.cat(inputs_of(model, lambda: [model(batch) for batch in data], ["3"])["3"])
    assert model[3].weight.kind == values and model[3].weight.group == (group or 0)
    w = dense[3].weight.detach()
    y, off = x @ w.t(), x @ (w - model[3].weight.dense()).t()
    row = handle.report.pruned["3"]
    assert row.rounded == pytest.approx(float(off.norm() / y.norm()) ** 2, rel=1e-3) and row.rounded != row.error


def test_values_can_be_left_floating_or_changed_at_the_end():
    for arguments, kind in (({}, "int4"), ({"values": "float"}, "float"), ({"values": "int8"}, "int8")):
        model = mlp()
        prune_(model, P, rows(), method="wanda", values="int4").finish(allow_unused=True)
        nm.compress_(model, **arguments)
        assert {model[i].weight.kind for i in (0, 3, 5)} == {kind}


def test_values_that_do_not_fit_are_refused_before_any_work():
    def read():
        raise AssertionError("the data was read")
        yield

    with pytest.raises(ops.OptionError, match="prune_: values='float' is unknown; choose one of 'int8', 'int4'"):
        prune_(mlp(), P, read(), values="float")
    model = mlp()
    model.forward = None  # fails when it runs
    with pytest.raises(ops.OptionError, match="prune_: layer '0': group=64 does not divide 32 columns"):
        prune_(model, P, rows(), values="int4", group=64)
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32, 32))
    with pytest.warns(UserWarning, match="prune_: convolutions keep floating-point values, not int8: 0"):
        handle = prune_(model, P, rows(3, 40, 32, 3, 3), method="wanda", values="int8")
    assert handle.report.pruned["0"].rounded is None and handle.report.pruned["2"].rounded > 0
    handle.finish(allow_unused=True)
    nm.compress_(model)
    assert (model[0].weight.kind, model[2].weight.kind) == ("float", "int8")


@pytest.mark.parametrize("values", [None, "int8"])
def test_finish_and_compress_hand_on_what_was_solved(values, monkeypatch):
    model, dense = mlp(), mlp()
    handle = prune_(model, P, rows(), method=LINEAR, values=values)
    pruned, solved = weights(model), {i: handle.layers[i].effective.pruned for i in ("0", "3", "5")}
    for name in ("mask", "compress", "is_nm"):
        monkeypatch.delattr(ops, name)  # nothing is chosen again
    copied = copy.deepcopy(model)
    handle.finish(allow_unused=True)
    assert_same(weights(model), pruned)
    nm.compress_(model, values="float")
    for i, packed in solved.items():
        assert model[int(i)].values.data_ptr() == packed.values.data_ptr()
        assert model[int(i)].indices.data_ptr() == packed.indices.data_ptr()
        assert (copied[int(i)].effective.pruned is None) is (values is None)  # without integers a copy of the model is no larger
    monkeypatch.undo()
    assert_same(weights(nm.densify_(model)), weights(prune_(dense, P, rows(), method=LINEAR, values=values).remove()))


def negate_a_zero(layer):
    where = (layer.weight == 0).nonzero()[0]
    layer.weight.data[tuple(where)] = -0.0


CHANGES = {
    "through .data": lambda layer: layer.weight.data.mul_(2.0),
    "in place": lambda layer: layer.weight.detach().mul_(2.0),
    "the sign of a zero": negate_a_zero,
    "by loading": lambda layer: layer.load_state_dict({key: 2 * value for key, value in layer.state_dict().items()}),
    "to another dtype": lambda layer: layer.bfloat16(),
}


@pytest.mark.parametrize("when", ["before finish", "after finish"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_weight_that_changed_since_is_compressed_as_it_is(how, when):
    model = mlp()
    handle = prune_(model, P, rows(), method=LINEAR)
    layers = [model[i] for i in (0, 3, 5)]
    if when == "before finish":
        CHANGES[how](layers[1])
    handle.finish(allow_unused=True)
    if when == "after finish":
        CHANGES[how](layers[1])
    assert [layer.as_pruned() is None for layer in layers] == [False, True, False]
    want = layers[1].weight.detach().clone()
    nm.compress_(model)
    assert torch.equal(model[3].weight.dense(), want)


class Last(OneShot):
    """Keeps the last two of each group as they are, zeros too."""

    guarded = False

    def solve(self, w, h, pattern):
        mask = torch.tensor([False, False, True, True]).repeat(w.shape[1] // 4).expand(w.shape)
        return w * mask, mask.clone()


def test_weights_of_value_zero_stay_kept():
    def built():
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        with torch.no_grad():
            model[0].weight[:, 2::4] = 0.0
        return model, prune_(model, P, rows(), method=Last())

    model, handle = built()
    handle.finish(allow_unused=True)
    assert model[0].as_pruned() is not None
    nm.compress_(model)
    assert set(model[0].indices.unique().tolist()) == {2 + 4 * 3 + 16 * (2 + 4 * 3)}  # positions 2 and 3 of both groups of a byte
    model, handle = built()
    optimizer = handle.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model(rows()[0]).square().sum().backward()
    optimizer.step()
    w = model[0].weight[2::4]  # the rows that the next layer reads
    assert w[:, 2::4].ne(0).all() and not w[:, 0::4].any() and not w[:, 1::4].any()
    assert all(layer.effective.pruned is None for layer in handle.layers.values())  # nothing of it is needed any more


REPRODUCE = """
import sys, torch
from python_tests.prune.test_prune import *
torch.set_num_threads(1)
model, data = built("llama")
prune_(model, P, data)
torch.save(weights(model), sys.argv[1])
"""


@pytest.mark.parametrize("other", ["here", pytest.param("in another process", marks=pytest.mark.slow)])
def test_equal_bits(tmp_path, other):
    model, data = built("llama")
    prune_(model, P, data)
    if other == "here":
        again, _ = built("llama")
        prune_(again, P, data)
        assert_same(weights(model), weights(again))
    else:
        subprocess.run([sys.executable, "-W", "ignore", "-c", REPRODUCE, str(tmp_path / "other.pt")], check=True)
        assert_same(weights(model), torch.load(tmp_path / "other.pt"))


# ---- memory


class Live(TorchDispatchMode):
    """The bytes of all storages that were made inside and still live, and their peak until ``done``."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = 0
        self.done = False
        self.seen = {t.untyped_storage()._cdata for t in model.state_dict().values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.seen:
                storage = t.untyped_storage()
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.peak = self.peak if self.done else max(self.peak, self.now)
        return out

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x).unflatten(-1, (-1, x.shape[-1])).mean(-2)


def peak(sizes, method, depth, folder):
    torch.manual_seed(0)
    blocks = [Residual(*(nn.Linear(*size) for size in sizes)) for _ in range(depth)]
    model, data = nn.Sequential(*blocks), rows(4, 40, 128)
    live = Live(model)
    with live:
        prune_(model, P, data, method=method, folder=folder, progress=lambda done, total, what: setattr(live, "done", done == total))
    return live.peak


WIDE, TALL = [(128, 384), (384, 128)], [(128, 1024)]
"""(in, out) of layers: a weight that is smaller than its Hessian, and one that is larger."""


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("admm", WIDE),
        ("sparsegpt", TALL),
        pytest.param("sparsegpt", WIDE, marks=pytest.mark.slow),
        pytest.param("admm", TALL, marks=pytest.mark.slow),
    ],
)
def test_memory(tmp_path, method, sizes):
    """One block, its Hessians, and while a layer is solved 6 W, 4 H and masks; with a folder whatever the depth."""
    own, hessians = 4 * sum(i * o for i, o in sizes), 4 * sum(i * i for i, _ in sizes)
    largest, h = 4 * max(i * o for i, o in sizes), 4 * max(i for i, _ in sizes) ** 2
    deep, flat = peak(sizes, method, 6, tmp_path / "6"), peak(sizes, method, 2, tmp_path / "2")
    assert deep <= 1.01 * flat
    store = 4 * 40 * (128 * 3 * 4 + 2 * 1024)  # data, outputs of two blocks, and what a pass needs
    assert flat <= own + hessians + 6.5 * largest + 4 * h + store


def test_quiet(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prune_(mlp(), P, rows(4))
    assert capsys.readouterr() == ("", "")
