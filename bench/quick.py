"""A handful of cases that take seconds: ``python -m bench.quick --device cpu``, the same as ``python -m bench.run --quick``."""

from __future__ import annotations

from collections.abc import Sequence

from .registry import Spec

TOKENS = (1, 16, 256)


def specs(device: str) -> list[Spec]:
    """Mask, prune, compress and linear with 2:4 on one weight, and a copy: fp32 and 16 MB on a CPU, bf16 and 90 MB on a GPU."""
    dtype, rows, cols = ("bfloat16", 4096, 11008) if device.startswith("cuda") else ("float32", 1024, 4096)
    streams = [Spec(op, "2:4", dtype, rows, cols) for op in ("nm_mask", "nm_prune", "nm_compress")]
    products = [Spec("nm_linear", "2:4", dtype, rows, cols, tokens) for tokens in TOKENS]
    return [*streams, *products, Spec("copy", "", dtype, rows, cols)]


def main(argv: Sequence[str] | None = None) -> int:
    """``bench.run`` with ``--quick``."""
    from .run import main as run

    return run(["--quick", *(argv or ())])


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
