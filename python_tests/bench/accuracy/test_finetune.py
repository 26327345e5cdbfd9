"""The task that begins from a trained model, which is kept on disk."""

from __future__ import annotations

import math

import pytest
import torch

import nmkernels as nm
from bench.accuracy.tasks import finetune
from python_tests.bench.accuracy.conftest import trained


@pytest.mark.slow
def test_fine_tuning_starts_from_cached_pretraining(tmp_path, monkeypatch):
    before = torch.get_rng_state()
    weights = finetune.pretrained(tmp_path, steps=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(tmp_path.glob("pretrained-4-*.pt"))) == len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "GPT", lambda config: pytest.fail("trained again"))
        assert all(torch.equal(value, weights[key]) for key, value in finetune.pretrained(tmp_path, steps=4).items())
    monkeypatch.setattr(finetune, "pretrained", lambda folder, steps: weights if steps == 2000 else pytest.fail("other weights"))
    task = finetune.FineTuneGPT()
    a, b, c = task.batch(1, 2), task.batch(1, 2), task.batch(1, 3)
    assert all(map(torch.equal, a, b)) and not torch.equal(a[0], c[0])
    model = task.model()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    handle = nm.sparsify_(model, nm.recipes.SRSTE("1:8"))
    trained(task, model, handle.attach(nm.optim.MaskedAdamW(model.parameters(), lr=1e-3)), 3)
    handle.finish()
    assert all(map(math.isfinite, task.evaluate(model.eval()).values())) and task.digest
