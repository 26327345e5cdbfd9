"""What the parser makes of the text of both compilers."""

from __future__ import annotations

import pytest

from .machine import execute
from .parse import RESERVED, parse

NVCC = """
.version 9.0
.target sm_90a
.extern .shared .align 128 .b8 dynamic[];
.visible .entry first(
	.param .u64 first_param_0,
	.param .align 64 .b8 first_param_1[128],
	.param .u8 first_param_2
)
.maxntid 64, 2, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<4>;
	.shared .align 8 .b8 fixed[24];
	mov.u32 	%r1, %tid.x;
	// begin inline asm
	{
.reg .pred p;
AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;
@p bra DONE;
bra AGAIN;
DONE:
}
	// end inline asm
	{
.reg .pred p;
AGAIN:
@!p bra AGAIN;
}
	st.shared.v2.u32 	[dynamic+8], {%r1, %r2};
$L__BB0_2:
	ret;
}
.entry second() { ret; }
.entry empty() { .reg .b32 %r<2>; }
"""


def test_scopes_parameters_and_shared_memory() -> None:
    kernel = parse(NVCC, "first")
    assert kernel.params == {"first_param_0": (0, 8), "first_param_1": (64, 128), "first_param_2": (192, 1)}
    assert (kernel.threads, kernel.most_threads) == (0, 128)
    assert kernel.shared == {"fixed": RESERVED, "dynamic": RESERVED + 128} and kernel.static_shared == RESERVED + 128
    assert [i.name for i in kernel.code] == ["mov", "mbarrier", "bra", "bra", "bra", "st", "ret"]
    # what two pieces of inline assembly call p and AGAIN are different registers and labels
    guards = [kernel.code[i].guard.lstrip("!") for i in (2, 4)]
    assert guards[0] != guards[1] and {kernel.size(g) for g in guards} == {1} and kernel.code[1].operands[0] == guards[0]
    assert [kernel.labels[str(kernel.code[i].operands[0])] for i in (2, 3, 4)] == [4, 1, 4]
    assert kernel.code[5].operands == ("[dynamic+8]", ("%r1", "%r2"))


@pytest.mark.parametrize(("name", "message"), [("third", "0 of 3 kernels"), ("", "3 of 3"), ("empty", "no instructions")])
def test_a_kernel_is_one_that_can_run(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(NVCC, name)


@pytest.mark.parametrize("threads", [0, 33, 256])
def test_a_launch_of_no_threads_raises(threads: int) -> None:
    """nvcc's PTX says how many there may be, not how many there are."""
    with pytest.raises(ValueError, match="threads of a block"):
        execute(parse(NVCC, "first"), 1, [0, bytes(128), 0], threads=threads)
