"""The compiled AdamW equals the reference: parameters and states to the bit, its sums to rounding."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import reference
from nmkernels.capability import compiled_core
from nmkernels.dispatch import implementations
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import LAYOUTS, copied, edge, hyper, make, same_as_reference, shifted
from python_tests.each import each


def compare(cpu, call: dict[str, Any], h: Tensor, n: int, m: int, **options: Any) -> Tensor:
    """Run both on copies; everything they write must agree. Returns the statistics."""
    return same_as_reference(cpu("nm_masked_adamw_"), copied(call), call, h, n, m, **options)


@each("grad", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@each("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each("n, m", [(0, 0), (2, 4), (1, 16), (3, 5), (7, 256)])
def test_dtypes_and_patterns(cpu, n, m, dtype, grad):
    cols = m * 5 or 37
    call = make(torch.Generator().manual_seed(1), (6, cols), (cols,), (2, 3, cols), dtype=dtype, grad=grad, out=torch.bfloat16)
    stats = compare(cpu, call, hyper(lr=0.3), n, m)
    assert stats[0] == 1
    assert (stats[4] > 0) == bool(n)


@each("out", [torch.float32, torch.float16, torch.float64], ids=str)
def test_output_in_another_dtype(cpu, out):
    compare(cpu, make(torch.Generator().manual_seed(2), (9, 32), out=out), hyper(), 2, 4)
    compare(cpu, make(torch.Generator().manual_seed(2), (9, 32), out=out), hyper(), 0, 0)


@each("amsgrad", [False, True])
@each("flags", [{}, {"frozen": True}, {"eps_inside": True}, {"maximize": True}, {"geometric": True},
                                   {"frozen": True, "eps_inside": True, "maximize": True, "geometric": True}], ids=str)  # fmt: skip
@each("numbers", [{}, {"v_step": 7.0}, {"clamp": 0.5}, {"decay": 0.0, "wd": 0.0}, {"eps": 0.0, "beta1": 0.0}], ids=str)
def test_flags_and_numbers(cpu, numbers, flags, amsgrad):
    gen = torch.Generator().manual_seed(3)
    call = make(gen, (7, 40), (3, 8), amsgrad=amsgrad, out=torch.float32)
    call["grads"][0][0] = 0.0
    call["exp_avg_sqs"][0][0] = 0.0  # v does not change here: log of the smallest denormal
    for n, m in ((2, 4), (0, 0)):
        compare(cpu, call, hyper(**numbers), n, m, **flags)


def test_gradient_scaling_and_skipping(cpu):
    call = make(torch.Generator().manual_seed(4), (5, 16), out=torch.float32)
    compare(cpu, call, hyper(), 2, 4, scale=torch.tensor([3.0]), found=torch.zeros(1), maximize=True)
    for bad in (1.0, float("nan")):
        stats = compare(cpu, call, hyper(), 2, 4, scale=torch.tensor([3.0]), found=torch.tensor([bad]), geometric=True)
        assert not stats.any()


@each("dtype", [torch.float32, torch.bfloat16], ids=str)
@each("flags", [{}, {"eps_inside": True}, {"frozen": True}], ids=str)
def test_edge_values(cpu, flags, dtype):
    call = edge(torch.Generator().manual_seed(5), dtype)
    for number in ({}, {"clamp": 1.0}):
        compare(cpu, call, hyper(**number), 2, 4, geometric=True, **flags)


def test_finite_statistics_of_edge_masks(cpu):
    """Sums that a NaN would hide are looked at without one."""
    call = make(torch.Generator().manual_seed(6), (40, 24))
    call["params"] = [torch.tensor([0.0, -0.0, 1e-40, 1.0, -1.0])[torch.randint(5, (40, 24))]]
    stats = compare(cpu, call, hyper(), 2, 4, geometric=True)
    assert stats.isfinite().all()


@each("layout", LAYOUTS)
@each("n, m", [(0, 0), (2, 4), (3, 5), (7, 256)])
def test_strided_tensors_are_stepped_in_place(cpu, n, m, layout):
    change = LAYOUTS[layout]
    call = make(torch.Generator().manual_seed(7), (20, 600 // (m or 4) * (m or 4)), amsgrad=True, out=torch.bfloat16)
    plain = compare(cpu, call, hyper(), n, m, geometric=True)
    for names in (tuple(call), ("params",), ("grads", "exp_avgs"), ("outs",)):
        mixed = {k: [change(x) for x in v] if k in names and k != "steps" else v for k, v in call.items()}
        stats = compare(cpu, mixed, hyper(), n, m, geometric=True)
        torch.testing.assert_close(stats, plain, rtol=2e-7, atol=0.0)  # cut elsewhere: three fp32 roundings of each strip's sums


@each("n, m", [(0, 0), (2, 4), (1, 8), (3, 5)])
def test_sums_that_only_doubles_hold(cpu, n, m):
    """A few of these terms already exceed fp32; the second row is ordinary."""
    call = make(torch.Generator().manual_seed(17), (2, 320))
    call["params"][0][0], call["grads"][0][0], call["exp_avg_sqs"][0][0] = -3e38, 3e18, 3e38
    stats = compare(cpu, call, hyper(beta2=0.5, decay=0.0), n, m)
    assert stats[1] > 1e40 and stats.isfinite().all() and (not m or stats[5] > 1e40)


@pytest.mark.quick(2, per="cpu")
@each("dtype", [torch.float32, torch.bfloat16], ids=str)
@each("n, m", [(0, 0), (2, 4), (1, 8), (1, 32), (3, 5)])
def test_sizes_around_a_strip_at_any_address(cpu, n, m, dtype):
    """Strips of 64, blocks of 256, tiles of 4096, one element less or more; memory that is aligned to an element only."""
    group = m or 1
    sizes = sorted({max(1, around // group + extra) * group for around in (0, 64, 256, 4096) for extra in (-1, 0, 1)})
    for shift in (0, 1, 3):
        call = make(torch.Generator().manual_seed(13), *((size,) for size in sizes), (17, 4 * group), dtype=dtype, amsgrad=True, out=dtype)
        for flags, numbers in (({"geometric": True}, {}), ({}, {"eps": 0.0, "beta1": 0.0})):
            same_as_reference(cpu("nm_masked_adamw_"), shifted(call, shift), call, hyper(**numbers), n, m, **flags)


def test_nothing_is_written_beside_a_parameter(cpu):
    for size in (4, 60, 64, 68, 256, 260):
        call = make(torch.Generator().manual_seed(14), (size,), amsgrad=True, out=torch.float32)
        around = {k: [torch.full((size + 128,), 5.0) for _ in v] for k, v in call.items() if k != "steps"}
        inner = {k: [x[64:-64].copy_(y) for x, y in zip(around[k], v, strict=True)] if k != "steps" else v for k, v in call.items()}
        cpu("nm_masked_adamw_")(*inner.values(), hyper(), 2, 4, False, False, False, True, None, None)
        for name, (x,) in around.items():
            assert (x[:64] == 5.0).all(), name
            assert (x[-64:] == 5.0).all(), name


def test_the_sum_of_logarithms_keeps_to_its_range(cpu):
    """Changes from denormal to huge, and so many alike that a plain GEMM of them would leave the doubles."""
    for change in (0.0, 1e-30, 3e-5, 1.9999999, 1e19):
        call = make(torch.Generator().manual_seed(15), (3, 8192))
        call["exp_avg_sqs"] = [torch.zeros(3, 8192)]
        call["grads"] = [torch.full((3, 8192), change).sqrt()]
        compare(cpu, call, hyper(beta2=0.0), 2, 4, geometric=True)
    for bad in (float("inf"), float("nan")):
        call["grads"][0][1, 5] = bad
        stats = compare(cpu, call, hyper(), 2, 4, geometric=True)
        assert not stats[2].isfinite()


@pytest.mark.skipif(not compiled_core().ok, reason=compiled_core().reason)
def test_statistics_have_the_same_bits_under_every_instruction_set():
    core = import_module("nmkernels._C")
    run = next(i.fn for i in implementations("nm_masked_adamw_") if i.backend == "cpu")
    call = make(torch.Generator().manual_seed(16), (40, 104), (5, 8), (7, 24), (4, 1028), amsgrad=True, out=torch.bfloat16)
    call = {k: [x.t().contiguous().t() if x.shape == (7, 24) else x for x in v] for k, v in call.items()}
    before, results = core.isa(), []
    for isa in core.isas():
        core.use_isa(isa)
        ours = copied(call)
        results.append((run(*ours.values(), hyper(), 2, 4, False, False, False, True, None, None), ours))
    core.use_isa(before)
    for other in results[1:]:
        assert_equal_bits(other, results[0])


def test_expanded_gradients_and_tensors_without_one_row_stride(cpu):
    call = make(torch.Generator().manual_seed(8), (4, 6, 8), out=torch.float32)
    strange = {k: [x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() else x for x in v] for k, v in call.items()}
    assert strange["params"][0].stride() == (8, 32, 1)
    compare(cpu, strange, hyper(), 2, 4)
    compare(cpu, {**call, "grads": [torch.randn(1, 1, 8).expand(4, 6, 8)]}, hyper(), 2, 4)
    last = {
        k: [x.to(memory_format=torch.channels_last) if x.dim() else x for x in v] for k, v in make(torch.Generator(), (2, 3, 4, 4)).items()
    }
    compare(cpu, last, hyper(), 0, 0)


def test_scalars_empty_tensors_and_no_tensors(cpu):
    call = make(torch.Generator().manual_seed(9), (), (0, 8), (3, 0), (5,), out=torch.float32)
    stats = compare(cpu, call, hyper(), 0, 0, geometric=True)
    assert stats[0] == 1
    compare(cpu, make(torch.Generator(), (0, 8), (3, 0)), hyper(), 2, 4)
    compare(cpu, make(torch.Generator()), hyper(), 2, 4)


def test_same_bits_on_any_number_of_threads(cpu):
    before, results = torch.get_num_threads(), []
    call = make(torch.Generator().manual_seed(10), (300, 104), (5, 8), (64, 52), out=torch.bfloat16)
    call = {k: [x.t().contiguous().t() if x.shape == (64, 52) else x for x in v] for k, v in call.items()}
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        ours = copied(call)
        stats = cpu("nm_masked_adamw_")(*ours.values(), hyper(), 2, 4, False, False, False, True, None, None)
        results.append((stats, ours))
    torch.set_num_threads(before)
    assert_equal_bits(results[1], results[0])
    assert_equal_bits(results[2], results[0])


def test_twenty_steps_with_a_late_step_count(cpu):
    call = make(torch.Generator().manual_seed(11), (8, 16))
    call["steps"] = [torch.tensor(99_990.0)]
    ours, theirs, gen = copied(call), copied(call), torch.Generator().manual_seed(12)
    for _ in range(20):
        g = [torch.randn(8, 16, generator=gen)]
        cpu("nm_masked_adamw_")(*{**ours, "grads": g}.values(), hyper(), 2, 4, False, False, False, False, None, None)
        reference.masked_adamw_(*{**theirs, "grads": g}.values(), hyper(), 2, 4)
    for name in ("params", "exp_avgs", "exp_avg_sqs", "steps"):
        assert_equal_bits(ours[name], theirs[name], name)


def test_declines_float64_parameters_only(cpu):
    entry = next(i for i in implementations("nm_masked_adamw_") if i.backend == "cpu")
    rest = ([torch.zeros(4)], [torch.zeros(4)], [], [torch.tensor(0.0)], [], hyper(), 2, 4, False, False, False, False, None, None)
    assert entry.supports([torch.zeros(4)], [torch.zeros(4, dtype=torch.float64)], *rest)[0]
    can, why = entry.supports([torch.zeros(4, dtype=torch.float64)], [torch.zeros(4)], *rest)
    assert not can
    assert "float64" in why
