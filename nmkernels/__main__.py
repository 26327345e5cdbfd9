"""``python -m nmkernels VERB``: see ``nmkernels.cli.main``."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
