"""A kernel is checked before its first use on a machine: a wrong one is replaced, said and remembered, a right one costs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nmkernels as nm
from nmkernels import dispatch, ops
from nmkernels.gemm.methods import methods
from nmkernels.gemm.problem import Problem
from nmkernels.ops import verify
from nmkernels.ops.define import CALLS
from nmkernels.testing import assert_equal_bits
from nmkernels.testing.calls import samples, small
from nmkernels.timing import TABLE, table
from python_tests.for_each import for_each

SAMPLES = samples()
CPU = torch.device("cpu")
W = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))


def another_process() -> None:
    """What only this process remembers is forgotten."""
    dispatch.forget()
    TABLE.forget()
    for memory in (verify._families, verify._warned, verify._unjudged):
        memory.clear()


@pytest.fixture(autouse=True)
def checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(verify.ENV, "1")
    monkeypatch.delenv(dispatch.ENV, raising=False)
    monkeypatch.setattr(dispatch, "_impls", dict(dispatch._impls))
    another_process()
    yield
    another_process()


Calls = list[tuple[Any, ...]]


def reference(op: str) -> Callable[..., Any]:
    return next(i.fn for i in dispatch.implementations(op) if i.backend == "reference")


def corrupted(result: Any) -> Any:
    """The same with one element changed."""

    def wrong(x: Tensor) -> Tensor:
        x = x.clone()
        flat = x.view(-1)
        flat[0] = ~flat[0] if x.dtype == torch.bool else flat[0] + 3
        return x

    first, *others = (result,) if isinstance(result, Tensor) else result
    return wrong(first) if isinstance(result, Tensor) else (wrong(first), *others)


def install(op: str, fn: Callable[..., Any] | None = None, **words: Any) -> Calls:
    """Make a backend called "mine" the preferred one, wrong if it has no function; returns the calls of it that will be made."""
    calls: Calls = []

    def mine(*args: Any, out: Any = None) -> Any:
        calls.append(args)
        result = (reference(op) if fn is None else fn)(*args)
        if fn is None and result is None:
            args[5][0].view(-1)[0] += 3  # the first of what it writes
        elif fn is None:
            result = corrupted(result)
        if out is not None:
            pytree.tree_map_(lambda target, source: target.copy_(source), out, result)
        return result

    dispatch.impl(op, backend="mine", priority=99, **words)(mine)
    return calls


def said(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def copied(args: Any) -> Any:
    return pytree.tree_map_only(Tensor, Tensor.clone, args)


def lines() -> dict[str, Any]:
    return {name: line for name, line in TABLE.lines().items() if name.startswith(verify.SPACE)}


# ---- a wrong kernel


@pytest.mark.parametrize("op", SAMPLES)
def test_a_wrong_kernel_of_any_op_is_replaced(op: str) -> None:
    calls, args = install(op), SAMPLES[op]
    ours, theirs = copied(args), copied(args)
    expected = reference(op)(*theirs)
    result, warned = said(lambda: CALLS[op](*ours))
    if op in verify.ROUNDED:
        torch.testing.assert_close(result, expected)
    elif op in verify.SUMS:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
        assert_equal_bits(ours, theirs)
    else:
        assert_equal_bits(*((ours, theirs) if expected is None else (result, expected)))
    _, silent = said(lambda: CALLS[op](*copied(args)))
    assert len(calls) == 1 and len(warned) == 1 and silent == []
    for word in (f"{op} by mine differed from the reference on ", verify.machine(CPU), "doctor --verify", "NMKERNELS_VERIFY=0", f"{op}("):
        assert word in warned[0]
    line = next(line for line in nm.explain(op, *args).splitlines() if line.startswith("  mine"))
    assert f"declined: differed from the reference on {verify.machine(CPU)}; switched off (" in line
    assert len(calls) == 1


def test_a_kernel_that_raises_is_replaced() -> None:
    calls = install("nm_prune", lambda *args: 1 // 0)
    result, warned = said(lambda: ops.prune(W, "2:4"))
    assert torch.equal(result, nm.reference.prune(W, 2, 4)) and len(calls) == 1
    assert len(warned) == 1 and "nm_prune by mine failed on" in warned[0] and "ZeroDivisionError" in warned[0]
    assert "declined: failed on" in nm.explain("nm_prune", W, 2, 4)


def test_only_what_is_wrong_is_switched_off() -> None:
    def wrong_in_float32(w: Tensor, n: int, m: int) -> Tensor:
        result = nm.reference.prune(w, n, m)
        return result + 1 if w.dtype == torch.float32 and m == 4 else result

    calls = install("nm_prune", wrong_in_float32)
    with pytest.warns(RuntimeWarning, match="nm_prune by mine"):
        ops.prune(W, "2:4")
    assert len(calls) == 1
    for x, pattern in ((W.bfloat16(), "2:4"), (W, "1:8")):
        before = len(calls)
        ops.prune(x, pattern)
        assert len(calls) == before + 2 and calls[-1][0] is x
    before = len(calls)
    ops.prune(torch.randn(24, 48), "2:4")
    assert len(calls) == before, "the same powers of two: the same family"
    # another family of the same kernel is not said again
    assert said(lambda: ops.prune(torch.randn(3, 8), "2:4"))[1] == [] and len(calls) == before + 1


def test_the_next_backend_is_checked_too() -> None:
    calls = install("nm_prune")
    dispatch.impl("nm_prune", backend="other", priority=98)(lambda w, n, m, out=None: w)
    result, warned = said(lambda: ops.prune(W, "2:4"))
    assert torch.equal(result, nm.reference.prune(W, 2, 4)) and len(calls) == 1
    assert ["by mine" in warned[0], "by other" in warned[1]] == [True, True]


def test_layers_go_on_with_right_numbers() -> None:
    install("nm_linear")
    install("nm_linear_dgrad")
    dispatch._impls["nm_linear"] = [i for i in dispatch._impls["nm_linear"] if i.backend in ("mine", "reference")]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    handle = nm.sparsify_(model, recipe := nm.recipes.SRSTE("2:4", packed=True))
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=1e-2))
    x = torch.randn(8, 64, requires_grad=True)

    def step() -> Tensor:
        y = model(x)
        expected = x
        for layer in model:
            w = nm.reference.prune(layer.weight.detach(), 2, 4)
            expected = expected @ w.T + layer.bias.detach()
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        optimizer.step()
        return y

    _, warned = said(step)
    assert sorted(w.split()[1] for w in warned) == ["nm_linear", "nm_linear_dgrad"]
    assert said(step)[1] == []
    handle.finish()
    nm.compress_(model)
    with torch.no_grad():
        y = model(x)
        assert all(torch.equal(model(x), y) for _ in range(3))
        torch.testing.assert_close(y, x @ model[0].weight.dense().T @ model[1].weight.dense().T, rtol=1, atol=10)


def test_a_compressed_layer_takes_no_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if not nm.capability.compiled_core().ok:
        pytest.skip("the compiled core is not built")
    module = nm.backends.cpu.linear.core()
    if module.isa() == "portable":
        pytest.skip("the portable kernel is slower than torch's GEMM here, so the layer does not call it")
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512))
    handle = nm.sparsify_(model, nm.recipes.SRSTE("2:4"))
    handle.finish(allow_unused=True)
    nm.compress_(model)
    c = model[0].weight

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def linear(self, *args: Any) -> bool:
            return module.linear(*args[:4], args[4] + 4, *args[5:7], args[7] - 1, *args[8:])  # all but one row, in another place

    x = torch.randn(1, 1024)
    expected = x @ c.dense().T + model[0].bias.detach()
    monkeypatch.setattr(nm.backends.cpu.linear, "core", Wrong)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="nm_linear by cpu differed"):
        ys = [model(x) for _ in range(4)]
    for y in ys:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_what_is_switched_off_is_no_candidate() -> None:
    p = Problem("fprop", 8, 64, 64, 2, 4, torch.float32, CPU)
    install("nm_linear")
    assert "mine rows" in [m.name for m in methods(p)]
    with pytest.warns(RuntimeWarning):
        ops.linear(torch.randn(8, 64), ops.compress(torch.randn(64, 64), "2:4"))
    assert "mine rows" not in [m.name for m in methods(p)]


def test_a_forced_backend_is_kept_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install("nm_prune")
    monkeypatch.setenv(dispatch.ENV, "mine")
    for _ in range(2):
        result, warned = said(lambda: ops.prune(W, "2:4"))
        assert not torch.equal(result, nm.reference.prune(W, 2, 4))
        assert len(warned) == (len(calls) == 2) and all("runs anyway, because NMKERNELS_BACKEND" in w for w in warned)
    assert "  mine       chosen" in nm.explain("nm_prune", W, 2, 4)
    dispatch.forget()  # chosen again, the verdict being known
    assert not torch.equal(ops.prune(W, "2:4"), nm.reference.prune(W, 2, 4))
    monkeypatch.delenv(dispatch.ENV)
    assert torch.equal(ops.prune(W, "2:4"), nm.reference.prune(W, 2, 4))


# ---- what is remembered


def test_a_verdict_is_kept_for_later_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, right = install("nm_prune"), install("nm_mask", nm.reference.mask)
    with pytest.warns(RuntimeWarning, match="nm_prune by mine"):
        ops.prune(W, "2:4")
    ops.mask(W, "2:4")
    assert len(wrong) == 1 and len(right) == 2
    stored = json.loads((cache / "tuning.json").read_text())["lines"]
    ours = {name.rpartition("|")[2]: bool(line["wrong"]) for name, line in stored.items() if "|mine|" in name}
    assert ours == {"nm_mask(float32[136, 144], 2, 4)": False, "nm_prune(float32[136, 144], 2, 4)": True}
    another_process()
    # it is said, and neither is checked again
    result, warned = said(lambda: (ops.prune(W, "2:4"), ops.mask(W, "2:4"))[0])
    assert torch.equal(result, nm.reference.prune(W, 2, 4)) and len(warned) == 1
    assert len(wrong) == 1 and len(right) == 3
    # other versions: both are
    another_process()
    monkeypatch.setattr(verify, "versions", lambda kind: "other versions")
    with pytest.warns(RuntimeWarning, match="nm_prune by mine"):
        ops.prune(W, "2:4")
    ops.mask(W, "2:4")
    assert len(wrong) == 2 and len(right) == 5
    # another machine: too
    another_process()
    monkeypatch.setattr(verify, "machine", lambda device: "another machine")
    ops.mask(W, "2:4")
    assert len(right) == 7


SCRIPT = """
import sys, warnings, torch
warnings.simplefilter("ignore")
from nmkernels import dispatch, ops, reference
calls = []
def mine(w, n, m, out=None):
    calls.append(w)
    return reference.prune(w, n, m) + (sys.argv[1] == "wrong")
