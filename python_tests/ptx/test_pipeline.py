"""A kernel with everything that Hopper does asynchronously runs right in every mode, and each way to break it is reported by name.

The kernel is ``kernels/pipeline.cu``; what runs is nvcc's text of it, ``pipeline.ptx``, which is committed so that no nvcc is needed. A
break is one edit of that text.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nmkernels import reference

from .breaks import COMMON, PARITY, assert_reported, distances_swapped
from .machine import execute
from .nvcc import NVCC, ptx
from .order import Hazard
from .parse import parse
from .tensor_map import encode

HERE = Path(__file__).parent / "kernels"
MODES: list[str | int] = ["earliest", "latest", 1]
OUT, IN, TOKENS = 256, 192, 128
BF16, SPAN_64, SPAN_128 = 9, 2, 3


@lru_cache(1)
def text() -> str:
    return (HERE / "pipeline.ptx").read_text()


@lru_cache(1)
def inputs() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    w, x = (torch.randint(-8, 9, (n, IN), generator=g).bfloat16() for n in (OUT, TOKENS))  # whole numbers, whose sums are exact
    values, indices = reference.compress(w, 2, 4)
    dense = reference.decompress(values, indices, 2, 4, IN)
    return values, reference.to_layout(indices, IN, "wgmma.sp"), x, (x.double() @ dense.double().T).bfloat16()


def map_of(t: Tensor, box: tuple[int, int], swizzle: int) -> bytes:
    return encode(BF16, t.data_ptr(), (t.shape[1], t.shape[0]), (t.shape[1] * 2,), box, swizzle=swizzle)


def run(code: str, mode: str | int, value_rows: int = 128, stale: bool = False) -> bool:
    """Whether the result is right."""
    values, metadata, x, want = inputs()
    y = torch.full((TOKENS, OUT), torch.nan, dtype=torch.bfloat16)
    maps = map_of(values, (32, value_rows), SPAN_64), map_of(x, (64, 32), SPAN_128), map_of(y, (64, 64), SPAN_128)
    memory = [values, y] if stale else [values, x, y]
    shared = 2 * 17408 + 2 * 8192
    execute(parse(code), 2, [*maps, metadata, IN // 64, TOKENS // 64], memory, mode=mode, threads=384, cluster=2, shared=shared)
    return torch.equal(y, want)


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_as_it_is(mode: str | int) -> None:
    assert run(text(), mode)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_other_orders(seed: int) -> None:
    assert run(text(), seed)


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_what_nvcc_makes_of_it_today() -> None:
    assert run(ptx(HERE / "pipeline.cu"), "latest")


CLUSTER = r"barrier\.cluster\.arrive\.\S*;\s*barrier\.cluster\.wait\.\S*;"
BREAKS = {
    **COMMON,
    "results before wait_group 0": (r"(wgmma\.wait_group\S*) 0;", r"\1 1;", 0, "register in flight"),
    "no wgmma.fence in one place": (r"wgmma\.fence\S*;", "", 1, "no wgmma.fence"),
    "selectors swapped": (r", ([01]), p, 1, 1, 0, 0;", lambda m: f", {1 - int(m[1])}, p, 1, 1, 0, 0;", 0, "wrong result"),
    "B's step of 32": (r"4611686293305360388", "4611686293305360386", 0, "wrong result"),
    "distances swapped": (r"(?<=, )(4611686293305360384)(?=;)", distances_swapped, 0, "wrong result|outside shared memory"),
    "consumer's parity not flipped": (PARITY, r"mov.u32\1\2;", -1, "read before the wait|overwritten|deadlock"),
    "producer's parity not inverted": (r"mov\.u32(\s+%r\d+), 1;", r"mov.u32\1, 0;", 1, "deadlock"),
    "expect_tx a box short": (r"17408;(?=\s+mov\.u32\s+%r\d+, memory)", "16896;", 1, "bytes differ from expect_tx|read before the wait"),
    "expect_tx a box more": (r"17408;(?=\s+mov\.u32\s+%r\d+, memory)", "17920;", 1, "deadlock"),
    "metadata read after the arrive": (
        r"(wgmma\.wait_group\S* 0;[\s\S]*?\[there\];\s*\}\s*)",
        r"\1 ld.shared.u32 %r1, [memory+16384]; ",
        1,
        "overwritten before it was read|read before the wait",
    ),
    "one stage more than there are": (r"(setp\.eq\.s32\s+%p\d+, %r\d+), 2;", r"\1, 3;", 1, "overwritten|deadlock|no mbarrier|outside|race"),
    "no wait_group.read": (r"cp\.async\.bulk\.wait_group\.read 0;", "", 0, "overwritten under a bulk store"),
    "no wait_group at the end": (r"cp\.async\.bulk\.wait_group 0;", "", 0, "left before wait_group"),
    "no barrier before the store": (r"(fence\.proxy\.async\S*;[\s\S]*?)bar\.sync[^;]*;", r"\1", 1, "race|not fenced"),
    "no remote arrive": (r"(setp\.gt\.s32\s+%p\d+, %r\d+), 1;", r"\1, 0;", 0, "deadlock"),
    "setmaxnreg by some threads": (r"(setmaxnreg\.dec)", r"@%p1 \1", 0, "divergent warpgroup"),
    "setmaxnreg of too many": (r"(setmaxnreg\.inc\S*) 232;", r"\1 240;", 0, "deadlock"),
    "no barrier after init": (CLUSTER, "", 1, "mbarrier used before|no mbarrier"),
    "no barrier at the end": (CLUSTER, "", -1, "a block (has left|may leave too early)"),
    "wrong count of a named barrier": (r"(bar\.sync\s+%r\d+), 128;", r"\1, 160;", 0, "deadlock|wrong count"),
    "count of empty too small": (r"(mbarrier\.init\S* \[%r\d+\]), 16;", r"\1, 15;", 0, "overwritten|read before|race"),
}  # fmt: skip


QUICK = {"wait_group 2 for 1", "no fence.proxy.async", "multicast to one block", "metadata read after the arrive"}


@pytest.mark.parametrize("mode", [pytest.param(m, marks=[pytest.mark.slow] if m != 1 else []) for m in MODES])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in BREAKS])
def test_a_break_is_reported(name: str, mode: str | int) -> None:
    assert_reported(lambda code: run(code, mode), text(), *BREAKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_box_of_another_size(mode: str | int) -> None:
    with pytest.raises(Hazard, match="bytes differ from expect_tx|deadlock|read before the wait|overwritten"):
        run(text(), mode, value_rows=129)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_map_of_memory_that_is_gone(mode: str | int) -> None:
    with pytest.raises(AssertionError, match="below every tensor|of a tensor of"):
        run(text(), mode, stale=True)
