"""MdGf: its decay, its two gradient rules, and what it refuses. The trajectories are the roster's."""

import itertools
import math

import pytest
import torch
import torch._dynamo.testing

from nmkernels.recipes import MdGf
from python_tests.recipes.loop import batches, loss_of, top_n
from python_tests.recipes.training import F32, F64, start, step

SHORT = MdGf("1:8", 20, start=4, end=14)


def curve(recipe):
    return [recipe.flow(torch.tensor(float(t), dtype=F64)).item() for t in range(recipe.total_steps + 1)]


# ---- the decay


def test_linear_flow_and_a_coefficient_of_ones_own():
    assert curve(MdGf("1:8", 8, schedule="linear", end=1.0)) == pytest.approx([1 - u / 8 for u in range(9)])
    steep = MdGf("1:8", 8, schedule="linear", end=6, coefficient=0.25)
    assert curve(steep) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0])
    slow = MdGf("1:8", 8, coefficient=1e-4, end=6)
    assert curve(slow) == pytest.approx([math.exp(-1e-4 * u) for u in range(6)] + [0, 0, 0]), "fine-tuning is binary all the same"


def test_flow_is_not_rounded_with_the_model():
    model, handle, optimizer = start(SHORT, F32)
    model.bfloat16()
    for batch in batches(6, F32):
        step(model, optimizer, tuple(t.bfloat16() for t in batch))
    assert 0 < handle.metrics()["flow"].item() == pytest.approx(model[0].nm_flow.item(), rel=1e-6)


@pytest.mark.parametrize("total", [16, 100, 997])
def test_levels_are_equal_steps_down(total):
    got = curve(MdGf("1:8", total, schedule="linear", end=1.0, levels=16))
    assert sorted({round(d * 16, 6) for d in got}) == list(range(17))
    counts = [sum(round(d * 16) == k for d in got) for k in range(1, 17)]
    assert max(counts) - min(counts) <= 1 and all(a >= b for a, b in itertools.pairwise(got))


def test_flow_and_phase_follow_the_steps_also_in_a_frozen_layer():
    """Whose weight never changes, so nothing but the flow tells that what was used is out of date."""
    model, handle, optimizer = start(SHORT, make=torch.optim.AdamW)
    model[0].weight.requires_grad_(False)
    w, want = model[0].weight, torch.tensor(curve(SHORT), dtype=F64)
    for t, batch in enumerate(batches(20)):
        torch.testing.assert_close(model[0].effective_weight(), torch.where(top_n(w, 1, 8), w, want[t] * w), rtol=1e-12, atol=0)
        assert handle.metrics()["phase"].item() == (0 if t < 4 else 1)
        step(model, optimizer, batch)
        assert handle.metrics()["flow"].item() == pytest.approx(want[t + 1].item(), rel=1e-12)
    assert handle.metrics()["density"].item() == 1 / 8


def test_the_flow_reaches_layers_of_any_dtype_in_full():
    model = start(MdGf("1:4", 20, end=18), torch.bfloat16)[0]
    assert model[0].nm_flow.dtype == F64 and "0.nm_flow" not in model.state_dict()


@pytest.mark.slow
def test_a_compiled_step_recompiles_at_the_changes_of_phase_only():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, _, optimizer = start(SHORT, F32)
    forward = torch.compile(model, fullgraph=True, backend=counter)
    compiled = [0]
    for batch in batches(20, F32):
        step(forward, optimizer, batch)
        compiled.append(counter.frame_count)
    assert [t for t, (a, b) in enumerate(itertools.pairwise(compiled)) if b > a] == [0, 4, 14], "dense, decay, fine-tuning"
    torch.compiler.reset()


def test_the_host_waits_at_the_changes_of_phase_only(monkeypatch):
    model, _, optimizer = start(SHORT, F32)
    data, waits, real = batches(20, F32), [], torch.Tensor.item
    for t, batch in enumerate(data):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", lambda self, t=t: (waits.append(t), real(self))[1])
            optimizer.step()
    ours = [t for t in waits if waits.count(t) > min(waits.count(s) for s in range(20))]
    assert sorted(set(ours)) == [3, 13]
