"""What Triton compiles for sm_80 and sm_90 gives the bits of the reference: its PTX, run on the CPU by ``python_tests.ptx``.

The interpreter tests what the kernels say; this tests what the compiler makes of it: layouts, shuffles, fragments, copies, conversions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.triton_compiling import recording
from nmkernels import Pattern, dispatch, reference, testing
from nmkernels.backends import adamw as shared
from nmkernels.backends.triton import adamw, integers, interpreted
from nmkernels.backends.triton import linear as family
from nmkernels.backends.triton.groups import ELEMENTS
from nmkernels.backends.triton.launches import Tiling, candidates
from python_tests.backends.adamw_calls import copied, edge, held, hyper, make, same_as_reference, shifted
from python_tests.backends.gemm_calls import hard, inputs, integer_weight
from python_tests.ops.samples import seed

if interpreted():
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

from python_tests.ptx import emulated

pytestmark = pytest.mark.slow

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CODE = [(90, F32), (80, BF16), (90, F16)]
"""Compute capabilities and dtypes; sm_80 shares all but a few instructions with sm_90."""


MODES: list[str | int] = ["earliest", "latest", 1]
"""When asynchronous operations happen; see ``python_tests.ptx``."""


def backend(op: str, name: str) -> Callable[..., Any]:
    return next(i.fn for i in dispatch.implementations(op) if i.backend == name)


@pytest.mark.parametrize("pattern", ["2:4", "3:5", "4:32"])
@pytest.mark.parametrize("op", ["nm_mask", "nm_prune", "nm_soft_threshold", "nm_compress"])
def test_groups(op: str, pattern: str) -> None:
    """The edge cases, and one that ends inside its second tile."""
    p = Pattern(pattern)
    for capability, dtype in CODE:
        inputs = [*(c.x for c in testing.cases(p, dtype)), torch.randn(1, (ELEMENTS // p.m + 3) * p.m).to(dtype)]
        for i, x in enumerate(inputs):
            with testing.poison(), emulated(capability, mode=MODES[i % 3]) as ran:
                got = backend(op, "triton")(x, p.n, p.m)
            assert len(ran) == (x.numel() > 0)
            testing.assert_equal_bits(got, backend(op, "reference")(x, p.n, p.m), f"{op} {pattern} {dtype} sm_{capability}")


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "4:8", "3:5", "8:256"])
def test_compressed_form(pattern: str) -> None:
    p = Pattern(pattern)
    for capability, dtype in CODE[:2]:
        for rows, cols in ((9, 5 * p.m), (2, 2500 // p.m * p.m + p.m)):
            w = torch.randn(rows, cols).to(dtype)
            mask = reference.mask(w, p.n, p.m) & (torch.rand(w.shape) < 0.7)
            want = reference.compress(w, p.n, p.m, mask)
            with testing.poison(), emulated(capability):
                got = backend("nm_compress", "triton")(w, p.n, p.m, mask)
                dense = backend("nm_decompress", "triton")(*want, p.n, p.m, cols)
            testing.assert_equal_bits(got, want, f"compress {pattern} sm_{capability}")
            testing.assert_equal_bits(dense, torch.where(mask, w, 0), f"decompress {pattern} sm_{capability}")


def test_transposable_mask() -> None:
    for capability, dtype in CODE[:2]:
        options = torch.tensor([0.0, 1.0, 2.0, -3.0, float("nan"), float("inf")], dtype=dtype)
        for w in (options[torch.randint(4, (8, 256))], options[torch.randint(6, (8, 256))], torch.randn(4, 1028).to(dtype)):
            with testing.poison(), emulated(capability):
                got = backend("nm_transposable_mask", "triton")(w, 2, 4)
            testing.assert_equal_bits(got, reference.transposable_mask(w, 2, 4), f"sm_{capability}")


def test_soft_threshold_scale() -> None:
    """Over two programs, the second of one group."""
    w = torch.randn(4 * ELEMENTS // 4 + 1, 4).to(BF16)
    with testing.poison(), emulated(80) as ran:
        got = backend("nm_soft_threshold_scale", "triton")(w, 2, 4)
    assert len(ran) == 1
    torch.testing.assert_close(got, reference.soft_threshold_scale(w, 2, 4), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("op", "pattern", "method", "capability", "dtype"),
    [
        ("nm_mvue", "2:4", "exact", 90, F32),
        ("nm_mvue", "3:5", "exact", 80, F16),
        ("nm_mvue", "2:4", "approx", 90, BF16),
        ("nm_mvue_compress", "2:4", "exact", 90, BF16),
        ("nm_mvue_compress", "4:32", "exact", 80, BF16),
    ],
)
def test_mvue(op: str, pattern: str, method: str, capability: int, dtype: torch.dtype) -> None:
    p = Pattern(pattern)
    hard = [c.x.reshape(-1, p.m)[:8] for c in testing.cases(p, dtype) if c.x.numel()]
    spread = torch.randn(16, p.m) * torch.logspace(0, -6, p.m, base=2)
    groups = torch.cat([*hard, spread.to(dtype)])
    groups = groups[: len(groups) // 8 * 8]
    down = groups.reshape(-1, 8, p.m).movedim(1, -1).flatten(0, 1)
    for dim, g in ((1, groups.reshape(8, -1)), (0, down[:-1])):
        args = (p.n, p.m, dim, seed(-5, 2**40), method)
        with testing.poison(), emulated(capability, mode=MODES[dim]):
            got = backend(op, "triton")(g, *args)
        testing.assert_equal_bits(got, backend(op, "reference")(g, *args), f"{op} {pattern} {method} sm_{capability} dim {dim}")


def step(
    capability: int, call: dict[str, Any], h: Tensor, n: int, m: int, ours: Any = None, mode: str | int = "latest", **options: Any
) -> Tensor:
    """Run the compiled kernels of MaskedAdamW and the reference on copies; returns the statistics."""
    ours = ours or copied(call)
    with emulated(capability, [x for xs in (*ours.values(), options.get("masks") or []) for x in xs], mode):
        return same_as_reference(adamw.masked_adamw_, ours, call, h, n, m, **options)


@pytest.mark.parametrize(
    ("n", "m", "dtype", "grad", "capability"),
    [
        (2, 4, F32, F32, 90),
        (2, 4, BF16, F32, 80),
        (1, 8, BF16, BF16, 90),
        (4, 32, F32, F16, 90),
        (0, 0, F32, F32, 80),
        (3, 5, F16, F32, 90),
    ],
    ids=str,
)
def test_adamw(n, m, dtype, grad, capability) -> None:
    cols = (m or 1) * 8
    call = make(torch.Generator().manual_seed(1), (3, cols), (cols * 3,), (1, cols * 17), dtype=dtype, grad=grad)
    first = step(capability, call, hyper(lr=0.3), n, m)
    testing.assert_equal_bits(step(capability, call, hyper(lr=0.3), n, m, mode=1), first)


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [(F32, {}), (BF16, {"frozen": True}), (BF16, {"eps_inside": True, "maximize": True}), (F32, {"geometric": True})],
    ids=str,
)
def test_adamw_edge_values_and_every_option(dtype, flags) -> None:
    call = edge(torch.Generator().manual_seed(5), dtype)
    step(90, call, hyper(clamp=1.0, v_step=7.0), 2, 4, scale=torch.tensor([3.0]), found=torch.zeros(1), **flags)
    assert not step(90, call, hyper(), 2, 4, found=torch.ones(1), **flags).any()


@pytest.mark.parametrize(("dtype", "fixed"), [(F32, True), (BF16, False)], ids=str)
def test_adamw_held_masks(dtype, fixed) -> None:
    """Rows of whole bytes and others, spare bits set."""
    call = make(torch.Generator().manual_seed(1), (3, 40), (5, 13), (1, 1030), dtype=dtype)
    step(90, call, hyper(lr=0.3), 0, 0, masks=held(torch.Generator().manual_seed(2), call, spare=0xFF), fixed=fixed)


@pytest.mark.parametrize(("dtype", "n", "m"), [(F32, 2, 4), (BF16, 3, 5), (F16, 0, 0)], ids=str)
def test_adamw_states_in_bf16(dtype, n, m) -> None:
    call = make(torch.Generator().manual_seed(1), (3, 40), (5, 15 if m != 4 else 16), dtype=dtype, amsgrad=True, state=BF16)
    for stochastic in (False, True):
        step(80, call, hyper(lr=0.3), n, m, stochastic=stochastic, seed=-(2**40) - 3)


def test_adamw_numbers_on_the_host(monkeypatch) -> None:
    """Arguments of 64 bits, large and negative, arrive as they are; memory at odd addresses."""
    call = make(torch.Generator().manual_seed(15), (8, 16), (3, 8))
    monkeypatch.setattr(shared, "on_host", lambda x, device: x.numel() == 9 or x.dim() == 0)
    for steps in ((7.0, 7.0), (99_990.0, 2.0)):
        call["steps"] = [torch.tensor(t) for t in steps]
        ours = shifted(copied(call), 1) | {"steps": copied(call)["steps"]}
        step(90, call, hyper(lr=-0.1, v_step=3.0), 2, 4, ours)


def check(op, capability, pattern, dtype, rows, cols, width, mode="latest", epilogue=()):
    """A GEMM's result against the reference, and the names of the kernels that ran."""
    p = Pattern(pattern)
    w = torch.nn.functional.pad(torch.randn(rows, cols), (0, -cols % p.m)).to(dtype)
    e = (*reference.compress(w, p.n, p.m), p.n, p.m, cols)
    x = torch.randn(width, rows if op == "linear_dgrad" else cols).to(dtype)
    args = (*e, x.t().contiguous()) if op == "linear_wgrad" else (x, *e, *epilogue)
    with testing.poison(), emulated(capability, mode=mode) as ran:
        result = getattr(family, op)(*args)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    testing.assert_no_worse(result, getattr(reference, op)(*args), getattr(reference, op)(*wide), f"{op} {pattern} sm_{capability}")
    return ran


