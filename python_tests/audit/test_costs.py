"""The pieces of a step from given costs, added up by hand."""

from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.audit.devices import DEVICES
from nmkernels.audit.rules import GEMMS, Case, Layer, Piece, Rules, speedup, total
from python_tests.audit.given import COSTS

P = nm.Pattern("2:4")
PACKED = {"fprop": (6.0, "sparse"), "dgrad": (7.0, "sparse"), "weight": (0.75, "rows")}
LAYER = Layer((64, 64), 64, torch.float32, torch.float32)


def case(rules, transposed=False, **words):
    return Case(replace(DEVICES["H200"], transposed=transposed), LAYER, rules, **words)


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
        (Rules(P, fprop=False, prepare=""), False, {role: (COSTS[f"{role} dense"], "dense") for role in GEMMS}),
        (Rules(P, trains=False), True, PACKED),
    ],
)
def test_the_cheapest_pieces(rules, transposed, want):
    pieces = case(rules, transposed).step(COSTS.get)
    assert used(pieces) == want
    assert total(pieces) == (sum(COSTS[f"{role} dense"] for role in GEMMS if role in want), sum(v for v, _ in want.values()))


def test_packing_that_costs_too_much_is_not_done():
    dear = {**COSTS, "weight rows+dense": 5.0}
    pieces = case(Rules(P)).step(dear.get)
    assert used(pieces)["weight"] == (0.5, "dense") and used(pieces)["fprop"] == (10.0, "dense")
    assert speedup(pieces) == 33 / 33.5
    assert used(case(Rules(P), accumulate=4).step(dear.get))["weight"] == (1.25, "rows+dense"), "four passes share it"


def test_an_estimate_that_does_not_pay_is_still_drawn():
    estimated = case(Rules(P, estimate=P))
    slow = used(estimated.step({**COSTS, "wgrad sparse": 13.0}.get))
    assert slow["wgrad"] == (12.0, "dense") and slow["estimate"] == (1.0, "mvue 2:4")
    whole = used(estimated.step({**COSTS, "wgrad estimated": 14.0}.get))
    assert whole["wgrad"] == (14.0, "of mvue 2:4") and "estimate" not in whole


def test_nothing_is_said_of_what_was_not_measured():
    assert case(Rules(P)).step({"fprop dense": 1.0}.get) == () == case(Rules(P)).inference({}.get)
    some = {name: took for name, took in COSTS.items() if "sparse" not in name}
    assert used(case(Rules(P)).step(some.get))["fprop"] == (10.0, "dense")


def test_inference():
    kept, packed, slow = case(Rules(P)), case(Rules(P), kept=False), {**COSTS, "fprop sparse": 10.5}
    assert kept.inference(COSTS.get) == packed.inference(COSTS.get) == (Piece("fprop", 10.0, 6.0, "sparse"),)
    assert kept.inference(slow.get) == (Piece("fprop", 10.0, 10.0, "dense"),)
    assert packed.inference(slow.get) == (Piece("fprop", 10.0, 12.0, "expanded"),)
