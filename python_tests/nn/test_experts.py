"""Stacks of experts: which modules have them, how they are put in front of, and what is multiplied when they are compressed."""

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import layouts, ops
from nmkernels.nn import CompressedExperts, SparseExperts
from nmkernels.nn.classes import change_class_
from nmkernels.nn.experts import (
    CompressedStack,
    StackedWeight,
    child_name,
    compress_stacks_,
    compressed_stack,
    expand_stacks_,
    experts_per_token,
    in_front,
    layer_name,
    make_stack_dense_,
    make_stack_sparse_,
    stacks_of,
)
from nmkernels.pattern import ShapeError
from nmkernels.testing import equal_bits
from python_tests.moe import CHOSEN, EXPERTS, HIDDEN, KINDS, TRANSPOSED, experts_of, mixture, tiny, tokens

NAMES = ("gate_up_proj", "down_proj")


def pruned(kind="mixtral", **options):
    """A model whose stacks are 2:4 along the dimension that is summed over, by torch's own means."""
    model = tiny(kind, **options)
    _, module = experts_of(model)
    with torch.no_grad():
        for name in NAMES:
            p = module.get_parameter(name)
            matrices = p.transpose(1, 2) if kind == TRANSPOSED else p
            groups = matrices.reshape(EXPERTS, matrices.shape[1], -1, 4)
            groups = groups * torch.zeros_like(groups).scatter_(-1, groups.abs().topk(2, dim=-1).indices, 1.0)
            new = groups.reshape(matrices.shape)
            p.copy_(new.transpose(1, 2) if kind == TRANSPOSED else new)
    return model


def deployed(model, names=NAMES, **options):
    _, module = experts_of(model)
    found = stacks_of(module)
    compress_stacks_(module, {name: compressed_stack(module.get_parameter(name), found[name], "2:4", **options) for name in names})
    return model


def inputs(seed=0, count=12):
    """Tokens, the numbers of their experts (the last expert has none) and their weights."""
    torch.manual_seed(seed)
    numbers = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(count)])
    return torch.randn(count, HIDDEN), numbers, torch.rand(count, CHOSEN)


@pytest.mark.parametrize("kind", KINDS)
def test_which_parameters_are_stacks(kind):
    _, module = experts_of(tiny(kind))
    layout = layouts.EXPERTS_T if kind == TRANSPOSED else layouts.EXPERTS
    assert stacks_of(module) == {"gate_up_proj": layout, "down_proj": layout}
    assert experts_per_token(module) == CHOSEN


def test_other_modules_have_none():
    plain = nn.Module()
    plain.gate_up_proj = plain.down_proj = nn.Parameter(torch.zeros(2, 8, 8))
    assert stacks_of(plain) == stacks_of(nn.Linear(8, 8)) == {}
    assert experts_per_token(plain) is None


def test_experts_per_token_is_the_first_positive_count_of_the_config():
    module, config = nn.Module(), {"num_experts_per_tok": 2, "num_experts_per_token": 3, "moe_topk": 4, "moe_k": 5, "top_k": 6}
    for (name, count), other in zip(list(config.items()), (0, None, [4, 4], "4", -1), strict=True):  # a count per layer is none
        module.config = SimpleNamespace(**config)
        assert experts_per_token(module) == count
        config[name] = other
    module.config = SimpleNamespace(**config)
    assert experts_per_token(module) is None


def test_only_3_d_parameters_of_these_names_are_stacks():
    module = type("Experts", (nn.Module,), {"_apply_gate": None})()
    module.is_transposed = module.has_bias = module.has_gate = False
    module.up_proj, module.down_proj = nn.Parameter(torch.zeros(2, 8, 8)), nn.Parameter(torch.zeros(8, 8))
    assert stacks_of(module) == {"up_proj": layouts.EXPERTS}
    module.has_gate = True
    assert stacks_of(module) == {}


def test_names_of_stacks():
    stack = CompressedStack(ops.compress(torch.randn(8, 8), "2:4"), 2)
    assert layer_name(child_name("a.experts.down_proj"), stack) == "a.experts.down_proj"
    assert child_name("down_proj") == "nm_down_proj" and layer_name("a.fc", nn.Linear(4, 4)) == "a.fc"


# ---- sparse


