"""The estimate chooses well on committed rows; where there are none it says so, and dense is taken unless it is far better."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import islice, product

import pytest
import torch

from bench import fit_rates
from bench.fit_rates import Observation, on, regrets, summary
from nmkernels.capability import compiled_core
from nmkernels.gemm import estimate
from nmkernels.gemm.choose import ESTIMATED, rule
from nmkernels.gemm.estimate import DENSE, EXPAND, FLOAT32, SPARSE
from nmkernels.gemm.problem import Problem

CPU = torch.device("cpu")
KINDS = tuple(fit_rates.KINDS.values())
FPROP_ONLY = {"avx2 amd 25", "avx512_bf16 amd 25", "avx512_bf16 amd 26"}
"""Machines that were not to be had when methods were timed: their rows are those of ``nm_linear``, under 40 problems and fprop alone."""

P = Problem("fprop", 64, 1024, 1024, 2, 4, torch.float32, CPU)

SLOW_ONEDNN = "oneDNN takes up to twice as long per token for 1024 as for 512 or 1536 tokens of such shapes; dense is taken"
BY_ELEMENT = "patterns of 16 and 32 share one line, and not all of them cost what it says"
DISTURBED = "timed while something else ran: another pattern of the same shape, which has as much to do or more, takes half as long"
TIE = "close: the methods differ by 40 % at most, and the estimates of both err by less than that"
CACHE = "decompressing is faster than into other shapes, whose dense weight leaves the cache"
NOT_ASKED = "only recipes with packed=True have no dense layout here"
EXCEPTIONS = {
    **{
        ("amx intel 6", f"{what} bfloat16, 1024 tokens"): SLOW_ONEDNN
        for what in (
            "fprop 512x2048 2:4", "fprop 512x2048 1:4", "fprop 512x2048 1:8", "fprop 4096x4096 1:8", "dgrad 1024x1024 1:8",
            "dgrad 3072x768 2:4", "dgrad 3072x768 1:4", "fprop 1024x4096 2:4", "dgrad 4096x1024 1:8",
        )
    },
    ("amx intel 6", "fprop 4096x4096 1:16 bfloat16, 16 tokens"): BY_ELEMENT,
    ("amx intel 6", "wgrad 1024x1024 1:16 bfloat16, 64 tokens"): BY_ELEMENT,
    ("amx intel 6", "wgrad 1024x1024 2:16 bfloat16, 256 tokens"): BY_ELEMENT,
    ("amx intel 6", "wgrad 512x2048 2:4 bfloat16, 16 tokens"): DISTURBED,
    ("amx intel 6", "wgrad 512x2048 2:4 bfloat16, 64 tokens"): DISTURBED,
    ("amx intel 6", "wgrad 4096x1024 2:16 float32, 16 tokens"): DISTURBED,
    ("avx512 intel 6", "dgrad 512x2048 1:4 float32, 1024 tokens"): DISTURBED,
    ("avx512_bf16 intel 6", "dgrad 4096x1024 2:4 float32, 64 tokens"): DISTURBED,
    ("avx512_bf16 amd 25", "wgrad 512x2048 1:4 bfloat16, 256 tokens"): DISTURBED,
    ("amx intel 6", "fprop 256x256 1:8 float32, 1 tokens"): "20 µs and 16",
    ("amx intel 6", "dgrad 256x256 1:8 float32, 256 tokens"): TIE,
    ("amx intel 6", "dgrad 1024x4096 1:4 bfloat16, 4 tokens"): TIE,
    ("amx intel 6", "dgrad 3072x768 1:4 bfloat16, 256 tokens"): TIE,
    ("amx intel 6", "dgrad 3072x768 1:8 float32, 16 tokens"): TIE,
    ("amx intel 6", "dgrad 4096x4096 1:8 float32, 16 tokens"): TIE,
    ("amx intel 6", "wgrad 1024x4096 1:8 float32, 64 tokens"): TIE,
    ("amx intel 6", "wgrad 3072x768 1:4 float32, 64 tokens"): TIE,
    ("amx intel 6", "wgrad 1024x1024 2:16 float32, 64 tokens"): TIE,
    ("avx512_bf16 intel 6", "dgrad 4096x1024 1:8 float32, 16 tokens"): TIE,
    ("avx512_bf16 intel 6", "dgrad 4096x4096 1:8 bfloat16, 1 tokens"): TIE,
    ("avx512_bf16 amd 25", "fprop 256x256 1:8 bfloat16, 64 tokens, cached"): TIE,
    ("avx512_bf16 amd 25", "fprop 256x1024 1:8 bfloat16, 64 tokens, cached"): TIE,
    ("avx512_bf16 amd 25", "fprop 256x1024 2:4 int8 float32, 4 tokens, cached"): TIE,
    ("avx512_bf16 amd 25", "fprop 1024x256 2:4 int8 float32, 2048 tokens, cached"): TIE,
    ("avx512_bf16 amd 25", "fprop 256x256 1:8 int8 float32, 256 tokens, cached"): TIE,
    ("avx512_bf16 amd 25", "fprop 512x512 1:8 int4/128 float32, 4 tokens, cached"): TIE,
    ("avx512_bf16 amd 25", "dgrad 1024x4096 1:4 bfloat16, 16 tokens"): TIE,
    ("avx512_bf16 amd 25", "dgrad 1024x4096 1:4 float32, 16 tokens"): TIE,
    ("avx512_bf16 amd 25", "dgrad 3072x768 2:4 bfloat16, 16 tokens"): TIE,
    ("avx512_bf16 amd 25", "dgrad 3072x768 1:4 bfloat16, 4 tokens"): TIE,
    ("avx512_bf16 amd 25", "dgrad 11008x4096 1:4 bfloat16, 16 tokens"): TIE,
    ("avx512_bf16 amd 25", "wgrad 1024x4096 1:8 bfloat16, 64 tokens"): TIE,
    ("avx2 amd 23", "fprop 256x256 1:4 float32, 1 tokens"): "56 µs and 42",
    ("avx2 amd 23", "fprop 256x1024 1:8 float32, 1 tokens, cached"): TIE,
    ("amx intel 6", "dgrad 3072x768 1:8 float32, 1 tokens"): CACHE,
    ("amx intel 6", "dgrad 3072x768 1:8 float32, 4 tokens"): CACHE,
    ("avx512_bf16 amd 25", "dgrad 11008x4096 1:8 float32, 1 tokens"): NOT_ASKED,
    ("avx2 intel 6", "dgrad 512x2048 2:4 bfloat16, 16 tokens"): NOT_ASKED,
    ("avx2 intel 6", "dgrad 1024x1024 4:8 bfloat16, 16 tokens"): NOT_ASKED,
}  # fmt: skip
"""Problems whose regret is above 1.25, or where the choice is slower than dense by more than 5 %, and why."""


def _name(case: Observation) -> str:
    return f"{case.problem.words()}{', cached' if case.problem.cached else ''}"


@cache
def cases() -> tuple[Observation, ...]:
    return tuple(fit_rates.cases())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense", [True, False])
def test_regret_is_small(kind: str, dense: bool) -> None:
    found = regrets([c for c in cases() if c.kind == kind], dense=dense)
    s = summary(found)
    assert s.cases >= 40 or kind in FPROP_ONLY, f"{kind}: collect rows, python -m bench.run --op 'method*'"
    if kind not in FPROP_ONLY:
        assert s.unknown == 0, "a method that is compared was not timed"
    assert s.unknown == s.cases or s.p95 <= 1.05, s
    bad = [r for r in found if r.over_best > 1.25 or (dense and r.over_dense > 1.05)]
    worse = {(kind, _name(r.case)): (r.chosen, r.over_best, r.over_dense) for r in bad}
    assert not {name: how for name, how in worse.items() if name not in EXCEPTIONS}


def test_a_choice_without_a_row_is_counted_and_not_forgotten() -> None:
    p = P._replace(dtype=torch.bfloat16, tokens=256)
    case = Observation("avx512_bf16 amd 26", p, {DENSE: 1e-3, "pairs": 9e-4})
    assert set(case.methods(True)) == {DENSE, SPARSE} and set(case.methods(False)) == {SPARSE, EXPAND, FLOAT32}
    assert set(Observation(case.kind, P).methods(False)) == {SPARSE, EXPAND}
    rates = dict(estimate.rates())
    fast = estimate.Line((1,), (1.0, *[0.0] * 8), 0.1, 1.0, 9, 0)
    rates[case.kind] = {**rates[case.kind], "bfloat16 fprop expand float32": fast}
    (found,) = regrets([case], rates, dense=False)
    assert found.chosen == FLOAT32 and math.isnan(found.over_best) and math.isnan(found.over_dense)
    assert summary([found])[0] == summary([found]).unknown == 1
    (found,) = regrets([case], rates)
    assert not math.isnan(found.over_best) and summary([found]).unknown == 0


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
@pytest.mark.parametrize("kind", KINDS)
def test_regret_is_of_what_layers_choose(kind: str) -> None:
    for p, forms in product(islice(_grid(), 0, None, 7), (("dense", "rows"), ("rows",))):
        p = p._replace(forms=forms)
        with on(kind):
            (method,) = rule(p)
            assert ESTIMATED[method.name] == fit_rates.choice(p, Observation(kind, p).methods(DENSE in forms)), p


def test_every_exception_is_one() -> None:
    bad = {(r.case.kind, _name(r.case)) for d in (True, False) for r in regrets(cases(), dense=d) if r.over_best > 1.05}
    assert set(EXCEPTIONS) <= bad


@cache
def fitted() -> dict[str, dict[str, estimate.Line]]:
    return fit_rates.lines(cases())


def test_constants_are_those_of_the_rows() -> None:
    assert not fit_rates.differing(fitted(), cases()), "run python -m bench.fit_rates"
    assert json.loads(fit_rates.text(estimate.rates())) == json.loads(fit_rates.RATES.read_text())


def test_a_line_that_is_not_that_of_the_rows_is_named() -> None:
    kind, other = "avx512_bf16 amd 25", "avx2 amd 25"
    off, more = (dict(fitted()[k]) for k in (kind, other))
    pairs, dense = "bfloat16 fprop pairs", "float32 fprop dense"
    off[pairs] = off[pairs]._replace(ns=tuple(1.03 * ns for ns in off[pairs].ns))
    more["float32 fprop of another kernel"] = more.pop(dense)
    wrong = fit_rates.differing({**fitted(), kind: off, other: more}, cases())
    assert wrong == [f"{other} {dense}", f"{other} float32 fprop of another kernel", f"{kind} {pairs}"]


@pytest.mark.parametrize("kind", [*KINDS, "amx amd 27", "avx512 amd 25", "avx2"])
@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_work_takes_longer(kind: str, role: str, dtype: torch.dtype) -> None:
    p = P._replace(role=role, dtype=dtype, rule="exact" if role == "wgrad" else "")
    with on(kind):
        for method in (DENSE, SPARSE):
            for more in ({"tokens": 4096}, {"rows": 4096}, {"cols": 4096}):
                few, many = estimate.seconds(method, p), estimate.seconds(method, p._replace(**more))
                assert 0 < few < many < math.inf, (method, more)
        assert estimate.seconds(SPARSE, p._replace(n=1)) <= estimate.seconds(SPARSE, p)
        assert 0 < estimate.making("dense", p) < 1 and 0 < estimate.making("packed", p) < 1
        if role != "wgrad":
            assert estimate.seconds(EXPAND, p) > estimate.making("packed", p) / 10
            assert estimate.seconds(FLOAT32, p._replace(dtype=torch.bfloat16)) > 0


BORROWERS = [*KINDS, "amx amd 27", "avx512 amd 25", "avx512_bf16 amd 27", "avx2", "avx2 intel 15"]
SIZES = [(128, 128), (256, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (11008, 4096)]


def _grid() -> Iterator[Problem]:
    for dtype, role, size, tokens in product(
        (torch.float32, torch.bfloat16, torch.float16), ("fprop", "dgrad", "wgrad"), SIZES, (1, 4, 16, 100, 512, 2048, 8192)
    ):
        p = Problem(role, tokens, *size, 2, 4, dtype, CPU, rule="exact" if role == "wgrad" else "")
        yield p
        if role == "fprop":
            yield from (p._replace(values="int8"), p._replace(cached=True), p._replace(n=1, m=8))


@pytest.mark.parametrize("kind", BORROWERS)
def test_nothing_borrowed_is_faster_than_at_the_lender(kind: str) -> None:
    """Relative to dense, by no more than the lender's own ratio: a choice that nobody measured here must not lose to dense."""
    borrowed = 0
    for p in _grid():
        with on(kind):
            dense = estimate.seconds(DENSE, p)
            own = estimate.line_of(kind, p, DENSE)
            for method in (SPARSE,) if p.role == "wgrad" else (SPARSE, EXPAND, FLOAT32):
                known = p._replace(cached=False)
                found = estimate.line(known, method)
                if found is None or found[0] == kind:
                    continue
                borrowed += 1
                ratio = estimate.seconds(method, known) / estimate.seconds(DENSE, known)
                with on(found[0]):
                    theirs = estimate.seconds(method, known) / estimate.seconds(DENSE, known)
                assert ratio >= theirs * (1 - 1e-9), (p.words(), method, found[0])
                assert estimate.margin(method, p) >= 1.25
                if own and method != SPARSE:  # torch's GEMM on this machine, and expanding
                    multiplied = p._replace(dtype=torch.float32) if method == FLOAT32 else p
                    assert estimate.seconds(method, p) >= estimate.seconds(DENSE, multiplied._replace(cached=False)), (p.words(), method)
                chosen = fit_rates.choice(p, (DENSE, method))
                assert chosen == DENSE or dense / estimate.seconds(method, p) > 1.25
    assert borrowed or kind in ("amx intel 6", "avx512_bf16 amd 25")


