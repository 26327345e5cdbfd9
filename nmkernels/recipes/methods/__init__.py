"""The methods of the field, one file each; every module of this folder is imported, and its recipes register themselves."""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")):
    import_module(f"{__name__}.{_module}")
