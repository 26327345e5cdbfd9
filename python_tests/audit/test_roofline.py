"""Predicted times and the choice of pieces by hand, the composition rule and the break-even points of the design's notes."""

from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.audit.advice import break_even
from nmkernels.audit.rules import Layer, LayerCosts, Piece, Rules, speedup, total
from nmkernels.gemm.devices import DEVICES
from nmkernels.gemm.problem import ROLES
from python_tests.audit.layer_zoo import COSTS

P = nm.Pattern("2:4")
H200, H100, A100 = (DEVICES[name] for name in ("H200", "H100", "A100"))
TWO_WAYS = Rules(P, dgrad=True, prepare="transposable")


def bare(device, ratio=None):
    """Without what starting a kernel takes."""
    device = replace(device, launch=0.0, call=0.0)
    return device if ratio is None else device.at(ratio)


def costs(device=H200, out=4096, cols=4096, tokens=8192, dtype=torch.bfloat16, master=None, rules=TWO_WAYS, **words):
    return LayerCosts(device, Layer((out, cols), tokens, dtype, master or dtype), rules, **words)


def test_arithmetic_bounds_many_tokens():
    assert costs().predict("fprop dense") == pytest.approx(2 * 8192 * 4096**2 / 770e12 + 3e-6)
    for role in ("fprop", "dgrad", "wgrad"):
        assert costs(rules=Rules(P, estimate=P)).predict(f"{role} sparse") == pytest.approx(2 * 8192 * 4096**2 / (1.4 * 770e12) + 3e-6)
    assert costs(A100).predict("fprop sparse") == pytest.approx(2 * 8192 * 4096**2 / (1.4 * 250e12) + 3e-6)


def test_memory_bounds_few_tokens():
    one, rest = costs(tokens=1), 2 * 2 * 4096
    for pattern, stored in ((None, 2), (P, 1.125), (nm.Pattern("1:8"), 0.3125)):
        changed, form = (one, "dense") if pattern is None else (one.but({"pattern": pattern}), "sparse")
        assert changed.predict(f"fprop {form}") == pytest.approx((4096**2 * stored + rest) / (0.85 * 4.8e12) + 3e-6)
    some = costs(tokens=64)  # sparser patterns are stored as 2:4 on tensor cores
    sparser = some.but({"pattern": nm.Pattern("1:8")})
    assert sparser.predict("fprop sparse") == some.predict("fprop sparse") < some.predict("fprop dense")
    narrow = costs(cols=64, rules=Rules(P, estimate=P))  # in wgrad the estimate of the gradient is what is packed
    assert narrow.predict("wgrad sparse") == pytest.approx((4096 * 8192 * 1.125 + 2 * 64 * (8192 + 4096)) / (0.85 * 4.8e12) + 3e-6)


def test_what_masking_packing_and_estimates_read_and_write():
    """Bytes an element, at 85 percent of the bandwidth."""

    def moved(costs, piece):
        return costs.predict(piece) * (1e12 * 4.8 * 0.85 / 4096**2)

    alone = costs(bare(H200), master=torch.float32)
    assert moved(alone, "weight both") == pytest.approx(4 + 2 + 0.125) == moved(alone, "weight dense"), "positions of a held mask stay"
    both = costs(bare(H200), tokens=4096, rules=replace(TWO_WAYS, estimate=P))
    assert moved(both, "weight both") == pytest.approx(5.25)
    assert moved(both.but({"prepare": "mask"}), "weight rows") == moved(both, "estimate") == pytest.approx(3.125)
    soft = costs(bare(H200), rules=replace(TWO_WAYS, prepare="threshold"))
    assert moved(soft, "weight rows") == pytest.approx(3.125) == moved(alone, "expand")


@pytest.mark.parametrize(("ratio", "limit"), [(1.2, 1.12), (1.25, 1.15), (1.3, 1.18), (1.6, 1.33), (1.75, 1.40)])
def test_composition_rule(ratio, limit):
    """fprop and dgrad sparse: at most 3 / (1 + 2/r); with the estimate too, at most r. Both are reached where preparing is nothing."""
    large = costs(bare(H200, ratio), 32768, 32768, 1 << 20)
    assert round(3 / (1 + 2 / ratio), 2) == limit
    assert 3 / (1 + 2 / ratio) * 0.998 < large.speedup() <= 3 / (1 + 2 / ratio) * (1 + 1e-12)
    assert ratio * 0.97 < large.but({"estimate": P}).speedup() <= ratio
    assert 3 / (2 + 1 / ratio) * 0.998 < large.but({"dgrad": False}).speedup() <= 3 / (2 + 1 / ratio)


