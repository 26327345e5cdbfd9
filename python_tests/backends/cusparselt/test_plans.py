"""Plans are made once for each GEMM, thread and device, and taken back; workspaces grow; a capture makes nothing."""

from __future__ import annotations

import shutil
import threading
import weakref

import pytest
import torch

from nmkernels import BackendError, reference
from nmkernels.backends.cusparselt import Algorithm, Problem, compress, context, matmul
from python_tests.backends.cusparselt.conftest import forget

X = {"dtype": torch.bfloat16, "rows": 32, "cols": 64, "tokens": 8, "bias": False, "activation": "", "residual": False}


def call(ours, **options):
    """One fprop by its sizes; returns its result and what torch has for it."""
    o = {**X, **options}
    gen = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=gen).to(o["dtype"])

    args = normal(o["tokens"], o["cols"]), *reference.compress(normal(o["rows"], o["cols"]), 2, 4), 2, 4, o["cols"]
    args = *args, normal(o["rows"]) if o["bias"] else None, o["activation"], normal(o["tokens"], o["rows"]) if o["residual"] else None
    return ours("nm_linear").fn(*args), reference.linear(*args)


def close(pair):
    y, right = pair
    torch.testing.assert_close(y, right, rtol=0.03, atol=0.03)


def test_each_field_makes_another_plan_and_a_second_call_none(fake, ours) -> None:
    sizes = [{}, {"rows": 48}, {"cols": 80}, {"tokens": 16}]
    changes = [*sizes, {"dtype": torch.float16}, {"bias": True}, {"activation": "relu2"}, {"residual": True}]
    for i, change in enumerate(changes):
        close(call(ours, **change))
        assert fake.calls("MatmulPlanInit") == i + 1, change
    gemms = fake.calls("Matmul")
    for change in changes:
        close(call(ours, **change))
    assert fake.calls("MatmulPlanInit") == len(changes)
    assert fake.calls("MatmulDescriptorInit") == len(changes)
    assert fake.calls("Init") == 1
    assert fake.calls("Matmul") == gemms + len(changes), "a cached call is one GEMM"


def test_a_cached_call_asks_nothing_else_of_the_library(fake, ours) -> None:
    values, indices = reference.compress(torch.randn(32, 64).bfloat16(), 2, 4)
    args = torch.randn(8, 64).bfloat16(), values, indices, 2, 4, 64, torch.randn(32).bfloat16()
    ours("nm_linear").fn(*args)
    entries = ("DenseDescriptorInit", "StructuredDescriptorInit", "MatmulDescSetAttribute", "MatmulGetWorkspace", "SpMMACompress2")
    before = {entry: fake.calls(entry) for entry in entries}
    for _ in range(3):
        ours("nm_linear").fn(*args)
    assert {entry: fake.calls(entry) for entry in entries} == before


def test_layouts_results_algorithms_and_splits_make_other_plans(fake) -> None:
    at, like = context.here(0), torch.empty(0)
    base = Problem("nt", torch.int8, torch.int32, 32, 64, 16)
    floats = Problem("nt", torch.float16, torch.float16, 32, 64, 16)
    made = [
        at.plan(problem, algorithm, like)
        for problem, algorithm in (
            *((base, Algorithm(*a)) for a in ((-1,), (0,), (1,), (1, 2), (1, 2, 1), (1, 2, 2), (1, 4, 2))),
            (base._replace(out=torch.float16), Algorithm()),
            *((floats._replace(layout=layout), Algorithm()) for layout in ("nt", "nn", "tn", "tn.packed")),
        )
    ]
    assert len({ready.number for ready in made}) == len(made) == fake.calls("MatmulPlanInit")
    for ready in made:
        assert at.plan(ready.problem, ready.algorithm, like) is ready


def test_another_library_has_its_own(fake, ours, monkeypatch, tmp_path) -> None:
    close(call(ours))
    monkeypatch.setenv("NMKERNELS_CUSPARSELT", str(shutil.copy(fake.path, tmp_path / "other.so")))
    forget()
    plans = fake.calls("MatmulPlanInit")
    close(call(ours))
    assert fake.calls("MatmulPlanInit") == plans
    forget()


def test_many_plans_are_dropped(fake, ours, monkeypatch) -> None:
    monkeypatch.setattr(context, "KEPT", 3)
    start = fake.get("live")
    for tokens in (8, 16, 24, 32, 40, 48, 56, 8):
        close(call(ours, tokens=tokens))
        assert len(context.here(0).plans) <= 3
    # handle, and per plan two matrices, a selection, a plan; the sparse matrix is shared
    assert fake.get("live") - start <= 2 + 3 * 4


