"""Kernels as the first work of a thread, and on one GPU of several; ``python_tests/csrc/test_queue.py`` has the same without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from threading import Thread

import pytest
import torch

import nmkernels as nm
from nmkernels import reference
from nmkernels.backends.cuda import linear as gemm
from nmkernels.testing import fill_poison
from python_tests.backends.gemm_calls import as_good_as_dense, inputs, packed

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
@pytest.mark.parametrize("by_column", [False, True])
def test_wgmma_is_the_first_work_of_a_thread(by_column: bool) -> None:
    """x Wᵀ, or a weight gradient; the result has its memory already, so that torch makes no context current either."""
    values, indices, w = packed("2:4", 256, 192, BF16)
    call = values.cuda(), reference.to_layout(indices, 192, "wgmma.sp").cuda(), 2, 4, 192
    x = inputs(*((192, 64) if by_column else (40, 192)), BF16, "cuda")
    out = fill_poison(torch.empty(*((256, 64) if by_column else (40, 256)), dtype=BF16, device="cuda"))
    torch.cuda.synchronize()
    on_fresh_thread(lambda: gemm.linear_wgrad(*call, x, out=out) if by_column else gemm.linear(x, *call, out=out))
    as_good_as_dense(out, w.cuda(), x, by_column=by_column)


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