@pytest.mark.parametrize("kind", [*KINDS, "avx2 amd 23", "amx amd 27", "avx2"])
@pytest.mark.parametrize("role", ["fprop", "dgrad", "wgrad"])
def test_nothing_takes_no_time(kind: str, role: str) -> None:
    with on(kind):
        for dtype, values in ((torch.float32, "float"), (torch.bfloat16, "float"), (torch.bfloat16, "int8")):
            p = P._replace(role=role, tokens=0, dtype=dtype, values=values, forms=("dense", "rows"))
            assert [estimate.seconds(name, p) for name in (DENSE, SPARSE, EXPAND, FLOAT32)] == [0.0] * 4
            assert len(rule(p)) == 1


def test_what_is_borrowed_needs_a_larger_margin() -> None:
    with on("amx intel 6"):
        assert estimate.measured(P) and estimate.margin(SPARSE, P) == estimate.margin(EXPAND, P) == 1.06 and estimate.margin(DENSE, P) == 1
        sparser = P._replace(n=1, m=64)  # than any pattern with rows
        assert not estimate.measured(sparser) and estimate.margin(SPARSE, sparser) == 1.25
    for kind, lender in [("amx amd 27", "amx intel 6"), ("avx512 amd 25", "avx512 intel 6"), ("avx2", "avx2 amd 23")]:
        with on(kind):
            assert estimate.line(P, SPARSE)[0] == lender and not estimate.measured(P) and estimate.margin(SPARSE, P) == 1.25
    with on("avx512 intel 6"):  # a lower instruction set comes before a higher one, which is better than nothing
        assert estimate.line(P._replace(dtype=torch.float16), SPARSE)[0] == "avx2 intel 6"
        assert estimate.line(P._replace(tokens=1, m=16), SPARSE)[0] == "avx512_bf16 amd 25"


