"""AST: its annealing, its optimizer, its mask and the distillation loss. The trajectories are the roster's."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm
from nmkernels.optim import AnnealedAdamW, MaskedAdamW
from nmkernels.pattern import RecipeError, ShapeError
from nmkernels.recipes import AST, distill_loss
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot, top_n
from python_tests.recipes.loop_ast import ast
from python_tests.recipes.running import F64, start, step


def test_annealing_is_linear_and_then_constant():
    recipe = AST("2:4", total_steps=40, decay=0.8)
    got = [recipe.rate(torch.tensor(float(t), dtype=F64)).item() for t in (0, 1, 5, 10, 39)]
    assert got == pytest.approx([0.0, 0.08, 0.4, 0.8, 0.8])
    assert AST(end=0, decay=0.8).rate(torch.zeros((), dtype=F64)).item() == 0.8


def test_the_first_step_has_no_decay_and_the_figures_tell_it():
    model, handle, optimizer = start(AST("2:4", total_steps=16, decay=0.5))
    seen = []
    for batch in batches(6):
        step(model, optimizer, batch)
        got = handle.metrics()
        seen.append(round(got["decay"].item(), 6))
        assert got["decay_ratio"] > 0
    assert seen == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    plain = AST("2:4", decay=0.0, end=0)
    first, with_decay = (start(r) for r in (plain, AST("2:4", total_steps=16, decay=0.5)))
    for model, _, optimizer in (first, with_decay):
        step(model, optimizer, batches(1)[0])
    assert distance(snapshot(first[0]), snapshot(with_decay[0])) == 0.0


def test_the_mask_is_renewed_every_so_many_steps():
    model, handle, optimizer = start(AST("2:4", decay=0.0, end=0, every=3), lr=0.1)
    masks = [handle.layers["0"].kept().clone()]
    for batch in batches(7):
        used = handle.layers["0"].effective_weight()
        assert torch.equal(used, model[0].weight.detach() * masks[-1])
        step(model, optimizer, batch)
        masks.append(handle.layers["0"].kept().clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(masks)]
    assert changed == [False, False, True, False, False, True, False]
    assert not torch.equal(masks[-1], top_n(model[0].weight.detach(), 2, 4)), "the weights have moved on"


def test_the_decay_does_not_enter_the_momentum():
    model, _, optimizer = start(AST("2:4", decay=1e3, end=0))
    step(model, optimizer, batches(1)[0])
    state, beta1 = optimizer.state[model[0].weight], Adam().beta1
    torch.testing.assert_close(state["exp_avg"], (1 - beta1) * model[0].weight.grad)
    assert state["exp_avg_sq"].max() > 1.0, "but v sees it"


def test_other_optimizers_are_refused_with_the_way_out():
    for make in (torch.optim.AdamW, MaskedAdamW, torch.optim.SGD):
        model = mlp()
        handle = nm.sparsify_(model, AST("2:4", total_steps=10))
        with pytest.raises(RecipeError, match=r"nm.optim.AnnealedAdamW\(model.parameters"):
            handle.attach(make(model.parameters(), lr=1e-3))
    assert isinstance(start(AST("2:4", total_steps=10))[2], AnnealedAdamW)


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


def test_distill_loss_has_a_gradient_for_the_student_alone():
    student, teacher = logits(4, 5).requires_grad_(), logits(4, 5, seed=1).requires_grad_()
    distill_loss(student, teacher, torch.arange(4)).backward()
    assert teacher.grad is None and student.grad.abs().max() > 0
    same = logits(4, 5).requires_grad_()
    distill_loss(same, same.detach().clone(), torch.arange(4), weight=1.0).backward()
    assert same.grad.abs().max() < 1e-15, "the teacher is the minimum"


def test_default_weights_are_a_third_and_two_thirds():
    student, labels = logits(4, 5), torch.arange(4)
    got = distill_loss(student, student, labels)
    torch.testing.assert_close(got, F.cross_entropy(student, labels) / 3)


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
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
