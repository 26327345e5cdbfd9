"""cuSPARSELt itself, on a GPU: what its stand-in cannot show. Every test needs the library; those of dtypes, also a GPU that has them."""

from __future__ import annotations

import pytest
import torch

from nmkernels import BackendError, capability, ops
from nmkernels.backends.cusparselt import blobs, compress, matmul, search
from python_tests.backends.cusparselt import conftest, test_gemm
from python_tests.backends.cusparselt.conftest import check, compare

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _library(monkeypatch, tmp_path):
    library, reason = capability.opened()
    if library is None:
        pytest.skip(reason)
    monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path))


def normal(*shape, **options):
    return conftest.normal(*shape, **{"seed": 1, **options}).cuda()


def weight(rows=256, cols=512, dtype=torch.bfloat16):
    """As raw ops take it: values, indices, N, M and columns."""
    c = ops.compress(ops.prune(normal(rows, cols, dtype=dtype), "2:4"), "2:4")
    return c.values, c.indices, 2, 4, cols


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["", "gelu", "silu", "relu2"])
@pytest.mark.parametrize("extras", [False, True])
def test_linear(ours, dtype, activation, extras) -> None:
    bias, residual = (normal(256, dtype=dtype, seed=2), normal(96, 256, dtype=dtype, seed=3)) if extras else (None, None)
    x, w = normal(96, 512, dtype=dtype, seed=4), weight(dtype=dtype)
    check(ours, "nm_linear", x, *w, bias, activation, residual)
    check(ours, "nm_linear", x[:13], *w, bias, activation, None)


def test_wgrad(ours) -> None:
    check(ours, "nm_linear_wgrad", *weight(), normal(512, 384, seed=2))


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_layouts(layout, dtype) -> None:
    w, x = (t.cuda() for t in test_gemm.operands(layout, dtype, 96, 256, 512))
    try:
        y = matmul(compress(w, layout), x, out_dtype=torch.bfloat16)
    except BackendError as error:
        pytest.skip(f"this GPU or version does not do it: {error}")
    test_gemm.check(y.cpu(), layout, w.cpu(), x.cpu())


def test_cuda_graph_sees_written_weights(ours) -> None:
    never, (values, indices, *sizes), x = weight(), weight(), normal(96, 512, seed=4)
    values.mul_(1)  # written: the compression belongs into the graph
    run = ours("nm_linear").fn
    for w in ((values, indices, *sizes), never):
        run(x, *w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, fixed = run(x, values, indices, *sizes), run(x, *never)
    graph.replay()
    compare(y, "nm_linear", x, values, indices, *sizes)
    compare(fixed, "nm_linear", x, *never)
    values.mul_(2)
    x.copy_(normal(96, 512, seed=5))
    graph.replay()
    compare(y, "nm_linear", x, values, indices, *sizes)


def test_other_threads_and_streams(ours) -> None:
    w, x = weight(), normal(96, 512, seed=4)

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                check(ours, "nm_linear", x, *w)

    torch.cuda.synchronize()
    conftest.in_threads(work, work, work)
    blobs._entries.clear()


def test_search(ours) -> None:
    w, x = weight(), normal(96, 512, seed=4)
    found = search("nm_linear", x, *w)
    assert found.seconds[found.best] > 0 and found.path is not None
    check(ours, "nm_linear", x, *w)
