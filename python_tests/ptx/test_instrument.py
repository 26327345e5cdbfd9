"""The instrument itself: instructions against what the manual says, written out by hand, and the errors that it must find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from python_tests.ptx import execute, parse

pytestmark = pytest.mark.slow

HEAD = """
.version 8.7
.target sm_90
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [k_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	{body}
	ret;
}}
"""


def run(body: str, out: torch.Tensor | None = None, threads: int = 32, apart: bool = False) -> list[int]:
    """What each thread leaves in its int32 of ``out`` after ``body``; %r1 is its number, %rd3 the address of its element."""
    out = torch.zeros(threads, dtype=torch.int32) if out is None else out
    execute(parse(HEAD.format(body=body, threads=threads)), [0], [out], warps_apart=apart)
    return out.tolist()


def result(body: str, **kwargs: object) -> list[int]:
    return run(body + "\n st.global.b32 [%rd3], %r9;", **kwargs)  # type: ignore[arg-type]


def test_one_thread() -> None:
    for body, want in [
        ("mov.b32 %r2, 0x44332211; mov.b32 %r3, 0x88776655; prmt.b32 %r9, %r2, %r3, 0x7421U;", 0x88553322),
        ("mov.b32 %r2, 0x80; prmt.b32 %r9, %r2, %r2, 0x8000U;", 0xFF808080),
        ("mov.b32 %r2, 0xF0F1; bfe.u32 %r9, %r2, 4, 8;", 0x0F),
        ("mov.b32 %r2, 0xF0F1; bfe.s32 %r9, %r2, 12, 4;", 0xFFFFFFFF),
        ("mov.b32 %r2, 1; shl.b32 %r9, %r2, 32;", 0),
        ("mov.b32 %r2, 0x80000000; shr.s32 %r9, %r2, 40;", 0xFFFFFFFF),
        ("mov.b32 %r2, -7; div.s32 %r9, %r2, 2;", (-3) & 0xFFFFFFFF),
        ("mov.b32 %r2, -7; rem.s32 %r9, %r2, 2;", (-1) & 0xFFFFFFFF),
        ("mov.b32 %r2, 0xFFFFFFFF; mul.wide.u32 %rd4, %r2, %r2; shr.u64 %rd4, %rd4, 32; cvt.u32.u64 %r9, %rd4;", 0xFFFFFFFE),
        ("mov.b32 %r2, 0x0F; mov.b32 %r3, 0x33; mov.b32 %r4, 0x55; lop3.b32 %r9, %r2, %r3, %r4, 0xe8;", 0x17),
        ("mov.b32 %r2, 0f3F808000; cvt.rn.bf16.f32 %rs1, %r2; cvt.u32.u16 %r9, %rs1;", 0x3F80),
        ("mov.b32 %r2, 0f3F818000; cvt.rn.bf16.f32 %rs1, %r2; cvt.u32.u16 %r9, %rs1;", 0x3F82),
        ("mov.b32 %r2, 0f7FC00000; mov.b32 %r3, 0f3F800000; min.f32 %r9, %r2, %r3;", 0x3F800000),
        ("mov.b32 %r2, 0f7FC00000; setp.neu.f32 %p1, %r2, 0f00000000; selp.b32 %r9, 7, 8, %p1;", 7),
        ("mov.b32 %r2, 0f7FC00000; setp.ne.f32 %p1, %r2, 0f00000000; selp.b32 %r9, 7, 8, %p1;", 8),
        ("mov.b32 %r2, 0xF0; popc.b32 %r9, %r2;", 4),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, 0x00020001; mov.b32 {%rs3, %rs4}, %r2; mov.b32 %r9, {%rs4, %rs3};", 0x00010002),
    ]:
        assert np.uint32(result(body)[0] & 0xFFFFFFFF) == want, body


def test_shuffles() -> None:
    for mode, source in [
        ("bfly.b32 %r9, %r1, 5, 31, -1", lambda i: i ^ 5),
        ("up.b32 %r9, %r1, 3, 0, -1", lambda i: i - 3 if i >= 3 else i),
        ("down.b32 %r9, %r1, 3, 31, -1", lambda i: i + 3 if i + 3 < 32 else i),
        ("idx.b32 %r9, %r1, 4, 31, -1", lambda i: 4),
        ("idx.b32 %r9, %r1, 2, 6175, -1", lambda i: i // 8 * 8 + 2),  # 0x181f: segments of 8
    ]:
        assert result(f"shfl.sync.{mode};") == [source(i) for i in range(32)]


def test_threads_that_part_meet_again() -> None:
    body = """
	mov.b32 %r9, 0;
	and.b32 %r2, %r1, 3;
