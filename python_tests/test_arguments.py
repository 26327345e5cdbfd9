"""Numbers and names that users pass: the same result for every kind of whole number, and a sentence with the argument's name for others."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nmkernels as nm
from nmkernels import ops
from nmkernels.arguments import as_int, as_number
from nmkernels.autograd import SplitRule
from nmkernels.nn import CompressedConv2d, SparseConv2d, SquaredReLUMLP
from nmkernels.nn.experts import CompressedStack
from nmkernels.optim import UpdateRule
from nmkernels.recipes import FST, LayerWise, Span, adopt, distill_loss, prox, search_decay, search_permutation
from python_tests.for_each import for_each

SHAPES = {"up": (64, 32), "down": (32, 64)}
WEIGHT = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def finished() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64))
    nm.sparsify_(model, "ste:2:4").finish(allow_unused=True)
    return model


def tuned(tokens: Any) -> Any:
    model = nm.compress_(finished())
    return [entry.tokens for entry in nm.tune(model, tokens, timer=lambda call: 1e-6).choices]


def audited(**arguments: Any) -> Any:
    return nm.audit(**{"model": SHAPES, "tokens": 8, "device": "H100", **arguments})


def searched(**arguments: Any) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    data, wide = [torch.randn(4, 16) for _ in range(8)], {"grid": (1.0,), "feasible": (0, 100)}
    recipe = FST(end=None, total_steps=None)
    return search_decay(recipe, nn.Linear(16, 16), lambda p: torch.optim.AdamW(p, lr=0.1), step, data, **{**wide, **arguments})


def decoded(c: nm.Compressed) -> list[float]:
    return c.dense().flatten().tolist()


WHOLE: dict[str, tuple[Callable[[Any], Any], int]] = {
    "Pattern": (lambda n: nm.Pattern(n, 4), 2),
    "Pattern=": (lambda m: nm.Pattern(2, m), 4),
    "tune: tokens": (tuned, 4),
    "tune: tokens=": (lambda tokens: tuned([2, tokens]), 4),
    "audit: tokens": (lambda tokens: audited(tokens=tokens), 8),
    "audit: accumulate": (lambda accumulate: audited(accumulate=accumulate), 2),
    "audit: the shape of layer 'a'": (lambda rows: audited(model={"a": (rows, 64)}), 32),
    "flops: the shape of layer 'a'": (lambda cols: nm.flops({"a": (64, cols)}, "ste:2:4", 8), 32),
    "flops: steps": (lambda steps: nm.flops(SHAPES, "step:2:4", steps), 8),
    "flops: tokens": (lambda tokens: nm.flops(SHAPES, "ste:2:4", 8, tokens=tokens), 8),
    "flops: switch_step": (lambda step: nm.flops(SHAPES, "step:2:4", 8, switch_step=step), 2),
    "group": (lambda group: decoded(ops.quantize_values(ops.compress(WEIGHT, "2:4"), "int4", group)), 32),
    "compress_: group": (lambda group: str(nm.compress_(finished(), values="int4", group=group)), 32),
    "quantization_report: group": (lambda group: nm.quantization_report(finished(), "int4", group).layers[0].group, 32),
    "nm_mvue: dim": (lambda dim: ops.mvue(WEIGHT, "2:4", dim, seed=0).tolist(), 1),
    "nm_mvue: offset": (lambda offset: ops.mvue(WEIGHT, "2:4", seed=0, offset=offset).tolist(), 3),
    "nm_mvue_compress: dim": (lambda dim: decoded(ops.mvue_compress(WEIGHT, "2:4", dim, seed=0)), 1),
    "SparseLinear: in_features": (lambda size: str(nm.SparseLinear(size, 8)), 8),
    "SparseLinear: out_features": (lambda size: str(nm.SparseLinear(8, size)), 8),
    "SparseConv2d: in_channels": (lambda size: str(SparseConv2d(size, 8, 3)), 8),
    "SparseConv2d: out_channels": (lambda size: str(SparseConv2d(8, size, 3)), 8),
    "SparseConv2d: groups": (lambda groups: str(SparseConv2d(8, 8, 3, groups=groups)), 1),
    **{f"SparseConv2d: {name}": (lambda v, name=name: str(SparseConv2d(8, 8, **{"kernel_size": 3, name: v})), 2) for name in
       ("kernel_size", "stride", "padding", "dilation")},
    "SparseConv2d: stride=": (lambda stride: str(SparseConv2d(8, 8, 3, (1, stride))), 2),
    "CompressedConv2d: kernel_size": (lambda size: str(CompressedConv2d(ops.compress(torch.ones(4, 72), "2:4"), size)), 3),
    "CompressedConv2d: stride": (lambda stride: str(CompressedConv2d(ops.compress(torch.ones(4, 72), "2:4"), 3, stride=stride)), 2),
    "CompressedStack: experts": (lambda experts: str(CompressedStack(ops.compress(WEIGHT, "2:4"), experts)), 2),
    **{f"SquaredReLUMLP: {name}": (lambda v, name=name: str(SquaredReLUMLP(**{"features": 8, "hidden": 8, name: v})), 8) for name in
       ("features", "hidden", "out_features")},
    "SplitRule: multiple": (lambda multiple: SplitRule(nm.Pattern("2:4"), multiple=multiple), 4),
    "UpdateRule: v_step": (lambda step: UpdateRule(v_step=step), 4),
    "search_permutation: escapes": (lambda escapes: search_permutation(WEIGHT, escapes=escapes).order.tolist(), 3),
    "search_permutation: seed": (lambda seed: search_permutation(WEIGHT, escapes=2, seed=seed).order.tolist(), 3),
    "search_decay: stride": (lambda stride: searched(stride=stride), 2),
}  # fmt: skip
"""How a message names the argument: a call with the argument, and a good value."""

MAY_BE_ZERO = (
    "group", "compress_: group", "quantization_report: group", "nm_mvue", "SparseLinear", "SquaredReLUMLP", "UpdateRule: v_step",
    "SparseConv2d: in_channels", "SparseConv2d: out_channels", "SparseConv2d: padding", "search_permutation",
)  # fmt: skip
MAY_BE_NEGATIVE = ("nm_mvue", "search_permutation: seed")
MAY_BE_NONE = ("flops: switch_step", "group", "compress_: group", "quantization_report: group")
MAY_BE_NONE += ("SquaredReLUMLP: out_features", "Pattern=")


@pytest.mark.parametrize("argument", WHOLE)
def test_whole_numbers_of_every_kind(argument: str) -> None:
    call, good = WHOLE[argument]
    want = call(good)
    for same in (np.int64(good), np.int16(good), torch.tensor(good), torch.tensor([good]), np.array(good)):
        got = call(same)
        assert got == want and repr(got) == repr(want), type(same)


@pytest.mark.parametrize("argument", WHOLE)
def test_others_are_refused_by_the_name_of_the_argument(argument: str) -> None:
    call, good = WHOLE[argument]
    bad: list[Any] = [good + 0.5, float(good), math.nan, math.inf, str(good), True, [[good]], torch.tensor(float(good)), torch.tensor(True)]
    bad += [] if argument.startswith(MAY_BE_ZERO) else [0]
    bad += [] if argument.startswith(MAY_BE_NEGATIVE) else [-1]
    bad += [] if argument in MAY_BE_NONE else [None]
    for value in bad:
        with pytest.raises(nm.NMError) as error:
            call(value)
        assert argument.removesuffix("=").lower() in str(error.value).lower(), value


FINITE: dict[str, tuple[Callable[[Any], Any], float]] = {
    "audit: other": (lambda other: audited(other=other), 2.5),
    "audit: budget": (lambda budget: audited(budget=budget), 2.5),
    "audit: rows['up']": (lambda times: audited(rows={"up": times}), 0.5),
    "flops: other": (lambda other: nm.flops(SHAPES, "ste:2:4", 8, other=other), 2.5),
    "flops: rows['up']": (lambda times: nm.flops(SHAPES, "ste:2:4", 8, rows={"up": times}), 0.5),
    "SplitRule: dense": (lambda dense: SplitRule(nm.Pattern("2:4"), dense), 0.5),
    **{f"UpdateRule: {name}": (lambda v, name=name: UpdateRule(**{name: v}), 0.5) for name in ("decay", "clamp")},
    **{f"Span: {name}": (lambda v, name=name: Span(**{"steps": 1, name: v}), 0.5) for name in ("fprop", "dgrad", "wgrad", "rank")},
    "temperature": (lambda heat: distill_loss(torch.eye(4), torch.ones(4, 4), torch.arange(4), temperature=heat).item(), 0.5),
    "weight": (lambda weight: distill_loss(torch.eye(4), torch.ones(4, 4), torch.arange(4), weight=weight).item(), 0.5),
    "prox: decay": (lambda decay: prox(WEIGHT, decay).tolist(), 0.5),
    "search_decay: a λ of grid": (lambda decay: searched(grid=(decay,)), 0.5),
    "search_decay: a μ of feasible": (lambda ratio: searched(feasible=(ratio, 100)), 0.5),
    "search_decay: measure": (lambda measure: searched(measure=measure), 0.5),
    "rows": (lambda times: LayerWise("4:16", rows={"up": times}), 0.5),
}
TENSOR_TOO, INFINITE = ("prox: decay",), ("prox: decay",)


@pytest.mark.parametrize("argument", FINITE)
def test_finite_numbers(argument: str) -> None:
    call, good = FINITE[argument]
    want = repr(call(good))
    for same in (np.float64(good), np.float32(good)):
        assert repr(call(same)) == want
    bad: list[Any] = [math.nan, str(good), None, True, [good], np.array([good, good]), -good, -1]
    bad += [] if argument in TENSOR_TOO else [torch.tensor(good)]
    bad += [] if argument in INFINITE else [math.inf]
    for value in bad:
        with pytest.raises(nm.NMError) as error:
            call(value)
        assert argument in str(error.value) and "to inf" not in str(error.value), value


@for_each("argument", ["SplitRule: dense", "weight", "search_decay: measure"])
def test_shares_are_at_most_1(argument: str) -> None:
    FINITE[argument][0](1)
    with pytest.raises(nm.NMError, match=argument):
        FINITE[argument][0](1.01)


@pytest.mark.parametrize("name", nm.recipes.names())
def test_a_recipe_keeps_numbers_as_those_of_python(name: str) -> None:
    recipe = nm.recipes.get("vnm:2:8" if name == "vnm" else name, total_steps=400)
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if as_number(value) is not None:
            whole = as_int(value) is not None
            for same in [np.int64(value), torch.tensor(value), np.array(value)] if whole else [np.float64(value)]:
                got = dataclasses.replace(recipe, **{field.name: same})
                assert got == recipe and repr(got) == repr(recipe) and nm.recipes.get(nm.recipes.text(got)) == recipe
            with pytest.raises(nm.NMError, match={"dense_features": "dense"}.get(field.name, field.name)):
                dataclasses.replace(recipe, **{field.name: str(value)})


def test_steps_of_numpy_are_steps_and_no_share() -> None:
    """4 of them were taken for 4 times the run."""
    assert nm.recipes.ASP(total_steps=100, start=np.int64(4)).stages[1][0] == 4
    assert nm.recipes.STEP(total_steps=100, t_max=torch.tensor(30)).bounds() == nm.recipes.STEP(total_steps=100, t_max=30).bounds()


def test_a_traced_op_takes_them_too() -> None:
    def sparse(g: Tensor, seed: int, offset: int) -> Tensor:
        return ops.mvue(g, "2:4", dim=-1, seed=seed, offset=offset)

    compiled = torch.compile(sparse, backend="eager", fullgraph=True)
    for seed, offset in ((0, 0), (1, 2), (5, 7)):
        assert torch.equal(compiled(WEIGHT, seed, offset), sparse(WEIGHT, seed, offset))


@for_each(
    "shapes, said",
    [
        ({"a": (4096,)}, r"the shape of layer 'a' is \(4096,\); it must be \(out, in\)"),
        ({"a": 4096}, r"the shape of layer 'a' is 4096"),
        ({"a..b": (8, 8)}, r"'a\.\.b' is not a layer's name"),
        ({1: (8, 8)}, r"1 is not a layer's name"),
        ([("a", (8, 8))], r"expected a model, or the shapes of its layers.*got list"),
    ],
)
def test_tables_of_shapes(shapes: Any, said: str) -> None:
    for call in (lambda: nm.audit(shapes, 8, device="H100"), lambda: nm.flops(shapes, "ste:2:4", 8)):
        with pytest.raises(nm.NMError, match=said):
            call()


# ---- names and filters that match nothing

NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "audit": (lambda: audited(rows={"upp": 2}), "audit: rows names 'upp', which matches no layer of the model; did you mean 'up'"),
    "flops": (lambda: nm.flops({"a.fc": (8, 8)}, "ste:2:4", 8, rows={"x": 2}), "rows names 'x', which matches no layer.*only 'a.fc'"),
    "flops, inside": (lambda: nm.flops({"body.fc": (8, 8)}, "ste:2:4", 8, rows={"bdoy": 2}), "'bdoy'.*did you mean 'body'"),
    "layerwise": (lambda: nm.sparsify_(mlp(), LayerWise("4:16", given={"fc*": "2:16"})), r"given names 'fc\*', which matches no"),
    "layerwise, rows": (lambda: nm.sparsify_(mlp(), LayerWise("4:16", rule=None, rows={"20": 2})), "rows names '20'.*did you mean '2'"),
    "sparsify_": (lambda: nm.sparsify_(mlp(), "ste:2:4", nothing), "(?s)no layer of the model.*not chosen by the filter"),
    "adopt": (lambda: adopt(mlp(), "2:4", nothing), "0: not chosen by the filter"),
}  # fmt: skip


def nothing(module: nn.Module, name: str) -> bool:
    return False


@pytest.mark.parametrize("entry", NAMES)
def test_names_and_filters_that_match_nothing(entry: str) -> None:
    call, said = NAMES[entry]
    with pytest.raises(nm.RecipeError, match=said):
        call()


def test_a_filter_that_leaves_all_dense_is_counted_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="audit: filter_fn chooses none of layers 'up', 'down'"):
        audited(filter_fn=nothing)
    with pytest.warns(UserWarning, match="flops: filter_fn chooses none of layers 'up', 'down'"):
        assert nm.flops(SHAPES, "ste:2:4", 8, filter_fn=nothing).training_ratio == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.flops(SHAPES, "ste:2:4", 8, filter_fn=lambda module, name: name == "up")
