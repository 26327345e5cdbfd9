"""One-shot methods against independent loops, and what holds for every method on every problem."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import ops
from nmkernels.pattern import Pattern
from nmkernels.prune import ADMM, Magnitude, OneShot, SparseGPT, Wanda, prune_
from nmkernels.prune.base import METHODS as REGISTERED
from nmkernels.prune.base import resolve, text
from nmkernels.prune.solve import damped, refit, solve, squared_error
from python_tests.recipes.loop import top_n

METHODS = [Magnitude(), Wanda(), Wanda(refit=10), SparseGPT(), SparseGPT(refit=10), ADMM()]
P = Pattern("2:4")


def problem(rows=24, cols=96, tokens=600, dtype=torch.float64, seed=0):
    """Weights, and the Hessian of strongly correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(tokens, cols // 3, generator=g, dtype=torch.float64)
    x = base @ torch.randn(cols // 3, cols, generator=g, dtype=torch.float64) + 2 * torch.randn(
        tokens, cols, generator=g, dtype=torch.float64
    )
    x *= torch.linspace(0.2, 3, cols, dtype=torch.float64)[torch.randperm(cols, generator=g)]
    w = torch.randn(rows, cols, generator=g, dtype=torch.float64)
    return w.to(dtype), (x.t() @ x / tokens).to(torch.promote_types(dtype, torch.float32))


def error(w, z, h):
    d = (w - z).double()
    return float(((d @ h.double()) * d).sum())


def column_by_column(w, h, n, m):
    """Algorithm 1 of the SparseGPT paper without blocks: every pruned weight changes all later columns at once."""
    w, mask = w.clone(), torch.zeros_like(w, dtype=torch.bool)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    for j in range(w.shape[1]):
        if j % m == 0:
            best = (w[:, j : j + m] / u.diagonal()[j : j + m]).square().topk(n, 1).indices
            mask[:, j : j + m].scatter_(1, best, True)
        e = torch.where(mask[:, j], 0.0, w[:, j]) / u[j, j]
        w[:, j:] -= e[:, None] * u[j, j:]
        w[~mask[:, j], j] = 0.0
    return w, mask


@pytest.mark.parametrize("block", [1, 40, 128])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:32"])
def test_sparsegpt_equals_a_loop_over_columns(pattern, block):
    w, h = problem()
    p = Pattern(pattern)
    want, mask = column_by_column(w, h, p.n, p.m)
    got, kept = SparseGPT(block=block).solve(w.clone(), h.clone(), p)
    assert torch.equal(kept, mask) and (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
def test_admm_is_the_best(pattern):
    w, h = problem()
    p = Pattern(pattern)
    errors = {text(m): solve(m, w, h, 600, p)[1].error for m in METHODS}
    assert errors["admm"] < 0.95 * errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]
    assert errors["admm"] < errors["wanda(refit=10)"] < errors["wanda"] and errors["sparsegpt(refit=10)"] < errors["sparsegpt"]


def test_what_admm_keeps_solves_the_normal_equations():
    w, h = problem(rows=8)
    h = damped(h, 0.01)
    packed, row = solve(ADMM(damping=1e-9), w, h, 10**6, P)
    z = packed.dense()
    assert ops.is_nm(z, P)
    best = torch.zeros_like(w)
    for r in range(len(w)):
        keep = z[r] != 0
        best[r, keep] = torch.linalg.solve(h[keep][:, keep], (h @ w[r])[keep])
    assert error(w, best, h) <= error(w, z, h) <= 1.005 * error(w, best, h)
    assert (z - best).norm() < 0.1 * (w * (z != 0) - best).norm()
    assert row.error == pytest.approx(error(w, z, h) / error(w, 0 * w, h), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "singular", "dead"])
def test_refit_never_raises_the_error(kind, dtype):
    w, h = problem(dtype=dtype, tokens=20 if kind == "singular" else 600)
    if kind == "dead":
        h[:, ::5] = h[::5] = 0.0
        h.diagonal()[::5] = h.diagonal().max()
    mask = ops.mask(w, P)
    before = squared_error(w, w * mask, h)
    for steps in (1, 3, 30, 200):
        z = refit(w, w * mask, mask, h, steps)
        assert z.isfinite().all() and not z[~mask].any()
        after = squared_error(w, z, h)
        assert after <= before * (1 + 1e-5)
        before = after
    assert after < 0.9 * squared_error(w, w * mask, h)


def test_refit_on_hessians_of_rounding():
    """Fewer tokens than inputs, of sizes from 0.001 to 1000, so that curvatures along which nothing is known are noise, or negative."""
    for seed in range(24):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn((1, 2, 3, 8)[seed % 4], 64, generator=g) * torch.logspace(-3, 3, 64)[torch.randperm(64, generator=g)]
        w, h = torch.randn(16, 64, generator=g), x.t() @ x
        mask = ops.mask(w, P)
        before = squared_error(w, w * mask, h)
        assert squared_error(w, refit(w, w * mask, mask, h, 100), h) <= before, seed


