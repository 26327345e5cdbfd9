"""Optimizers: MaskedAdamW, which is AdamW until a recipe gives it masks."""

from .adamw import MaskedAdamW
from .annealed import AnnealedAdamW
from .rules import UpdateRule

__all__ = ["AnnealedAdamW", "MaskedAdamW", "UpdateRule"]
