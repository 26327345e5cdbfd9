"""A weight is compressed once, and again when it has changed; a graph is never left with an old one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from nmkernels import reference
from nmkernels.backends.cusparselt import blobs


def weight(seed=1, rows=32, cols=64):
    gen = torch.Generator().manual_seed(seed)
    return reference.compress(torch.randn(rows, cols, generator=gen).bfloat16(), 2, 4)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def run(ours, values, indices, x=X, n=2, m=4, cols=64):
    y = ours("nm_linear").fn(x, values, indices, n, m, cols)
    torch.testing.assert_close(y, reference.linear(x, values, indices, n, m, cols), rtol=0.03, atol=0.03)
    return y


@pytest.fixture
def compressions(fake, ours):
    """How often something was compressed since the last asking; the check of the algorithm is over."""
    run(ours, *weight(9))
    blobs.forget()
    seen = fake.calls("SpMMACompress2")

    def since() -> int:
        nonlocal seen
        before, seen = seen, fake.calls("SpMMACompress2")
        return seen - before

    return since


def test_once(ours, compressions) -> None:
    values, indices = weight()
    for _ in range(3):
        run(ours, values, indices)
    assert compressions() == 1


def test_changes_are_seen(ours, compressions) -> None:
    values, indices = weight()
    run(ours, values, indices)
    for change in (
        lambda: values.mul_(2),
        lambda: indices.copy_(weight(3)[1]),
        lambda: values.copy_(weight(4)[0]),
        lambda: setattr(values, "data", weight(5)[0]),
        lambda: setattr(indices, "data", weight(6)[1]),
    ):
        assert compressions() <= 1
        change()
        run(ours, values, indices)
        run(ours, values, indices)
        assert compressions() == 1


def test_other_indices_or_another_reading(ours, compressions) -> None:
    values, indices = weight()
    run(ours, values, indices)
    other = weight(3)[1]
    run(ours, values, other)
    assert compressions() == 2
    # 1:4 of 128 columns and 2:4 of 64 have as many values and indices
    wide = torch.randn(8, 128).bfloat16()
    run(ours, values, other, wide, 1, 4, 128)
    assert compressions() >= 1
    run(ours, values, other)
    assert compressions() == 1


def test_other_indices_at_the_same_address(ours, compressions) -> None:
    values, indices = weight()
    memory = bytearray(indices.numpy().tobytes())
    for seed in (1, 3):
        memory[:] = weight(seed)[1].numpy().tobytes()
        # a tensor of its own, which no version tells from the one before
        run(ours, values, torch.frombuffer(memory, dtype=torch.uint8).view(indices.shape))
        assert compressions() == 1


def test_it_ends_with_the_weight(ours, compressions) -> None:
    values, indices = weight()
    run(ours, values, indices)
    (entry,) = blobs._entries.values()
    blob = weakref.ref(entry.blob)
    del entry, values
    gc.collect()
    assert not blobs._entries and blob() is None


def test_a_thousand_steps_leave_one(ours, compressions) -> None:
    values, indices = weight()
    seen = []
    for _ in range(20):
        values.mul_(1.01)
        run(ours, values, indices)
        (entry,) = blobs._entries.values()
        seen.append(weakref.ref(entry.blob))
    del entry
    assert compressions() == 20
    assert sum(blob() is not None for blob in seen) == 1


def test_tensors_of_inference_mode_are_not_remembered(ours, compressions) -> None:
    with torch.inference_mode():
        values, indices = (t.clone() for t in weight())
        run(ours, values, indices)
        values.mul_(2)  # which no counter tells
        run(ours, values, indices)
    assert compressions() == 2 and not blobs._entries
    values, indices = weight()
    with torch.inference_mode():
        run(ours, values, indices)
        run(ours, values, indices)
    assert compressions() == 1


def test_gradients_are_not_remembered(ours, compressions) -> None:
    values, indices = weight()
    ours("nm_linear_wgrad").fn(values, indices, 2, 4, 64, torch.randn(64, 16).bfloat16())
    assert not blobs._entries


def test_a_graph_takes_a_blob_of_a_weight_that_was_never_written(ours, compressions, capture) -> None:
    values, indices = weight()
    run(ours, values, indices)
    assert compressions() == 1
    capture(True)
    run(ours, values, indices)
    assert compressions() == 0
    (entry,) = blobs._entries.values()
    blob = weakref.ref(entry.blob)
    del entry
    capture(False)
    for _ in range(3):
        values.mul_(2)
        run(ours, values, indices)
    assert blob() is not None, "the graph reads it"
    del values
    assert blob() is None


def test_a_graph_compresses_a_weight_that_is_written(ours, compressions, capture) -> None:
    values, indices = weight()
    values.mul_(2)
    run(ours, values, indices)
    assert compressions() == 1
    capture(True)
    for _ in range(2):
        run(ours, values, indices)
    assert compressions() == 2, "at every call: the step between them may be replayed"
    capture(False)
    run(ours, values, indices)
    assert compressions() == 0, "what was remembered before is still right"


def test_what_a_graph_compresses_is_not_remembered(ours, compressions, capture) -> None:
    values, indices = weight()
    capture(True)
    run(ours, values, indices)
    assert not blobs._entries
    capture(False)
    run(ours, values, indices)
    assert compressions() == 2


def test_another_stream(ours, compressions, monkeypatch) -> None:
    from nmkernels.backends.cusparselt import context

    values, indices = weight()
    run(ours, values, indices)
    monkeypatch.setattr(context, "on_host", lambda: (0, 5))
    run(ours, values, indices)
    assert compressions() == 1
    (entry,) = blobs._entries.values()
    assert entry.streams == {0, 5}