def test_a_borrowed_role_is_scaled_by_the_machines_own_dense() -> None:
    large = P._replace(rows=4096, cols=4096)
    dgrad = large._replace(role="dgrad", cols=2048)
    with on("avx2 amd 25"):
        assert estimate.line(large, DENSE)[0] == "avx2 amd 25" and estimate.line(dgrad, DENSE)[0] == "avx2 intel 6"
        scaled = estimate.seconds(DENSE, dgrad)
        ours = estimate.seconds(DENSE, large)
    with on("avx2 intel 6"):
        assert scaled / estimate.seconds(DENSE, dgrad) == pytest.approx(ours / estimate.seconds(DENSE, large))


def test_a_line_says_nothing_of_much_smaller_weights() -> None:
    """A Zen 3 and a Zen 5 have rows of 4096×4096 alone; what small layers cost there is borrowed from kinds that have timed them."""
    small, smallest = (P._replace(rows=n, cols=n, forms=("dense", "rows"), cached=True) for n in (256, 128))
    for kind, lender in (("avx2 amd 25", "avx2 amd 23"), ("avx512_bf16 amd 26", "avx512_bf16 amd 25")):
        with on(kind):
            assert estimate.line(P._replace(rows=2048, cols=2048), SPARSE)[0] == kind
            assert estimate.line(P, SPARSE)[0] == estimate.line(small, SPARSE)[0] == lender
            for p in (small, smallest):
                ratio = estimate.seconds(SPARSE, p) / estimate.seconds(DENSE, p)
                with on(lender):
                    assert ratio == pytest.approx(estimate.seconds(SPARSE, p) / estimate.seconds(DENSE, p))
                assert rule(p._replace(tokens=1))[0].name == "dense"
    with on("amx intel 6"):  # which has no rows of cached weights, and smaller ones in memory: its own estimate, with a larger margin
        assert estimate.margin(SPARSE, small) == estimate.CACHED_MANY
        assert estimate.seconds(SPARSE, small) == estimate.seconds(SPARSE, small._replace(cached=False))


