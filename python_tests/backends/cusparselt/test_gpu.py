"""cuSPARSELt itself, on a GPU: what its stand-in cannot show. Every test needs the library; those of dtypes, also a GPU that has them."""

from __future__ import annotations

import pytest
import torch

from nmkernels import BackendError, capability, ops, reference, testing
from nmkernels.backends.cusparselt import blobs, compress, matmul, search
from python_tests.backends.cusparselt import conftest, test_gemm

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _library(monkeypatch, tmp_path):
    library, reason = capability.opened()
    if library is None:
        pytest.skip(reason)
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path))


def normal(*shape, **options):
    return conftest.normal(*shape, **{"seed": 1, **options}).cuda()


def weight(rows=256, cols=512, dtype=torch.bfloat16, pattern="2:4"):
    return ops.compress(ops.prune(normal(rows, cols, dtype=dtype), pattern), pattern)


def check(y, *args):
    cpu = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in cpu]
    testing.assert_no_worse(y.cpu(), reference.linear(*cpu), reference.linear(*wide))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["", "gelu", "silu", "relu2"])
@pytest.mark.parametrize("extras", [False, True])
def test_linear(ours, dtype, activation, extras) -> None:
    c = weight(dtype=dtype)
    extra = (normal(256, dtype=dtype, seed=2), activation, normal(96, 256, dtype=dtype, seed=3)) if extras else (None, activation, None)
    args = normal(96, 512, dtype=dtype, seed=4), c.values, c.indices, 2, 4, 512, *extra
    can, reason = ours("nm_linear").supports(*args)
    assert can, reason
    check(ours("nm_linear").fn(*args), *args)
    check(ours("nm_linear").fn(args[0][:13], *args[1:8], None), args[0][:13], *args[1:8], None)


def test_wgrad(ours) -> None:
    g, x = normal(512, 256), normal(512, 384, seed=2)
    c = ops.compress(ops.prune(g.t().contiguous(), "2:4"), "2:4")
    y = ours("nm_linear_wgrad").fn(c.values, c.indices, 2, 4, 512, x)
    dense, x = c.dense().cpu(), x.cpu()
    testing.assert_no_worse(y.cpu(), dense @ x, dense.double() @ x.double())


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_layouts(layout, dtype) -> None:
    w, x = (t.cuda() for t in test_gemm.operands(layout, dtype, 96, 256, 512))
    try:
        y = matmul(compress(w, layout), x, out_dtype=torch.bfloat16)
    except BackendError as error:
        pytest.skip(f"this GPU or version does not do it: {error}")
    test_gemm.check(y.cpu(), layout, w.cpu(), x.cpu())


def test_a_graph_replays_what_was_captured_and_sees_written_weights(ours) -> None:
    c, x = weight(), normal(96, 512, seed=4)
    values, indices = c.values.clone(), c.indices.clone()
    values.mul_(1)  # written: the compression belongs into the graph
    run = ours("nm_linear").fn
    for _ in range(2):
        run(x, values, indices, 2, 4, 512)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, values, indices, 2, 4, 512)
        fixed = run(x, c.values, c.indices, 2, 4, 512) if c.values._version == 0 else y
    graph.replay()
    check(y, x, values, indices, 2, 4, 512)
    check(fixed, x, c.values, c.indices, 2, 4, 512)
    values.mul_(2)
    x.copy_(normal(96, 512, seed=5))
    graph.replay()
    check(y, x, values, indices, 2, 4, 512)


def test_other_threads_and_streams(ours) -> None:
    c, x = weight(), normal(96, 512, seed=4)

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                check(ours("nm_linear").fn(x, c.values, c.indices, 2, 4, 512), x, c.values, c.indices, 2, 4, 512)

    torch.cuda.synchronize()
    conftest.in_threads(work, work, work)
    blobs.forget()


def test_search(ours) -> None:
    c, x = weight(), normal(96, 512, seed=4)
    found = search("nm_linear", x, c.values, c.indices, 2, 4, 512)
    assert found.seconds[found.best] > 0 and found.path is not None
    check(ours("nm_linear").fn(x, c.values, c.indices, 2, 4, 512), x, c.values, c.indices, 2, 4, 512)
