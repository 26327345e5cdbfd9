"""A handful of cases: ``python -m bench.quick --device cpu`` takes seconds; on a GPU it is every case of its speed targets, minutes."""

from __future__ import annotations

from collections.abc import Sequence

from . import targets
from .registry import Spec
from .targets_cuda import STREAM

TOKENS = (1, 16, 256)


def specs(device: str) -> list[Spec]:
    """On a CPU mask, prune, compress and linear with 2:4 on one weight of 16 MB, and a copy; on a GPU the targets and more bf16 streams."""
    if device.startswith("cuda"):
        more = ("nm_mask", "nm_prune", "nm_soft_threshold", "nm_transposable_mask")
        return [*targets.specs(device), *(Spec(op, "2:4", "bfloat16", *STREAM) for op in more)]
    streams = [Spec(op, "2:4", "float32", 1024, 4096) for op in ("nm_mask", "nm_prune", "nm_compress")]
    products = [Spec("nm_linear", "2:4", "float32", 1024, 4096, tokens) for tokens in TOKENS]
    return [*streams, *products, Spec("copy", "", "float32", 1024, 4096)]


def main(argv: Sequence[str] | None = None) -> int:
    """``bench.run`` with ``--quick``."""
    from .run import main as run

    return run(["--quick", *(argv or ())])


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
