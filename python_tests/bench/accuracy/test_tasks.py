"""The tasks themselves: batches depend on (seed, step) alone, training and test data are apart, and a few steps learn."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm
from bench.accuracy import tasks, worker
from bench.accuracy.spec import TUNING_SEEDS, Case, RunSpec
from bench.accuracy.tasks import digits, finetune

NAMES = ["gpt", "vit"]
DIGITS = ["mlp", "resnet", "vit"]


@pytest.fixture(autouse=True)
def needs(request: pytest.FixtureRequest) -> None:
    if any(name in request.node.name for name in (*DIGITS, "digits")):
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_sparse_layers(name):
    task = tasks.get(name)
    again = task.batch(1, 5)
    assert all(torch.equal(a, b) for a, b in zip(task.batch(1, 5), again, strict=True))
    assert not torch.equal(task.batch(1, 6)[0], again[0]) and not torch.equal(task.batch(2, 5)[0], again[0])
    assert len(nm.sparsify_(task.model(), nm.recipes.STE("1:32")).layers) == 8, "all but the small ones and the head"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_learn(name):
    short, shorter = (worker.run(RunSpec(Case(name, "ste", "2:4", steps), 4e-3, 0)).row for steps in (60, 2))
    assert short is not None and shorter is not None and short.val_loss < shorter.val_loss
    assert (short.accuracy == short.accuracy) is (name == "vit")


def test_digits_for_training_tuning_and_test_are_apart():
    task = tasks.get("mlp")
    training, test = ({t.numpy().tobytes() for t in images} for images in (task.images, task.test_images))
    assert not training & test
    assert (len(task.images), len(task.test_images)) == (digits.TRAIN, digits.TEST)
    task.padded = F.pad(torch.arange(digits.TRAIN).view(-1, 1, 1).expand(-1, 8, 8).float(), (1, 1, 1, 1), mode="replicate")
    for seed, count in ((0, digits.TRAIN), (TUNING_SEEDS[0], digits.TRAIN - digits.HELD_OUT)):
        seen = {int(i.mean().round()) for step in range(200) for i in task.batch(seed, step)[0]}
        assert seen == set(range(count))
    tasks.base.get.cache_clear()


@pytest.mark.parametrize("name", ["gpt", "finetune", "finetune-low"])
def test_text_for_tuning_and_for_the_test_is_apart(name, monkeypatch):
    monkeypatch.setattr(finetune, "pretrained", lambda folder, steps: {})
    task, found = tasks.get(name), []
    monkeypatch.setattr(type(task), "loss", lambda self, model, batch: found.append(batch[0]) or torch.zeros(()))
    model = torch.nn.Linear(1, 1)
    task.evaluate(model)
    test = torch.cat(found)
    found.clear()
    task.evaluate(model, tuning=True)
    tuning = torch.cat(found)
    assert min(len(test), len(tuning)) > 300 and not {t.numpy().tobytes() for t in test} & {t.numpy().tobytes() for t in tuning}
    tasks.base.get.cache_clear()


def test_digits_of_tuning_runs_are_judged_on_images_held_out():
    task = tasks.get("mlp")
    guesses = []

    class Model(torch.nn.Linear):
        def forward(self, images):
            guesses.append(images)
            return F.one_hot(torch.zeros(len(images), dtype=torch.long), digits.CLASSES).float()

    task.evaluate(Model(1, 1))
    task.evaluate(Model(1, 1), tuning=True)
    assert torch.equal(guesses[0], task.test_images) and torch.equal(guesses[1], task.images[-digits.HELD_OUT :])


@pytest.mark.parametrize(("name", "layers", "weights"), [("mlp", 2, 64 * 128 + 128 * 128), ("resnet", 4, 9 * 16 * (16 + 16 + 32 + 64))])
def test_sparse_layers_of_the_image_tasks(name, layers, weights):
    task = tasks.get(name)
    for pattern in ("1:8", "1:16"):
        handle = nm.sparsify_(model := task.model(), nm.recipes.STE(pattern))
        assert len(handle.layers) == layers and sum(layer.weight.numel() for layer in handle.layers.values()) == weights
        assert model(task.batch(0, 1)[0]).shape == (digits.BATCH, digits.CLASSES)
        for layer in handle.layers.values():
            kept = (layer.effective_weight() != 0).sum(-1)  # of the matrix (out, kh · kw · in)
            assert (kept == layer.shape[1] // int(pattern[2:])).all()
    training, inference = worker.run_flops(Case(name, "ste", "1:8", 10))
    assert training > inference * task.tokens * 10 * 2  # two dense products at least


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_image_tasks_learn(name):
    rows = [worker.run(RunSpec(Case(name, "ste", "1:8", steps), 1e-2, 0)).row for steps in (120, 2)]
    assert rows[0].val_loss < 0.8 * rows[1].val_loss and rows[0].accuracy > 50
    model = tasks.get(name).model().eval()
    before = [b.clone() for b in model.buffers()]
    tasks.get(name).evaluate(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_evaluation_moves_its_data_to_the_model():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    assert [t.device.type for t in tasks.base.to_model(model, torch.ones(1), torch.ones(2))] == ["meta", "meta"]
    for name in ("digits", "gpt", "sentiment", "translation", "pretrained"):
        assert importlib.import_module(f"bench.accuracy.tasks.{name}").to_model is tasks.base.to_model
