"""sparsify_: the model after it, the errors before it; which layers are taken, and why the others are not."""

import copy
import operator
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import nmkernels as nm
from nmkernels.train.sparsify import select
from python_tests.train.test_wrapped import one_process


def model_of():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))


@pytest.mark.parametrize("recipe", ["srste:1:4", nm.recipes.SRSTE("1:4")])
def test_handle_holds_the_layers_by_name(recipe):
    model = model_of()
    handle = nm.sparsify_(model, recipe)
    assert handle.layers == {"0": model[0], "2": model[2]} and handle.model is model
    assert handle.recipe == nm.recipes.SRSTE("1:4") and {str(layer.pattern) for layer in handle.layers.values()} == {"1:4"}
    assert "2 of 3 linear layers sparse, with 4096 of 4352 weights (94.1 %)" in str(handle.report) and "tiny" in str(handle.report)


def test_shared_module_is_one_layer_under_every_name():
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    handle = nm.sparsify_(model, "ste:2:4")
    assert list(handle.layers) == ["0"] and model[2] is model[0] and isinstance(model[2], nm.SparseLinear)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    handle.remove()
    assert type(model[0]) is nn.Linear and model[2] is model[0]


def test_model_that_is_itself_a_linear():
    model = nn.Linear(32, 16)
    handle = nm.sparsify_(model, "ste:2:4")
    assert isinstance(model, nm.SparseLinear) and list(handle.layers) == [""] and "(root)" in str(handle.report)
    handle.finish(allow_unused=True)
    with pytest.raises(nm.RecipeError, match=r"CompressedLinear\(ops.compress"):
        nm.compress_(model)
    assert type(handle.remove()) is nn.Linear and nm.ops.is_nm(model.weight.detach(), "2:4")


def test_double_sparsify_raises():
    model = model_of()
    handle = nm.sparsify_(model, "ste:2:4")
    with pytest.raises(nm.RecipeError, match=r"sparse layers already.*densify_"):
        nm.sparsify_(model, "ste:1:4")
    handle.remove()
    assert str(nm.sparsify_(model, "ste:1:4").layers["0"].pattern) == "1:4"


def test_what_cannot_be_done_changes_nothing():
    """No layer at all, whose message shows the report; one that the filter chose; no recipe."""
    for sizes, recipe, chooses, error, said in [
        ((32, 8), "ste:2:4", None, nm.RecipeError, r"no layer(.|\n)*tiny"),
        ((32, 30, 32), "ste:2:4", lambda module, name: True, nm.ShapeError, "'1'.*in_features=30"),
        *(((32, 32), bad, None, (nm.PatternError, nm.RecipeError), None) for bad in ("ste:4:2", "ste:x", "nothing:2:4", 3, None)),
    ]:
        model = nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))
        with pytest.raises(error, match=said):
            nm.sparsify_(model, recipe, chooses)
        assert {type(m) for m in model} == {nn.Linear}


def test_a_copy_is_evaluated_and_deployed_through_the_model():
    model = nn.Sequential(nn.Linear(32, 32))
    recipe = nm.recipes.STEP("2:4", total_steps=4, switch="fixed", start=1)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters()))
    ema, x = copy.deepcopy(model), torch.randn(2, 32)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
    with pytest.raises(nm.RecipeError, match="load its state dict into the model"):
        nm.compress_(copy.deepcopy(model))
    model.load_state_dict(ema.state_dict())
    want = torch.nn.functional.linear(x, nm.ops.prune(ema[0].weight.detach(), "2:4"), ema[0].bias)
    assert torch.allclose(model(x), want, atol=1e-6)
    handle.finish()
    assert torch.allclose(nm.compress_(model)(x), want, atol=1e-6)


# ---- which layers are taken

P = nm.Pattern("2:4")


def reasons(model, filter_fn=None, pattern=P):
    """name -> "" for a layer that is taken, else the reason."""
    chosen, report = select(model, pattern, filter_fn)
    assert [c.name for c in chosen] == [e.name for e in report.sparse]
    return {e.name: "" if e.sparse else e.reason for e in report.entries}


def test_dtypes_devices_lazy_layers_and_fake_tensors():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert reasons(nn.Sequential(nn.Linear(32, 32, dtype=dtype, device="meta"))) == {"0": ""}
    model = nn.Sequential(nn.LazyLinear(32))
    model(torch.ones(1, 32))
    assert reasons(model) == {"0": ""}
    with torch._subclasses.FakeTensorMode():
        assert reasons(nn.Sequential(nn.Linear(32, 32))) == {"0": ""}


