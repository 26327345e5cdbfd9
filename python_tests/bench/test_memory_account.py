"""The account of the memory-bound kernels: ways through machine code and shares by hand; budgets; the committed table."""

from __future__ import annotations

import pytest

from bench import cuda_resources as resources
from bench import memory_account as accounts
from bench import rows as tidy

A100, H100, H200 = accounts.GPUS


def code(*lines: str) -> str:
    """As cuobjdump prints it."""
    return "".join(f"        /*{16 * i:04x}*/ {line:>60} ;   /* 0x0000000000007947 */\n" for i, line in enumerate(lines))


def test_the_chosen_method_is_followed() -> None:
    """Out of bounds a thread leaves at once; odd groups are worked on elsewhere and come back by BSYNC; narrow stores are another way."""
    kernel = code(
        "S2R R0, SR_TID.X",
        "@P0 EXIT",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "BSSY B0, 0x60",
        "@P1 BRA 0xa0",
        "FADD R4, R4, R5",
        "@P2 BRA 0xe0",  # 0x60
        "STG.E.64 desc[UR4][R2.64], R4",
        "EXIT",
        "NOP",
        "MUFU.RCP R4, R4",  # 0xa0
        "MUFU.RCP R4, R4",
        "BSYNC B0",
        "NOP",
        "STG.E desc[UR4][R2.64], R4",  # 0xe0
        "EXIT",
    )
    shortest = ["S2R", "EXIT", "LDG.E.128", "BSSY", "BRA", "FADD", "BRA", "STG.E.64", "EXIT"]
    assert accounts.way(kernel, 16, 8) == shortest
    assert accounts.way(kernel, 16, 4) == [*shortest[:7], "STG.E", "EXIT"]
    assert accounts.way(kernel, 0, 0) == ["S2R", "EXIT"]
    with pytest.raises(accounts.NoWayError, match="reads 32 and writes 8"):
        accounts.way(kernel, 32, 8)


def test_a_loop_is_gone_round_as_often_as_it_must() -> None:
    loop = code("MOV R1, R2", "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]", "FADD R3, R3, R4", "@P0 BRA 0x10", "EXIT")
    assert accounts.way(loop, 48, 0) == ["MOV", *["LDGSTS.E.BYPASS.128", "FADD", "BRA"] * 3, "EXIT"]


def test_what_instructions_occupy() -> None:
    ops = [
        "LOP3.LUT",
        "IMAD.MOV.U32",
        "IMAD.WIDE.U32",
        "FFMA.SAT",
        "DFMA",
        "F2F.F64.F32",
        "LDG.E.128",
        "LDSM.16.MT88.4",
        "STS.U8",
        "BAR.SYNC",
    ]
    assert accounts.counts(ops) == accounts.Counts(issue=10, half_rate=1, multiplies=3, floats=1, doubles=1, special=1, port=9)


def test_blocks_of_a_multiprocessor() -> None:
    """65,536 registers, 2048 threads, 164 and 228 KB: 80 registers of 256 threads leave room for three blocks."""
    assert [accounts.blocks(H100, 256, registers, 0) for registers in (32, 33, 73, 80, 81, 255)] == [8, 6, 3, 3, 2, 1]
    assert accounts.blocks(H100, 256, 32, 57 * 1024) == 4
    assert accounts.blocks(A100, 256, 32, 54 * 1024) == 2  # 55 KB with the system's


def test_one_share_by_hand() -> None:
    """32 elements of 4 bytes for a thread: an H200's memory wants 4.32e12 / 128 threads a second, of 132 multiprocessors at 1.75 GHz."""
    case = accounts.Case("a", "a.cu", "k", 256, 32, 64, 64)
    warps = 0.9 * 4.8e12 / 128 / 32 / 132 / 1.75e9
    few = accounts.share(case, H200, accounts.Counts(400, 100, 10, 10, 0, 0, 8), 32, 0)
    assert (few.share, few.binds, few.issue, few.half_rate, few.bytes, few.blocks) == (1.0, "memory", 12.5, 3.12, 4.0, 8)
    assert f"issue:{warps * 100:.2f} half-rate-pipe:{warps * 50:.2f}" in few.busy
    many = accounts.share(case, H200, accounts.Counts(1000, 600, 10, 10, 0, 0, 8), 32, 0)
    assert (many.share, many.binds) == (round(1 / (warps * 300), 2), "half-rate pipe")
    alone = accounts.share(case, H200, accounts.Counts(400, 100, 10, 10, 0, 0, 8), 255, 0)
    assert (alone.blocks, alone.busy.split()[-1]) == (1, f"reads-under-way:{0.9 * 4.8e12 / 132 * 800e-9 / 2 / (256 * 64):.2f}")


def test_the_table_is_complete_and_keeps_the_budgets() -> None:
    """At most so many slots for a 16-bit element (DESIGN, how fast), as many clocks of the half-rate pipe for MVUE, and two blocks."""
    table = tidy.load(accounts.PATH)
    assert [(row["what"], row["gpu"]) for row in table] == [(case.what, gpu.name) for case in accounts.CASES for gpu in accounts.GPUS]
    budgets = {"pack both ways, transposable bf16": 31, "scale of the soft threshold bf16": 12, "soft threshold float": 12}
    for t in ("bf16", "fp16"):
        budgets |= dict.fromkeys([f"soft threshold {t}", f"pack by soft threshold {t}"], 12)
        budgets |= dict.fromkeys([f"MVUE along rows {t}", f"MVUE along tokens {t}"], 20)
    assert budgets.keys() <= {row["what"] for row in table}
    for row in table:
        assert int(row["blocks"]) >= 2, row
        if row["gpu"] != "A100":
            assert float(row["issue"]) <= budgets.get(row["what"], 99), row
            assert "MVUE" not in row["what"] or 2 * float(row["half_rate"]) <= 20, row


def test_the_table_was_made_from_these_sources() -> None:
    files = {path.name: path for path in resources.sources()}
    made = {case.what: resources.digest(files[case.source]) for case in accounts.CASES}
    assert {row["what"]: row["digest"] for row in tidy.load(accounts.PATH)} == made, f"rewrite it: {accounts.REWRITE}"


@pytest.mark.slow
@pytest.mark.skipif(not resources.tools().ok, reason=resources.tools().reason)
def test_the_table_is_what_the_compiler_makes() -> None:
    """Of a file that another test compiles as well, and of a small one."""
    made = accounts.table_rows(accounts.compiled(["compress", "pack by soft"]))
    table = [row for row in tidy.load(accounts.PATH) if row["what"] in {row["what"] for row in made}]
    assert len({row["what"] for row in made}) == 7 and made == table, f"rewrite it: {accounts.REWRITE}"
