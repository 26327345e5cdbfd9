"""MaskedAdamW in CUDA with transposable masks, and with the packed weight of the same pass: everything equals the reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels import ops, reference
from nmkernels.backends.cuda import adamw
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import COUNTS, LAYOUTS, copied, edge, hyper, make, seeded, shifted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def buffers(call: dict[str, Any], rows: Any, columns: Any, layout: str) -> list[Tensor]:
    """Four of each param, full of ones; ``rows`` and ``columns`` are the dtypes of the values, or None."""
    made: list[Tensor] = []
    for p in call["params"]:
        for dtype, w in ((rows, p), (columns, p.t())):
            form = None if dtype is None else ops.empty_packed(w, "2:4", dtype=dtype, layout=layout)
            made += [torch.empty(0)] * 2 if form is None else [x.fill_(1) for x in form.buffers()[:2] if x is not None]
    return made


def compare(
    device: str, call: dict[str, Any], transposable: bool, packs: list[Tensor], layout: str = "canonical", *,
    mine: dict[str, Any] | None = None, ours: list[Tensor] | None = None, found: Tensor | None = None, geometric: bool = False,
    **numbers: float,
) -> None:  # fmt: skip
    """Step ``mine`` (a copy of ``call``) into ``ours`` (a copy of ``packs``), the reference ``call``; everything must agree."""
    mine, theirs = mine or copied(call, device), copied(call)
    ours, wanted = [x.to(device, copy=True) for x in packs] if ours is None else ours, [x.clone() for x in packs]
    h, skip = hyper(**numbers), None if found is None else found.to(device)
    stats = adamw.masked_adamw_(
        *mine.values(), h.to(device), 2, 4, False, False, False, geometric, None, skip, transposable, ours, layout
    ).cpu()
    expected = reference.masked_adamw_(
        *theirs.values(), h, 2, 4, geometric=geometric, found_inf=found, transposable=transposable, packs=wanted, layout=layout
    )
    for name in call:
        assert_equal_bits(mine[name], theirs[name], name)
    assert_equal_bits([x.cpu() for x in ours], wanted, "packs")
    assert [stats[i].item() for i in COUNTS] == [expected[i].item() for i in COUNTS]
    torch.testing.assert_close(stats, expected, rtol=1e-6, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype, grad, out", [(F32, F32, BF16), (BF16, BF16, None), (F16, F32, F32)], ids=str)
def test_masks_of_ragged_matrices(device, dtype, grad, out):
    for transposable in [False, True]:
        for shape in ((4, 4), (8, 12), (64, 64), (68, 132), (132, 20)):
            call = make(seeded(1), shape, shape, dtype=dtype, grad=grad, out=out, amsgrad=True)
            call["params"][0] = (torch.randint(-2, 3, shape, generator=seeded(2)) * 0.5).to(dtype)  # ties
            compare(device, call, transposable, buffers(call, dtype, None, "canonical"), geometric=True, lr=0.1)
        if not transposable:  # any number of rows, and no rows at all
            call = make(seeded(3), (7, 36), (3, 5, 8), (24,), dtype=dtype, grad=grad, out=out)
            packs = [
                x
                for i, p in enumerate(call["params"])
                for x in (buffers({"params": [p]}, BF16, None, "canonical") if i == 0 else [torch.empty(0)] * 4)
            ]
            compare(device, call, transposable, packs)


def test_both_ways(device):
    for rows, columns in [(BF16, BF16), (F16, None), (None, BF16), (F32, F16)]:
        for shape in ((4, 8), (20, 28), (64, 128), (84, 76)):
            call = make(seeded(4), shape, (12, 16), out=BF16)
            compare(device, call, True, buffers(call, rows, columns, "canonical"), lr=0.1)
            packs = buffers(call, rows, columns, "canonical")
            compare(device, call, True, packs, found=torch.ones(1))
            compare(device, call, True, packs, found=torch.zeros(1))


@pytest.mark.parametrize("layout, step", [("mma.sp", 16), ("wgmma.sp", 64)])
def test_layouts_of_tensor_cores(device, layout, step):
    for transposable in [False, True]:
        if transposable:
            for shape in ((64, 64), (128, 192)):
                call = make(seeded(5), shape)
                compare(device, call, True, buffers(call, BF16, F16, layout), layout, lr=0.1)
        for shape in ((step, 64), (step * 5, 128)):
            call = make(seeded(6), shape)
            compare(device, call, False, buffers(call, F16, None, layout), layout, lr=0.1)


def test_strides_and_addresses(device):
    for change, transposable in product(LAYOUTS.values(), (False, True)):
        call = make(seeded(7), (20, 72), (64, 64), amsgrad=True, out=BF16)
        packs = buffers(call, BF16, BF16 if transposable else None, "canonical")
        for names in (tuple(call), ("params",), ("grads", "outs")):
            mixed = {k: [change(x) for x in v] if k in names and k != "steps" else v for k, v in call.items()}
            compare(device, mixed, transposable, packs)
    call = make(seeded(8), (20, 28), dtype=BF16, out=BF16)
    packs = buffers(call, BF16, BF16, "canonical")
    for by in [1, 4]:  # no multiples of 16
        apart = [torch.cat([x.new_ones(by), x.reshape(-1)]).to(device)[by:].view(x.shape) for x in packs]
        compare(device, call, True, packs, mine=shifted(copied(call, device), by), ours=apart)
    compare(device, call, True, packs, ours=[x.t().contiguous().t().to(device) for x in packs])


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_edge_values(device, dtype):
    for transposable in [False, True]:
        call = edge(seeded(9), dtype)
        compare(device, call, transposable, buffers(call, BF16, F16 if transposable else None, "canonical"), geometric=True)


def test_blocks_of_several_params_and_new_buffers(device, monkeypatch):
    monkeypatch.setattr(adamw, "BLOCKS", 3)
    call = make(seeded(10), (64, 64), (4, 200), (0, 8), (140, 8), (36, 36), out=F32)
    for columns in (BF16, None):
        packs = buffers(call, BF16, columns, "canonical")
        packs[4:8] = [torch.empty(0)] * 4
        compare(device, call, True, packs)


def test_other_patterns_are_packed_after_their_step(device):
    for n, m in ((1, 4), (3, 5)):
        call, h = make(seeded(11), (7, 8 * m), (3, m)), hyper(lr=0.1)
        for found in (None, torch.zeros(1), torch.ones(1)):
            mine, theirs = copied(call, device), copied(call)
            forms = [ops.empty_packed(p, f"{n}:{m}", dtype=BF16) for p in call["params"]]
            wanted = [x for form in forms for x in (*(y.fill_(1) for y in form.buffers()[:2]), torch.empty(0), torch.empty(0))]
            packs = [x.to(device, copy=True) for x in wanted]
            skip = None if found is None else found.to(device)
            adamw.masked_adamw_(*mine.values(), h.to(device), n, m, False, False, False, False, None, skip, False, packs)
            reference.masked_adamw_(*theirs.values(), h, n, m, found_inf=found, packs=wanted)
            assert_equal_bits([x.cpu() for x in packs], wanted)


def test_it_declines_what_it_has_no_kernel_for(device, ours):
    def ask(n: int, m: int, transposable: bool, packs: list[Tensor] | None) -> tuple[bool, str]:
        x = [torch.zeros(8, 8, device=device)]
        flags = (False, False, False, False, None, None)
        return ours("nm_masked_adamw_").supports(
            x, x, x, x, [], [torch.tensor(0.0)], [], hyper(), n, m, *flags, transposable, packs, "canonical"
        )

    some = [torch.zeros(8, 4, device=device)] * 4
    assert ask(2, 4, True, some)[0]
    assert ask(1, 4, False, None)[0]
    assert "2:4 only" in ask(1, 4, True, None)[1]
    assert ask(1, 4, False, some)[0]
    assert "float64" in ask(2, 4, False, [x.double() for x in some])[1]
