"""MaskedAdamW as Triton compiles it for sm_80 and sm_90: its PTX, run on the CPU by ``python_tests.ptx``, gives the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nmkernels.backends.triton import adamw, interpreted
from nmkernels.testing import assert_equal_bits
from python_tests.backends.adamw_calls import LAYOUTS, copied, hyper, make, nasty, same_as_reference, shifted

if interpreted():
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)

from python_tests.ptx import emulated

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def compare(
    capability: int, call: dict[str, Any], h: Tensor, n: int, m: int, ours: dict[str, Any] | None = None, apart: bool = True, **options: Any
) -> tuple[Tensor, list[str]]:
    """Run the compiled kernels and the reference on copies; returns the statistics and the kernels' names."""
    ours = ours or copied(call)
    with emulated(capability, [x for xs in ours.values() for x in xs], apart) as names:
        return same_as_reference(adamw.masked_adamw_, ours, call, h, n, m, **options), names


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("n, m, dtype, grad, out", [(2, 4, F32, F32, BF16), (2, 4, BF16, F32, None), (1, 8, BF16, BF16, BF16),
                                                    (4, 32, F32, F16, None), (0, 0, F32, F32, None),
                                                    (3, 5, F16, F32, F32)], ids=str)  # fmt: skip
def test_kinds_of_params(n, m, dtype, grad, out, capability):
    cols = (m or 1) * 8
    call = make(seeded(1), (3, cols), (cols * 3,), (1, cols * 17), dtype=dtype, grad=grad, out=out)
    first, names = compare(capability, call, hyper(lr=0.3), n, m)
    assert names[-3:] == ["adamw_scalars_kernel", "adamw_kernel", "adamw_stats_kernel"]
    assert_equal_bits(compare(capability, call, hyper(lr=0.3), n, m, apart=False)[0], first)


@pytest.mark.parametrize("dtype, flags", [(F32, {}), (BF16, {"frozen": True}), (BF16, {"eps_inside": True, "maximize": True}),
                                          (F32, {"geometric": True})], ids=str)  # fmt: skip
def test_nasty_values_and_every_option(dtype, flags):
    call = nasty(seeded(5), dtype)
    compare(90, call, hyper(clamp=1.0, v_step=7.0), 2, 4, scale=torch.tensor([3.0]), found=torch.zeros(1), **flags)
    assert not compare(90, call, hyper(), 2, 4, found=torch.ones(1), **flags)[0].any()


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_memory_that_is_not_flat(n, m):
    parts = [make(seeded(i), (6, 24), out=BF16) for i in range(5)]
    parts += [make(seeded(9), (200, 12), out=BF16)]
    ours = [shifted(parts[0], 1), *({k: [change(x) if x.dim() else x for x in v] for k, v in p.items()}
                                    for p, change in zip(parts[1:], [*LAYOUTS.values(), LAYOUTS["transposed"]], strict=True))]  # fmt: skip
    call, mixed = ({k: [x[k][0] for x in side for _ in x[k][:1]] for k in parts[0]} for side in (parts, ours))
    compare(90, call, hyper(), n, m, {k: [x if k != "steps" else x.clone() for x in v] for k, v in mixed.items()})


def test_numbers_on_the_host(monkeypatch):
    """Arguments of 64 bits, large and negative, arrive as they are."""
    call = make(seeded(15), (8, 16), (3, 8), out=F32)
    monkeypatch.setattr(adamw, "on_host", lambda x, device: x.numel() == 9 or x.dim() == 0)
    for steps in ((7.0, 7.0), (99_990.0, 2.0)):
        call["steps"] = [torch.tensor(t) for t in steps]
        compare(90, call, hyper(lr=-0.1, v_step=3.0), 2, 4)