dispatch.impl("nm_prune", backend="mine", priority=99)(mine)
w = torch.randn(8, 16)
print(len(calls), torch.equal(ops.prune(w, "2:4"), reference.prune(w, 2, 4)), len(calls))
"""


@pytest.mark.slow
def test_processes_and_instruction_sets(cache: Path) -> None:
    def run(how: str, **words: str) -> str:
        environment = {**os.environ, "NMKERNELS_CACHE": str(cache), verify.ENV: "", **words}
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, env=environment, check=True)
        return done.stdout.strip()

    assert run("wrong") == "0 True 1"
    assert run("wrong") == "0 True 0"
    assert run("wrong", NMKERNELS_ISA="portable") == "0 True 1"
    assert run("wrong", NMKERNELS_VERIFY="0") == "0 False 1"
    assert run("right", NMKERNELS_BACKEND="mine") == "0 True 1", "switched off, and forced"


def test_where_nothing_can_be_stored_this_process_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.os, "replace", Mock(side_effect=OSError("read-only file system")))
    calls, right = install("nm_prune"), install("nm_mask", nm.reference.mask)
    _, warned = said(lambda: (ops.prune(W, "2:4"), ops.mask(W, "2:4")))
    assert len(warned) == 1 and "nm_prune by mine" in warned[0]
    dispatch.forget()
    assert said(lambda: (ops.prune(W, "2:4"), ops.mask(W, "2:4")))[1] == []
    assert len(calls) == 1 and len(right) == 3


def test_an_edited_verdict_is_checked_again() -> None:
    calls = install("nm_mask", nm.reference.mask)
    ops.mask(W, "2:4")
    (name,) = lines()
    for line in ({"wrong": 3}, {"wrong": ["x"]}, {}):
        TABLE.store({name: line})
        dispatch.forget()
        before = len(calls)
        ops.mask(W, "2:4")
        assert len(calls) == before + 2 and lines()[name]["wrong"] == ""
    TABLE.store({name: {"wrong": "x"}, "check|": {"wrong": "y"}})
    dispatch.forget()
    assert said(lambda: ops.mask(W, "2:4"))[1] and len(calls) == before + 2


# ---- what is right costs nothing


def test_a_right_kernel_stays_and_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install("nm_prune", nm.reference.prune)
    _, warned = said(lambda: ops.prune(W, "2:4"))
    assert warned == [] and len(calls) == 2 and calls[-1][0] is W
    # another shape of the family
    ops.prune(torch.randn(3, 8, 16), "2:4")
    assert len(calls) == 3
    monkeypatch.setattr(verify, "trusted", None)
    for call in (lambda: ops.prune(W, "2:4"), lambda: torch.ops.nmkernels.nm_prune(W, 2, 4)):
        call()
    assert len(calls) == 5


def test_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install("nm_prune")
    with pytest.warns(RuntimeWarning):
        ops.prune(W, "2:4")
    monkeypatch.setenv(verify.ENV, "0")
    dispatch.forget()
    result, warned = said(lambda: ops.prune(W, "2:4"))
    assert not torch.equal(result, nm.reference.prune(W, 2, 4)) and warned == [] and len(calls) == 2
    assert "  mine       chosen" in nm.explain("nm_prune", W, 2, 4)


def test_explaining_checks_nothing() -> None:
    calls = install("nm_prune")
    assert "  mine       chosen" in nm.explain("nm_prune", W, 2, 4)
    assert dispatch.choose("nm_prune", W, 2, 4).backend == "mine"
    assert calls == [] and lines() == {}


@for_each("backend, priority, compiles", [("reference", 99, False), ("mine", -1, False), ("mine", 99, True)])
def test_what_is_not_checked(backend: str, priority: int, compiles: bool) -> None:
    entry = dispatch.Impl("nm_prune", backend, print, dispatch.always, priority, compiles=compiles)
    assert verify.trusted(entry, (W, 2, 4)) is True and lines() == {}
    assert verify.trusted(dispatch.Impl("toy", "mine", print, dispatch.always, 9), (3,)) is True
    assert verify.trusted(dispatch.Impl("nm_prune", "mine", print, dispatch.always, 9), (W.to("meta"), 2, 4)) is True


# ---- when, and what it leaves alone


def test_nothing_is_checked_under_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the capture of a CUDA graph."""
    calls = install("nm_prune")
    with monkeypatch.context() as m:
        m.setattr(verify, "undisturbed", lambda device: False)
        result, warned = said(lambda: [ops.prune(W, "2:4") for _ in range(2)])
    assert warned == [] and lines() == {} and len(calls) == 2 and not torch.equal(result[0], nm.reference.prune(W, 2, 4))
    result, warned = said(lambda: ops.prune(W, "2:4"))
    assert torch.equal(result, nm.reference.prune(W, 2, 4)) and len(warned) == 1 and len(calls) == 3


