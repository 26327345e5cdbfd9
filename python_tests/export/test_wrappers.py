"""Models inside torch.compile, DDP and the like: files carry the plain model's names, and go into and come out of any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import nmkernels as nm
from nmkernels.testing import equal_bits
from python_tests.export.editing import parts

LAYERS = ("0", "1.1")


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False)))


def finished() -> nn.Sequential:
    torch.manual_seed(0)
    model = build()
    handle = nm.sparsify_(model, "ste:2:4", lambda module, name: name in LAYERS)
    handle.finish(allow_unused=True)
    return model


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def inside(wrap: Callable[[nn.Module], nn.Module], *path: str) -> Callable[[nn.Module], nn.Module]:
    """``wrap`` around each of those descendants, deeper ones first."""

    def wrapped(model: nn.Module) -> nn.Module:
        for name in path:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, wrap(model.get_submodule(name)))
        return model

    return wrapped


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compile of DDP": lambda model: compiled(DistributedDataParallel(model)),
    "DDP of compile": lambda model: DistributedDataParallel(compiled(model)),
    "a compiled layer": inside(compiled, "1.1"),
    "compiled layers in a compiled block": inside(compiled, "0", "1.1", "1"),
    "a checkpointed block": inside(checkpoint_wrapper, "1"),
}


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'file'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names(path: Path) -> set[str]:
    tensors, metadata = parts(path)
    return {*tensors, *json.loads(metadata.get("layers") or metadata["nm"])}


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", WRAPS)
def test_a_file_has_the_plain_names_whatever_wraps_the_model(tmp_path: Path, kind: str) -> None:
    x, model, plain = torch.randn(3, 16), WRAPS[kind](finished()), build()
    want = model(x)
    nm.save_dense(model, tmp_path / "dense")
    nm.compress_(model)
    nm.save_compressed(model, tmp_path / "m")
    assert names(tmp_path / "dense") == {"0", "0.weight", "0.bias", "1.1", "1.1.weight"}
    packed = {f"{name}.{part}" for name in LAYERS for part in ("values", "indices")}
    assert names(tmp_path / "m") == {"0", "0.bias", "1.1", *packed}
    load_model(plain, tmp_path / "dense")
    torch.testing.assert_close(plain(x), want)
    torch.testing.assert_close(model(x), want)
    assert equal_bits(nm.load_compressed(build(), tmp_path / "m")(x), nm.compress_(finished())(x))
    model = WRAPS[kind](build())
    model(x)  # what is compiled is compiled by now
    assert nm.load_compressed(model, tmp_path / "m") is model
    torch.testing.assert_close(model(x), want)
    for module in model.modules():
        if isinstance(module, nm.CompressedLinear):
            module.values.zero_()
    assert not model(x).any(), "the wrapper still calls the dense layer"


def test_a_child_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    """Only DDP's own name is dropped: a class of the user's may say ``self.module``."""
    outer, fresh = nn.Module(), nn.Module()
    outer.module, fresh.module = finished(), build()
    nm.save_compressed(nm.compress_(outer), tmp_path / "m")
    assert all(name.startswith("module.") for name in names(tmp_path / "m"))
    nm.load_compressed(fresh, tmp_path / "m")
    assert equal_bits(fresh.module[0].values, outer.module[0].values)
