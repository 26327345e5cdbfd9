"""AST: its annealing, its optimizer and the distillation loss. The trajectories are the roster's."""

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.pattern import RecipeError, ShapeError
from nmkernels.recipes import AST, STEP, distill_loss
from python_tests.for_each import for_each
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.loop_effective import ast
from python_tests.recipes.training import F64, start, train


def test_the_figures_tell_the_decay():
    model, handle, optimizer = start(AST("2:4", total_steps=16, decay=0.5))
    seen = []
    train(model, optimizer, batches(6), lambda t: seen.append(handle.metrics()["decay"].item()))
    assert seen == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5]) and handle.metrics()["decay_ratio"] > 0


@for_each("recipe, way", [(AST(total_steps=10), "AnnealedAdamW"), (STEP(total_steps=10), "MaskedAdamW")])
def test_other_optimizers_are_refused_with_the_way_out(recipe, way):
    for make in (torch.optim.AdamW, torch.optim.SGD, *([MaskedAdamW] if way != "MaskedAdamW" else [])):
        with pytest.raises(RecipeError, match=rf"handle.attach\(nm.optim.{way}\(model.parameters\(\), lr=\.\.\.\)\)"):
            nm.sparsify_(model := mlp(), recipe).attach(make(model.parameters(), lr=1e-3))
    assert type(start(recipe)[2]).__name__ == way


def test_maximize_decays_all_the_same():
    model, _, optimizer = start(AST("2:4", decay=0.3, end=0), maximize=True, weight_decay=0.0)
    for batch in batches(5):
        optimizer.zero_grad()
        (-loss_of(model, batch)).backward()
        optimizer.step()
    want = ast(snapshot(mlp()), batches(5), 2, 4, 0.3, 0, 10, adam=Adam(weight_decay=0.0))
    assert distance(snapshot(model), want) < 1e-10


# ---- distillation


def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_distill_loss_by_hand():
    student, teacher, labels = logits(2, 3, 5), logits(2, 3, 5, seed=1), torch.tensor([[0, 4, 2], [1, -100, 3]])
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    divergence = (p * (p / q).log()).sum(-1)
    entropy = -student.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    counted = labels != -100
    want = 0.25 * entropy[counted].mean() + 0.75 * 9.0 * divergence[counted].mean()
    torch.testing.assert_close(distill_loss(student, teacher, labels, temperature=3.0, weight=0.75), want)


def test_default_loss_weights_and_frozen_teacher():
    """To equal logits the divergence is 0, its least, and leaves a third of the cross-entropy."""
    student, teacher = logits(4, 5).requires_grad_(), logits(4, 5).requires_grad_()
    got = distill_loss(student, teacher, torch.arange(4))
    got.backward()
    want = F.cross_entropy(student, torch.arange(4)) / 3
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(student.grad, torch.autograd.grad(want, student)[0])
    assert teacher.grad is None


@for_each(
    "change, error, complaint",
    [
        ({"temperature": 0.0}, RecipeError, "temperature"),
        ({"weight": 1.5}, RecipeError, "weight"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, ShapeError, "without the classes"),
        ({"teacher_logits": logits(4, 6)}, ShapeError, "one shape"),
    ],
)
def test_distill_loss_refuses(change, error, complaint):
    given = {"student_logits": logits(4, 5), "teacher_logits": logits(4, 5), "labels": torch.arange(4)}
    with pytest.raises(error, match=complaint):
        distill_loss(**{**given, **change})
