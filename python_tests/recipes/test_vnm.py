"""V:N:M: the columns that are chosen, the mask inside them, blocks that do not fit. The trajectories are the roster's."""

import itertools

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import STEP, VNM
from nmkernels.recipes.methods.vnm import BlockColumns, _exact, _greedy, best_columns
from python_tests.recipes.loop import batches, top_n
from python_tests.recipes.loop_vnm import columns_of, retained
from python_tests.recipes.running import start, step, train

DATA = batches(20)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the columns


def test_equal_plain_search():
    for n in [1, 2, 3, 4]:
        for m in [4, 5, 6, 7, 8, 12]:
            w = randn(12, 2 * m, seed=10 * n + m)
            for objective in ("retained", "sums"):
                got = best_columns(w, n, m, 4, objective).repeat_interleave(4, 0)
                assert torch.equal(got, columns_of(w, n, m, 4, objective)), objective


def test_every_block_keeps_four_columns_of_every_group():
    columns = best_columns(randn(32, 48), 2, 8, 8)
    assert columns.shape == (4, 48) and (columns.reshape(4, 6, 8).sum(-1) == 4).all()


def test_exact_is_better_than_the_sums_of_columns():
    """What counts is what N:4 leaves: one large weight per row is worth more than four middling ones."""
    w = torch.tensor([[9.0, 0, 0, 0, 4, 4, 4, 4], [0, 9.0, 0, 0, 4, 4, 4, 4]])
    assert best_columns(w, 1, 8, 2, "retained")[0].tolist() == [True, True, True, True] + [False] * 4
    assert best_columns(w, 1, 8, 2, "sums")[0].tolist() == [True, True, False, False, True, True, False, False]


def test_ties_go_to_the_lower_columns():
    for m in (8, 12):
        assert best_columns(torch.ones(4, m), 2, m, 2)[0].tolist() == [True] * 4 + [False] * (m - 4)
        assert best_columns(torch.zeros(4, m), 2, m, 2)[0].tolist() == [True] * 4 + [False] * (m - 4)


def test_greedy_is_near_the_best():
    for v in [1, 4, 64]:
        size = randn(512, 8 * 8, seed=v).abs().reshape(512 // v, v, 8, 8)
        exact, greedy = _exact(size, 2), _greedy(size, 2)

        def kept(chosen, size=size):
            return (size * chosen[:, None]).sort(-1, descending=True).values[..., :2].sum().item()

        assert 0.98 * kept(exact) < kept(greedy) <= kept(exact)


def test_one_row_per_block_is_the_ordinary_mask():
    w = randn(16, 32)
    transform = BlockColumns(nm.Pattern("2:8"), v=1)
    columns = best_columns(w, 2, 8, 1)
    assert torch.equal(transform(w, columns), w * top_n(w, 2, 8))


def test_four_columns_is_nm_whatever_v_is():
    w = randn(16, 32)
    assert torch.equal(BlockColumns(nm.Pattern("2:4"), v=16)(w, best_columns(w, 2, 4, 16)), w * top_n(w, 2, 4))


def test_retained_of_the_choice_is_the_largest_of_all():
    w = randn(8, 7)
    (got,) = best_columns(w, 2, 7, 8)
    sums = {c: retained(w, c, 2) for c in itertools.combinations(range(7), 4)}
    assert tuple(got.nonzero().flatten().tolist()) == max(sums, key=sums.get)
    used = BlockColumns(nm.Pattern("2:7"), v=8)(w, got[None])
    assert used.abs().sum().item() == pytest.approx(max(sums.values())) and nm.ops.is_nm(used, "2:7")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_weights_inside_keep_fewer(dtype):
    """Where the kept columns of a row are zero, the zeros outside are not kept in their place, whatever lies there."""
    w = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 3], [0, 0, 0, 0, 9, 9, 0, 0], [0, 0, 0, 0, 0, 0, 9, 9]], dtype=dtype)
    transform, columns = BlockColumns(nm.Pattern("2:8"), v=3), best_columns(w, 2, 8, 3)
    assert columns[0].tolist() == [False] * 4 + [True] * 4
    used, kept = transform(w, columns), transform.kept(w, columns)
    assert (
        torch.equal(used, w.masked_fill(~kept, 0))
        and not (kept & ~columns.repeat_interleave(3, 0)).any()
        and kept[0].tolist() == [False] * 7 + [True]
    )
    out = torch.full_like(w, torch.nan)
    assert torch.equal(transform(w, columns, out=out), used) and torch.equal(out, used)


