"""nm.flops against figures computed by hand, and what it counts in which model."""

import copy
import math

import pytest
import torch
from torch import nn

import nmkernels as nm
from examples.train_gpt.model import GPT, GPTConfig
from nmkernels.recipes import SRSTE, STEP, LayerWise, MdGf, Recipe, Span
from nmkernels.recipes.compose import with_pattern
from nmkernels.testing import equal_bits

BLOCK = 192 * 64 + 64 * 64 + 256 * 64 + 64 * 256  # qkv, projection, up, down
HEAD = 256 * 64


def gpt():
    return GPT(GPTConfig(width=64, layers=2, heads=2, context=32))


def test_step_on_a_gpt_by_hand():
    """501 steps (T_max = 500) at 3 dense GEMMs, 499 at 1/2 + 1 + 1; the head dense to the end."""
    cost = nm.flops(gpt(), "step:2:4", 1000, tokens=512)
    assert cost.dense_training == 512 * 1000 * 3 * 2 * (2 * BLOCK + HEAD)
    assert cost.training == 512 * 2 * (2 * BLOCK * (501 * 3 + 499 * 2.5) + HEAD * 1000 * 3)
    assert cost.dense_inference == 2 * (2 * BLOCK + HEAD) and cost.inference == 2 * (BLOCK + HEAD)
    assert cost.training_ratio == pytest.approx(cost.training / cost.dense_training)
    assert cost.inference_ratio == (BLOCK + HEAD) / (2 * BLOCK + HEAD)
    for key in ("training", "inference", "dense_training", "dense_inference"):
        assert getattr(cost, key) == sum(getattr(part, key) for part in cost.layers)
    assert [p.name for p in cost.layers if not p.sparse] == ["lm_head"] and len(cost.layers) == 9


def test_flops_after_the_switch_and_of_dense_layers():
    one = {"fc": (64, 64)}
    known = nm.flops(one, STEP("2:4", total_steps=100), 100, switch_step=20)
    assert known.training == 2 * 64 * 64 * (20 * 3 + 80 * 2.5)
    cost = nm.flops({"a": (50, 64), "b": (64, 64)}, nm.recipes.FST("2:4", end=None), 10)
    assert [part.sparse for part in cost.layers] == [False, True], "a transposable mask needs whole groups of outputs too"
    assert "out_features=50 is not a multiple of M=4" in cost.layers[0].why and cost.layers[0].training == cost.layers[0].dense_training
    with pytest.raises(nm.RecipeError, match="srste does not choose a switching step"):
        nm.flops(one, "srste:2:4", 100, switch_step=20)


class Odd(Recipe):
    """Ten steps of everything that a span can say, then plain; leaves an adapter of rank 4."""

    final = "nm+adapter"

    def stage(self, state):
        return SRSTE().stage(state)

    def profile(self, steps):
        return [Span(10, fprop=0.5, dgrad=0.5, wgrad=0.25, rank=8, teacher=1), Span(max(steps - 10, 0), fprop=0.5, rank=4)]


def test_adapters_and_teachers():
    cost = nm.flops({"fc": (32, 64), "head": (16, 32)}, Odd(), 30, tokens=7)
    sparse, head = 2 * 32 * 64, 2 * 16 * 32
    adapters = (10 * 8 + 20 * 4) * 3 * 2 * (32 + 64)
    assert cost.training == 7 * (sparse * (10 * 1.25 + 20 * 2.5) + adapters + head * 30 * 3 + 10 * (sparse + head))
    assert cost.inference == sparse / 2 + 2 * 4 * (32 + 64) + head
    assert cost.layers[-1].name == "(teacher)" and "(teacher)" in str(cost)


def test_rows_and_other():
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    cost = nm.flops(model, "ste:2:4", 1, rows={"1": 0.5, "1.1": 0.25}, other=100.0)
    assert [part.rows for part in cost.layers[:3]] == [1.0, 0.5, 0.25]
    assert cost.dense_inference == 2 * 32 * 32 * 1.75 + 100 and cost.inference == 32 * 32 * 1.75 + 100
    assert cost.training == 2 * 32 * 32 * 1.75 * 2.5 + 300
    with pytest.raises(nm.RecipeError, match=r"rows names '1.2'.*did you mean '1.[01]'"):
        nm.flops(model, "ste:2:4", 1, rows={"1.2": 1.0})
    with pytest.raises(nm.RecipeError, match="at least 0"):
        nm.flops(model, "ste:2:4", 1, rows={"0": -1.0})


