"""``python -m nmkernels VERB``: see ``nmkernels.cli``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
