"""Which layers are taken: everything else is skipped and reported with its reason, never silently."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import nmkernels as nm
from nmkernels.recipes.select import select

P = nm.Pattern("2:4")


def reasons(model, filter_fn=None, pattern=P):
    """name -> "" for a layer that is taken, else the reason."""
    chosen, report = select(model, pattern, filter_fn)
    assert [c.name for c in chosen] == [e.name for e in report.sparse]
    return {e.name: "" if e.sparse else e.reason for e in report.entries}


def weird(kind):
    """One layer of each kind that cannot be made sparse."""
    layer = nn.Linear(32, 32)
    if kind == "subclass":
        layer = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32)
    elif kind == "lazy":
        layer = nn.LazyLinear(32)
    elif kind == "parametrized":
        parametrizations.orthogonal(layer)
    elif kind == "old weight_norm":
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(layer)
    elif kind == "pruned by torch":
        prune.l1_unstructured(layer, "weight", 0.5)
    elif kind == "forward replaced":
        layer.forward = lambda x: x
    elif kind == "integer":
        layer.weight = nn.Parameter(torch.ones(32, 32, dtype=torch.int8), requires_grad=False)
    elif kind == "complex":
        layer = nn.Linear(32, 32, dtype=torch.complex64)
    elif kind == "float8":
        layer.weight = nn.Parameter(torch.ones(32, 32).to(torch.float8_e4m3fn), requires_grad=False)
    elif kind == "flattened":
        layer.weight = nn.Parameter(torch.empty(0))
    elif kind == "indivisible":
        layer = nn.Linear(30, 32)
    elif kind == "sparse":
        layer = nm.SparseLinear(32, 32)
    elif kind == "compressed":
        layer = nm.CompressedLinear(nm.ops.compress(torch.randn(32, 32), P))
    return layer


KINDS = {
    "subclass": "subclass of nn.Linear",
    "lazy": "run the model once",
    "parametrized": "ParametrizedLinear is a subclass",
    "old weight_norm": "computed from other tensors",
    "pruned by torch": "computed from other tensors",
    "forward replaced": "forward was replaced",
    "integer": "torch.int8",
    "complex": "torch.complex64",
    "float8": "torch.float8_e4m3fn",
    "flattened": "flattened or sharded",
    "indivisible": "in_features=30 is not a multiple of M=4",
    "sparse": "sparse already",
    "compressed": "compressed already",
}


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_layers_are_skipped_with_their_reason_and_raise_when_chosen(kind):
    model = nn.ModuleDict({"good": nn.Linear(32, 32), "odd": weird(kind)})
    got = reasons(model)
    assert got["good"] == "" and KINDS[kind] in got["odd"]
    assert reasons(model, lambda module, name: name == "good")["odd"] == got["odd"]
    error = nm.ShapeError if kind == "indivisible" else nm.RecipeError
    with pytest.raises(error, match=r"chose layer .odd.*Leave it out of the filter"):
        reasons(model, lambda module, name: name == "odd")


def test_initialised_lazy_layer_is_taken():
    model = nn.Sequential(nn.LazyLinear(32))
    model(torch.ones(1, 32))
    assert reasons(model) == {"0": ""}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_and_devices(dtype):
    assert reasons(nn.Sequential(nn.Linear(32, 32, dtype=dtype, device="meta"))) == {"0": ""}


@pytest.mark.parametrize("name", ["lm_head", "head", "classifier"])
def test_heads_by_name_are_skipped_unless_chosen(name):
    model = nn.ModuleDict({"body": nn.ModuleDict({name: nn.Linear(32, 32)}), name + "2": nn.Linear(32, 32)})
    assert reasons(model) == {f"body.{name}": "output head", f"{name}2": ""}
    assert reasons(model, lambda module, fqn: True) == {f"body.{name}": "", f"{name}2": ""}


class Model(nn.Module):
    def __init__(self, getter):
        super().__init__()
        self.body, self.to_tokens = nn.Linear(32, 32), nn.Linear(32, 64)
        self.getter = getter

    def get_output_embeddings(self):
        return self.getter(self)


def test_heads_by_get_output_embeddings_also_inside_a_wrapper():
    wrapper = nn.ModuleDict({"inner": Model(lambda m: m.to_tokens)})
    assert reasons(wrapper) == {"inner.body": "", "inner.to_tokens": "output head"}


@pytest.mark.parametrize("error", [None, NotImplementedError, AttributeError])
def test_model_without_output_embeddings(error):
    def getter(model):
        if error:
            raise error("none here")

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


def test_tiny_layers_are_skipped_unless_chosen():
    model = nn.ModuleDict({"out": nn.Linear(32, 15), "in_": nn.Linear(12, 32), "fit": nn.Linear(16, 16)})
    got = reasons(model)
    assert "tiny" in got["out"] and "tiny" in got["in_"] and got["fit"] == ""
    assert not any(reasons(model, lambda module, name: True).values())


def test_attention_and_experts_are_reported():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 64, 32))
            self.position = nn.Parameter(torch.randn(1, 10, 32))

    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "moe": Experts(), "conv": nn.Conv1d(4, 4, 3)})
    got = reasons(model)
    assert set(got) == {"attention.in_proj_weight", "attention.out_proj", "moe.up"}
    assert "never calls" in got["attention.out_proj"] and "3-D expert" in got["moe.up"]
    with pytest.raises(nm.RecipeError, match=r"'moe.up'.*3-D"):
        reasons(model, lambda module, name: name.startswith("moe"))


def test_filter_gets_module_and_name_and_any_truth_value():
    model, seen = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), []

    def chooses(module, name):
        seen.append((module, name))
        return 1 if name == "2" else None

    assert reasons(model, chooses) == {"0": "not chosen by the filter", "2": ""}
    assert seen == [(model[0], "0"), (model[2], "2")]


def test_selecting_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 32))
    before = {k: type(m) for k, m in model.named_modules()}
    reasons(model)
    assert {k: type(m) for k, m in model.named_modules()} == before


def test_pattern_decides_what_divides():
    model = nn.Sequential(nn.Linear(40, 32))
    assert reasons(model, pattern=nm.Pattern("1:8")) == {"0": ""}
    assert "in_features=40 is not a multiple of M=16" in reasons(model, pattern=nm.Pattern("1:16"))["0"]
