"""The tasks themselves: batches depend on (seed, step) alone, training and test data are apart, and a few steps learn."""

from __future__ import annotations

import pytest
import torch

import nmkernels as nm
from bench.accuracy import tasks, worker
from bench.accuracy.spec import RunSpec

NAMES = ["gpt", "vit"]


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest) -> None:
    if "vit" in request.node.name:
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.mark.parametrize("name", NAMES)
def test_batches_depend_on_seed_and_step_and_eight_layers_are_sparse(name):
    task = tasks.get(name)
    again = task.batch(1, 5)
    assert all(torch.equal(a, b) for a, b in zip(task.batch(1, 5), again, strict=True))
    assert not torch.equal(task.batch(1, 6)[0], again[0]) and not torch.equal(task.batch(2, 5)[0], again[0])
    assert len(nm.sparsify_(task.model(), nm.recipes.STE("1:32")).layers) == 8, "all but the small ones and the head"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_learn(name):
    short, shorter = (worker.run(RunSpec(name, "ste", "2:4", 0, 4e-3, steps)).row for steps in (60, 2))
    assert short is not None and shorter is not None and short.val_loss < shorter.val_loss
    assert (short.accuracy == short.accuracy) is (name == "vit")


def test_vit_images_for_training_are_not_in_the_test_set():
    task = tasks.get("vit")
    train = {t.numpy().tobytes() for t in task.images}
    assert not any(t.numpy().tobytes() in train for t in task.test_images)
    assert len(task.images) + len(task.test_images) == 1797
