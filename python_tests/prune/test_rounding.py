"""Rounding with error compensation: as a slow loop does it, better than to the nearest, block by block, and handed on to ``compress_``."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import ops
from nmkernels.nn import SparseLinear
from nmkernels.nn.experts import by_expert
from nmkernels.pattern import CheckpointError, NMError, Pattern, RecipeError
from nmkernels.prune import prune_
from nmkernels.prune.rounding import DAMPING, SWEEPS, round_values
from nmkernels.prune.solve import damped
from python_tests.moe import mixture, only_experts
from python_tests.prune.families import inputs_of
from python_tests.prune.test_prune import P, assert_same, mlp, rows, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 2 tokens per input feature")


def problem(out=6, cols=48, pattern="2:4", tokens=1000, dtype=torch.float64, seed=0):
    """(a compressed weight, H of inputs that depend on each other)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cols, generator=g, dtype=torch.float64)
    x = x[:, : cols // 4] @ torch.randn(cols // 4, cols, generator=g, dtype=torch.float64) + x
    return ops.compress(torch.randn(out, cols, generator=g, dtype=torch.float64).to(dtype), pattern), (x.T @ x / tokens).to(dtype)


def error_of(weight, target, h):
    d = target - weight
    return ((d @ h) * d).sum(1)


def slow(packed, bits, group, h, damping=DAMPING):
    """Row by row and number by number, with the inverse Hessian of what is left instead of a Cholesky factor."""
    w, (out, cols) = packed.dense(), packed.shape
    kept = ops.Compressed(torch.ones_like(packed.values), packed.indices, packed.pattern, packed.shape).dense() != 0
    h = h + damping * h.diagonal().mean() * torch.eye(cols, dtype=h.dtype)
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    inverses = []  # of H without the columns before j
    for j in range(cols):
        inverses.append(torch.linalg.inv(h[j:, j:]))

    def rounded(value, step):
        return 0.0 if step == 0 else float(min(high, max(low, round(value / step))))

    def bf16(value):
        return float(torch.tensor(value, dtype=torch.float64).bfloat16())

    all_q, all_steps = [], []
    for r in range(out):
        row, q, steps = w[r].clone(), torch.zeros(cols, dtype=torch.float64), []
        for j in range(cols):
            inverse = inverses[j]
            if j % group == 0:
                members = [k for k in range(j, j + group) if kept[r, k]]
                first = max((float(row[k]) for k in members), key=abs)
                tried = [abs(first) * (f / 40) / 7 for f in range(20, 43)] + [-first * (f / 40) / 8 for f in range(24, 43)]
                tried = [bf16(abs(first) / 127)] if bits == 8 else [bf16(step) for step in tried]
                # 1/u_kk² is the reciprocal of the first element of the inverse of what is left from k on
                costs = [
                    sum((float(row[k]) - rounded(float(row[k]), s) * s) ** 2 / float(inverses[k][0, 0]) for k in members) for s in tried
                ]
                steps.append(tried[costs.index(min(costs))])
            q[j] = rounded(float(row[j]), steps[-1]) if kept[r, j] else 0.0
            off = (row[j] - q[j] * steps[-1]) / inverse[0, 0]
            row[j:] -= off * inverse[0]
        step = lambda: torch.tensor(steps, dtype=torch.float64).repeat_interleave(group)  # noqa: E731, B023
        rough = ops.quantize_values(packed, f"int{bits}", group)
        d, e = w[r] - q * step(), w[r] - rough.dense(torch.float64)[r]
        if e @ h @ e <= d @ h @ d:
            steps = rough.step[r].tolist()
            q = (rough.dense(torch.float64)[r] / step()).nan_to_num(0.0).round()
        for _ in range(SWEEPS):
            for j in range(cols):
                if j % group == 0:
                    part = torch.zeros_like(q)
                    part[j : j + group] = q[j : j + group]
                    slope, curvature = float((w[r] - q * step()) @ h @ part), float(part @ h @ part)
                    new = bf16(steps[j // group] + slope / curvature) if curvature else steps[j // group]
                    change = new - steps[j // group]
                    if change**2 * curvature < 2 * change * slope:
                        steps[j // group] = new
                if kept[r, j]:
                    others = (w[r] - q * step()) @ h[:, j] + q[j] * steps[j // group] * h[j, j]
                    q[j] = rounded(float(others / h[j, j]), steps[j // group])
        all_q.append(q)
        all_steps.append(torch.tensor(steps, dtype=torch.float64))
    return torch.stack(all_q), torch.stack(all_steps)


@pytest.mark.parametrize(
    ("values", "group", "pattern"),
    [("int4", 16, "2:4"), ("int4", 0, "1:4"), ("int8", 0, "2:4"), ("int8", 12, "1:4"), ("int4", 16, "1:1")],
)
def test_as_a_slow_loop(values, group, pattern):
    packed, h = problem(1 if group == 12 else 4, 48, pattern)
    got = round_values(packed, values, group, h, 1000)
    q, steps = slow(packed, int(values[3:]), group or 48, h)
    assert torch.equal(got.step.double(), steps)
    assert torch.equal(got.dense(torch.float64), q * steps.repeat_interleave(group or 48, 1))


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:8", "3:5", "8:16", "5:7"])
@pytest.mark.parametrize(("values", "group", "share"), [("int4", None, 0.7), ("int8", None, 0.8), ("int4", 0, 0.8)])
def test_far_below_the_nearest(values, group, share, pattern):
    cols = 140 if Pattern(pattern).m in (5, 7) else 192
    share = 0.85 if pattern == "1:8" else share  # where few are kept, few can make up for the others
    packed, h = problem(40, cols, pattern, dtype=torch.float32)
    made, nearest, w = round_values(packed, values, group, h, 1000), ops.quantize_values(packed, values, group), packed.dense()
    for each, part in ((damped(h, DAMPING), slice(None)), (h, slice(0))):  # no row is worse, as it is measured there
        ours, usual = error_of(made.dense(), w, each), error_of(nearest.dense(), w, each)
        assert ours.sum() < share * usual.sum() and bool((ours <= usual * (1 + 1e-4))[part].all())
    assert torch.equal(made.indices, packed.indices) and made.pattern == packed.pattern
    assert (made.kind, made.group, made.step.dtype) == (values, nearest.group, torch.bfloat16)


def test_inputs_that_tell_nothing():
    """Dead inputs are rounded to the nearest, the others compensated; a singular H is damped until it factorises; without H, nearest."""
    packed, h = problem(8, 64)
    dead = torch.arange(64) % 16 >= 12
    h[dead], h[:, dead] = 0.0, 0.0
    made = round_values(packed, "int4", 16, h, 1000)
    off = (made.dense() - packed.dense())[:, dead].abs()
    step = made.step.float().abs().repeat_interleave(16, 1)[:, dead]
    free = packed.dense()[:, dead].abs() < 6 * step  # nothing was clamped
    assert bool((off <= 0.501 * step)[free].all())

    packed, nearest = packed.to(torch.float32), ops.quantize_values(packed, "int4", 16)
    x, w = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)), packed.dense()
    for singular in (x.T @ x, torch.ones(64, 64), x.T @ x - 0.2 * torch.eye(64)):
        made = round_values(packed, "int4", 16, singular, 4)
        assert not torch.equal(made.values, nearest.values)
        assert error_of(made.dense(), w, singular).sum() < error_of(nearest.dense(), w, singular).sum()
    for nothing, tokens in ((h * 0, 0), (h * math.inf, 1000), (h * math.nan, 1000)):
        made = round_values(packed, "int4", 16, nothing, tokens)
        assert torch.equal(made.values, nearest.values) and torch.equal(made.step, nearest.step)
    zero = ops.Compressed(packed.values * 0, packed.indices, packed.pattern, packed.shape)
    made = round_values(zero, "int4", 16, h, 1000)
    assert not made.dense().any() and not made.step.any()


# ---- prune_(values=) and compress_


def test_a_block_sees_the_outputs_of_rounded_ones():
    """And ``compress_`` takes over what was rounded, unless the weight has changed or other integers are wanted."""

    def pruned():
        handle = prune_(model := mlp(), P, data, method="wanda", values="int4")
        handle.finish(allow_unused=True)
        return model, handle

    data = rows()
    (model, handle), (kept, _), (changed, _), (other, _) = (pruned() for _ in range(4))
    nearest = {name: ops.quantize_values(layer.as_pruned(), "int4") for name, layer in handle.layers.items()}
    floats = ops.compress(other[3].weight.detach(), P)
    with torch.no_grad():
        changed[3].weight.mul_(2)
    assert_same(weights(nm.compress_(model)), weights(nm.compress_(kept, values="int4")))
    nm.compress_(changed)
    assert torch.equal(changed[0].values, model[0].values) and not torch.equal(model[3].values, nearest["3"].values)
    assert torch.equal(changed[3].values, nearest["3"].values)  # of twice the weight: twice the step
    nm.compress_(other, values="int4", group=16)
    assert torch.equal(other[3].values, ops.quantize_values(floats, "int4", 16).values)

    dense = mlp()
    for name in ("0", "3", "5"):
        x = torch.cat(inputs_of(model, lambda: [model(batch) for batch in data], [name])[name])
        w, rounded = dense.get_submodule(name).weight.detach(), model.get_submodule(name).weight.dense()
        error = float((x @ (w - rounded).t()).square().sum() / (x @ w.t()).square().sum())
        assert handle.report.pruned[name].rounded == pytest.approx(error, rel=1e-3)


def test_a_copied_or_pickled_model_keeps_its_integers():
    prune_(model := mlp(), P, rows(), method="wanda", values="int4").finish(allow_unused=True)
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), mlp()
    others[2].load_state_dict(model.state_dict())
    nm.recipes.adopt(others[2], P).finish(allow_unused=True)
    nm.compress_(others[2], values="int4")
    want = nm.compress_(model)
    for other in others[:2]:
        assert_same(weights(nm.compress_(other)), weights(want))
    assert not torch.equal(others[2][3].values, want[3].values), "to the nearest would be others"


def test_a_run_that_rounds_goes_on(tmp_path):
    class Stopped(Exception):
        pass

    def stop(done, total, what):
        if done == 2:
            raise Stopped

    def run(folder, **options):
        handle = prune_(model := mlp(), P, rows(), method="wanda", folder=folder, **{"values": "int4", **options})
        handle.finish(allow_unused=True)
        return weights(nm.compress_(model))

    want = run(None)
    with pytest.raises(Stopped):
        run(tmp_path / "a", progress=stop)
    assert_same(want, run(tmp_path / "a"))
    assert_same(want, run(tmp_path / "a"))
    # a version that rounded to the nearest left no integers
    about = tmp_path / "a" / "run.json"
    about.write_text(json.dumps({key: value for key, value in json.loads(about.read_text()).items() if key != "rounding"}))
    with pytest.raises(CheckpointError, match="holds the results of another run: its rounding is .*None.*, not .*error compensation"):
        run(tmp_path / "a")
    run(tmp_path / "b")
    unit = tmp_path / "b" / "unit-0001.safetensors"
    content = bytearray(unit.read_bytes())
    content[-1] ^= 1
    unit.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="unit-0001.safetensors is damaged"):
        run(tmp_path / "b")


def finished(pattern="2:4"):
    """A model whose sparse layers, two of them in blocks, are finished, and data."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    model = nn.Sequential(nn.Linear(64, 64), blocks, nn.Linear(64, 32)).eval()
    nm.sparsify_(model, f"ste:{pattern}").finish(allow_unused=True)
    return model, [x + x[:, :1] + x.roll(1, 1) for x in rows(3, 200, 64)]


@pytest.mark.parametrize("compressed", [False, True])
def test_finished_layers_are_rounded_on_data(compressed):
    """As by hand, layer after layer on the outputs of rounded ones; the model is untouched when a batch fails."""
    model, data = finished()
    float_weights = {name: layer.weight.detach().clone() for name, layer in model.named_modules() if isinstance(layer, SparseLinear)}
    if compressed:
        nm.compress_(model)
    nearest = nm.compress_(copy.deepcopy(model), values="int4", group=32)
    x = torch.cat(data)
    before, y = weights(model), model(x).detach()
    message = "its last dimension must be 64" if compressed else r"^compress_: .* batch 2 of data.* or a tensor\.$"
    with pytest.raises(NMError, match=message):
        nm.compress_(model, values="int4", data=[data[0], data[0][:, :8]])

    def fails(*args):
        calls.append(1)
        if len(calls) == 9:  # the last one
            raise ZeroDivisionError

    calls = []
    hook = model[2].register_forward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        nm.compress_(model, values="int4", data=data)
    hook.remove()
    assert_same(before, weights(model))

    nm.compress_(model, values="int4", group=32, data=data)
    assert (model(x) - y).norm() < 0.7 * (nearest(x) - y).norm()
    for name, w in float_weights.items():
        layer = model.get_submodule(name)
        inputs = torch.cat(inputs_of(model, lambda: [model(batch) for batch in data], [name])[name])
        want = round_values(ops.compress(w, P), "int4", 32, inputs.t() @ inputs / len(inputs), len(inputs))
        assert (layer.weight.kind, layer.weight.group) == ("int4", 32)
        assert (layer.values != want.values).float().mean() < 0.02  # another order of sums


def test_data_is_refused_for_floats_and_when_it_is_empty():
    model, data = finished()
    before = weights(model)
    for options in ({}, {"values": "float"}):
        with pytest.raises(ops.OptionError, match="compress_: data= is for values='int8' or 'int4'"):
            nm.compress_(model, data=data, **options)
    with pytest.raises(RecipeError, match="compress_: data has no batch"):
        nm.compress_(model, values="int4", data=[])
    with pytest.warns(UserWarning, match="compress_: .* got fewer than 2 tokens per input feature"):
        nm.compress_(copy.deepcopy(model), values="int4", data=[data[0][:20]])
    assert_same(before, weights(model))
    nm.compress_(model, values="int8", data=data)
    values = weights(model)
    assert_same(values, weights(nm.compress_(model, values="int8", data=iter(()))))  # integers already, and the data is not read


def test_layers_that_reorder_their_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    handle = nm.sparsify_(model, nm.recipes.Complementary("1:4"))
    handle.finish(allow_unused=True)
    assert any(layer.columns is not None for layer in handle.layers.values())
    data = [x + x[:, :1] + x.roll(1, 1) for x in rows(3, 200, 64)]
    x = torch.cat(data)
    y, nearest = model(x).detach(), nm.compress_(copy.deepcopy(model), values="int4")
    nm.compress_(model, values="int4", data=data)
    assert (model(x) - y).norm() < 0.8 * (nearest(x) - y).norm()


def tokens_of(model, x):
    """What each expert that has tokens multiplies, by the name of the stack's problem."""
    numbers = (torch.arange(len(x))[:, None] + torch.arange(2)) % 2
    by_name = {}
    for expert, first, last in by_expert(model.experts, None, x, numbers, None):
        by_name |= {f"experts.gate_up_proj[{expert}]": first, f"experts.down_proj[{expert}]": last}
    return by_name


def mixed(count=600):
    """Inputs that depend on each other; of three experts the last one gets none of them."""
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
    return x + x[:, :1] + x.roll(1, 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_experts_are_rounded_on_their_own_tokens(compressed, transposed):
    model, x = mixture(dtype=torch.float32, transposed=transposed, bias=True), mixed()
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    floats = nm.compress_(copy.deepcopy(model))
    nearest = nm.compress_(copy.deepcopy(floats), values="int4")
    model = copy.deepcopy(floats) if compressed else model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NMError):
        nm.compress_(model, values="int4", data=[(torch.randn(3, 8), 2)])
    assert_same(dict(model.state_dict()), before)
    nm.compress_(model, values="int4", data=[(x, 2)])
    inputs = tokens_of(floats, x)
    assert inputs.keys() == tokens_of(mixture(dtype=torch.float32, transposed=transposed, bias=True), x).keys() and len(inputs) == 4
    for key in ("gate_up_proj", "down_proj"):
        stacks = [m.experts.stacks[key] for m in (model, nearest, floats)]
        for e, (ours, theirs, w) in enumerate(zip(*(stack.layers for stack in stacks), strict=True)):
            assert torch.equal(ours.indices, w.indices)
            if e == 2:
                assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
                continue
            errors = [(inputs[f"experts.{key}[{e}]"] @ (w.dense() - q.dense()).t()).square().sum() for q in (ours, theirs)]
            assert errors[0] < 0.8 * errors[1]


def test_prune_rounds_each_expert():
    model, x = mixture(dtype=torch.float32), mixed()
    with torch.no_grad():
        inputs = tokens_of(model, x)
        dense = {key: model.experts.get_parameter(key).clone() for key in ("gate_up_proj", "down_proj")}
    handle = prune_(model, P, [(x, 2)], only_experts, method="wanda", values="int4")
    handle.finish(allow_unused=True)
    kept = {key: model.experts.get_parameter(key).detach() != 0 for key in dense}
    nm.compress_(model)
    for key, w in dense.items():
        q = model.experts.stacks[key].dense().detach()
        assert model.experts.stacks[key].weight.kind == "int4" and not bool((q != 0)[~kept[key]].any())
        for e in range(3):
            row = handle.report.pruned[f"experts.{key}[{e}]"]
            if e == 2:
                assert row.rounded is None
                continue
            a = inputs[f"experts.{key}[{e}]"].double()
            error = (a @ (w[e] - q[e]).double().t()).square().sum() / (a @ w[e].double().t()).square().sum()
            assert row.rounded == pytest.approx(float(error), rel=1e-3) and row.rounded > row.error
