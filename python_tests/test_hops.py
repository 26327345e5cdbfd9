"""The way of a tensor from the public call to the kernel is short: so many Python calls in so many files, and no more."""

import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import nmkernels as nm
from nmkernels.capability import compiled_core

pytestmark = pytest.mark.skipif(not compiled_core().ok, reason="the compiled core is not built")

PACKAGE = Path(nm.__file__).parent


def hops(call, warm=3):
    """(Python calls inside the package, the files they are in) of ``call`` once it has run ``warm`` times; forward only, in this thread."""
    for _ in range(warm):
        call()
    files = []

    def seen(frame, event, _):
        path = Path(frame.f_code.co_filename)
        # every attached model sees a step; those of other tests are not part of this call
        if event == "call" and PACKAGE in path.parents and not of_every_step(frame):
            files.append(str(path.relative_to(PACKAGE)))

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), sorted(set(files))


def of_every_step(frame):
    while frame is not None and frame.f_code.co_name != "on_foreign_step":
        frame = frame.f_back
    return frame is not None


def model_of(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    handle = nm.sparsify_(model, recipe)
    return model, handle.attach(recipe.optimizer(model.parameters(), lr=1e-3))


@pytest.mark.parametrize(("packed", "first", "files", "again"), [(True, 23, 9, 15), (False, 20, 8, 11), ("auto", 23, 9, 15)])
def test_forward_and_backward_of_a_layer_after_a_step(packed, first, files, again):
    """The first forward pass after an optimizer's step makes W̃; later ones read it."""
    model, optimizer = model_of(nm.recipes.SRSTE("2:4", packed=packed))
    x = torch.randn(8, 64, requires_grad=True)
    for _ in range(4):
        outputs = []
        forward = hops(lambda: outputs.append(model[0](x)), warm=0)  # noqa: B023
        another = hops(lambda: outputs.append(model[0](x)), warm=0)  # noqa: B023
        back = hops(outputs[0].square().sum().backward, warm=0)
        outputs[1].sum().backward()
        model[1](x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert forward[0] <= first and len(forward[1]) <= files, forward
    assert another[0] <= again, another
    assert back[0] <= 8, back


def test_forward_of_compressed_layers(monkeypatch, tmp_path):
    """The first one, for which methods are chosen, by estimates that nothing has been asked of yet; a later one asks nothing."""

    def compressed():
        return torch.nn.Sequential(*(nm.CompressedLinear(nm.ops.compress(torch.randn(*size), "2:4")) for size in ((256, 64), (64, 256))))

    model, x = compressed(), torch.randn(8, 64)
    # the estimates of one kind of machine, which choose the same methods on all
    monkeypatch.setattr(nm.gemm.estimate, "machine", cache(lambda device: "avx512_bf16 amd 25"))
    with torch.no_grad():
        compressed()(x)  # kernels are checked once on each machine
        monkeypatch.setenv("NMKERNELS_CACHE", str(tmp_path))
        nm.gemm.choose.forget()
        count, where = hops(lambda: model(x), warm=0)
        assert count <= 250 and len(where) <= 12, (count, where)
        count, where = hops(lambda: model(x), warm=0)
        assert count <= 4 and len(where) <= 1, (count, where)
    monkeypatch.undo()
    nm.gemm.choose.forget()


def test_compress():
    w = torch.randn(64, 64)
    count, where = hops(lambda: nm.ops.compress(w, "2:4"))
    assert count <= 12, (count, where)


@pytest.mark.parametrize(
    ("recipe", "most", "files"),
    [("srste:2:4", 37, 10), ("step:2:4(total_steps=100)", 89, 17), ("slope:2:4(total_steps=100)", 51, 15)],
    ids=["srste", "step, dense at first", "slope, with held masks"],
)
def test_step_of_two_layers(recipe, most, files):
    model, optimizer = model_of(nm.recipes.get(recipe))
    x = torch.randn(8, 64)
    for _ in range(4):
        model(x).sum().backward()
        count, where = hops(optimizer.step, warm=0)
        optimizer.zero_grad()
    assert count <= most and len(where) <= files, (count, where)


def test_prune_of_two_blocks():
    """More than half of it is ADMM's iterations; four files are adapters of the libraries that the process has imported."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval() for _ in range(3)]
    data = [{"input_ids": torch.randint(99, (2, 24))} for _ in range(3)]
    handles = []
    count, where = hops(lambda: handles.append(nm.prune_(models.pop(), "2:4", data)), warm=2)
    assert count <= 7700 and len(where) <= 46, (count, where)
    count, where = hops(lambda: handles[-1].finish(allow_unused=True), warm=0)
    assert count <= 837 and len(where) <= 17, (count, where)
