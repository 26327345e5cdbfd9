"""All of torch's dense GEMMs are right, very slow ones are reported and not timed, and the roofline is the larger of its two sides."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

from bench.cases import dense, linear, machine
from bench.registry import Provider, Spec
from bench.timing import Timed
from python_tests.for_each import for_each


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@for_each("shape", [(1, 64, 128), (16, 32, 64)])
def test_every_candidate_computes_the_same(dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "HOPELESS", float("inf"))
    tokens, rows, cols = shape
    w, x, g = torch.randn(rows, cols), torch.randn(tokens, cols), torch.randn(tokens, rows)
    # fprop, dgrad and wgrad: the last two by views
    for a, b in ((x, w), (g, w.t()), (g.t(), x.t())):
        a, b = a.to(dtype), b.to(dtype)
        found, exact = dense.gemms(a, b, 8.0, 2.0), a.double() @ b.double().t()
        names = {p.name for p in found.providers}
        assert {"torch dense"} < names and any("packed" in name for name in names) and found.facts == {}
        assert ("torch dense float32" in names) == (dtype != torch.float32)
        for p in found.providers:
            with p.under():
                y = p.call()
            assert isinstance(y, torch.Tensor) and y.dtype == dtype
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=float(8 * torch.finfo(dtype).eps * exact.abs().max()), msg=p.name)
    assert torch.backends.mkldnn.enabled


def test_a_very_slow_gemm_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "onednn", lambda x, w: time.sleep(0.06))
    x, w = torch.randn(2, 64), torch.randn(32, 64)
    found = dense.gemms(x, w, 8.0, 2.0)
    assert [p.name for p in found.plain] == ["torch dense"] and found.facts["torch dense oneDNN", "us"] >= 6e4
    monkeypatch.setattr(dense, "onednn", partial(getattr, None))  # a build that has no such op
    assert [p.name for p in dense.gemms(x, w, 8.0, 2.0).plain] == ["torch dense"]


def test_shares_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fma_rate", lambda dtype: 100.0)
    read = Provider("torch read", lambda: None, bytes=50.0)
    full = Provider("torch dense", lambda: None, bytes=80.0, flops=100.0)
    few, many = Provider("few", lambda: None, bytes=40.0, flops=10.0), Provider("many", lambda: None, bytes=40.0, flops=75.0)
    spec = Spec("nm_linear", "2:4", "float32", 4, 4, 1)
    # 100 bytes and 100 FLOPs a second: dense takes 1 s at least, few is bound by its bytes, many by its FLOPs
    timed = Timed([{"torch read": 0.5, "torch dense": 2.0, "few": 1.0, "many": 1.5}] * 3)
    found = machine.shares(spec, [few, many], [full], read)(timed)
    assert found["torch dense", "share of roofline"] == [0.5] * 3
    assert found["few", "share of roofline"] == [0.4] * 3 and found["many", "share of roofline"] == [0.5] * 3
    assert found["few", "x roofline allows"] == [2.5] and found["many", "x roofline allows"] == [1 / 0.75]
    # where a GEMM reads faster than torch's sum, that is the bandwidth
    fast = Timed([{"torch read": 0.5, "torch dense": 0.25, "few": 0.5}])
    assert machine.shares(spec, [few], [full], read)(fast)["few", "share of roofline"] == [0.25]
    assert machine.shares(spec, [few], [full], read)(Timed([])) == {}


def test_a_gemm_meets_the_fastest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "HOPELESS", float("inf"))
    work = linear.fprop(Spec("nm_linear", "2:4", "bfloat16", 32, 64, 4), "cpu")
    against = {r.metric: set(r.against) for r in work.ratios}
    fastest, packed = against["x fastest dense"], against["x packed dense"]
    assert {"torch dense", "torch dense float32"} <= fastest and not any("packed" in name for name in fastest)
    assert packed and all("packed" in name for name in packed)
    assert work.facts["torch dense", "has AMX"] in (0.0, 1.0)
