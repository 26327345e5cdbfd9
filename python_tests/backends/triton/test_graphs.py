"""Every op inside a CUDA graph, replayed on other numbers, and compiled by inductor: on a GPU only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nmkernels import dispatch, ops, testing
from python_tests.conformance import Conformance, built, tensors
from python_tests.ops import test_conformance

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SUITES = [c for c in vars(test_conformance).values() if isinstance(c, type) and issubclass(c, Conformance) and c is not Conformance]
SAMPLES = [pytest.param(c, name, id=f"{c.op}-{name}") for c in SUITES for name in c.samples]


def arguments(suite: type[Conformance], name: str, word: int) -> tuple[Any, ...]:
    """A sample built after the seed ``word``; what Triton declines, or has nothing to launch for, is skipped."""
    args = built(suite.samples[name], DEVICE, word)
    if not tensors(args)[0].numel():
        pytest.skip("nothing is launched for empty tensors")
    can, reason = next(i for i in dispatch.implementations(suite.op) if i.backend == "triton").supports(*args)
    if not can:
        pytest.skip(reason)
    for x in tensors(args):
        if x.dtype == torch.int64:  # the seeds, which samples give as constants
            x += word
    return args


def captured(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """What replays a call, and the result that it rewrites each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


@pytest.mark.parametrize(("suite", "name"), SAMPLES)
def test_a_replayed_graph_is_the_call(suite: type[Conformance], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    static = arguments(suite, name, 0)
    monkeypatch.setenv(dispatch.ENV, "triton")
    op = getattr(torch.ops.nmkernels, suite.op).default
    replay, result = captured(lambda: op(*static))
    for word in (1, 2):
        args = arguments(suite, name, word)
        for x, new in zip(tensors(static), tensors(args), strict=True):
            x.copy_(new)
        replay()
        expected = op(*args)
        testing.assert_equal_bits(result, expected, f"replay {word}")
        testing.assert_equal_bits(tensors(static), tensors(args), f"arguments after replay {word}")


@pytest.mark.parametrize("suite", SUITES, ids=lambda c: c.op)
def test_inductor_gives_the_same(suite: type[Conformance]) -> None:
    name = next(iter(suite.samples))
    args, twin = arguments(suite, name, 0), arguments(suite, name, 0)
    op = getattr(torch.ops.nmkernels, suite.op).default
    torch._dynamo.reset()
    result = torch.compile(lambda *a: op(*a), fullgraph=True)(*args)
    testing.assert_equal_bits(result, op(*twin), "compiled")
    testing.assert_equal_bits(tensors(args), tensors(twin), "arguments")


def test_reduce_overhead_on_new_data() -> None:
    """Inductor's own graphs: a step with ops before, between and after ours."""
    torch._dynamo.reset()

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x.relu(), ops.compress(w * 2, "2:4")) + 1

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        w, x = torch.randn(64, 128, device=DEVICE), torch.randn(32, 128, device=DEVICE)
        torch.testing.assert_close(compiled(w, x).clone(), step(w, x))


def test_kernels_go_to_the_current_stream() -> None:
    """What was queued on it before is seen: on any other, the kernel would overtake the product."""
    w = torch.randn(1024, 1024, device=DEVICE)
    expected = ops.prune(w * 2, "2:4")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        result = ops.prune(w * 2, "2:4")
    side.synchronize()
    testing.assert_equal_bits(result, expected)
