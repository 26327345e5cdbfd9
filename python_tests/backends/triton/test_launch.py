"""Cached launches, of kernels that do nothing: what needs code of its own never shares a kernel, and the rest is compiled once."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver, jit

from nmkernels import explain
from nmkernels.backends import triton as backend
from nmkernels.backends.triton import launch as launching
from nmkernels.capability import Probe
from nmkernels.dispatch import choose

HOPPER = GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel after compiling: remembers what it is launched with, directly or through Triton."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, target):
        self.launched, self.told = [], 0
        self.metadata = SimpleNamespace(target=target)

    def run(self, *args):
        self.launched.append(args)

    def __getitem__(self, grid):
        def tell(*args):
            self.told += 1

        return tell


class Kernel:
    """As much of a JITFunction as a launch needs; counts how often it is compiled."""

    def __init__(self, do_not_specialize=(), target=HOPPER):
        self.fn, self.do_not_specialize, self.target, self.compiled = object(), do_not_specialize, target, []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled.append(Compiled(self.target))
            self.options = options
            return self.compiled[-1]

        return compile_and_run


class Driver:
    def get_current_stream(self, device):
        return f"stream of {device}"


class OnDevice(torch.Tensor):
    """A tensor that says it is on GPU ``index``, the current one."""

    index = 0

    def get_device(self):
        return self.index


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_started", {})
    monkeypatch.setattr(driver, "_active", Driver())


X = torch.zeros(256)
HUGE = torch.empty(2**31 // 4 + 1, device="meta")[:256]
"""Of a storage beyond 2 GB."""

ARGUMENTS = [
    X,
    HUGE,
    X.to(torch.bfloat16),
    X.to(torch.uint8),
    X.to(torch.bool),
    X[1:],
    X[4:],
    None,
    *(1, True, False, 0, 2, 15, 16, -1, -16, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, 2**63 - 1, 2**63, -(2**31), -(2**31) - 1, -(2**40)),
    *(1.0, 0.5),
]


def name(x):
    return f"{x.dtype} at {x.data_ptr() % 16}" if isinstance(x, torch.Tensor) else repr(x)


def test_different_code_is_never_shared():
    """For every two kinds of an argument: one kernel if Triton's own rules say so, else two."""
    validator = jit.native_specialize_impl
    for a, b in itertools.combinations_with_replacement(ARGUMENTS, 2):
        kernel = Kernel()
        for x in (a, b, a, b):
            launching.launch(kernel, 1, (X, x, 7), TILE=64)
        same = validator(CUDABackend, a, False, True, True) == validator(CUDABackend, b, False, True, True)
        assert len(kernel.compiled) == 2 - same, f"{name(a)} and {name(b)}"


def test_a_call_on_a_gpu_is_declined_where_nothing_can_be_launched(monkeypatch):
    """As in an image without a C compiler: the next backend runs it, and the reason is told."""
    with FakeTensorMode():
        w = torch.empty(4, 8, device="cuda")
    assert backend.supports(w, 2, 4) == (True, "compiled by Triton")
    monkeypatch.setattr(backend, "triton_probe", lambda: Probe(False, "Failed to find C compiler"))
    assert backend.supports(w, 2, 4) == (False, "Failed to find C compiler")
    assert "declined: Failed to find C compiler" in explain("nm_mask", w, 2, 4)
    assert choose("nm_mask", w, 2, 4).backend == "reference"


def test_elsewhere_every_launch_goes_through_triton():
    """AMD's compiler addresses a storage of up to 2 GB with 32 bits, which is not in the key."""
    validator = jit.native_specialize_impl
    assert validator(CUDABackend, X, False, True, True) == validator(CUDABackend, HUGE, False, True, True)
    assert validator(HIPBackend, X, False, True, True) != validator(HIPBackend, HUGE, False, True, True)
    for target in (GPUTarget("hip", "gfx942", 64), GPUTarget("xpu", {}, 32)):
        kernel = Kernel(target=target)
        for x in (X, X, HUGE):
            launching.launch(kernel, 1, (x, 7), TILE=64)
        assert len(kernel.compiled) == 3  # each time Triton is asked for the kernel
        assert not any(c.launched or c.told for c in kernel.compiled)
    assert not launching._started


def test_integers_that_are_declared_share_whatever_they_are():
    kernel = Kernel(do_not_specialize=("n",))
    for n in (1, 2, 16, 2**31, 2**40):
        launching.launch(kernel, 1, (X, n), TILE=64)
    assert len(kernel.compiled) == 1