def test_layers_with_patterns_of_their_own():
    own = LayerWise("2:4", rule=None, given={"0": "1:4", "1": "3:4"})
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8))
    cost = nm.flops(model, own, 1)
    assert [(p.why[:4], p.inference) for p in cost.layers] == [("1:4", 64 * 32 / 2), ("3:4", 64 * 32 * 1.5), ("tiny", 2 * 32 * 8)]
    assert [p.training for p in cost.layers] == [2 * 64 * 32 * 2.25, 2 * 64 * 32 * 2.75, 2 * 32 * 8 * 3]
    nm.sparsify_(model, own)
    assert nm.flops(model, own, 1) == cost
    inner = with_pattern(STEP("2:4", total_steps=100, switch="fixed", inner=SRSTE("2:4")), nm.Pattern("1:8"))
    assert inner.pattern == inner.inner.pattern == nm.Pattern("1:8")


def test_layers_other_than_plain_linear():
    """Attention's own projections are counted dense; how many tokens reach an expert only ``rows`` can say."""
    experts = nn.Module()
    experts.up = nn.Parameter(torch.zeros(4, 32, 64))
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 2), "experts": experts})
    cost = nm.flops(model, "ste:2:4", 1)
    assert {p.name: p.inference for p in cost.layers} == {"attn.in_proj_weight": 6 * 32 * 32, "attn.out_proj": 2 * 32 * 32, "experts.up": 0}
    two_of_four = nm.flops(model, "ste:2:4", 1, rows={"experts": 0.5})
    assert two_of_four.inference - cost.inference == 2 * 2 * 32 * 64


def test_a_frozen_layer_has_no_weight_gradient():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight.requires_grad_(False)
    cost = nm.flops(model, "ste:2:4", 1)
    assert [p.training for p in cost.layers] == [2 * 32 * 32 * 1.5, 2 * 32 * 32 * 2.5]
    assert [p.dense_training for p in cost.layers] == [2 * 32 * 32 * 2, 2 * 32 * 32 * 3]
    assert nm.flops(model[0], "ste:2:4", 1).training == cost.layers[0].training, "also one that is the whole model"


def test_every_form_of_a_model_counts_the_same():
    model, recipe = gpt(), SRSTE("1:8")
    chosen = lambda m, name: "mlp" in name  # noqa: E731
    before = copy.deepcopy(model.state_dict())
    dense = nm.flops(model, recipe, 10, filter_fn=chosen)
    assert equal_bits(dict(before), dict(model.state_dict())) and not any(isinstance(m, nm.SparseLinear) for m in model.modules())
    with torch.device("meta"):
        meta = gpt()
    handle = nm.sparsify_(model, recipe, filter_fn=chosen)
    sparse = nm.flops(model, recipe, 10)
    assert not any(layer.ran for layer in handle.layers.values())
    handle.finish(allow_unused=True)
    nm.compress_(model)
    totals = [
        (c.training, c.inference, c.dense_training, c.dense_inference)
        for c in (dense, nm.flops(meta, recipe, 10, filter_fn=chosen), sparse, nm.flops(model, recipe, 10))
    ]
    assert totals == [totals[0]] * 4
    with pytest.raises(nm.RecipeError, match="filter_fn has no effect"):
        nm.flops(model, recipe, 10, filter_fn=chosen)


def test_steps_of_the_run_and_of_the_schedule():
    one, recipe = {"fc": (32, 32)}, MdGf("1:4", 100, end=60)
    by_name = nm.flops(one, "mdgf:1:4", 100)  # its total_steps is the run's
    assert by_name.training == nm.flops(one, MdGf("1:4", 100), 100).training
    assert nm.flops(one, recipe, 30).training_ratio == 1.0
    assert nm.flops(one, recipe, 1000).training == 2 * 32 * 32 * (60 * 3 + 940 * 2.25)


def test_what_cannot_be_counted():
    for bad in ({"steps": 0}, {"tokens": 0}, {"other": -1.0}, {"other": math.nan}, {"steps": True}):
        with pytest.raises(nm.RecipeError, match=f"flops: {next(iter(bad))}="):
            nm.flops({"fc": (32, 32)}, "ste:2:4", **{"steps": 1, **bad})
    with pytest.raises(nm.RecipeError, match="no linear layer"):
        nm.flops(nn.LayerNorm(4), "ste:2:4", 1)
    with pytest.raises(nm.RecipeError, match="got int"):
        nm.flops(nn.Linear(32, 32), 3, 1)


def test_the_table():
    text = str(nm.flops({"up": (256, 64), "head": (10, 256)}, "sste:2:4", 1000, tokens=4096)).splitlines()
    assert text[0].split() == ["layer", "shape", "rows", "training", "of", "dense", "inference", "of", "dense", "why"]
    assert text[1].split() == ["up", "(256,64)", "1", "2.68e+11", "0.667", "1.64e+04", "0.500", "2:4"]
    assert text[2].endswith("1.000  output head")
    assert text[3] == "training 3.314e+11 FLOPs, 0.712 of dense, 1000 steps of 4096 tokens"
    assert text[4] == "inference 2.15e+04 FLOPs per token, 0.568 of dense"