@pytest.mark.parametrize("op", ["linear", "linear_dgrad", "linear_wgrad"])
@pytest.mark.parametrize(
    ("pattern", "dtype", "capability"), [("2:4", BF16, 80), ("2:4", BF16, 90), ("1:8", F16, 90), ("2:4", F32, 80)], ids=str
)
def test_narrow_gemms(op, pattern, dtype, capability) -> None:
    check(op, capability, pattern, dtype, 66, 136, 6)


@pytest.mark.parametrize(("capability", "mode"), [(80, "latest"), *((90, mode) for mode in MODES)])
@pytest.mark.parametrize("op", ["linear", "linear_dgrad", "linear_wgrad"])
def test_wide_tiles_of_whole_blocks(op, capability, mode, monkeypatch) -> None:
    monkeypatch.setattr(family, "choose", lambda *_args: Tiling("gemm", 128, 128, 64, 8, 3))
    check(op, capability, "2:4", BF16, 128, 256, 130, mode=mode)


@pytest.mark.parametrize("kind", ["fprop", "wgrad"])
def test_no_plan_leaves_wgmma_in_flight_that_reads_registers(kind, monkeypatch) -> None:
    """As compiled for sizes of models, where the compiler chooses otherwise than for small ones: nothing of a step outlives it."""
    e = (*(torch.empty(4096, s, dtype=d, device="meta") for s, d in ((2048, BF16), (512, torch.uint8))), 2, 4, 4096)
    options = [p for width in (32, 512) for p in candidates(kind, BF16, 4096, 4096, width, 2, 4, 90) if p.method == "gemm"]
    plans = {(p.rows, p.width, p.cols): p for p in options}
    for p in plans.values():
        monkeypatch.setattr(family, "choose", lambda *_args, p=p: p)
        x = torch.empty(p.width, 4096, dtype=BF16, device="meta")
        with recording(90) as kernels:
            family.linear(x, *e) if kind == "fprop" else family.linear_wgrad(*e, x.t().contiguous())
        ptx = kernels[0].asm["ptx"]
        waits = {int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)}
        assert waits <= {0} or not re.search(r"wgmma\.mma_async\S+ *\{[^}]*\}, *\{", ptx), p