$L_loop:
	add.s32 %r9, %r9, 10;
	sub.s32 %r2, %r2, 1;
	setp.ge.s32 %p1, %r2, 0;
	@%p1 bra $L_loop;
	redux.sync.add.s32 %r3, %r9, -1;
	add.s32 %r9, %r9, %r3;"""
    assert result(body) == [10 * (i % 4 + 1) + 800 for i in range(32)]


def test_ldmatrix_gives_each_thread_its_part() -> None:
    fill = (
        "shl.b32 %r2, %r1, 2; shl.b32 %r3, %r1, 17; or.b32 %r3, %r3, %r1; shl.b32 %r4, %r1, 1; add.s32 %r5, %r4, 1; shl.b32 %r5, %r5, 16;"
    )
    fill += "or.b32 %r5, %r5, %r4; st.shared.b32 [%r2], %r5; bar.sync 0; and.b32 %r6, %r1, 7; shl.b32 %r6, %r6, 4;"
    plain = result(fill + "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6];")
    assert [x & 0xFFFF for x in plain] == [2 * i for i in range(32)]  # elements 2i and 2i + 1 of 64, row-major
    transposed = result(fill + "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r6];")
    assert [x & 0xFFFF for x in transposed] == [8 * (2 * (i % 4)) + i // 4 for i in range(32)]


def test_mma_is_a_matrix_gemm() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-4, 5, shape, generator=gen) for shape in ((16, 16), (16, 8), (16, 8)))
    tables = []
    for lane in range(32):
        g, t = lane // 4, lane % 4
        halves = [a[g + 8 * (r % 2), 2 * t + e + 8 * (r // 2)] for r in range(4) for e in range(2)]
        halves += [b[2 * t + e + 8 * r, g] for r in range(2) for e in range(2)]
        words = torch.stack(halves).half().view(torch.int32).tolist()
        sums = torch.stack([c[g + 8 * r, 2 * t + e] for r in range(2) for e in range(2)])
        tables.append(words + sums.float().view(torch.int32).tolist())
    memory = torch.tensor(tables, dtype=torch.int32).flatten()
    loads = "mul.wide.u32 %rd2, %r1, 40; add.s64 %rd3, %rd1, %rd2;" + "".join(
        f"ld.global.b32 %r{10 + i}, [%rd3+{4 * i}];" for i in range(10)
    )
    gemm = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r30, %r31, %r32, %r33 }, { %r10, %r11, %r12, %r13 }, "
    gemm += "{ %r14, %r15 }, { %r16, %r17, %r18, %r19 };"
    stores = "".join(f"st.global.b32 [%rd3+{4 * i}], %r{30 + i};" for i in range(4))
    run(loads + gemm + stores, memory)
    d, want = memory.view(32, 10)[:, :4].contiguous().view(torch.float32), (a @ b + c).float()
    for lane in range(32):
        g, t = lane // 4, lane % 4
        assert d[lane].tolist() == [want[g + 8 * r, 2 * t + e].item() for r in range(2) for e in range(2)]


def test_an_address_outside_is_found() -> None:
    with pytest.raises(AssertionError, match="of a tensor of 128 bytes"):
        run("st.global.b32 [%rd3+4], %r1;")
    with pytest.raises(AssertionError, match="is no multiple of 8"):
        run("add.s64 %rd4, %rd1, 4; ld.global.v2.b32 {%r2, %r3}, [%rd4];")


def test_two_threads_that_disagree_are_found() -> None:
    with pytest.raises(AssertionError, match="different values to one address"):
        run("st.global.b32 [%rd1], %r1;")


def test_a_missing_barrier_is_found() -> None:
    def swapped(barrier: str) -> list[int]:
        body = f"shl.b32 %r2, %r1, 2; st.shared.b32 [%r2], %r1; {barrier} xor.b32 %r3, %r2, 128; ld.shared.b32 %r9, [%r3];"
        return result(body, threads=64, apart=True)

    assert swapped("bar.sync 0;") == [i ^ 32 for i in range(64)]
    assert swapped("") != [i ^ 32 for i in range(64)]


def test_an_unknown_instruction_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="no rule for wmma"):
        run("wmma.load.a.sync.b32 %r9, %r1;")


def test_wgmma_reads_shared_memory_as_its_descriptor_says() -> None:
    """One 64 x 8 x 16 GEMM, A in registers, B without swizzle: two core matrices of 8 rows (n) of 16 bytes (k), 128 bytes apart."""
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, shape, generator=gen) for shape in ((64, 16), (16, 8)))
    rows = []
    for thread in range(128):
        w, g, t = thread // 32, thread % 32 // 4, thread % 4
        halves = [a[16 * w + g + 8 * (r % 2), 2 * t + e + 8 * (r // 2)] for r in range(4) for e in range(2)]
        if thread < 64:  # thread i brings word i of B in shared memory: core matrix i // 32, row n, two of k
            n, k = thread % 32 // 4, 8 * (thread // 32) + 2 * (thread % 4)
            halves += [b[k, n], b[k + 1, n]]
        rows.append(torch.stack(halves + [torch.tensor(0)] * (10 - len(halves))).half().view(torch.int32))
    memory = torch.stack(rows).flatten()
    body = "mul.wide.u32 %rd2, %r1, 20; add.s64 %rd3, %rd1, %rd2;" + "".join(f"ld.global.b32 %r{10 + i}, [%rd3+{4 * i}];" for i in range(5))
    body += "shl.b32 %r2, %r1, 2; st.shared.b32 [%r2], %r14; bar.sync 0;"
    descriptor = 8 << 16 | 16 << 32  # start 0, 128 bytes to the next of k, 256 to the next of n (there is none)
    body += f"mov.b64 %rd4, {descriptor}; setp.ne.b32 %p1, %r1, %r1; wgmma.fence.sync.aligned;"
    body += "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r30,%r31,%r32,%r33}, {%r10,%r11,%r12,%r13}, %rd4, %p1, 1, 1, 0;"
    body += "".join(f"st.global.b32 [%rd3+{4 * i}], %r{30 + i};" for i in range(4))
    run(body, memory, threads=128)
    d, want = memory.view(128, 5)[:, :4].contiguous().view(torch.float32), (a @ b).float()
    for thread in range(128):
        w, g, t = thread // 32, thread % 32 // 4, thread % 4
        assert d[thread].tolist() == [want[16 * w + g + 8 * r, 2 * t + e].item() for r in range(2) for e in range(2)]


def test_a_register_that_wgmma_may_still_read_stays_as_it_is() -> None:
    def overwritten(waits: str) -> list[int]:
        gemm = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r30,%r31,%r32,%r33}, {%r10,%r11,%r12,%r13}, 524416, %p1, 1, 1, 0;"
        other = gemm.replace("%r1", "%r2")
        commit = "wgmma.commit_group.sync.aligned;"
        body = "".join(f"mov.b32 %r{i}, 0;" for i in (*range(10, 14), *range(20, 24))) + "setp.ne.b32 %p1, %r1, %r1;"
        return result(f"{body} {gemm} {commit} {other} {commit} {waits} mov.b32 %r12, 5; mov.b32 %r9, %r12;", threads=128)

    assert overwritten("wgmma.wait_group.sync.aligned 1;") == [5] * 128
    for waits in ("", "wgmma.wait_group.sync.aligned 2;"):
        with pytest.raises(AssertionError, match="%r12 is written while a wgmma"):
            overwritten(waits)
