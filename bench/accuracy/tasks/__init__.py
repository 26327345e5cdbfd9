"""The tasks by name."""

from __future__ import annotations

from . import cifar, finetune, gpt, hf, opcodes, vit  # noqa: F401  registers them
from .base import Settings, Task, get, names, task

__all__ = ["Settings", "Task", "get", "names", "task"]