@pytest.mark.gpu
def test_in_a_capture_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(64, 64, device="cuda")
    with monkeypatch.context() as m:
        m.setenv(verify.ENV, "0")
        expected = ops.prune(w, "2:4")
    another_process()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.prune(w, "2:4")
    assert lines() == {}
    graph.replay()
    assert_equal_bits(captured, expected)
    assert_equal_bits(ops.prune(w, "2:4"), expected)
    assert [line["wrong"] for line in lines().values()] == [""]


@for_each("how", ["compile", "vmap", "requires grad", "fake", "make_fx"])
def test_the_first_call_comes_from(how: str) -> None:
    another_process()
    TABLE.store(dict.fromkeys(lines()))
    calls = install("nm_prune")
    if how == "fake":
        with torch._subclasses.FakeTensorMode() as mode:
            ops.prune(mode.from_tensor(W), "2:4")
        assert calls == [] and lines() == {}
    if how == "make_fx":
        graph = torch.fx.experimental.proxy_tensor.make_fx(lambda w: ops.prune(w, "2:4"), tracing_mode="fake")(W)
        assert calls == [] and lines() == {}
    first = {
        "compile": torch.compile(lambda w: ops.prune(w, "2:4"), backend="eager", fullgraph=True),
        "vmap": lambda w: torch.func.vmap(lambda x: ops.prune(x, "2:4"))(w[None])[0],
        "requires grad": lambda w: ops.mask(w.clone().requires_grad_(), "2:4") * w,
        "make_fx": graph if how == "make_fx" else None,
    }.get(how, lambda w: ops.prune(w, "2:4"))
    if how == "requires grad":
        calls = install("nm_mask")
    result, warned = said(lambda: first(W))
    assert torch.equal(result, nm.reference.prune(W, 2, 4)) and len(warned) == 1 and len(calls) == 1