def test_a_line_of_one_size_is_proportional_to_the_elements() -> None:
    sizes = [P._replace(tokens=tokens, rows=512, cols=512) for tokens in (1, 64, 1024)]
    found = fit_rates.fit([fit_rates.Sample(p, 1e-6 * p.tokens + 1e-5) for p in sizes])
    for p in sizes:
        assert found.seconds(p) == pytest.approx(1e-6 * p.tokens + 1e-5, rel=0.01)
        assert found.seconds(p._replace(rows=256)) == pytest.approx(found.seconds(p) / 2)
    assert found.least == 512 * 512 / 4


@pytest.mark.parametrize("kind", ["portable", "no core", "mps"])
def test_without_constants_dense_is_taken(kind: str) -> None:
    with on(kind):
        assert fit_rates.choice(P, (DENSE, SPARSE)) == DENSE and fit_rates.choice(P, (SPARSE, EXPAND)) == EXPAND
        assert not estimate.measured(P) and estimate.making("packed", P) == 0


def test_kernels_of_each_instruction_set() -> None:
    bf16, dgrad = P._replace(dtype=torch.bfloat16), P._replace(dtype=torch.bfloat16, role="dgrad")
    amd = "avx512_bf16 amd 25"
    assert {estimate.kernel(P, kind) for kind in KINDS} == {"stored"} and estimate.kernel(bf16, "avx512 intel 6") == "stored"
    assert [estimate.kernel(bf16._replace(m=m), "amx intel 6") for m in (4, 32)] == ["expanded in cache", "expanded by element"]
    for p in (P, bf16._replace(m=16, n=1)):
        one = p._replace(tokens=1)
        assert [estimate.kernel(one._replace(n=n, m=16), amd) for n in (1, 2)] == ["stored", "stored by element"]
    assert [estimate.kernel(bf16._replace(n=n, m=m), amd) for n, m in ((2, 4), (1, 8), (4, 8), (1, 16))] == [
        "pairs", "pairs", "expanded in cache", "stored",
    ]  # fmt: skip
    assert [estimate.kernel(dgrad._replace(n=1, m=8, tokens=t), amd) for t in (64, 65)] == ["expanded in cache", "stored"]
    assert [estimate.kernel(bf16._replace(m=m, values="int8"), amd) for m in (4, 16)] == ["integers", "integers by element"]


