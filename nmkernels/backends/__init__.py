"""The backends. Importing this package registers all of them; ``supports`` of each says which calls it can run.

A new backend is one module and one name in this list. Importing a module must be cheap and must work where
the backend itself cannot run, so that ``explain`` can say why.
"""

from importlib import import_module

from .cpu.fingerprint import fingerprint

__all__ = ["NAMES", "fingerprint", "renew_changed_forms"]

NAMES = ("reference", "cpu", "triton", "cuda", "cusparselt")

for _name in NAMES:
    import_module(f".{_name}", __name__)

from .cuda.adamw_pack import renew_changed_forms  # noqa: E402 - of the backends above