# ---- in training


def test_columns_are_held_between_refreshes_and_the_inner_mask_follows():
    model, handle, optimizer = start(VNM("2:8", v=8, every=4))
    chosen = []
    for batch in DATA[:9]:
        layer = handle.layers["2"]
        chosen.append(layer.nm_columns.clone())
        inside = layer.weight.detach() * layer.nm_columns.repeat_interleave(8, 0)
        assert torch.equal(layer.effective_weight(), inside * top_n(inside, 2, 8))
        step(model, optimizer, batch)
    same = [torch.equal(a, b) for a, b in itertools.pairwise(chosen)]
    assert same[:3] == [True] * 3 and same[4:7] == [True] * 3 and not (same[3] and same[7])
    assert handle.state["held"]["2"].keys() == {"nm_columns"} and not any("nm_" in key for key in model.state_dict())


def test_rows_that_v_does_not_divide():
    model = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 50), nn.GELU(), nn.Linear(50, 33)).double()
    model[4] = nn.Linear(50, 33).double()
    handle = nm.sparsify_(model, VNM("2:8", v=64))
    reasons = {e.name: e.reason for e in handle.report.entries}
    assert reasons["0"] == "32:2:8, as v=64 does not divide 96 outputs" and reasons["2"] == "2:2:8, as v=64 does not divide 50 outputs"
    assert model[0].transform.v == 32 and model[0].nm_columns.shape == (3, 16)
    handle.finish(allow_unused=True)
    assert nm.ops.is_nm(model[0].weight.detach(), "2:8")
    even = nm.sparsify_(nn.Sequential(nn.Linear(16, 128)), VNM("2:8", v=64))
    assert even.report.entries[0].reason == "64:2:8"


def test_deployed_weight_is_in_blocks():
    model, handle, optimizer = start(VNM("2:8", v=16, every=3))
    train(model, optimizer, DATA[:8])
    columns = {name: layer.nm_columns.clone() for name, layer in handle.layers.items()}
    handle.finish()
    for name, layer in handle.layers.items():
        w = layer.weight.detach()
        used = (w.reshape(w.shape[0] // 16, 16, -1) != 0).any(1)
        assert nm.ops.is_nm(w, "2:8") and not (used & ~columns[name]).any()
    nm.compress_(model)


def test_inside_step():
    """Columns of the weights of the switch; before it the preview chooses them from the present weights."""
    recipe = STEP("2:8", 20, switch="fixed", start=6, inner=VNM("2:8", v=8, every=0))
    model, handle, optimizer = start(recipe)
    for t, batch in enumerate(DATA):
        if t in (3, 6):
            w = model[2].weight.detach().clone()
            kept = columns_of(w, 2, 8, 8)
            with handle.deployable():
                assert torch.equal(model[2].effective_weight(), w * kept * top_n(w * kept, 2, 8))
        step(model, optimizer, batch)
    assert torch.equal(handle.layers["2"].nm_columns.repeat_interleave(8, 0), kept)
    handle.finish()


def test_layer_wise_inside():
    _, handle, _ = start(nm.recipes.LayerWise("2:8", inner="vnm(v=8)", rule=None, given={"0": "4:8", "2": "1:8"}))
    assert [e.reason for e in handle.report.sparse] == ["8:4:8", "8:1:8"]
    assert [int(layer.effective_weight().count_nonzero()) for layer in handle.layers.values()] == [256, 128]
