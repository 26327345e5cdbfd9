"""Floor 5: optimizers. MaskedAdamW is AdamW until a recipe gives it masks."""

from .adamw import MaskedAdamW
from .rules import PLAIN, Target, UpdateRule

__all__ = ["PLAIN", "MaskedAdamW", "Target", "UpdateRule"]
