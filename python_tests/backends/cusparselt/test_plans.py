"""Plans are made once for each GEMM, thread and device, and taken back; workspaces grow; a capture makes nothing."""

from __future__ import annotations

import weakref

import pytest
import torch

from nmkernels import BackendError
from nmkernels.backends.cusparselt import Algorithm, Matmul, compress, context, matmul
from python_tests.backends.cusparselt.conftest import check, in_threads, normal, packed

MAKING = ("Init", "MatmulPlanInit", "MatmulDescriptorInit", "DenseDescriptorInit", "StructuredDescriptorInit")
ASKING = ("MatmulDescSetAttribute", "MatmulGetWorkspace", "SpMMACompress2", "Matmul")


def call(ours, dtype=torch.bfloat16, rows=32, cols=64, tokens=8, bias=False, activation="", residual=False):
    """One fprop by its sizes."""
    more = normal(rows, dtype=dtype) if bias else None, activation, normal(tokens, rows, dtype=dtype) if residual else None
    return check(ours, "nm_linear", normal(tokens, cols, dtype=dtype), *packed(rows, cols, dtype), *more)


def test_each_field_makes_another_plan(fake, ours) -> None:
    sizes = [{}, {"rows": 48}, {"cols": 80}, {"tokens": 16}]
    changes = [*sizes, {"dtype": torch.float16}, {"bias": True}, {"activation": "relu2"}, {"residual": True}]
    for i, change in enumerate(changes):
        call(ours, **change)
        assert fake.calls("MatmulPlanInit") == fake.calls("MatmulDescriptorInit") == i + 1, change
    assert fake.calls("Init") == 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_cached_call_makes_and_asks_nothing(fake, ours, capture, captured) -> None:
    fprop, wgrad = (normal(8, 64), *packed(), normal(32)), (*packed(), normal(64, 16))
    ours("nm_linear").fn(*fprop)
    ours("nm_linear_wgrad").fn(*wgrad)
    before = {entry: fake.calls(entry) for entry in MAKING + ASKING}
    capture(captured)
    assert ours("nm_linear").supports(*fprop)[0] and ours("nm_linear_wgrad").supports(*wgrad)[0]
    ours("nm_linear").fn(*fprop)
    ours("nm_linear_wgrad").fn(*wgrad)
    before["SpMMACompress2"] += 1  # the gradient
    before["Matmul"] += 2
    assert {entry: fake.calls(entry) for entry in MAKING + ASKING} == before


def test_many_plans_are_dropped(fake, ours, monkeypatch) -> None:
    monkeypatch.setattr(context, "MOST_PLANS", 3)
    start = fake.get("live")
    for tokens in (8, 16, 24, 32, 40, 48, 56, 8):
        call(ours, tokens=tokens)
        assert len(context.session_on(0).plans) <= 3
    # handle, and per plan two matrices, a selection, a plan; the sparse matrix is shared
    assert fake.get("live") - start <= 2 + 3 * 4


def test_threads(fake, ours) -> None:
    call(ours, bias=True)
    start, inits, gemms = fake.get("live"), fake.calls("Init"), fake.calls("Matmul")
    turns = 6

    def work(bias: bool) -> None:
        for tokens in (8, 16):
            for _ in range(turns // 2):
                call(ours, tokens=tokens, bias=bias)

    in_threads(*[lambda bias=bias: work(bias) for bias in (False, True, False, True)])
    assert fake.calls("Init") == inits + 4, "a handle for each thread"
    assert fake.get("live") == start, "what a thread made ends with it"
    # three GEMMs are new to the process and are checked by two runs each, whichever thread comes first
    assert fake.calls("Matmul") == gemms + 4 * turns + 3 * 2


def test_devices(fake, ours, monkeypatch) -> None:
    for device in (0, 1, 0, 3):
        monkeypatch.setattr(context, "on_host", lambda device=device: (device, 0))
        fake.set("device", device)
        call(ours)
    assert sorted(context._threads.sessions) == [0, 1, 3]
    assert fake.calls("Init") == fake.calls("MatmulPlanInit") == 3
    # the library of the tests does notice a call on another device
    fake.set("device", 1)
    fake.misused = True
    with pytest.raises(BackendError, match="cusparseLt.* failed: CUSPARSE_STATUS_INVALID_VALUE"):
        call(ours)


def test_workspaces(fake, ours, monkeypatch, capture) -> None:
    at = context.session_on(0)
    call(ours)
    assert at.workspaces == {}
    fake.set("workspace", 100)
    call(ours, tokens=16)
    first = at.workspaces[0]
    call(ours, tokens=24)
    assert at.workspaces == {0: first} and first.numel() == 100
    fake.set("workspace", 1000)
    call(ours, tokens=32)
    grown = at.workspaces[0]
    assert grown.numel() == 1000
    monkeypatch.setattr(context, "on_host", lambda: (0, 7))
    call(ours, tokens=32)
    assert set(at.workspaces) == {0, 7} and at.workspaces[0] is grown
    capture(True)
    monkeypatch.setattr(context, "on_host", lambda: (0, 8))
    call(ours, tokens=32)
    assert set(at.workspaces) == {0, 7}, "a graph has its own"


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_workspace_lives_until_its_gemm_is_launched(fake, ours, monkeypatch, capture, in_graph) -> None:
    fake.set("workspace", 4096)
    call(ours)
    made: list[weakref.ref] = []
    workspace = context.Session.workspace

    def watched(self, *args):
        made.append(weakref.ref(found := workspace(self, *args)))
        return found

    def run(*args) -> None:
        assert made[-1]() is not None and made[-1]().data_ptr() in args

    capture(in_graph)
    with monkeypatch.context() as m:
        m.setattr(context.Session, "workspace", watched)
        m.setattr(context.session_on(0), "_run", run)
        ours("nm_linear").fn(normal(8, 64), *packed())
    assert len(made) == 1


def test_a_capture_refuses_what_is_new(fake, ours, capture) -> None:
    args = normal(8, 64), *packed()
    capture(True)
    for op, given in (("nm_linear", args), ("nm_linear", (*args, None, "gelu")), ("nm_linear_wgrad", (*packed(), normal(64, 16)))):
        can, reason = ours(op).supports(*given)
        assert not can and "it has no plan for this GEMM yet" in reason
        with pytest.raises(BackendError, match="a CUDA graph is being captured.*Run it once before the capture"):
            ours(op).fn(*given)
    with pytest.raises(BackendError, match="a CUDA graph is being captured"):
        context.session_on(0).plan(Matmul("nt", torch.float16, torch.float16, 32, 64, 16), Algorithm(), args[0])
    capture(False)
    assert fake.calls("MatmulPlanInit") == 0
    ours("nm_linear").fn(*args)
    capture(True)
    seen: list[str] = []
    in_threads(lambda: seen.append(ours("nm_linear").supports(*args)[1]))
    assert "in the same thread" in seen[0]


def test_a_blob_outlives_the_thread_that_made_it(fake) -> None:
    w = torch.zeros(32, 64, dtype=torch.float16)
    w[:, ::2] = 1
    found: list[object] = []
    in_threads(lambda: found.append(compress(w)))
    x = torch.ones(8, 64, dtype=torch.float16)
    assert torch.equal(matmul(found[0], x), torch.full((8, 32), 32.0, dtype=torch.float16))