class Model(nn.Module):
    def __init__(self, getter):
        super().__init__()
        self.body, self.to_tokens = nn.Linear(32, 32), nn.Linear(32, 64)
        self.getter = getter

    def get_output_embeddings(self):
        return self.getter(self)


def test_heads_are_skipped_unless_chosen():
    for name in ("lm_head", "head", "classifier"):
        model = nn.ModuleDict({"body": nn.ModuleDict({name: nn.Linear(32, 32)}), name + "2": nn.Linear(32, 32)})
        assert reasons(model) == {f"body.{name}": "output head", f"{name}2": ""}
        assert reasons(model, lambda module, fqn: True) == {f"body.{name}": "", f"{name}2": ""}
    wrapper = nn.ModuleDict({"inner": Model(lambda m: m.to_tokens)})
    assert reasons(wrapper) == {"inner.body": "", "inner.to_tokens": "output head"}
    for getter in (lambda m: None, *(Mock(side_effect=error("none here")) for error in (NotImplementedError, AttributeError))):
        assert reasons(Model(getter)) == {"body": "", "to_tokens": ""}


def test_tied_weights_but_not_shared_modules():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(64, 32), "out": nn.Linear(32, 64), "a": shared, "b": shared, "c": nn.Linear(32, 32), "d": nn.Linear(32, 32)}
    )
    model["out"].weight, model["d"].weight = model["embed"].weight, model["c"].weight
    got = reasons(model)
    assert got["a"] == "" and "b" not in got
    assert all("tied" in got[name] for name in "cd") and "tied" in got["out"]


def test_tiny_and_indivisible_layers():
    model = nn.ModuleDict({"out": nn.Linear(32, 15), "in_": nn.Linear(12, 32), "fit": nn.Linear(16, 16)})
    got = reasons(model)
    assert "tiny" in got["out"] and "tiny" in got["in_"] and got["fit"] == ""
    assert not any(reasons(model, lambda module, name: True).values())
    model = nn.Sequential(nn.Linear(40, 32))
    assert reasons(model, pattern=nm.Pattern("1:8")) == {"0": ""}
    assert "in_features=40 is not a multiple of M=16" in reasons(model, pattern=nm.Pattern("1:16"))["0"]


def test_filter_gets_module_and_name_and_any_truth_value():
    model, seen = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), []

    def chooses(module, name):
        seen.append((module, name))
        return 1 if name == "2" else None

    assert reasons(model, chooses) == {"0": "not chosen by the filter", "2": ""}
    assert seen == [(model[0], "0"), (model[2], "2")]


class Tensors(nn.Module):
    """A module of somebody else's: Parameters, buffers and sizes as they keep them."""

    def __init__(self, **members):
        super().__init__()
        for key, value in members.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(key, value)
            else:
                setattr(self, key, value)


class OddAttention(Tensors):
    """Attention whose weight has a dimension for the heads."""

    def __init__(self):
        super().__init__(r=nn.Parameter(torch.randn(32, 4, 8)))


class ByTorchsFunction(nn.Module):
    """Attention that owns linear layers and lets torch's function multiply their weights, as fairseq's, open_clip's and WavLM's."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.attend(x)

    def attend(self, x):
        weights = self.q_proj.weight, self.k_proj.weight, self.v_proj.weight
        return nn.functional.multi_head_attention_forward(x, x, x, 32, 2, *weights)


class Linear4bit(nn.Linear):
    """As bitsandbytes keeps a weight: its bytes in one column, in a subclass of nn.Linear."""


class Wrapped(torch.Tensor):
    """A quantised weight of torchao's kind: a tensor subclass that says it is float32."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data):
        self.data8 = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8)
        raise NotImplementedError(f"Wrapped has no {func}")


def random(*shape):
    return nn.Parameter(torch.randn(*shape))


def linear(weight=None, kind=nn.Linear, changed=lambda layer: None, **members):
    """A linear layer with another weight, changed by a function, or with other members."""
    layer = kind(32, 32)
    if weight is not None:
        layer.weight = nn.Parameter(weight, requires_grad=False)
    vars(layer).update(members)
    changed(layer)
    return layer


def by_torch(kind, *args):
    from torch.ao.nn import quantized

    return operator.attrgetter(kind)(quantized)(*args)


