"""A weight is compressed once, and again when it has changed; a graph is never left with an old one."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch

from nmkernels.backends.cusparselt import blobs
from python_tests.backends.cusparselt.conftest import check, normal, packed


@pytest.fixture
def run(fake, ours):
    """``run(values, indices)`` multiplies, and says how often something was compressed for it."""

    def run(values, indices, n=2, m=4, cols=64) -> int:
        seen = fake.calls("SpMMACompress2")
        check(ours, "nm_linear", normal(8, cols), values, indices, n, m, cols)
        return fake.calls("SpMMACompress2") - seen

    # the check of the algorithms is not counted
    run(*packed(seed=9)[:2])
    run(*packed(pattern="1:4", cols=128, seed=9))
    blobs._entries.clear()
    return run


@pytest.fixture
def weight():
    return packed()[:2]


def remembered():
    """The memory of the only blob."""
    (entry,) = blobs._entries.values()
    return weakref.ref(entry.blob.last.value.data.untyped_storage())


def test_other_indices_or_another_reading(run, weight) -> None:
    values, indices = weight
    other = packed(seed=3)[1]
    # 1:4 of 128 columns and 2:4 of 64 have as many values and indices
    assert [run(values, indices), run(values, other), run(values, other, 1, 4, 128), run(values, other)] == [1] * 4
    memory = bytearray(indices.numpy().tobytes())
    for seed in (1, 3):
        memory[:] = packed(seed=seed)[1].numpy().tobytes()
        # at the same address a tensor of its own, which no version tells from the one before
        assert run(values, torch.frombuffer(memory, dtype=torch.uint8).view(indices.shape)) == 1


def test_one_is_left_after_many_steps_and_ends_with_the_weight(run) -> None:
    values, indices = packed()[:2]
    seen = []
    for _ in range(20):
        values.mul_(1.01)
        assert run(values, indices) == 1
        seen.append(remembered())
    assert sum(blob() is not None for blob in seen) == 1
    del values
    gc.collect()
    assert not blobs._entries and seen[-1]() is None


def test_tensors_of_inference_mode_are_not_remembered(run, weight) -> None:
    with torch.inference_mode():
        values, indices = (t.clone() for t in weight)
        assert run(values, indices) == 1
        values.mul_(2)  # which no counter tells
        assert run(values, indices) == 1 and not blobs._entries
        assert [run(*weight), run(*weight)] == [1, 0]


def test_what_a_graph_compresses_is_not_remembered(run, weight, capture) -> None:
    capture(True)
    run(*weight)
    assert not blobs._entries
    capture(False)
    weight[0].mul_(2)
    assert run(*weight) == 1


def test_each_call_reads_it_through_what_orders_streams(run, weight, monkeypatch) -> None:
    run(*weight)
    (entry,) = blobs._entries.values()
    read = Mock(wraps=entry.blob.last.get)
    monkeypatch.setattr(entry.blob.last, "get", read)
    assert run(*weight) == 0
    read.assert_called_once_with()  # which waits: backends/test_streams.py
