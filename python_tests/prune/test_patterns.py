"""A pattern per layer, and pruning in several calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import ops
from nmkernels.pattern import PatternError, RecipeError
from nmkernels.prune import prune_
from nmkernels.testing import equal_bits

pytestmark = pytest.mark.filterwarnings("ignore:prune_. layer")
DATA = [torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(2))
    return nn.Sequential(*blocks, nn.Linear(32, 16))


def patterns(found: nm.train.handle.Handle) -> dict[str, str]:
    return {name: str(layer.pattern) for name, layer in found.layers.items()}


TABLE = {"1.2": "dense", "*.0": "4:8", "*.2": "1:4", "2": "2:4"}


def tuned(handle, dense) -> nn.Module:
    """Some steps of training, then compressed."""
    optimizer = handle.attach(handle.recipe.optimizer(handle.model.parameters(), lr=1e-2))
    for x in DATA:
        optimizer.zero_grad()
        nn.functional.mse_loss(handle.model(x), x[:, :16].tanh()).backward()
        optimizer.step()
    kept = {name: layer.weight.detach() != 0 for name, layer in handle.layers.items()}
    assert all(ops.is_nm(layer.weight.detach(), layer.pattern) for layer in handle.layers.values())
    handle.finish()
    nm.compress_(handle.model)
    for name, mask in kept.items():
        packed = handle.model.get_submodule(name).weight
        assert not packed.dense()[~mask].any() and packed.pattern == handle.layers[name].pattern
    return handle.model


def test_each_layer_has_its_pattern_and_keeps_it_in_training():
    handle = prune_(model(), TABLE, DATA, method="wanda", permute=True, values="int8")
    assert patterns(handle) == {"0.0": "4:8", "0.2": "1:4", "1.0": "4:8", "2": "2:4"}
    reasons = {e.name: e.reason for e in handle.report.entries}
    assert reasons == {"0.0": "4:8", "0.2": "1:4", "1.0": "4:8", "1.2": "dense, as pattern= says", "2": "2:4"}
    compressed = tuned(handle, model())
    assert {str(m.pattern) for m in compressed.modules() if type(m).__name__ == "CompressedLinear"} == {"4:8", "1:4", "2:4"}


def test_one_pattern_by_name_is_what_a_filter_gives():
    one, other = model(), model()
    prune_(one, {"*.0": "2:4"}, DATA)
    handle = prune_(other, "2:4", DATA, lambda module, name: name.endswith(".0"))
    assert type(handle.recipe).__name__ == "ASP"
    assert all(equal_bits(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_second_call_prunes_the_rest_on_the_inputs_of_the_first(monkeypatch):
    """The sparse layers run as they are; then one handle holds all masks."""
    both = model()
    first = prune_(both, "2:4", DATA, lambda module, name: name.startswith("0."), values="int8")
    weights = {name: value.clone() for name, value in both.state_dict().items()}
    second = prune_(both, "1:4", DATA, lambda module, name: name == "1.0", method="sparsegpt")
    assert patterns(second) == {"0.0": "2:4", "0.2": "2:4", "1.0": "1:4"}
    assert all(equal_bits(value, both.state_dict()[name]) for name, value in weights.items() if name.startswith(("0.", "1.2", "2.")))
    plain = model()
    plain.load_state_dict(weights)
    prune_(plain, "1:4", DATA, lambda module, name: name == "1.0", method="sparsegpt")
    assert equal_bits(plain[1][0].weight, both[1][0].weight)
    assert [e.name for e in second.report.entries if e.sparse] == ["0.0", "0.2", "1.0"]
    assert second.layers["0.0"].integers == ("int8", None) and first.layers["0.0"].effective.pruned is not None
    third = prune_(both, {"1.2": "2:4"}, DATA)  # and so on, after finish too
    third.finish(allow_unused=True)
    last = prune_(both, "2:4", DATA, lambda module, name: name == "2")
    assert list(last.layers) == ["0.0", "0.2", "1.0", "1.2", "2"]
    tuned(last, model())


WRONG = {
    "fits nothing": ({"*.attn.*": "2:4"}, RecipeError, r"prune_: pattern names '\*.attn.\*', which matches no layer of the model"),
    "not N:M": ({"*": "half"}, PatternError, r"prune_: the pattern of '\*': .*half.* Or \"dense\"."),
    "empty": ({}, RecipeError, r'prune_: pattern={} must be N:M, or a table from layer names to it, {"\*.mlp.\*": "2:4"}'),
    "all dense": ({"*": "dense"}, RecipeError, r"prune_: pattern={'\*': 'dense'} leaves every layer dense."),
    "does not divide": ({"2": "2:5"}, RecipeError, r"names layer '2', which cannot be made 2:5 sparse: in_features=32 is not .* \"dense\""),
}


@pytest.mark.parametrize("what", WRONG)
def test_tables_that_are_wrong(what):
    table, kind, said = WRONG[what]
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(kind, match=said):
        prune_(net, table, DATA)
    assert all(equal_bits(value, net.state_dict()[name]) and type(net[2]) is nn.Linear for name, value in before.items())


def test_training_is_not_interrupted():
    net = model()
    handle = prune_(net, {"2": "2:4"}, DATA, method="magnitude")
    handle.attach(torch.optim.AdamW(net.parameters()))
    with pytest.raises(RecipeError, match="an optimizer is attached to its sparse layers. Prune all layers before handle.attach"):
        prune_(net, {"1.*": "2:4"}, DATA)
    other = model()
    nm.sparsify_(other, "srste:2:4", lambda module, name: name == "2")
    with pytest.raises(RecipeError, match="layer '2' is in sparse training"):
        prune_(other, {"1.*": "2:4"}, DATA)
