"""Kernels as the first work of a thread, and on one GPU of several; ``python_tests/csrc/test_queue.py`` has the same without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.nn.functional as F

import nmkernels as nm
from nmkernels import reference
from nmkernels.backends.cuda import linear as gemm
from nmkernels.testing import assert_no_worse, fill_poison
from python_tests.backends.gemm_calls import inputs, packed

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def on_fresh_thread(work: Callable[[], object]) -> None:
    """Runs it on a thread that has done nothing with CUDA, and raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.fixture
def hopper() -> None:
    why = gemm.why_not_wgmma(torch.device("cuda"))
    if why:
        pytest.skip(why)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("role", "rows", "cols"), [("fprop", 256, 192), ("dgrad", 192, 256)])
def test_wgmma_is_the_first_work_of_a_thread(role: str, rows: int, cols: int) -> None:
    """x Wᵀ, or g W of the packed transpose; the result has its memory already, so that torch makes no context current either."""
    values, indices, w = packed("2:4", rows, cols, BF16)
    metadata = reference.to_layout(indices, cols, "wgmma.sp").cuda()
    values, w, x = values.cuda(), w.cuda(), inputs(40, cols, BF16, "cuda")
    out = fill_poison(torch.empty(40, rows, dtype=BF16, device="cuda"))
    torch.cuda.synchronize()
    on_fresh_thread(lambda: gemm.linear(x, values, metadata, 2, 4, cols, out=out))
    assert_no_worse(out, F.linear(x, w), F.linear(x.double(), w.double()), role)


@pytest.mark.usefixtures("hopper")
def test_a_weight_gradient_is_the_first_work_of_a_thread() -> None:
    values, indices, g = packed("2:4", 128, 192, BF16)
    metadata = reference.to_layout(indices, 192, "wgmma.sp").cuda()
    values, g, x = values.cuda(), g.cuda(), inputs(192, 64, BF16, "cuda")
    out = fill_poison(torch.empty(128, 64, dtype=BF16, device="cuda"))
    torch.cuda.synchronize()
    on_fresh_thread(lambda: gemm.linear_wgrad(values, metadata, 2, 4, 192, x, out=out))
    assert_no_worse(out, g @ x, g.double() @ x.double())


def test_a_backward_pass_is_the_first_work_of_autograds_thread() -> None:
    layer = nm.SparseLinear(256, 256, device="cuda", dtype=BF16)
    x = inputs(40, 256, BF16, "cuda").requires_grad_()
    on_fresh_thread(lambda: layer(x).float().square().sum().backward())
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_a_gpu_that_the_process_does_not_use_has_no_context() -> None:
    code = """
import torch
import nmkernels as nm
w = torch.randn(256, 256, device="cuda:1", dtype=torch.bfloat16)
c = nm.ops.compress(w, "2:4")
nm.ops.linear(torch.randn(64, 256, device="cuda:1", dtype=torch.bfloat16), c)
torch.cuda.synchronize(1)
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0) and torch.cuda.current_device() == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