def test_rows_are_independent_of_how_many_there_are(monkeypatch):
    w, h = problem(dtype=torch.float64)
    whole = refit(w, w * ops.mask(w, P), ops.mask(w, P), h, 5), squared_error(w, None, h)
    monkeypatch.setattr("nmkernels.prune.solve.ROWS", 7)
    parts = refit(w, w * ops.mask(w, P), ops.mask(w, P), h, 5), squared_error(w, None, h)
    assert torch.allclose(whole[0], parts[0], rtol=1e-9) and torch.allclose(whole[1], parts[1], rtol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=text)
def test_transposable_masks_are_nm_both_ways(method):
    w, h = problem(rows=32, dtype=torch.float32)
    packed, _ = solve(type(method)(refit=method.refit, transposable=True), w, h, 600, P)
    z = packed.dense()
    assert ops.is_nm(z, P) and ops.is_nm(z.t().contiguous(), P) and z.count_nonzero() > 0.4 * z.numel()


def unusual(kind, dtype, seed):
    w, h = problem(16, 64, {"few tokens": 6}.get(kind, 300), dtype, seed)
    if kind == "dead columns":
        h[:, ::3] = h[::3] = 0.0
    elif kind == "singular":
        h[:] = h.diagonal().mean() * torch.ones_like(h)
    elif kind == "outlier":
        h[:, 5] *= 1e4
        h[5] *= 1e4
    elif kind == "zero":
        h.zero_()
    elif kind == "constant weights":
        w[:] = 0.5
    return w, h


