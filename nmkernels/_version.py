"""The version, in one place: pyproject.toml and ``nmkernels.__version__`` read it here."""

__version__ = "0.1.0"