@pytest.mark.parametrize("kind", ["mixtral", TRANSPOSED])
def test_sparse_module_keeps_its_class_names_and_parameters(kind):
    model = tiny(kind)
    name, module = experts_of(model)
    dense, keys, parameters = type(module), list(model.state_dict()), dict(model.named_parameters())
    values = {key: p.detach().clone() for key, p in parameters.items()}
    stacks = [make_stack_sparse_(module, key, "2:4") for key in NAMES]
    assert isinstance(module, SparseExperts) and isinstance(module, dense)
    assert type(module).__name__ == f"Sparse{dense.__name__}"
    assert list(model.state_dict()) == keys
    assert all(p is parameters[key] and torch.equal(p, values[key]) for key, p in model.named_parameters())
    assert [stack.master.shape[1] for stack in stacks] == [HIDDEN, 48]
    for stack in stacks:
        stack.master.detach().mul_(2)  # a view: what is written to it is written to the Parameter
    assert all(torch.equal(module.get_parameter(key), 2 * values[f"{name}.{key}"]) for key in NAMES)
    for stack in stacks:
        make_stack_dense_(stack)
    assert type(module) is dense and list(model.state_dict()) == keys and not any("nm_" in key for key in module._modules)


@pytest.mark.parametrize("kind", ["mixtral", TRANSPOSED])
def test_expanded_stacks_are_the_dense_module_again(kind):
    model = pruned(kind)
    _, module = experts_of(model)
    dense, want, (x, *more) = type(module), copy.deepcopy(model.state_dict()), inputs()
    y = module(x, *more)
    assert expand_stacks_(experts_of(deployed(model))[1]) is module
    assert type(module) is dense and not any("nm_" in key for key in module._modules)
    assert set(model.state_dict()) == set(want) and all(torch.equal(value, want[key]) for key, value in model.state_dict().items())
    assert all(isinstance(module.get_parameter(key), nn.Parameter) for key in NAMES) and torch.equal(module(x, *more), y)


def test_refused_where_groups_do_not_fit():
    _, module = experts_of(tiny())
    with pytest.raises(ShapeError, match="48"):
        make_stack_sparse_(module, "down_proj", "2:32")
    assert not isinstance(module, SparseExperts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_multiplies_what_is_pruned(kind, implementation):
    model, want = tiny(kind, implementation), pruned(kind, implementation=implementation)
    _, module = experts_of(model)
    for key in NAMES:
        make_stack_sparse_(module, key, "2:4")
    ids = tokens()[0]
    a, b = model(ids, labels=ids), want(ids, labels=ids)
    assert torch.allclose(a.logits, b.logits, atol=1e-6)
    a.loss.backward()
    b.loss.backward()
    _, dense = experts_of(want)
    for key in NAMES:  # straight through, to the pruned weights too
        grad = module.get_parameter(key).grad
        assert grad.count_nonzero() > 0.9 * dense.get_parameter(key).grad.count_nonzero() > 0
        assert torch.allclose(grad, dense.get_parameter(key).grad, atol=1e-7)
    assert not set(NAMES) & module.__dict__.keys()


def test_parameters_come_back_when_a_call_fails():
    _, module = experts_of(tiny())
    for key in NAMES:
        make_stack_sparse_(module, key, "2:4")
    with pytest.raises(RuntimeError):
        module(torch.zeros(3, HIDDEN + 1), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2))
    assert isinstance(module.gate_up_proj, nn.Parameter) and not set(NAMES) & module.__dict__.keys()


def test_another_thread_never_meets_the_dense_weight():
    """The call that ends first must not uncover the Parameters for one that is still under way."""
    _, module = experts_of(tiny())
    stack = make_stack_sparse_(module, "down_proj", "2:4")
    inner, seen = type(module).dense_type.forward, []

    class Nested(type(module).dense_type):
        def forward(self, *args):
            if len(args) == 3:  # within this call another one begins and ends
                SparseExperts.forward(self, *args, "inner")
                seen.append(self.down_proj.detach().clone())
            return inner(self, *args[:3])

    change_class_(module, in_front(SparseExperts, Nested))
    module(*inputs())
    assert torch.equal(seen[0], ops.prune(stack.master.detach(), "2:4").view_as(seen[0]))
    assert isinstance(module.down_proj, nn.Parameter)