@pytest.mark.parametrize("kind", ["few tokens", "dead columns", "singular", "outlier", "zero", "constant weights", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_no_result_is_worse_than_wanda_s_mask(kind, dtype):
    for seed, method in enumerate((*METHODS[1:], ADMM(transposable=True))):
        w, h = unusual(kind, dtype, seed)
        packed, row = solve(method, w, h, 6 if kind == "few tokens" else 300, P)
        z = packed.dense()
        assert z.dtype == dtype and z.isfinite().all() and ops.is_nm(z, P), method
        scores = w.to(h.dtype) * h.diagonal().sqrt()
        mask = ops.transposable_mask(scores, P) if method.transposable else ops.mask(scores, P)
        wide = w.to(h.dtype)
        most, size = error(wide, wide * mask, h), error(wide, 0 * wide, h)
        assert error(wide, z, h) <= most * (1 + 1e-4) + 1e-6 * size, (method, row)
        assert row.error == pytest.approx(error(wide, z, h) / (size or 1), rel=1e-3, abs=1e-5)


def test_damping_is_raised_where_a_factorisation_fails():
    w, h = problem(tokens=5, dtype=torch.float32)
    _, row = solve(SparseGPT(damping=1e-12), w, h, 5, P)
    assert row.damping >= 0.01 and row.note == f"damping raised to {row.damping:g}" and row.error <= row.wanda


@pytest.mark.parametrize(("tokens", "damping"), [(4 * 96 - 1, 0.1), (4 * 96, 0.01)])
def test_few_tokens_are_damped_more(tokens, damping):
    w, h = problem(dtype=torch.float32)
    assert solve(SparseGPT(), w, h, tokens, P)[1].damping == damping


class Broken(OneShot):
    def solve(self, w, h, pattern):
        torch.linalg.cholesky(-torch.eye(3))


class NotANumber(OneShot):
    def solve(self, w, h, pattern):
        return w.fill_(torch.nan), self.mask(torch.randn_like(w), pattern)


class Poor(OneShot):
    """Overwrites both arguments, and leaves weights outside its mask."""

    def solve(self, w, h, pattern):
        h.zero_()
        return w.neg_(), self.mask(1 / w, pattern)


class Unmasked(OneShot):
    guarded = False

    def solve(self, w, h, pattern):
        return w, self.mask(w, pattern)


def test_weights_outside_the_mask_of_a_method_count_as_pruned():
    w, h = problem(dtype=torch.float32)
    assert solve(Unmasked(), w, h, 600, P)[1].error == solve(Magnitude(), w, h, 600, P)[1].error > 0.01


@pytest.mark.parametrize(
    ("method", "note"),
    [
        (Broken(), "Wanda's mask: the Hessian could not be factorised with damping up to 10"),
        (NotANumber(), "Wanda's mask: the new weights were not finite with damping up to 10"),
        (Poor(), "Wanda's mask, which has the smaller error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_method_cannot_do_is_wanda_s_mask(method, note):
    w, h = problem(dtype=torch.float32)
    packed, row = solve(method, w, h, 600, P)
    assert row.note.startswith(note) and row.error == row.wanda
    assert torch.equal(packed.dense(), w * ops.mask(w * h.diagonal().sqrt(), P))


@pytest.mark.parametrize(
    ("tokens", "scale", "note"),
    [(0, 0.0, "magnitude: no tokens reached it"), (3, 1.0, "magnitude: 3 tokens"), (9, 1e38, "its inputs overflow")],
)
def test_without_a_hessian_it_is_magnitude(tokens, scale, note):
    w, h = problem(dtype=torch.float32)
    packed, row = solve(ADMM(), w, h * scale, tokens, P)
    assert note in row.note and row.error is row.wanda is None
    assert torch.equal(packed.dense(), w * ops.mask(w, P))


# ---- as recipes choose


def two(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 48, dtype=dtype), nn.GELU(), nn.Linear(48, 32, dtype=dtype))


def test_magnitude_is_the_mask():
    model = two()
    prune_(model, "1:4", [torch.randn(40, 32)], method="magnitude")
    for i in (0, 2):
        weight = two()[i].weight
        assert torch.equal(model[i].weight, weight * top_n(weight, 1, 4))


class Random(OneShot):
    def solve(self, w, h, pattern):
        mask = self.mask(torch.rand(w.shape, generator=torch.Generator().manual_seed(self.refit)), pattern)
        return w * mask, mask

    guarded = False


def test_a_method_of_the_user_works_by_name_and_as_an_instance():
    results = []
    for method in (Random(), "random", "Random()", "random(refit=0)"):
        model = two()
        handle = prune_(model, P, [torch.randn(200, 32)], method=method)
        assert handle.report.remark.startswith("pruned by random on 1 batches")
        results.append(model[0].weight)
    assert all(torch.equal(results[0], other) for other in results)
    assert {"admm", "magnitude", "random", "sparsegpt", "wanda"} <= set(REGISTERED)


REFUSED = {
    "damping": ("admm(damping=-0.1)", "ADMM: damping=-0.1 must be a finite number of at least 0"),
    "refit": ("wanda(refit=1.5)", "Wanda: refit=1.5 must be a whole number of at least 0"),
    "block": ("sparsegpt(block=0)", "SparseGPT: block=0 must be a whole number of at least 1"),
    "iterations": ("admm(iterations='8')", "ADMM: iterations='8' must be a whole number of at least 1"),
    "penalty": ("admm(penalty=0)", "ADMM: penalty=0 must be a finite number of at least"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_are_no_such_numbers(setting):
    text, said = REFUSED[setting]
    with pytest.raises(nm.RecipeError, match=said):
        resolve(text)
    method, value = (ADMM(), 0.25) if setting == "damping" else (SparseGPT(), 64) if setting == "block" else (ADMM(), 3)
    assert getattr(replace(method, **{setting: torch.tensor(value).numpy()[()]}), setting) == value


def test_methods_as_text():
    assert resolve("admm") == ADMM() and resolve("SparseGPT(block=64, damping=0.1)") == SparseGPT(block=64, damping=0.1)
    for method in (*METHODS, ADMM(iterations=7, penalty=0.2, transposable=True, damping=0.5, refit=0)):
        assert resolve(text(method)) == method
    with pytest.raises(nm.RecipeError, match="no one-shot method is called 'sparsgpt'.*[Dd]id you mean.*sparsegpt.*Methods are admm, "):
        resolve("sparsgpt")
    with pytest.raises(nm.RecipeError, match="no one-shot method is called 'admm:2:4'"):
        resolve("admm:2:4")
    with pytest.raises(nm.RecipeError, match="ADMM: transposable must be True or False; got 'false'"):
        resolve("admm(transposable=false)")
    with pytest.raises(TypeError, match="admm has no keyword 'iteration'.*iterations.*It takes damping, refit"):
        resolve("admm(iteration=3)")
    with pytest.raises(nm.RecipeError, match="must be a name or a OneShot.*got type"):
        resolve(ADMM)
    with pytest.raises(NotImplementedError, match="OneShot has no solve"):
        OneShot().solve(torch.ones(4, 4), torch.ones(4, 4), P)
    assert math.isclose(float(damped(torch.diag(torch.tensor([0.0, 1.0, 3.0])), 0.5).diagonal()[0]), 2.0)


@pytest.mark.parametrize("method", METHODS, ids=text)
@pytest.mark.parametrize("transposable", [False, True])
def test_weights_of_inputs_that_were_always_zero_cost_nothing_and_stay(method, transposable):
    """Where a group has only such inputs its largest weights stay as they are; next to others they are the first to go."""
    method = replace(method, transposable=transposable)
    w, h = problem(dtype=torch.float32)
    for dead in (range(8, 16), range(2, 96, 4), range(96)):
        h_dead = h.clone()
        h_dead[:, list(dead)] = h_dead[list(dead)] = 0.0
        packed, row = solve(method, w, h_dead, 600, P)
        z = packed.dense()
        kept = z != 0
        assert int(kept.sum()) == w.numel() // 2, "N of M"
        assert torch.equal(z[:, list(dead)][kept[:, list(dead)]], w[:, list(dead)][kept[:, list(dead)]])
        if len(dead) == 8 and not transposable:
            assert torch.equal(kept[:, 8:16], ops.mask(w[:, 8:16].contiguous(), P))
        if len(dead) == 24 and isinstance(method, Wanda) and not transposable:
            assert not kept[:, 2::4].any()
        assert not method.guarded or row.error <= row.wanda + 1e-9
