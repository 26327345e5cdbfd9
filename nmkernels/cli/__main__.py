"""``python -m nmkernels.cli VERB``, the same as ``python -m nmkernels VERB``."""

from .main import main

if __name__ == "__main__":
    raise SystemExit(main())
