"""The tasks by name."""

from __future__ import annotations

from . import gpt, vit  # noqa: F401  registers them
from .base import Settings, Task, get, names, task

__all__ = ["Settings", "Task", "get", "names", "task"]