def test_epilogues_and_splits(monkeypatch) -> None:
    for activation in ("", "gelu", "relu2"):
        check("linear", 90, "1:4", F16, 20, 64, 7, epilogue=(torch.randn(20, dtype=F16), activation))
    for op in ("linear", "linear_dgrad", "linear_wgrad"):  # Triton compiles a size of 1 as a constant
        check(op, 90, "2:4", BF16, 1, 64, 5)
    check("linear", 90, "2:4", BF16, 5, 4, 5)
    monkeypatch.setattr(family, "choose", lambda *_args: Tiling("gemm", 64, 16, 128, 4, 3, 3))
    ran = check("linear", 80, "2:4", BF16, 70, 512, 9, epilogue=(torch.randn(70, dtype=BF16), "silu"))
    assert ran == ["spmm_kernel", "combine_kernel"]


@pytest.mark.parametrize(("pattern", "dtype", "tokens"), [("2:4", BF16, 1), ("2:4", F32, 4), ("1:8", F16, 3), ("3:5", BF16, 2)], ids=str)
def test_few_tokens(pattern, dtype, tokens) -> None:
    m = Pattern(pattern).m
    for capability in (80, 90):
        ran = check("linear", capability, pattern, dtype, 9, 100 * m, tokens, epilogue=(torch.randn(9, dtype=dtype), "silu"))
        assert ran == ["few_kernel"]