@for_each("mode", ["inference", "autocast", "deterministic", "bfloat16", "meta"])
def test_modes(mode: str) -> None:
    """The check is the same in all of them."""
    another_process()
    TABLE.store(dict.fromkeys(lines()))
    ops_called = ("nm_compress", "nm_linear", "nm_mvue_compress", "nm_masked_adamw_", "nm_pack")
    expected = {}
    for entry in (i for op in ops_called for i in dispatch.implementations(op) if i.backend == "cpu"):
        expected[verify.family(entry, SAMPLES[entry.op])] = small(entry.op, SAMPLES[entry.op])
    another_process()
    contexts: dict[str, Any] = {
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "meta": torch.device("meta"),
    }
    torch.use_deterministic_algorithms(mode == "deterministic")
    torch.set_default_dtype(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    before = torch.get_rng_state()
    try:
        with contexts.get(mode, torch.no_grad()), warnings.catch_warnings():
            warnings.simplefilter("error")
            for op in ops_called:
                CALLS[op](*(copied(SAMPLES[op])))
            for name, args in expected.items():
                entry = next(i for i in dispatch.implementations(name.rpartition("|")[2].partition("(")[0]) if i.backend == "cpu")
                assert verify.family(entry, SAMPLES[entry.op]) == name
                assert_equal_bits(small(entry.op, SAMPLES[entry.op]), args)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    if nm.capability.compiled_core().ok:
        assert set(lines()) == set(expected) and not any(line["wrong"] for line in lines().values())


def test_threads_check_once_and_wait() -> None:
    running: list[int] = []

    def slow(w: Tensor, n: int, m: int) -> Tensor:
        running.append(len(running))
        time.sleep(0.05)
        return nm.reference.prune(w, n, m) + 1

    calls = install("nm_prune", slow)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(ops.prune(W, "2:4"))) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1 and all(torch.equal(y, nm.reference.prune(W, 2, 4)) for y in results) and len(results) == 4


