"""Distillation from a dense teacher, as recipes that retrain a pruned model use it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pattern import RecipeError, ShapeError

IGNORED = -100
"""The label that ``cross_entropy`` leaves out."""


def distill_loss(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, temperature: float = 2.0, weight: float = 2 / 3) -> Tensor:
    """(1 − weight) · CE(student, labels) + weight · T² · KL(softmax(teacher/T) ‖ softmax(student/T)), both as means over tokens.

    T² keeps the size of the second term's gradient from falling with the temperature T (Hinton et al., 2015). ⅓ and ⅔ at T = 2 are
    what the Adaptive Sparse Trainer's example run uses (Huang et al., AAAI 2025, arXiv 2407.20584); its code also takes in tokens
    without a label, which here count in neither term. The teacher gets no gradient.

    Args:
        student_logits, teacher_logits: ``(..., classes)``, of one shape.
        labels: ``(...)``, whole numbers; −100 for tokens that do not count.
        temperature: T > 0.
        weight: of the second term, 0 to 1.

    Raises:
        RecipeError: temperature or weight out of range. ShapeError: the shapes do not fit.

    Example:
        >>> logits, labels = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
        >>> loss = distill_loss(logits, logits, labels)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, labels) / 3)
        True
    """
    if not 0 < temperature < float("inf") or not 0 <= weight <= 1:
        raise RecipeError(f"distill_loss: temperature={temperature} must be above 0 and weight={weight} between 0 and 1.")
    if student_logits.shape != teacher_logits.shape or student_logits.shape[:-1] != labels.shape:
        raise ShapeError(
            f"distill_loss: the student's logits {tuple(student_logits.shape)} and the teacher's {tuple(teacher_logits.shape)} must be of "
            f"one shape, and labels {tuple(labels.shape)} of theirs without the classes."
        )
    student, teacher = (x.reshape(-1, x.shape[-1]) for x in (student_logits, teacher_logits.detach()))
    labels = labels.reshape(-1)
    entropy = F.cross_entropy(student, labels, ignore_index=IGNORED)
    divergence = F.kl_div(
        F.log_softmax(student / temperature, dim=-1), F.log_softmax(teacher / temperature, dim=-1), reduction="none", log_target=True
    ).sum(-1)
    counted = labels != IGNORED
    mean = torch.where(counted, divergence, 0.0).sum() / counted.sum()
    return (1 - weight) * entropy + weight * temperature**2 * mean