@pytest.mark.parametrize(("bits", "capability"), [(8, 80), (4, 90)])
def test_rounding_to_integers(bits, capability) -> None:
    """On values that are hard to round; that nothing is contracted is a requirement in ``bench/triton_resources.py``."""
    for dtype, kept, steps in ((F32, 64, 2), (BF16, 15, 3), (F16, 70, 1)):
        w = hard(24, kept).to(dtype)
        with testing.poison(), emulated(capability) as ran:
            got = integers.quantize_values(w, bits, steps)
        assert ran == ["steps_kernel", "quantize_kernel"]
        testing.assert_equal_bits(got, reference.quantize_values(w, bits, steps), f"{kept} {dtype} sm_{capability}")


@pytest.mark.parametrize("bits", [8, 4])
def test_decoding(bits) -> None:
    for capability, dtype in CODE:
        for kept, steps in ((64, 1), (15, 3), (2100, 4)):
            values, _, step = integer_weight("1:1", 5, kept, bits, steps)
            with testing.poison(), emulated(capability):
                got = integers.dequantize_values(values, step, kept, dtype)
            testing.assert_equal_bits(got, reference.dequantize_values(values, step, kept, dtype), f"{kept} {dtype} sm_{capability}")


@pytest.mark.parametrize(
    ("pattern", "bits", "dtype", "tokens", "steps", "ran"),
    [
        ("2:4", 8, BF16, 1, 1, ["few_kernel"]),
        ("2:4", 4, BF16, 1, 4, ["few_kernel"]),
        ("1:8", 4, F16, 3, 16, ["few_kernel"]),
        ("2:4", 8, F32, 4, 4, ["few_kernel"]),
        ("3:5", 4, BF16, 2, 1, ["few_kernel"]),
        ("2:4", 8, BF16, 16, 1, ["spmm_kernel", "combine_kernel"]),
        ("2:4", 4, F16, 6, 8, ["spmm_kernel", "combine_kernel"]),
        ("1:4", 4, BF16, 16, 2, ["spmm_kernel", "combine_kernel"]),
        ("1:8", 8, BF16, 5, 4, ["spmm_kernel", "combine_kernel"]),
        ("4:8", 4, F16, 9, 2, ["spmm_kernel", "combine_kernel"]),
    ],
    ids=str,
)
def test_products_of_integers(pattern, bits, dtype, tokens, steps, ran) -> None:
    p, cols = Pattern(pattern), 520 if pattern == "3:5" else 1024
    operands, x = integer_weight(pattern, 9, cols, bits, steps), inputs(tokens, cols, dtype)
    bias = torch.randn(9).to(dtype)
    args = (*operands, p.n, p.m, cols)
    wide = reference.linear_integers(x.double(), *args, bias.double(), "silu")
    for capability in (80, 90):
        with testing.poison(), emulated(capability) as names:
            y = integers.linear_integers(x, *args, bias, "silu")
        testing.assert_no_worse(y, reference.linear_integers(x, *args, bias, "silu"), wide, f"{pattern} int{bits} sm_{capability}")
        assert names == ran