def test_what_is_not_the_kernels_fault_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install("nm_prune", nm.reference.prune)
    with monkeypatch.context() as m:
        m.setattr(verify, "truth", lambda *args: (_ for _ in ()).throw(MemoryError("no memory")))
        _, warned = said(lambda: [ops.prune(W, "2:4") for _ in range(2)])
    assert warned == [] and lines() == {} and len(calls) == 2

    def no_memory(*args: Any) -> Tensor:
        if args[0].shape != W.shape:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return nm.reference.prune(*args)

    another_process()
    install("nm_prune", no_memory)
    assert said(lambda: ops.prune(W, "2:4"))[1] == [] and lines() == {}


def test_a_backend_that_cannot_run_the_small_call_is_not_judged() -> None:
    calls = install("nm_prune", supports=lambda w, n, m: (w.shape == W.shape, "of one shape"))
    assert said(lambda: [ops.prune(W, "2:4") for _ in range(2)])[1] == [] and len(calls) == 2 and lines() == {}


def test_a_weight_gradient_in_float32_is_compared_with_float64() -> None:
    """Whatever dtype its result is to have; one that is rounded on the way is noticed."""
    values, indices, x = torch.randn(64, 32).bfloat16(), torch.full((64, 8), 0x44, dtype=torch.uint8), torch.randn(64, 64).bfloat16()
    call = "nm_linear_wgrad", (values, indices, 2, 4, 64, x, torch.float32)
    true = verify.truth(call[0], small(*call))
    assert true.exact.dtype == torch.float64 and true.result.dtype == torch.float32
    right = reference(call[0])
    for fn, wrong in ((right, False), (lambda *args: right(*args).bfloat16().float(), True)):
        entry = dispatch.Impl(call[0], "mine", fn, dispatch.always, 99)
        assert bool(verify.examine(entry, true, CPU)) == wrong


def test_wrong_in_8_bits_is_noticed_and_14_bits_of_a_sum_are_not() -> None:
    """Tensor cores add 8-bit floats with fewer bits than float32 has."""
    op = "nm_linear_quantized"
    w, x = torch.randn(64, 128), torch.randn(16, 128)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        q, p = ops.quantize(x, dtype), ops.quantize_pack(w, dtype)
        true = verify.truth(op, small(op, (*q, *p, None, torch.float32, False, False)))
        for error, right in ((0.0, True), (2.0**-13, dtype != torch.int8), (0.1, False)):
            entry = dispatch.Impl(op, "mine", lambda *args, e=error: reference(op)(*args) * (1 + e), dispatch.always, 9)
            assert (verify.examine(entry, true, CPU) == "") == right, (dtype, error)