def test_integers_have_lines_of_their_own() -> None:
    with on("avx512_bf16 amd 25"):
        p = P._replace(dtype=torch.bfloat16, values="int4", group=128)
        assert estimate.measured(p) and not estimate.measured(p._replace(m=64))
        few, floats = p._replace(tokens=1, rows=4096, cols=4096), {"values": "float", "group": 0}
        assert estimate.seconds(SPARSE, few) < estimate.seconds(SPARSE, few._replace(**floats))
        assert estimate.seconds(SPARSE, few) < estimate.seconds(DENSE, few) < estimate.seconds(EXPAND, few)
    names = estimate.rates()["avx512_bf16 amd 25"]
    ends = {name.partition(" fprop ")[2] for name in names if "integers" in name}
    assert ends == {f"integers{how} {kind}{kept}" for how in ("", " by element") for kind in ("int8", "int4") for kept in ("", " cached")}
    assert {f"{dtype} fprop dense int8{kept}" for dtype in ("float32", "bfloat16") for kept in ("", " cached")} <= set(names)


def test_the_machine_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nmkernels.capability.instruction_set", lambda: "avx2")
    monkeypatch.setattr("nmkernels.capability.processor", lambda: "amd 25")
    estimate.forget()
    try:
        assert estimate.machine(CPU) == "avx2 amd 25"
        monkeypatch.setattr("nmkernels.capability.processor", lambda: "intel 6")
        assert estimate.machine(CPU) == "avx2 amd 25"
        estimate.forget()
        assert estimate.machine(CPU) == "avx2 intel 6"
    finally:
        monkeypatch.undo()
        estimate.forget()


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA L4"])
def test_a_gpu_is_predicted_where_the_table_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    estimate.forget()
    forms = ("dense", "rows", "rows:wgmma.sp")
    one = Problem("fprop", 1, 4096, 4096, 2, 4, torch.bfloat16, torch.device("cuda", 0), forms)
    try:
        assert estimate.machine(one.device) == "sm_90" and not estimate.measured(one)
        assert fit_rates.choice(one, (DENSE, SPARSE)) == (SPARSE if "H100" in name else DENSE)
        many = one._replace(tokens=8192)
        assert fit_rates.choice(many, (DENSE, SPARSE)) == (SPARSE if "H100" in name else DENSE)  # 1.4 times as fast, above the margin
        assert fit_rates.choice(one._replace(forms=forms[1:]), (SPARSE, EXPAND)) == SPARSE
        assert estimate.seconds(FLOAT32, many) > estimate.seconds(EXPAND, many) > estimate.seconds(DENSE, many)
        assert 0 < estimate.making("packed", one) < estimate.making("dense", one)
    finally:
        monkeypatch.undo()
        estimate.forget()
