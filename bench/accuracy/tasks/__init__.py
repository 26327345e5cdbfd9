"""The tasks; every file of this folder registers its own."""

from importlib import import_module
from pkgutil import iter_modules

from .base import Settings, Task, get, names, task

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Settings", "Task", "get", "names", "task"]
