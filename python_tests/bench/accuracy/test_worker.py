"""One run: same data and first weights for all methods, evaluated as deployed, divergence recorded."""

from __future__ import annotations

import math

import pytest
import torch

import nmkernels as nm
from bench.accuracy import methods, traces, worker
from bench.accuracy.spec import RunSpec


def spec(method: str, pattern: str = "2:4", **more) -> RunSpec:
    return RunSpec(**{"task": "tiny", "method": method, "pattern": pattern, "seed": 3, "lr": 1e-2, "steps": 50} | more)


def test_methods_share_data_and_first_weights(tiny):
    worker.run(spec("dense", "dense"))
    first, again = (worker.run(spec("sste")).row for _ in range(2))
    assert torch.equal(torch.stack(tiny.seen[:50]), torch.stack(tiny.seen[50:100]))
    assert torch.equal(tiny.first[0], tiny.first[1]) and first.val_loss == again.val_loss


def test_the_deployable_weights_are_evaluated(tiny, monkeypatch):
    seen, evaluate = [], tiny.evaluate

    def spy(self, model, tuning):
        seen.extend(layer.effective_weight().detach().clone() for layer in model if isinstance(layer, nm.SparseLinear))
        return evaluate(self, model, tuning)

    monkeypatch.setattr(tiny, "evaluate", spy)
    # mask decay without fine-tuning still lets something through at the end, which finish() cuts off
    monkeypatch.setitem(methods.METHODS, "leaky", methods.Method("mdgf", {"end": 1.0, "residual": 0.5}))
    worker.run(spec("leaky"))
    assert len(seen) == 2 and all(nm.ops.is_nm(w, "2:4") for w in seen)


def test_a_diverging_run_is_recorded(tiny, monkeypatch):
    loss = tiny.loss
    monkeypatch.setattr(tiny, "loss", lambda self, model, batch: loss(self, model, batch) * (math.nan if len(self.seen) >= 20 else 1))
    outcome = worker.run(spec("ste"))
    assert outcome.row is not None
    assert (outcome.row.status, outcome.row.done, math.isnan(outcome.row.val_loss)) == ("diverged", 20, True)


def test_traces_tell_switch_and_flips(tiny):
    outcome = worker.run(spec("step-25", seed=0, purpose="tuned"))
    assert outcome.trace is not None and outcome.row is not None
    assert [line["step"] for line in outcome.trace] == ["25", "50"]
    assert (outcome.row.switch_step, outcome.row.switch_reason) == (12, "fixed")
    assert set(outcome.trace[0]) == set(traces.COLUMNS)
    assert float(outcome.trace[0]["density"]) == 0.5 and float(outcome.trace[0]["v_mean"]) > 0
    assert float(outcome.trace[1]["v_change"]) == 0  # frozen
    assert worker.run(spec("step-25", purpose="repeat")).trace is None
    compared = worker.run(spec("step", seed=0, purpose="tuned")).trace
    assert compared is not None and float(compared[0]["z_bar"]) > 0 and float(compared[0]["threshold"]) > 0


def test_the_optimizer_and_its_second_decay_are_those_of_the_run(tiny):
    slow, fast = (worker.run(spec("srste", beta2=b)).row for b in (0.999, 0.9))
    sgd = worker.run(spec("srste", optimizer="sgd", lr=0.5)).row
    assert slow.val_loss != fast.val_loss and sgd.val_loss < 1.5
    assert [(r.optimizer, r.beta2) for r in (slow, fast, sgd)] == [("adamw", 0.999), ("adamw", 0.9), ("sgd", 0.0)]
    with pytest.raises(nm.NMError, match="second moment"):
        worker.run(spec("step", optimizer="sgd"))


def test_tuning_seeds_are_judged_on_validation_data(tiny, monkeypatch):
    said: list[bool] = []
    monkeypatch.setattr(tiny, "evaluate", lambda self, model, tuning: said.append(tuning) or {"val_loss": 1.0, "bleu": 2.0})
    assert worker.run(spec("ste", steps=1)).row.bleu == 2.0
    worker.run(spec("ste", steps=1, seed=100))
    assert said == [False, True]


def test_what_ended_the_dense_phase_is_recorded(tiny, monkeypatch):
    monkeypatch.setitem(methods.METHODS, "never", methods.Method("step", {"threshold": 1e-30}))
    monkeypatch.setitem(methods.METHODS, "at once", methods.Method("step", {"threshold": 1e30}))
    want = {"never": (26, "t_max"), "at once": (6, "t_min"), "step-10": (5, "fixed"), "srste": (0, "")}
    for name, (step, reason) in want.items():
        row = worker.run(spec(name)).row
        assert (row.switch_step, row.switch_reason) == (step, reason)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(methods.CORE | methods.VARIANTS))
def test_every_method_runs(tiny, method):
    row = worker.run(spec(method, "dense" if method == "dense" else "1:8")).row
    assert row is not None and row.status == "ok" and math.isfinite(row.val_loss) and row.done == 50
