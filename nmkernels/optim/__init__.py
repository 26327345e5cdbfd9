"""Optimizers: MaskedAdamW, which is AdamW until a recipe gives it masks."""

from .adamw import MaskedAdamW, merge_stats
from .annealed import AnnealedAdamW, AnnealedRule
from .rules import PLAIN, Target, UpdateRule

__all__ = ["PLAIN", "AnnealedAdamW", "AnnealedRule", "MaskedAdamW", "Target", "UpdateRule", "merge_stats"]
