"""Predicted times against numbers computed by hand, the composition rule and the break-even points of the design's notes."""

from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.audit.advice import Case, break_even
from nmkernels.audit.devices import DEVICES
from nmkernels.audit.rules import Layer, Rules, at, gemm, predict, refused, speedup

P = nm.Pattern("2:4")
BF16 = torch.bfloat16
H200, H100, A100 = (DEVICES[name] for name in ("H200", "H100", "A100"))
TWO_WAYS = Rules(P, dgrad=True, prepare="transposable")


def bare(device, ratio=None):
    """Without what starting a kernel takes."""
    device = replace(device, launch=0.0, call=0.0)
    return device if ratio is None else at(device, ratio)


def layer(out=4096, cols=4096, tokens=8192, dtype=BF16, master=None):
    return Layer((out, cols), tokens, dtype, master or dtype)


def test_arithmetic_bounds_many_tokens():
    big = layer()
    assert gemm(H200, big, "fprop") == pytest.approx(2 * 8192 * 4096**2 / 700e12 + 3e-6)
    for role in ("fprop", "dgrad", "wgrad"):
        assert gemm(H200, big, role, P) == pytest.approx(2 * 8192 * 4096**2 / 875e12 + 3e-6)
    assert gemm(A100, big, "fprop", P) == pytest.approx(2 * 8192 * 4096**2 / (1.4 * 250e12) + 3e-6)


def test_memory_bounds_few_tokens():
    one, rest = layer(tokens=1), 2 * 2 * 4096
    assert gemm(H200, one, "fprop") == pytest.approx((4096**2 * 2 + rest) / (0.85 * 4.8e12) + 3e-6)
    assert gemm(H200, one, "fprop", P) == pytest.approx((4096**2 * 1.125 + rest) / (0.85 * 4.8e12) + 3e-6)
    assert gemm(H200, one, "fprop", nm.Pattern("1:8")) == pytest.approx((4096**2 * 0.3125 + rest) / (0.85 * 4.8e12) + 3e-6)
    assert gemm(bare(H200), layer(16384, 16384, 1), "fprop") / gemm(bare(H200), layer(16384, 16384, 1), "fprop", P) == pytest.approx(
        2 / 1.125, rel=1e-3
    )


def test_sparser_patterns_are_stored_as_2_4_on_tensor_cores():
    some = layer(tokens=64)
    assert gemm(H200, some, "fprop", nm.Pattern("1:8")) == gemm(H200, some, "fprop", P)
    assert gemm(H200, some, "fprop", P) < gemm(H200, some, "fprop")


@pytest.mark.parametrize(
    ("device", "shape", "one", "two"),
    [
        (H100, (4096, 4096), 18.4, 25.8),
        (H100, (4096, 11008), 49.5, 69.3),
        (H200, (4096, 4096), 12.9, 18.0),
        (H200, (4096, 11008), 34.5, 48.3),
        (H200, (8192, 28672), 180, 252),
    ],
)
def test_masking_packing_and_estimates_at_85_percent_of_the_bandwidth(device, shape, one, two):
    """Microseconds of a weight packed one way, both ways with its mask, and of as many gradients estimated and packed."""
    device, rules = bare(device), replace(TWO_WAYS, estimate=P)
    mask = replace(rules, prepare="mask")
    weight = Layer(shape, shape[1], BF16, BF16)
    assert 1e6 * predict(device, weight, mask, fused=False)("weight rows") == pytest.approx(one, rel=0.01)
    assert 1e6 * predict(device, weight, rules, fused=False)("weight both") == pytest.approx(two, rel=0.01)
    assert 1e6 * predict(device, weight, rules)("estimate") == pytest.approx(one, rel=0.01)


def test_what_is_fused_reads_nothing():
    moved = 1e12 * 4.8 * 0.85 / 4096**2
    cost = predict(H200, layer(master=torch.float32), replace(TWO_WAYS, prepare="mask"))
    assert cost("weight rows") * moved == pytest.approx(1.125) and cost("weight rows+dense") * moved == pytest.approx(3.125)
    alone = predict(bare(H200), layer(master=torch.float32), TWO_WAYS, fused=False)
    assert alone("weight both") * moved == pytest.approx(4 + 2.25 + 0.125) and alone("weight dense") * moved == pytest.approx(6)
    soft = replace(TWO_WAYS, prepare="threshold")  # which the optimizer does not do in its pass
    assert predict(bare(H200), layer(), soft)("weight rows") * moved == pytest.approx(3.125)
    assert alone("expand") * moved == pytest.approx(3.125)


@pytest.mark.parametrize("ratio", [1.2, 1.25, 1.3, 1.6, 1.75])
def test_composition_rule(ratio):
    """fprop and dgrad sparse: at most 3 / (1 + 2/r); with the estimate too, at most r. Both are reached where preparing is nothing."""
    case = Case(bare(H200, ratio), layer(32768, 32768, 1 << 20), TWO_WAYS)
    limit = 3 / (1 + 2 / ratio)
    assert limit * 0.998 < case.speedup() <= limit * (1 + 1e-12)
    assert round(limit, 2) == {1.2: 1.12, 1.25: 1.15, 1.3: 1.18, 1.6: 1.33, 1.75: 1.40}[ratio]
    estimated = case.but({"estimate": P}).speedup()
    assert ratio * 0.97 < estimated <= ratio
    assert 3 / (2 + 1 / ratio) * 0.998 < case.but({"dgrad": False}).speedup() <= 3 / (2 + 1 / ratio)