@pytest.mark.parametrize("form", ["sparse", "compressed"])
def test_copies_and_pickles(form):
    model = pruned()
    _, module = experts_of(model)
    if form == "sparse":
        for key in NAMES:
            make_stack_sparse_(module, key, "2:4")
    else:
        deployed(model)
    ids = tokens()[0]
    want = model(ids).logits
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, other = experts_of(made)
        assert type(other) is type(module) and other is not module
        assert torch.equal(made(ids).logits, want)
        for child in other.children():
            if isinstance(child, StackedWeight):
                assert child.weight is other.get_parameter(child.key)


@pytest.mark.slow
def test_unpickles_in_another_process(tmp_path):
    """The class was made in this process, and the other has never seen it."""
    model, ids = deployed(pruned()), tokens()[0]
    torch.save((model, ids, model(ids).logits), tmp_path / "model.pt")
    code = f"import torch; torch.set_num_threads({torch.get_num_threads()}); "  # bits depend on it
    code += f"m, x, y = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); assert torch.equal(m(x).logits, y)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- compressed


def test_stack_multiplies_each_experts_tokens():
    w = ops.prune(torch.randn(3, 8, 16), "2:4")
    stack = CompressedStack(ops.compress(w.view(24, 16), "2:4"), 3)
    x, counts = torch.randn(5, 16), [2, 0, 3]
    want = torch.cat([x[:2] @ w[0].t(), x[2:] @ w[2].t()])
    assert torch.allclose(stack(x, counts), want, atol=1e-6)
    assert stack(x[:0], [0, 0, 0]).shape == (0, 8)
    assert torch.equal(stack.dense(), w) and stack.shape == stack.stored_shape == (3, 8, 16)
    turned = CompressedStack(stack.weight, 3, layouts.EXPERTS_T)
    assert torch.equal(turned.dense(), w.transpose(1, 2)) and turned.stored_shape == (3, 16, 8)
    for experts, layout, said in ((5, layouts.EXPERTS, "cannot be divided among 5"), (3, "linear", "unknown")):
        with pytest.raises(ShapeError, match=said):
            CompressedStack(stack.weight, experts, layout)


def test_stacks_are_in_the_mode_of_their_module():
    for training in (True, False):
        _, module = experts_of(deployed(pruned().train(training)))
        assert [stack.training for stack in module.stacks.values()] == [training] * 2


def test_a_stack_notices_uncounted_writes():
    stack, x, counts = CompressedStack(ops.compress(torch.randn(3 * 16, 8), "2:4"), experts=3), torch.randn(5, 8), [2, 0, 3]
    for act in (nn.Module.eval, CompressedStack.train, nn.Module.cpu, lambda stack: stack.load_state_dict(stack.state_dict())):
        with torch.no_grad():
            before, layers = stack(x, counts), weakref.ref(stack.layers[0])
            stack.values.data.mul_(2)
            act(stack)
            gc.collect()
            assert layers() is None, "what it held is free"
            assert torch.allclose(stack(x, counts), 2 * before)
    stack.values = stack.values / 2  # a new buffer
    assert torch.allclose(stack(x, counts), before)
    assert torch.allclose(stack.double()(x.double(), counts).float(), before, atol=1e-6)


