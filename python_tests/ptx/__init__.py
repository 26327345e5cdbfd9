"""A test instrument: runs PTX on the CPU, as Triton and nvcc compile it, so that compiled kernels are tested where there is no GPU.

    with emulated(90, mode="latest"):
        values, indices = triton_compress(w, 2, 4)      # w on the CPU; the code is that of sm_90

    execute(parse(text, "pack_rows_kernel"), blocks, [w, values, indices], threads=256)

``parse`` reads a kernel; ``machine`` takes the warps of a cluster of blocks through it, each with its own program counter; ``instructions``
(arithmetic), ``exchange`` (memory and warps), ``barriers``, ``bulk`` with ``tensor_map`` (copies under way) and ``wgmma`` say what each
instruction does, as the PTX ISA manual defines it; ``block`` and ``operands`` hold the state.

What a kernel must not do raises: an address outside every tensor, and whatever leaves the order of asynchronous operations undefined, as a
``Hazard`` with a name. ``order`` finds these from what each warp has waited for, not from what happened to run first, so most are found in
every mode. Modes say when an asynchronous operation happens: "earliest", "latest" (its result is NaN till then), or a seed.

Nothing is said about speed. Instructions that no kernel has used so far are refused by name. What ptxas makes of the text is not seen here:
registers that it reuses too early are counted in SASS (``bench/triton_resources.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .machine import execute
from .parse import parse


@contextmanager
def emulated(capability: int, tensors: Sequence[Tensor] = (), mode: str | int = "earliest") -> Iterator[list[str]]:
    """Inside, what the Triton backend would launch runs here, on CPU tensors; the list collects the kernels' names.

    Args:
        capability: 80 or 90, ...: whose code is compiled and run.
        tensors: memory besides the arguments that kernels may touch.
        mode: when what a warp starts and does not wait for happens; see ``Cluster``.
    """
    from bench.triton_compiling import compiling  # the rest of this package needs no Triton

    names: list[str] = []

    def run(compiled: Any, programs: int, args: tuple[Any, ...]) -> None:
        names.append(compiled.metadata.name)
        given = [a for a, kind in zip(args, compiled.src.signature.values(), strict=False) if kind != "constexpr"]
        execute(parse(compiled.asm["ptx"]), programs, given, tensors, mode)

    with compiling(capability, run):
        yield names