@pytest.mark.parametrize(
    ("device", "ratio", "tokens"),
    [(H200, 1.25, 940), (H200, 1.6, 500), (replace(A100, passes=767e9 / 2.04e12), 1.4, 1250)],
)
def test_break_even_of_two_way_packing(device, ratio, tokens):
    """tokens ≥ 4.375 · rate / (4 · bandwidth · (1 − 1/r)), as fprop and dgrad pay for it."""
    case = Case(bare(device, ratio), layer(8192, 8192), TWO_WAYS, fused=False)
    found = break_even(case)
    rate, memory = device.dense["bfloat16"], device.bandwidth * device.passes
    assert found == pytest.approx(4.375 * rate / (4 * memory * (1 - 1 / ratio)), abs=1)
    assert found == pytest.approx(tokens, rel=0.01)
    assert case.but(layer={"tokens": found}).speedup() >= 1 > case.but(layer={"tokens": found - 1}).speedup()
    assert break_even(replace(case, fused=True)) < found / 1.5, "the optimizer's pass reads the weight anyhow"


@pytest.mark.parametrize(("ratio", "inputs"), [(1.25, 1340), (1.6, 720)])
def test_break_even_of_the_estimate(ratio, inputs):
    """inputs ≥ 3.125 · rate / (2 · bandwidth · (1 − 1/r)): MVUE of g (tokens, out) is paid for by gᵀ x, which grows with them."""

    def gain(cols):
        cost = predict(bare(H200, ratio), layer(8192, cols, 65536), replace(TWO_WAYS, estimate=P))
        return cost("wgrad dense") - cost("wgrad sparse") - cost("estimate")

    assert gain(inputs * 1.02) > 0 > gain(inputs * 0.98)


def test_predictions_are_monotone():
    speeds = [Case(H200, layer(tokens=t), TWO_WAYS).speedup() for t in (256, 512, 1024, 4096, 16384, 65536)]
    assert speeds == sorted(speeds) and len(set(speeds)) == len(speeds)
    times = [gemm(H200, layer(tokens=t), "fprop", P) for t in (1, 16, 64, 256, 1024)]
    assert times == sorted(times)
    ratios = [Case(at(H200, r), layer(), TWO_WAYS).speedup() for r in (1.0, 1.1, 1.3, 1.6, 2.0)]
    assert ratios == sorted(ratios) and ratios[0] < 1.001, "with no faster GEMM nothing is gained"
    passes = [Case(H200, layer(tokens=1024), TWO_WAYS, accumulate=k).speedup() for k in (1, 2, 8)]
    assert passes == sorted(passes) and passes[0] < passes[-1]


@pytest.mark.parametrize(
    ("role", "changed", "pattern", "want"),
    [
        ("fprop", {}, "2:4", ""),
        ("fprop", {}, "1:8", ""),
        ("fprop", {}, "4:8", "pattern"),
        ("fprop", {"tokens": 16}, "4:8", ""),
        ("fprop", {"dtype": torch.float32}, "2:4", "float32"),
        ("fprop", {"dtype": torch.float32, "tokens": 4}, "2:4", ""),
        ("fprop", {"dtype": torch.float64, "tokens": 4}, "2:4", "float64"),
        ("fprop", {"out": 4096 + 32}, "2:4", "shape"),
        ("fprop", {"cols": 4096 + 32}, "2:4", "shape"),
        ("dgrad", {"cols": 4096 + 16}, "2:4", "shape"),
        ("wgrad", {"cols": 4096 + 16}, "2:4", ""),
        ("wgrad", {"out": 4096 + 16}, "2:4", "shape"),
        ("wgrad", {"tokens": 1001}, "2:4", ""),
    ],
)
def test_which_gemms_have_a_sparse_kernel(role, changed, pattern, want):
    assert refused(H200, layer(**changed), role, nm.Pattern(pattern)) == want
    cost = predict(H200, layer(**changed), Rules(nm.Pattern(pattern), estimate=nm.Pattern(pattern)))
    assert (cost(f"{role} sparse") is None) == bool(want)
    if want == "shape" and "out" not in changed:
        assert refused(A100, layer(4096 + 16), role, nm.Pattern(pattern)) == "" or role == "dgrad"


def test_no_choice_is_slower_than_another():
    """A step takes the faster form of each GEMM, so more structure never costs more than its preparation."""
    for tokens in (64, 1024, 65536):
        case = Case(H200, layer(tokens=tokens), TWO_WAYS)
        dense = speedup(case.but({"fprop": False, "dgrad": False, "prepare": ""}).step())
        assert dense == 1.0
        assert case.speedup() >= case.but({"dgrad": False}).speedup() * (1 - 1e-12)
