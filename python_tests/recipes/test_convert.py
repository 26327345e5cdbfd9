"""sparsify_: the model after it, and the errors before it."""

import copy

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.testing import equal_bits
from python_tests import plain
from python_tests.copies import WAYS, copied


def model_of():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 8))


@pytest.mark.parametrize("recipe", ["srste:1:4", nm.recipes.SRSTE("1:4")])
def test_handle_holds_the_layers_by_name(recipe):
    model = model_of()
    handle = nm.sparsify_(model, recipe)
    assert handle.layers == {"0": model[0], "2": model[2]} and handle.model is model
    assert handle.recipe == nm.recipes.SRSTE("1:4") and {str(layer.pattern) for layer in handle.layers.values()} == {"1:4"}
    assert "2 of 3 linear layers sparse, with 4096 of 4352 weights (94.1 %)" in str(handle.report) and "tiny" in str(handle.report)


def test_filter_fn_chooses_instead_of_the_rules():
    model = model_of()
    handle = nm.sparsify_(model, "ste:2:4", filter_fn=lambda module, name: name == "4")
    assert list(handle.layers) == ["4"] and type(model[0]) is nn.Linear


def test_state_dict_keys_dtypes_and_tensors_are_those_of_the_dense_model():
    model = model_of().to(torch.bfloat16)
    dense = copy.deepcopy(model)
    nm.sparsify_(model, "srste:2:4")
    model(torch.randn(2, 32).bfloat16()).sum().backward()
    assert equal_bits(dict(model.state_dict()), dict(dense.state_dict())) and list(model.state_dict()) == list(dense.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in dense.named_parameters()]


@pytest.mark.parametrize("assign", [False, True])
def test_strict_load_both_ways(assign):
    sparse, dense = model_of(), model_of()
    nm.sparsify_(sparse, "srste:2:4")
    sparse.load_state_dict(dense.state_dict(), strict=True, assign=assign)
    expected = nn.functional.linear(torch.eye(32), plain.masked(dense[0].weight, 2, 4), dense[0].bias)
    assert torch.equal(sparse[0](torch.eye(32)), expected)
    other = model_of()
    other.load_state_dict(sparse.state_dict(), strict=True, assign=assign)
    assert equal_bits(dict(other.state_dict()), dict(dense.state_dict()))


def test_masks_not_in_buffers():
    model = model_of()
    recipe = nm.recipes.SRSTE("2:4")
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters()))
    model(torch.randn(2, 32)).sum().backward()
    optimizer.step()
    assert not list(model.buffers())


def test_optimizer_built_before_or_after():
    for before in (True, False):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1) if before else None
        handle = nm.sparsify_(model, "ste:2:4")
        optimizer = handle.attach(optimizer or torch.optim.AdamW(model.parameters(), lr=0.1))
        old = model[0].weight.detach().clone()
        model(torch.randn(2, 32)).sum().backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, old)


def test_shared_module_is_one_layer_under_every_name():
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    handle = nm.sparsify_(model, "ste:2:4")
    assert list(handle.layers) == ["0"] and model[2] is model[0] and isinstance(model[2], nm.SparseLinear)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    handle.finish(allow_unused=True)
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


def test_double_sparsify_raises_and_remove_is_the_way_out():
    model = model_of()
    handle = nm.sparsify_(model, "ste:2:4")
    with pytest.raises(nm.RecipeError, match=r"sparse layers already.*densify_"):
        nm.sparsify_(model, "ste:1:4")
    handle.remove()
    assert str(nm.sparsify_(model, "ste:1:4").layers["0"].pattern) == "1:4"


def test_no_layer_at_all_shows_the_report():
    model = nn.Sequential(nn.Linear(32, 8), nn.ReLU())
    with pytest.raises(nm.RecipeError, match=r"no layer(.|\n)*tiny"):
        nm.sparsify_(model, "ste:2:4")
    assert type(model[0]) is nn.Linear


def test_impossible_choice_changes_nothing():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(30, 32))
    with pytest.raises(nm.ShapeError, match=r"'1'.*in_features=30"):
        nm.sparsify_(model, "ste:2:4", lambda module, name: True)
    assert {type(m) for m in model} == {nn.Linear}


@pytest.mark.parametrize("recipe", ["ste:4:2", "ste:0:4", "ste:x", "nothing:2:4", 3, None])
def test_wrong_recipe(recipe):
    model = model_of()
    with pytest.raises((nm.PatternError, nm.RecipeError)):
        nm.sparsify_(model, recipe)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("how", WAYS)
def test_sparse_model_can_be_copied(how):
    model = model_of()
    nm.sparsify_(model, "ste:2:4")
    twin = copied(model, how)
    x = torch.randn(3, 32)
    assert torch.equal(twin(x), model(x)) and twin[0].weight is not model[0].weight
    assert type(nm.densify_(twin)[0]) is nn.Linear and isinstance(model[0], nm.SparseLinear)


def test_two_models_in_one_process():
    one, two = model_of(), model_of()
    handles = [nm.sparsify_(one, "ste:2:4"), nm.sparsify_(two, "ste:1:4")]
    handles[0].finish(allow_unused=True)
    assert one[0].finished and not two[0].finished and torch.equal(two[0].effective_weight(), plain.masked(two[0].weight, 1, 4))


def test_float64_model_falls_to_the_reference():
    model = model_of().double()
    dense = copy.deepcopy(model)
    nm.sparsify_(model, "ste:2:4")
    with torch.no_grad():
        for i in (0, 2):
            dense[i].weight.copy_(plain.masked(dense[i].weight, 2, 4))
    x = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x), dense(x), rtol=1e-12, atol=1e-12)


def test_compile_of_a_sparsified_model_equals_eager():
    model = model_of()
    nm.sparsify_(model, "srste:2:4")
    x = torch.randn(3, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert equal_bits(compiled(x).detach(), model(x).detach())


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