SQUARE, COMPUTED, QUANTISED = (32, 32), "its weight is computed by torch.nn.utils", "quantised"
LINEAR = {
    "subclass": (lambda: linear(kind=nn.modules.linear.NonDynamicallyQuantizableLinear), {"": (SQUARE, "subclass of nn.Linear")}),
    "lazy": (lambda: nn.LazyLinear(32), {"": ((), "run the model once")}),
    "parametrized": (lambda: linear(changed=parametrizations.orthogonal), {"": (SQUARE, COMPUTED)}),
    "old weight_norm": (lambda: linear(changed=nn.utils.weight_norm), {"": (SQUARE, COMPUTED)}),
    "pruned by torch": (lambda: linear(changed=lambda m: prune.l1_unstructured(m, "weight", 0.5)), {"": (SQUARE, COMPUTED)}),
    "forward replaced": (lambda: linear(forward=abs), {"": (SQUARE, "forward was replaced")}),
    "integer": (lambda: linear(torch.ones(32, 32, dtype=torch.int8)), {"": (SQUARE, "torch.int8")}),
    "complex": (lambda: nn.Linear(32, 32, dtype=torch.complex64), {"": (SQUARE, "torch.complex64")}),
    "float8": (lambda: linear(torch.ones(32, 32).to(torch.float8_e4m3fn)), {"": (SQUARE, "torch.float8_e4m3fn")}),
    "flattened": (lambda: linear(torch.empty(0)), {"": (SQUARE, "fully_shard")}),
    "2:4 of torch": (lambda: linear(torch.randn(32, 32).to_sparse_csr()), {"": (SQUARE, "sparse_csr")}),
    "wrapped": (lambda: linear(Wrapped(torch.zeros(32, 32, dtype=torch.int8))), {"": (SQUARE, "Wrapped, a quantised")}),
    "bitsandbytes": (lambda: linear(torch.zeros(512, 1, dtype=torch.uint8), Linear4bit), {"": (SQUARE, "torch.uint8 (quantised")}),
    "indivisible": (lambda: nn.Linear(30, 32), {"": ((32, 30), "in_features=30 is not a multiple of M=4")}),
    "sparse": (lambda: nm.SparseLinear(32, 32, pattern="1:4"), {"": (SQUARE, "it is 1:4 already")}),
    "compressed": (lambda: nm.CompressedLinear(nm.ops.compress(torch.randn(32, 32), P)), {"": (SQUARE, "compressed already")}),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(32, 2, kdim=16, vdim=8, add_bias_kv=True),
        {
            **{f".{x}_proj_weight": ((32, n), "multiplies it itself") for x, n in (("q", 32), ("k", 16), ("v", 8))},
            ".out_proj": ((32, 32), "never calls"),
        },
    ),
    "WavLM's attention": (lambda: ByTorchsFunction(), {f".{x}_proj": (SQUARE, "never calls the layer") for x in "qkv"}),
    "XLNet's attention": (lambda: OddAttention(), {".r": ((32, 4, 8), "a tensor of OddAttention")}),
    "gpt-oss's experts": (
        lambda: Tensors(up=random(4, 32, 64), up_bias=random(4, 64), down=random(4, 32, 32)),
        {".up": ((4, 32, 64), "3-D expert"), ".down": ((4, 32, 32), "3-D expert")},
    ),
    "another's linear": (
        lambda: Tensors(in_features=64, out_features=32, weight=random(32, 64)),
        {"": ((32, 64), "a linear layer of its own kind")},
    ),
    "GPTQ": (
        lambda: Tensors(in_features=64, out_features=32, qweight=torch.zeros(8, 32, dtype=torch.int32), scales=torch.ones(1, 32)),
        {"": ((32, 64), "Tensors is quantised, to torch.int32")},
    ),
    "quantised Linear": (lambda: by_torch("Linear", 64, 32), {"": ((32, 64), QUANTISED)}),
    "dynamic Linear": (lambda: by_torch("dynamic.Linear", 64, 32), {"": ((32, 64), QUANTISED)}),
}
"""Kinds of linear layers that cannot be made sparse: a maker, and (shape, reason) by the end of the name."""