def test_the_order_of_kinds_counts():
    kernel = Kernel()
    for args in ((X, 1, 2), (X, 2, 1), (X, None, 1), (X, 1, None), (X, X, 1), (X, 1, X)):
        launching.launch(kernel, 1, args, TILE=64)
    assert len(kernel.compiled) == 6


@pytest.mark.parametrize(
    "other",
    [
        {"warps": 8},
        {"stages": 4},
        {"TILE": 128},
        {"EVEN": False},
        {"NAME": "silu"},
        {"enable_fp_fusion": True},
        {"MORE": 1},
    ],
    ids=str,
)
def test_options_and_constexprs_count(other):
    kernel, usual = Kernel(), {"warps": 4, "stages": 3, "TILE": 64, "EVEN": True, "NAME": ""}
    for options in (usual, {**usual, **other}, usual, {**usual, **other}):
        launching.launch(kernel, 1, (X, 7), **options)
    assert len(kernel.compiled) == 2


def test_names_of_constexprs_count():
    kernel = Kernel()
    launching.launch(kernel, 1, (X,), A=1, B=2)
    launching.launch(kernel, 1, (X,), A=1, C=2)
    assert len(kernel.compiled) == 2


def test_kernels_and_devices_count():
    one, other = Kernel(), Kernel()
    x = X.as_subclass(OnDevice)
    for kernel in (one, other, one):
        launching.launch(kernel, 1, (x,), TILE=64)
    assert len(one.compiled) == len(other.compiled) == 1
    x.index = 1
    launching.launch(one, 1, (x,), TILE=64)
    assert len(one.compiled) == 2


def test_the_device_of_the_tensors_is_made_current(monkeypatch):
    class OnGPU(OnDevice):
        is_cuda = True

    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append("left")

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    x = X.as_subclass(OnGPU)
    launching.launch(Kernel(), 1, (x,), TILE=64)
    assert entered == []
    x.index = 1
    launching.launch(Kernel(), 1, (x,), TILE=64)
    assert entered == [1, "left"]


def test_a_parameter_is_a_tensor_and_the_first_argument_need_not_be_one():
    kernel = Kernel()
    for x in (X, torch.nn.Parameter(X)):
        launching.launch(kernel, 1, (None, x, 7), TILE=64)
    assert len(kernel.compiled) <= 2
    launching.launch(kernel, 1, (None, torch.nn.Parameter(X[1:]), 7), TILE=64)
    assert len(kernel.compiled) <= 3


def test_what_reaches_the_device():
    """The second launch goes straight to the launcher: grid, current stream of the device, arguments, then constexprs without options."""
    kernel, x = Kernel(), X.as_subclass(OnDevice)
    for programs in (5, 6):
        launching.launch(kernel, programs, (x, None, 7), warps=2, stages=1, N=2, M=4, enable_fp_fusion=True)
    assert kernel.options == {"num_warps": 2, "num_stages": 1, "enable_fp_fusion": True, "N": 2, "M": 4}
    (launched,) = kernel.compiled[0].launched
    assert launched[:9] == (6, 1, 1, "stream of 0", "function", "metadata", None, None, None)
    assert launched[9] is x
    assert launched[10:] == (None, 7, 2, 4)


def test_contraction_is_off_unless_asked_for():
    kernel = Kernel()
    launching.launch(kernel, 1, (X,), N=2)
    assert kernel.options["enable_fp_fusion"] is False


def test_no_programs_are_nothing():
    kernel = Kernel()
    launching.launch(kernel, 0, (X,), N=2)
    assert not kernel.compiled


def test_profilers_are_told():
    """With a hook the launch goes through Triton, which calls it."""
    kernel, hook = Kernel(), lambda metadata: None
    launching.launch(kernel, 1, (X,), N=2)
    hooks = launching.triton.knobs.runtime.launch_enter_hook
    hooks.add(hook)
    try:
        launching.launch(kernel, 1, (X,), N=2)
    finally:
        hooks.remove(hook)
    assert kernel.compiled[0].told == 1
    assert not kernel.compiled[0].launched


@pytest.mark.parametrize("hook", [print, None])
def test_a_hook_may_be_no_chain(hook, monkeypatch):
    """Then Triton is left to deal with it."""
    kernel = Kernel()
    launching.launch(kernel, 1, (X,), N=2)
    monkeypatch.setattr(launching.triton.knobs.runtime, "launch_exit_hook", hook)
    launching.launch(kernel, 1, (X,), N=2)
    assert kernel.compiled[0].told == 1