@pytest.mark.parametrize(
    ("device", "ratio", "tokens"),
    [(H200, 1.25, 1239), (H200, 1.6, 661), (replace(A100, passes=767e9 / 2.04e12), 1.4, 1498)],
)
def test_break_even_of_two_way_packing(device, ratio, tokens):
    """tokens ≥ 5.25 · rate / (4 · bandwidth · (1 − 1/r)), as fprop and dgrad pay for it."""
    packing = costs(bare(device, ratio), 8192, 8192)
    found = break_even(packing)
    rate, memory = device.dense["bfloat16"], device.bandwidth * device.passes
    assert found == pytest.approx(5.25 * rate / (4 * memory * (1 - 1 / ratio)), abs=1)
    assert found == pytest.approx(tokens, rel=0.01)
    assert packing.but(layer={"tokens": found}).speedup() >= 1 > packing.but(layer={"tokens": found - 1}).speedup()


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
        ("fprop", {"out": 4096 + 16, "device": A100}, "2:4", ""),
        ("fprop", {"cols": 4096 + 32}, "2:4", "shape"),
        ("dgrad", {"cols": 4096 + 16}, "2:4", "shape"),
        ("wgrad", {"cols": 4096 + 16}, "2:4", ""),
        ("wgrad", {"out": 4096 + 16}, "2:4", "shape"),
        ("wgrad", {"tokens": 1001}, "2:4", ""),
    ],
)
def test_which_gemms_have_a_sparse_kernel(role, changed, pattern, want):
    pattern = nm.Pattern(pattern)
    changed = costs(rules=Rules(pattern, estimate=pattern), **changed)
    assert changed.refused(role) == want and (changed.predict(f"{role} sparse") is None) == bool(want)


# ---- the pieces of a step from given costs, added up by hand

PACKED = {"fprop": (6.0, "sparse"), "dgrad": (7.0, "sparse"), "weight": (0.75, "rows")}


def priced(rules, transposed=False, **words):
    return costs(replace(H200, transposed=transposed), rules=rules, **words)


def used(pieces):
    return {p.name: (p.used, p.form) for p in pieces}


@pytest.mark.parametrize(
    ("rules", "transposed", "want"),
    [
        (Rules(P), False, {"fprop": (6.0, "sparse"), "dgrad": (11.0, "dense"), "weight": (1.25, "rows+dense"), "wgrad": (12.0, "dense")}),
        (Rules(P), True, {**PACKED, "wgrad": (12.0, "dense")}),
        (
            Rules(P, dgrad=True, estimate=P, prepare="transposable"),
            False,
            {**PACKED, "weight": (2.0, "both"), "wgrad": (8.0, "sparse"), "estimate": (1.0, "mvue 2:4")},
        ),
        (Rules(P, fprop=False, prepare=""), False, {role: (COSTS[f"{role} dense"], "dense") for role in ROLES}),
        (Rules(P, trains=False), True, PACKED),
    ],
)
def test_the_cheapest_pieces(rules, transposed, want):
    pieces = priced(rules, transposed).step(COSTS.get)
    assert used(pieces) == want
    assert total(pieces) == (sum(COSTS[f"{role} dense"] for role in ROLES if role in want), sum(v for v, _ in want.values()))


def test_a_weight_without_a_gradient_needs_no_cost_of_wgrad():
    costs = {name: seconds for name, seconds in COSTS.items() if not name.startswith("wgrad")}
    assert used(priced(Rules(P, trains=False), True).step(costs.get)) == PACKED
    assert priced(Rules(P), True).step(costs.get) == ()


def test_packing_that_costs_too_much_is_not_done():
    dear = {**COSTS, "weight rows+dense": 5.0}
    pieces = priced(Rules(P)).step(dear.get)
    assert used(pieces)["weight"] == (0.5, "dense") and used(pieces)["fprop"] == (10.0, "dense")
    assert speedup(pieces) == 33 / 33.5
    assert used(priced(Rules(P), accumulate=4).step(dear.get))["weight"] == (1.25, "rows+dense"), "four passes share it"


def test_an_estimate_that_does_not_pay_is_still_drawn():
    estimated = priced(Rules(P, estimate=P))
    slow = used(estimated.step({**COSTS, "wgrad sparse": 13.0}.get))
    assert slow["wgrad"] == (12.0, "dense") and slow["estimate"] == (1.0, "mvue 2:4")
    whole = used(estimated.step({**COSTS, "wgrad estimated": 14.0}.get))
    assert whole["wgrad"] == (14.0, "of mvue 2:4") and "estimate" not in whole


def test_unmeasured_pieces_are_left_out():
    assert priced(Rules(P)).step({"fprop dense": 1.0}.get) == () == priced(Rules(P)).inference({}.get)
    some = {name: took for name, took in COSTS.items() if "sparse" not in name}
    assert used(priced(Rules(P)).step(some.get))["fprop"] == (10.0, "dense")


def test_inference():
    kept, packed, slow = priced(Rules(P)), priced(Rules(P), has_dense=False), {**COSTS, "fprop sparse": 10.5}
    assert kept.inference(COSTS.get) == packed.inference(COSTS.get) == (Piece("fprop", 10.0, 6.0, "sparse"),)
    assert kept.inference(slow.get) == (Piece("fprop", 10.0, 10.0, "dense"),)
    assert packed.inference(slow.get) == (Piece("fprop", 10.0, 12.0, "expanded"),)
