"""Fingerprints: the same for the same bytes on every instruction set, another one for any other."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn

from nmkernels import capability
from nmkernels.backends.cpu.fingerprint import fingerprint
from python_tests.for_each import for_each


@pytest.fixture(autouse=True)
def built():
    if not capability.compiled_core().ok:
        pytest.skip(capability.compiled_core().reason)


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
@for_each("shape", [(), (1,), (3, 5), (64, 129), (300, 1024)])
def test_independent_of_isa_and_threads(isa, dtype, shape):
    w, threads = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), torch.get_num_threads()
    found = {fingerprint(w), fingerprint(w.clone())}
    try:
        torch.set_num_threads(3 - min(threads, 2))
        found.add(fingerprint(w))
        import_module("nmkernels._C").use_isa("portable")
        found.add(fingerprint(w))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1 and None not in found


def test_what_is_seen():
    w = torch.randn(64, 32)
    seen = {fingerprint(w)}
    for i in range(64):  # one bit at a time, all over
        w.view(torch.int32).data[i, i % 32] ^= 1 << (i % 32)
        seen.add(fingerprint(w))
    assert len(seen) == 65
    rows = torch.arange(64.0).reshape(8, 8)
    assert len({fingerprint(x) for x in (rows, rows.flip(0), rows.roll(1, 0), rows.roll(2, 1), rows[:7])}) == 5
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0])), "bits, not values"
    assert len({fingerprint(torch.zeros(n)) for n in range(100)}) == 100


def test_many_random_changes_never_collide():
    w, generator = torch.zeros(4096), torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(5000):
        w.view(torch.int32).data[torch.randint(4096, (1,), generator=generator)] = torch.randint(2**31, (1,), generator=generator).int()
        seen.add(fingerprint(w))
    assert len(seen) == 5000


def test_several_tensors_transposed_ones_and_parameters():
    a, b = torch.randn(4, 6), torch.randn(3)
    assert fingerprint(a, b) == fingerprint(a) + fingerprint(b) and fingerprint() == ()
    assert fingerprint(nn.Parameter(a.clone())) == fingerprint(a) == fingerprint(a.t())
    assert fingerprint(a.requires_grad_()) is not None


def test_none_where_the_memory_cannot_be_read(monkeypatch):
    w = torch.randn(4, 6)
    assert fingerprint(w[:, ::2]) is None and fingerprint(w.expand(2, 4, 6)) is None
    assert fingerprint(w.to("meta")) is None and fingerprint(w.to_sparse()) is None
    assert fingerprint(w.as_subclass(type("Mine", (torch.Tensor,), {}))) is None
    assert fingerprint(w, w[:, ::2]) is None
    monkeypatch.setattr("nmkernels.backends.cpu.fingerprint.compiled_core", lambda: capability.Probe(False, "not built"))
    assert fingerprint(w) is None