CONV, EMBEDDING, RECURRENT = "a convolution", "an embedding", "a recurrent layer"
OTHERS = {
    "Conv1d": (lambda: nn.Conv1d(4, 8, 3), {"": ((8, 4, 3), CONV)}),
    "Conv2d": (lambda: nn.Conv2d(1, 1, 3), {"": ((1, 1, 3, 3), CONV)}),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 8, 3), {"": ((4, 8, 3, 3), CONV)}),
    "LazyConv1d": (lambda: nn.LazyConv1d(4, 3), {"": ((), CONV)}),
    "weight_norm of Conv1d": (lambda: parametrizations.weight_norm(nn.Conv1d(4, 8, 3)), {"": ((8, 4, 3), CONV)}),
    "Embedding": (lambda: nn.Embedding(50, 32), {"": ((50, 32), EMBEDDING)}),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(50, 32), {"": ((50, 32), EMBEDDING)}),
    "LSTM": (
        lambda: nn.LSTM(32, 32, proj_size=8),
        {".weight_ih_l0": ((128, 32), RECURRENT), ".weight_hh_l0": ((128, 8), RECURRENT), ".weight_hr_l0": ((8, 32), RECURRENT)},
    ),
    "RNNCell": (lambda: nn.RNNCell(32, 32), {".weight_ih": ((32, 32), RECURRENT), ".weight_hh": ((32, 32), RECURRENT)}),
    "Bilinear": (lambda: nn.Bilinear(8, 16, 32), {"": ((32, 8, 16), "a bilinear form of two inputs")}),
    "a module of the user's": (
        lambda: Tensors(
            **{"weight": random(4, 32), "bias_table": random(9, 4), "mask": torch.ones(8, 8), "token_weights": torch.ones(8, 8)},
            **{"cls": random(1, 32), "position": random(1, 10, 32), "kernel": random(2, 3, 3, 3)},
        ),
        {
            f".{key}": (shape, "a tensor of Tensors")
            for key, shape in (("weight", (4, 32)), ("kernel", (2, 3, 3, 3)), ("token_weights", (8, 8)))
        },
    ),
    "sizes of 1 and 2": (
        lambda: Tensors(column=random(32, 1), row=random(1, 32), one=random(1, 1), scale=random(32), two=random(2, 32), pair=random(2, 2)),
        {".two": ((2, 32), "a tensor of Tensors"), ".pair": ((2, 2), "a tensor of Tensors")},
    ),
    "a lazy Parameter": (lambda: Tensors(table=nn.UninitializedParameter()), {".table": ((), "a tensor of Tensors")}),
    "ParameterList": (lambda: nn.ParameterList([torch.randn(16, 32), torch.randn(5)]), {".0": ((16, 32), "a tensor of ParameterList")}),
    "dynamic LSTM": (lambda: by_torch("dynamic.LSTM", 64, 32), {"": ((), QUANTISED)}),
    "dynamic GRUCell": (lambda: by_torch("dynamic.GRUCell", 64, 32), {"": ((), QUANTISED)}),
    "quantised Conv2d": (lambda: by_torch("Conv2d", 4, 8, 3), {"": ((8, 4, 3, 3), QUANTISED)}),
    "quantised Embedding": (lambda: by_torch("Embedding", 10, 12), {"": ((10, 12), QUANTISED)}),
    "norms": (lambda: nn.Sequential(nn.LayerNorm((4, 8)), nn.BatchNorm2d(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.PReLU(8)), {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*LINEAR, *OTHERS])
def test_every_module_is_reported_with_its_reason(kind):
    make, want = {**LINEAR, **OTHERS}[kind]
    odd = make()
    model, asked = nn.ModuleDict({"good": nn.Linear(32, 32), "odd": odd}), []
    chosen, report = select(model, P)
    got = [e for e in report.entries if e.name != "good"]
    assert [c.name for c in chosen] == ["good"] and str(report).count("odd") == len(got)
    assert {e.name: e.shape for e in got} == {f"odd{name}": shape for name, (shape, _) in want.items()}
    for e in got:
        reason = want[e.name.removeprefix("odd")][1]
        assert not e.sparse and reason in e.reason and e.kind in (type(odd).__name__, "Linear", "NonDynamicallyQuantizableLinear")
        assert e.linear == (kind in LINEAR)
    if kind in LINEAR:
        with pytest.raises(
            nm.ShapeError if kind == "indivisible" else nm.RecipeError, match=r"chose layer 'odd.*Leave it out of the filter"
        ):
            select(model, P, lambda module, name: name.startswith("odd"))
    # a filter is asked of linear layers only, so that "all but the head" needs to know of nothing else
    select(model, P, lambda module, name: (asked.append(name), name == "good")[1])
    assert asked == ["good", *(e.name for e in got if e.linear)]


def test_the_report_does_not_compute_weights():
    layer = parametrizations.spectral_norm(nn.Linear(32, 32))
    before = layer.parametrizations.weight[0]._u.clone()
    assert "computed" in reasons(nn.Sequential(layer))["0"]
    assert torch.equal(layer.parametrizations.weight[0]._u, before)


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="torch is built without gloo")
def test_a_sharded_weight_is_taken(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with one_process(tmp_path):
        model = nn.ModuleDict({"good": nn.Linear(32, 32), "odd": nn.Linear(32, 32)})
        model["odd"].weight = nn.Parameter(distribute_tensor(model["odd"].weight.detach(), init_device_mesh("cpu", (1,))))
        assert reasons(model) == {"good": "", "odd": ""}
