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
SUITES = [
    c
    for c in vars(test_conformance).values()
    if isinstance(c, type) and issubclass(c, Conformance) and c is not Conformance
    if any(i.backend == "triton" for i in dispatch.implementations(c.op))
]


def samples(suite: type[Conformance]) -> list[str]:
    """Those that Triton takes, and has something to launch for."""
    supports = next(i for i in dispatch.implementations(suite.op) if i.backend == "triton").supports
    given = {name: built(suite.samples[name], DEVICE, 0) for name in suite.samples}
    return [name for name, args in given.items() if tensors(args)[0].numel() and supports(*args)[0]]


def arguments(suite: type[Conformance], name: str, word: int) -> tuple[Any, ...]:
    """A sample built after the seed ``word``."""
    args = built(suite.samples[name], DEVICE, word)
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


@pytest.mark.parametrize("suite", SUITES, ids=lambda c: c.op)
def test_a_replayed_graph_is_the_call(suite: type[Conformance], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENV, "triton")
    op = getattr(torch.ops.nmkernels, suite.op).default
    for name in samples(suite):
        static = arguments(suite, name, 0)
        replay, result = captured(lambda static=static: op(*static))
        for word in (1, 2):
            args = arguments(suite, name, word)
            for x, new in zip(tensors(static), tensors(args), strict=True):
                x.copy_(new)
            replay()
            expected = op(*args)
            testing.assert_equal_bits(result, expected, f"{name}, replay {word}")
            testing.assert_equal_bits(tensors(static), tensors(args), f"{name}, arguments after replay {word}")


@pytest.mark.parametrize("suite", SUITES, ids=lambda c: c.op)
def test_inductor_gives_the_same(suite: type[Conformance]) -> None:
    name = next(iter(samples(suite)))
    args, baseline = arguments(suite, name, 0), arguments(suite, name, 0)
    op = getattr(torch.ops.nmkernels, suite.op).default
    torch._dynamo.reset()
    result = torch.compile(lambda *a: op(*a), fullgraph=True)(*args)
    testing.assert_equal_bits(result, op(*baseline), "compiled")
    testing.assert_equal_bits(tensors(args), tensors(baseline), "arguments")


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
    """What was queued on it before is seen: on any other, the kernel would overtake the GEMM."""
    w = torch.randn(1024, 1024, device=DEVICE)
    expected = ops.prune(w * 2, "2:4")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        result = ops.prune(w * 2, "2:4")
    side.synchronize()
    testing.assert_equal_bits(result, expected)
