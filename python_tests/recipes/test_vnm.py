"""V:N:M: the columns that are chosen, the mask inside them, blocks that do not fit. The trajectories are the roster's."""

import itertools

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.recipes import STEP, VNM
from nmkernels.recipes.contrib.vnm import BlockColumns, best_columns
from python_tests.for_each import for_each
from python_tests.recipes.loop import batches, top_n
from python_tests.recipes.loop_effective import columns_of
from python_tests.recipes.training import start, step

DATA = batches(20)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- the columns


@for_each("m", [4, 5, 6, 7, 8, 12])
def test_equal_plain_search(m):
    for n, objective in itertools.product([1, 2, 3, 4], ["retained", "sums"]):
        w = randn(12, 2 * m, seed=10 * n + m)
        got = best_columns(w, n, m, 4, objective).repeat_interleave(4, 0)
        assert torch.equal(got, columns_of(w, n, m, 4, objective)), (n, objective)


@pytest.mark.parametrize("n", [2, 3])
def test_sums_of_16_bit_magnitudes_are_not_rounded(n):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(best_columns(w, n, 8, 4), best_columns(w.double(), n, 8, 4))


def test_ties_go_to_the_lower_columns():
    for m, value in itertools.product((8, 12), (0.0, 1.0)):
        assert best_columns(torch.full((4, m), value), 2, m, 2)[0].tolist() == [True] * 4 + [False] * (m - 4)


@for_each("n, m, v", [(2, 8, 1), (2, 4, 16)])
def test_degenerate_blocks_give_the_ordinary_mask(n, m, v):
    w = randn(16, 32)
    assert torch.equal(BlockColumns(nm.Pattern(n, m), v=v)(w, best_columns(w, n, m, v)), w * top_n(w, n, m))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_weights_inside_keep_fewer(dtype):
    """Where the kept columns of a row are zero, the zeros outside are not kept in their place, whatever lies there."""
    w = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 3], [0, 0, 0, 0, 9, 9, 0, 0], [0, 0, 0, 0, 0, 0, 9, 9]], dtype=dtype)
    transform, columns = BlockColumns(nm.Pattern("2:8"), v=3), best_columns(w, 2, 8, 3)
    assert columns[0].tolist() == [False] * 4 + [True] * 4
    used, kept = transform(w, columns), transform.kept(w, columns)
    assert torch.equal(used, w * kept) and not kept[:, :4].any() and kept[0].tolist() == [False] * 7 + [True]
    out = torch.full_like(w, torch.nan)
    assert torch.equal(transform(w, columns, out=out), used) and torch.equal(out, used)


# ---- in training


def test_rows_that_v_does_not_divide():
    model = nn.Sequential(nn.Linear(16, 96), nn.GELU(), nn.Linear(96, 50), nn.GELU(), nn.Linear(50, 128), nn.Linear(128, 128))
    handle = nm.sparsify_(model, VNM("2:8", v=64))
    reasons = {e.name: e.reason for e in handle.report.sparse}
    assert reasons == {
        "0": "32:2:8, as v=64 does not divide 96 outputs",
        "2": "2:2:8, as v=64 does not divide 50 outputs",
        "5": "64:2:8",
    }
    assert model[0].transform.v == 32 and model[0].nm_columns.shape == (3, 16)
    assert not any("nm_" in key for key in model.state_dict())


def test_inside_step():
    """Columns of the weights of the switch; before it the preview chooses them from the present weights."""
    model, handle, optimizer = start(STEP("2:8", 20, switch="fixed", start=6, inner=VNM("2:8", v=8, every=0)))
    for t, batch in enumerate(DATA[:9]):
        if t in (3, 6):
            w = model[2].weight.detach().clone()
            kept = columns_of(w, 2, 8, 8)
            with handle.deployable():
                assert torch.equal(model[2].effective_weight(), w * kept * top_n(w * kept, 2, 8))
        step(model, optimizer, batch)
    assert torch.equal(handle.layers["2"].nm_columns.repeat_interleave(8, 0), kept)


def test_layer_wise_inside():
    _, handle, _ = start(nm.recipes.LayerWise("2:8", inner="vnm(v=8)", rule=None, given={"0": "4:8", "2": "1:8"}))
    assert [e.reason for e in handle.report.sparse] == ["8:4:8", "8:1:8"]
    assert [int(layer.effective_weight().count_nonzero()) for layer in handle.layers.values()] == [256, 128]
