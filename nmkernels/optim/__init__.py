"""Floor 5: optimizers. MaskedAdamW is AdamW until a recipe gives it masks."""

from .adamw import MaskedAdamW, merge_stats
from .rules import PLAIN, Target, UpdateRule

__all__ = ["PLAIN", "MaskedAdamW", "Target", "UpdateRule", "merge_stats"]