@pytest.mark.parametrize("pattern", ["1:1", "2:4"])
def test_a_stack_of_integers_loads_from_the_meta_device(pattern):
    stack = CompressedStack(ops.quantize_values(ops.compress(torch.randn(3 * 4, 8), pattern)), experts=3)
    x, counts, state = torch.randn(5, 8), [2, 0, 3], copy.deepcopy(stack.state_dict())
    y = stack(x, counts)
    stack.to("meta").load_state_dict(state, assign=True)
    assert torch.equal(stack(x, counts), y) and repr(stack) and not stack.dense().is_meta


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[1:]], ids=["both", "first", "last"])
def test_compressed_equals_dense(kind, names):
    want, model = pruned(kind), deployed(pruned(kind), names)
    (_, a), (_, b) = experts_of(want), experts_of(model)
    assert isinstance(b, CompressedExperts) and isinstance(b, type(a)) and type(b).__name__ == f"Compressed{type(a).__name__}"
    assert list(b.stacks) == list(names)
    results = []
    for module in (a, b):
        x, numbers, weights = inputs()
        y = module(x.requires_grad_(), numbers, weights.requires_grad_())
        y.square().sum().backward()
        biases = [p.grad for name, p in module.named_parameters() if name.endswith("_bias")]
        assert len(biases) == 2 * (kind == TRANSPOSED)
        results.append([y.detach(), x.grad, weights.grad, *biases])
    for ours, theirs in zip(*results[::-1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5), (ours - theirs).abs().max()


def test_compressed_takes_what_the_dense_one_takes():
    """By name; on half the tokens; with nobody's experts, as expert parallelism gives them; under autocast."""
    model = deployed(pruned())
    _, module = experts_of(model)
    _, dense = experts_of(pruned())
    x, numbers, weights = inputs()
    names = list(inspect.signature(type(dense).forward).parameters)[1:]
    want = dense(x, numbers, weights)
    assert torch.allclose(module(**dict(zip(names, (x, numbers, weights), strict=True))), want, atol=1e-6)
    assert torch.allclose(module(x[:6], numbers[:6], weights[:6]), want[:6], atol=1e-6)
    numbers[:, 1] = EXPERTS
    assert torch.allclose(module(x, numbers, weights), dense(x, numbers, weights), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(module(x, numbers, weights), dense(x, numbers, weights), rtol=0.05, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("values", [None, "int4"])
def test_compiled_without_a_graph_break(values):
    model = deployed(pruned(implementation="grouped_mm"), values=values).eval()
    ids = tokens()[0]
    want = model(ids).logits
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, backend="eager", fullgraph=True)(ids).logits, want, atol=1e-6)


# ---- integers


def finished(**options):
    model = mixture(dtype=torch.float32, **options)
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    return model


@pytest.mark.parametrize("form", ["finished", "compressed"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("values", "group"), [("int8", None), ("int4", 8)])
def test_each_expert_is_rounded_to_the_nearest(form, transposed, values, group):
    model = finished(transposed=transposed, bias=True)
    floats = nm.compress_(copy.deepcopy(model))
    model = copy.deepcopy(floats) if form == "compressed" else model
    assert nm.compress_(model, values=values, group=group) is model and nm.compress_(model, values=values, group=group) is model
    for key, stack in model.experts.stacks.items():
        assert f"values={values}, group={group or 'row'}, dtype=torch.float32" in repr(stack)
        assert stack.step.shape == (3, stack.out_features, stack.in_features // group if group else 1)
        for layer, before in zip(stack.layers, floats.experts.stacks[key].layers, strict=True):
            want = ops.quantize_values(before.weight, values, group)
            assert all(equal_bits(getattr(layer.weight, part), getattr(want, part)) for part in ("values", "indices", "step"))
    with pytest.raises(nm.RecipeError, match=f"layer 'experts.gate_up_proj' has {values} values already"):
        nm.compress_(model, values="int4" if values == "int8" else "int8")
    x, dense = torch.randn(7, 16, requires_grad=True), nm.densify_(copy.deepcopy(model))
    results = [(y := m(x), torch.autograd.grad(y.sum(), [x, m.experts.down_proj_bias])) for m in (model, dense)]
    torch.testing.assert_close(*results)
    assert dense.experts.down_proj.dtype == torch.float32


def test_integers_are_moved_copied_and_loaded_but_not_cast():
    model, x, counts = nm.compress_(finished(), values="int4"), torch.randn(5, 24), [2, 0, 3]
    stack = model.experts.stacks["down_proj"]
    y, step = stack(x, counts), stack.step.clone()
    other = pickle.loads(pickle.dumps(copy.deepcopy(stack))).half()
    assert (other.step.dtype, other.values.dtype, other.dtype, other.dense().dtype) == (torch.bfloat16, torch.uint8, *2 * (torch.float16,))
    assert torch.equal(other.step, step) and torch.allclose(other(x.half(), counts).float(), y, atol=1e-2)
    fresh = nm.compress_(finished(seed=1), values="int4")
    assert torch.equal(fresh.load_state_dict(model.state_dict()) and fresh.experts.stacks["down_proj"](x, counts), y)
    with pytest.raises(RuntimeError, match="values are int4 in the state dict and float in this layer"):
        nm.compress_(finished()).load_state_dict(model.state_dict())
    stack.step.mul_(2)
    assert torch.allclose(stack(x, counts), 2 * y)
    stack.step = step  # a new buffer
    assert torch.equal(stack(x, counts), y)
    for layer in nm.compress_(model, values="int4", keep_dense=True).experts.stacks["down_proj"].layers:
        assert layer.keep_dense
