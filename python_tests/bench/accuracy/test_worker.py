"""One run: same data and first weights for all methods, evaluated as deployed, divergence recorded."""

from __future__ import annotations

import math

import pytest
import torch

import nmkernels as nm
from bench.accuracy import methods, studies, worker
from bench.accuracy.dense_v import AdamWithDenseV
from bench.accuracy.spec import RunSpec


def spec(method: str, pattern: str = "2:4", seed: int = 3, lr: float = 1e-2, **more) -> RunSpec:
    return RunSpec(studies.case("tiny", method, pattern, **more), lr, seed)


def test_methods_share_data_and_first_weights(tiny):
    worker.run(spec("dense"))
    first, again = (worker.run(spec("sste")).row for _ in range(2))
    assert torch.equal(torch.stack(tiny.seen[:50]), torch.stack(tiny.seen[50:100]))
    assert torch.equal(tiny.first[0], tiny.first[2]) and first.val_loss == again.val_loss  # the second is for the count of FLOPs


def test_the_deployable_weights_are_evaluated(tiny, monkeypatch):
    seen, evaluate = [], tiny.evaluate

    def spy(self, model, tuning):
        seen.extend(layer.effective_weight().detach().clone() for layer in model if isinstance(layer, nm.SparseLinear))
        return evaluate(self, model, tuning)

    monkeypatch.setattr(tiny, "evaluate", spy)
    # mask decay without fine-tuning still lets something through at the end, which finish() cuts off
    monkeypatch.setitem(methods.METHODS, "leaky", methods.Method("mdgf", {"end": 1.0, "residual": 0.5}))
    for method in ("leaky", "asp-sparsegpt", "oneshot-admm", "admm-held", "admm-srste"):
        seen.clear()
        worker.run(spec(method))
        assert len(seen) >= 2 and all(nm.ops.is_nm(w, "2:4") for w in seen[-2:])  # before them the dense model that is pruned


@pytest.mark.parametrize(("method", "done"), [("ste", 20), ("oneshot-magnitude", 50)])
def test_a_diverging_run_is_recorded_and_not_pruned(tiny, monkeypatch, method, done):
    loss = tiny.loss
    monkeypatch.setattr(tiny, "loss", lambda self, model, batch: loss(self, model, batch) * (math.nan if len(self.seen) >= 20 else 1))
    row = worker.run(spec(method)).row
    assert row is not None and (row.status, row.done, math.isnan(row.val_loss)) == ("diverged", done, True)


def test_the_optimizer_and_its_second_decay_are_those_of_the_run(tiny):
    slow, fast = (worker.run(spec("srste", beta2=b)).row for b in (0.999, 0.9))
    sgd = worker.run(spec("srste", optimizer="sgd", lr=0.5)).row
    assert slow.val_loss != fast.val_loss and sgd.val_loss < 1.5
    assert [(r.optimizer, r.beta2) for r in (slow, fast, sgd)] == [("adamw", 0.999), ("adamw", 0.9), ("sgd", 0.0)]
    with pytest.raises(nm.NMError, match="second moment"):
        worker.run(spec("step-25", optimizer="sgd"))


def test_tuning_seeds_are_judged_on_validation_data(tiny, monkeypatch):
    said: list[bool] = []
    monkeypatch.setattr(tiny, "evaluate", lambda self, model, tuning: said.append(tuning) or {"val_loss": 1.0, "bleu": 2.0})
    assert worker.run(spec("ste", steps=1)).row.bleu == 2.0
    worker.run(spec("ste", steps=1, seed=100))
    assert said == [False, True]


def test_what_ended_the_dense_phase_is_recorded(tiny):
    for name, expected in {"step-10": (5, "fixed"), "step-25-thawed": (12, "fixed"), "ste": (0, "")}.items():
        row = worker.run(spec(name)).row
        assert (row.switch_step, row.switch_reason) == expected


def test_thawed_step_goes_on_with_the_second_moment(tiny):
    """Up to T₀ it is STEP, and after it plain STE with the optimizer's state: as torch's AdamW on masked weights."""
    runs = {}
    for method in ("step-25", "step-25-thawed"):
        it = worker.Training(spec(method))
        moments = []
        for step in range(1, 51):
            it.step(step)
            moments.append(it.optimizer.state[it.model[0].weight]["exp_avg_sq"].clone())
        runs[method] = moments
    frozen, thawed = runs["step-25"], runs["step-25-thawed"]
    assert torch.equal(frozen[11], thawed[11]) and torch.equal(frozen[12], frozen[49])
    assert not torch.equal(thawed[12], thawed[11]) and not torch.equal(thawed[48], thawed[49])


def test_a_pruned_run_is_dense_until_it_is_pruned(tiny):
    """The first half equals dense training, whose optimizer goes on; at the end, the model of the dense run itself is pruned."""
    dense, half = (worker.Training(spec(m)) for m in ("dense", "asp-wanda"))
    for step in range(1, 26):
        assert dense.step(step) == pytest.approx(half.step(step), rel=1e-5)
    half.prune()
    masks = [layer.weight.detach() != 0 for layer in half.model if isinstance(layer, nm.SparseLinear)]
    assert half.optimizer.state[half.model[0].weight]["step"] == 25
    for step in range(26, 51):
        half.step(step)
    assert all(torch.equal(m, layer.weight != 0) for m, layer in zip(masks, half.model[::2], strict=True))
    whole = worker.run(spec("dense")).row
    tiny.seen.clear()
    pruned = worker.run(spec("oneshot-magnitude")).row
    assert pruned.val_loss > whole.val_loss and len(tiny.seen) == worker.CALIBRATION, "not trained again"


def test_dense_second_moments(tiny):
    """With the model's own gradients it is AdamW; in a run its v is that of the dense weights, and the update that of STE."""
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.arange(8.0)) for _ in range(2))
    ours, theirs = AdamWithDenseV([a], 0.1, (0.9, 0.99), 0.1), torch.optim.AdamW([b], 0.1, (0.9, 0.99), weight_decay=0.1)
    for _ in range(5):
        a.grad = b.grad = torch.randn(8)
        ours.step()
        theirs.step()
    assert torch.allclose(a, b, atol=1e-6)
    a.grad, before = torch.ones(8), a.detach().clone()
    ours.dense[a] = torch.zeros(8)
    ours.state[a]["exp_avg_sq"].zero_()
    ours.step()
    assert (a - before * (1 - 0.01)).abs().max() <= 0.1 * 2 + 1e-6, "a unit that is dead in the dense model only"
    it = worker.Training(spec("oracle"))
    it.step(1)
    x, dense = tiny.seen[-1], it.task.model()
    dense.load_state_dict({name: value for name, value in zip(dense.state_dict(), tiny_state(tiny, it), strict=True)})
    it.task.loss(dense, (x,)).backward()
    assert torch.allclose(it.optimizer.state[it.model[0].weight]["exp_avg_sq"], 1e-3 * dense[0].weight.grad.square(), rtol=1e-4)


def tiny_state(tiny, it):
    """The weights of a run before its first step: the twin copied them."""
    return [p.detach() for p in it.twin.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(methods.METHODS) - {"dense"}))
def test_every_method_runs(tiny, method):
    row = worker.run(spec(method)).row
    assert row is not None and row.status == "ok" and math.isfinite(row.val_loss) and row.done == 50 and row.training_flops > 0
