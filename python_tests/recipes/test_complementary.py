"""Complementary sparsity: the mask on small numbers, its limits, and what is deployed."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import nmkernels as nm
from nmkernels.recipes import STEP, Complementary
from nmkernels.recipes.contrib.complementary import StrideMask
from python_tests.for_each import for_each
from python_tests.recipes.loop import mlp, snapshot
from python_tests.recipes.loop_effective import spaced
from python_tests.recipes.training import DATA, DATA32, F32, run


@for_each("spacing", [None, 1, 2])
def test_every_group_keeps_its_largest_and_of_ties_the_first(spacing):
    for pattern in ["1:2", "2:4", "1:4", "2:8"]:
        p, w = nm.Pattern(pattern), torch.randn(6, 32, dtype=torch.float64).index_fill(0, torch.tensor(5), 0.0)
        transform = StrideMask(p, spacing)
        kept, order = spaced(w, p.n, p.m, spacing).bool(), transform.traits.columns(32)
        assert torch.equal(transform.kept(w), kept) and torch.equal(transform(w), w * kept)
        assert (order is None) == (spacing == 1)
        together = slice(None) if order is None else order
        assert torch.equal(transform(w)[:, together], nm.ops.prune(w[:, together], pattern))
        out, g = torch.full_like(w, torch.nan), torch.randn_like(w)
        assert transform(w, out=out) is out and torch.equal(out, transform(w))
        assert torch.equal(transform.gradient(g, w)[0], g)
        assert torch.equal(StrideMask(p, spacing, chain=True).gradient(g, w)[0], g * kept)


def test_the_zeros_stay_where_they_were_trained():
    model, handle, _ = run(Complementary("1:4"))
    want = spaced(model[0].weight.detach(), 1, 4).bool()
    handle.finish()
    assert torch.equal(model[0].weight != 0, want)
    assert not nm.ops.is_nm(model[0].weight.detach(), "1:4") and nm.ops.is_nm(model[0].grouped.detach(), "1:4")
    handle.remove()
    assert "columns" not in vars(model[0]) and torch.equal(model[0].weight != 0, want)


def test_columns_are_folded_where_it_can_be_proved():
    """The first layer has to reorder its input; the second gets it in order from the first. Also under STEP."""
    for recipe in (Complementary("2:4"), STEP("2:4", switch="fixed", start=3, inner=Complementary("2:4", decay=0.1))):
        model, handle, _ = run(recipe)
        handle.finish()
        x, before = DATA[0][0], snapshot(model)
        want, bias = model(x), model[0].bias
        nm.compress_(model)
        assert torch.allclose(model(x), want, atol=1e-14)
        first, second = (StrideMask(nm.Pattern("2:4")).traits.columns(width) for width in (16, 32))
        assert model[2].order is None and torch.equal(model[2].weight.dense(), before["2.weight"][:, second])
        assert model[0].bias is bias and torch.equal(bias, before["0.bias"][second])
        assert torch.equal(model[0].order.long(), first) and torch.equal(model[0].dense(), before["0.weight"][second])


class Two(nn.Module):
    """Two readers of one layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x):
        h = self.a(x).relu()
        return self.b(h) + self.c(h)


@for_each("disagree", [True, False])
def test_two_readers_that_disagree_keep_their_own_order(disagree):
    model, x = Two().double(), torch.randn(3, 16, dtype=torch.float64)
    handle = nm.sparsify_(model, Complementary("2:4"), filter_fn=lambda module, name: name in ("b", "c" if disagree else "b"))
    handle.finish(allow_unused=True)
    if disagree:
        model.c.columns = torch.arange(32)  # as if c had been pruned with another spacing
        with torch.no_grad():
            model.c.weight.copy_(nm.ops.prune(model.c.weight.detach(), "2:4"))
    want, bias = model(x), model.a.bias.clone()
    nm.compress_(model)
    assert torch.allclose(model(x), want, atol=1e-13)
    assert torch.equal(model.a.bias, bias) == disagree == (model.b.order is not None)


def test_a_weight_changed_after_finish_is_refused(tmp_path):
    model, handle, _ = run(Complementary("2:4"))
    handle.finish()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    for action in (lambda: nm.compress_(model), lambda: nm.save_dense(model, tmp_path / "m")):
        with pytest.raises(nm.RecipeError, match="'0'"):
            action()


def test_files(tmp_path):
    model, handle, _ = run(Complementary("2:4"), F32, DATA32)
    handle.finish()
    x, want = DATA32[0][0], model(DATA32[0][0])
    for name, change in (("before", lambda model: None), ("after", nm.compress_)):
        change(model)
        nm.save_dense(model, tmp_path / name)
        dense = mlp(F32, seed=4)
        dense.load_state_dict(load_file(tmp_path / name))
        torch.testing.assert_close(dense(x), want)