def test_threads(fake, ours) -> None:
    failures: list[BaseException] = []
    close(call(ours, bias=True))
    start, inits, gemms = fake.get("live"), fake.calls("Init"), fake.calls("Matmul")
    turns = 6

    def work(seed: int) -> None:
        try:
            for tokens in (8, 16):
                for _ in range(turns // 2):
                    close(call(ours, tokens=tokens, bias=bool(seed % 2)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert fake.calls("Init") == inits + 4, "a handle for each thread"
    assert fake.get("live") == start, "what a thread made ends with it"
    # three GEMMs are new to the process and are checked by two runs each, whichever thread comes first
    assert fake.calls("Matmul") == gemms + 4 * turns + 3 * 2


def test_devices(fake, ours, monkeypatch) -> None:
    for device in (0, 1, 0, 3):
        monkeypatch.setattr(context, "on_host", lambda device=device: (device, 0))
        fake.set("device", device)
        close(call(ours))
    assert sorted(context._threads.here) == [0, 1, 3]
    assert fake.calls("Init") == fake.calls("MatmulPlanInit") == 3


def test_a_call_on_the_wrong_device_would_be_noticed(fake, ours) -> None:
    """The library of the tests does check; otherwise the test before proves nothing."""
    close(call(ours))
    fake.set("device", 1)
    fake.misused = True
    with pytest.raises(BackendError, match="cusparseLt.* failed: CUSPARSE_STATUS_INVALID_VALUE"):
        call(ours)


def test_workspaces(fake, ours, monkeypatch, capture) -> None:
    at = context.here(0)
    close(call(ours))
    assert at.workspaces == {}
    fake.set("workspace", 100)
    close(call(ours, tokens=16))
    first = at.workspaces[0]
    close(call(ours, tokens=24))
    assert at.workspaces == {0: first} and first.numel() == 100
    fake.set("workspace", 1000)
    close(call(ours, tokens=32))
    grown = at.workspaces[0]
    assert grown.numel() == 1000
    monkeypatch.setattr(context, "on_host", lambda: (0, 7))
    close(call(ours, tokens=32))
    assert set(at.workspaces) == {0, 7} and at.workspaces[0] is grown
    capture(True)
    monkeypatch.setattr(context, "on_host", lambda: (0, 8))
    close(call(ours, tokens=32))
    assert set(at.workspaces) == {0, 7}, "a graph has its own"


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_workspace_lives_until_its_gemm_is_launched(fake, ours, monkeypatch, capture, in_graph) -> None:
    fake.set("workspace", 4096)
    close(call(ours))
    made: list[weakref.ref] = []
    workspace = context.Here.workspace

    def watched(self, *args):
        made.append(weakref.ref(found := workspace(self, *args)))
        return found

    def run(*args) -> None:
        assert made[-1]() is not None and made[-1]().data_ptr() in args

    capture(in_graph)
    with monkeypatch.context() as m:
        m.setattr(context.Here, "workspace", watched)
        m.setattr(context.here(0), "_run", run)
        call(ours)
    assert len(made) == 1


def test_a_capture_makes_nothing(fake, ours, capture) -> None:
    values, indices = reference.compress(torch.randn(32, 64).bfloat16(), 2, 4)
    args = torch.randn(8, 64).bfloat16(), values, indices, 2, 4, 64
    grad = values, indices, 2, 4, 64, torch.randn(64, 16).bfloat16()
    ours("nm_linear").fn(*args)
    ours("nm_linear_wgrad").fn(*grad)
    entries = ("Init", "MatmulPlanInit", "MatmulDescriptorInit", "DenseDescriptorInit", "StructuredDescriptorInit")
    before = {entry: fake.calls(entry) for entry in entries}
    capture(True)
    assert ours("nm_linear").supports(*args)[0] and ours("nm_linear_wgrad").supports(*grad)[0]
    ours("nm_linear").fn(*args)
    ours("nm_linear_wgrad").fn(*grad)
    assert {entry: fake.calls(entry) for entry in entries} == before


def test_a_capture_refuses_what_is_new(fake, ours, capture) -> None:
    values, indices = reference.compress(torch.randn(32, 64).bfloat16(), 2, 4)
    args = torch.randn(8, 64).bfloat16(), values, indices, 2, 4, 64
    capture(True)
    for op, given in (("nm_linear", args), ("nm_linear_wgrad", (*args[1:], torch.randn(64, 16).bfloat16()))):
        for activation in ("", "gelu") if op == "nm_linear" else ("",):
            call = (*given, None, activation) if op == "nm_linear" else given
            can, reason = ours(op).supports(*call)
            assert not can and "it has no plan for this GEMM yet" in reason
            with pytest.raises(BackendError, match="a CUDA graph is being captured.*Run it once before the capture"):
                ours(op).fn(*call)
    with pytest.raises(BackendError, match="a CUDA graph is being captured"):
        context.here(0).plan(Problem("nt", torch.float16, torch.float16, 32, 64, 16), Algorithm(), args[0])
    capture(False)
    assert fake.calls("MatmulPlanInit") == 0
    ours("nm_linear").fn(*args)
    capture(True)
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(ours("nm_linear").supports(*args)[1]))
    thread.start()
    thread.join()
    assert "in the same thread" in seen[0]


def test_a_blob_outlives_the_thread_that_made_it(fake) -> None:
    w = torch.zeros(32, 64, dtype=torch.float16)
    w[:, ::2] = 1
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(compress(w)))
    thread.start()
    thread.join()
    x = torch.ones(8, 64, dtype=torch.float16)
    assert torch.equal(matmul(found[0], x), torch.full((8, 32), 32.0, dtype=torch.float16))
