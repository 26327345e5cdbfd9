"""The pieces of a step from given costs, added up by hand."""

import pytest

import nmkernels as nm
from nmkernels.audit.rules import Piece, Rules, inference, speedup, step, total
from python_tests.audit.prices import COSTS

P = nm.Pattern("2:4")


def used(pieces):
    return {p.name: (p.used, p.form) for p in pieces}


@pytest.mark.parametrize(
    ("rules", "transposed", "want"),
    [
        (Rules(P), False, {"fprop": (6.0, "sparse"), "dgrad": (11.0, "dense"), "weight": (1.25, "rows+dense"), "wgrad": (12.0, "dense")}),
        (Rules(P), True, {"fprop": (6.0, "sparse"), "dgrad": (7.0, "sparse"), "weight": (0.75, "rows"), "wgrad": (12.0, "dense")}),
        (
            Rules(P, dgrad=True, estimate=P, prepare="transposable"),
            False,
            {
                "fprop": (6.0, "sparse"),
                "dgrad": (7.0, "sparse"),
                "weight": (2.0, "both"),
                "wgrad": (8.0, "sparse"),
                "estimate": (1.0, "mvue 2:4"),
            },
        ),
        (Rules(P, fprop=False, prepare=""), False, {r: (COSTS[f"{r} dense"], "dense") for r in ("fprop", "dgrad", "wgrad")}),
        (Rules(P, trains=False), True, {"fprop": (6.0, "sparse"), "dgrad": (7.0, "sparse"), "weight": (0.75, "rows")}),
    ],
)
def test_the_cheapest_pieces(rules, transposed, want):
    pieces = step(COSTS.get, rules, transposed)
    assert used(pieces) == want
    assert total(pieces) == (sum(COSTS[f"{r} dense"] for r in ("fprop", "dgrad", "wgrad") if r in want), sum(v for v, _ in want.values()))


def test_packing_that_costs_too_much_is_not_done():
    dear = {**COSTS, "weight rows+dense": 5.0}
    pieces = step(dear.get, Rules(P))
    assert used(pieces)["weight"] == (0.5, "dense") and used(pieces)["fprop"] == (10.0, "dense")
    assert speedup(pieces) == 33 / 33.5
    assert used(step(dear.get, Rules(P), accumulate=4))["weight"] == (1.25, "rows+dense"), "four passes share it"


def test_an_estimate_that_does_not_pay_is_still_drawn():
    slow = {**COSTS, "wgrad sparse": 13.0}
    assert used(step(slow.get, Rules(P, estimate=P)))["wgrad"] == (12.0, "dense")
    assert used(step(slow.get, Rules(P, estimate=P)))["estimate"] == (1.0, "mvue 2:4")
    whole = used(step({**COSTS, "wgrad estimated": 14.0}.get, Rules(P, estimate=P)))
    assert whole["wgrad"] == (14.0, "of mvue 2:4") and "estimate" not in whole


def test_nothing_is_said_of_what_was_not_measured():
    assert step({"fprop dense": 1.0}.get, Rules(P)) == () and inference({}.get) == ()
    some = {name: took for name, took in COSTS.items() if "sparse" not in name}
    assert used(step(some.get, Rules(P)))["fprop"] == (10.0, "dense")


def test_inference():
    assert inference(COSTS.get) == (Piece("fprop", 10.0, 6.0, "sparse"),)
    slow = {**COSTS, "fprop sparse": 10.5}
    assert inference(slow.get) == (Piece("fprop", 10.0, 10.0, "dense"),)
    assert inference(slow.get, kept=False) == (Piece("fprop", 10.0, 12.0, "expanded"),)
    assert inference(COSTS.get, kept=False) == (Piece("fprop", 10.0, 6.0, "sparse"),)
