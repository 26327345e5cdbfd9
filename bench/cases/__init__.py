"""What is timed, one file per family; importing this package fills the registry."""

from . import adamw, choice, effective, ffn, gemm, groups, host, layer, linear, machine, mvue, pack, step

__all__ = ["adamw", "choice", "effective", "ffn", "gemm", "groups", "host", "layer", "linear", "machine", "mvue", "pack", "step"]
