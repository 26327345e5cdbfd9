"""A test instrument: runs the PTX that Triton compiles, on the CPU, so that compiled kernels are tested where there is no GPU.

    with emulated(90):
        values, indices = triton_compress(w, 2, 4)      # w on the CPU; the code is that of sm_90

``parse`` reads a kernel, ``machine`` walks blocks of threads through it in numpy, ``instructions`` and ``exchange`` say what each
instruction does, as the PTX ISA manual defines it, and ``operands`` knows registers and memory. An address outside every tensor, or one
that is not a multiple of the access's width, is an error. Nothing is said about speed, and instructions that no kernel has used so far
are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from bench.triton_compiling import compiling

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
    names: list[str] = []

    def run(compiled: Any, programs: int, args: tuple[Any, ...]) -> None:
        names.append(compiled.metadata.name)
        given = [a for a, kind in zip(args, compiled.src.signature.values(), strict=False) if kind != "constexpr"]
        execute(parse(compiled.asm["ptx"]), programs, given, tensors, mode)

    with compiling(capability, run):
        yield names
