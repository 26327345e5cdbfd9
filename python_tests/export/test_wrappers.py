"""Models inside torch.compile, DDP and the like: files carry the plain model's names, and go into and come out of any of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import nmkernels as nm
from nmkernels.pattern import CheckpointError
from nmkernels.testing import equal_bits
from python_tests.export.editing import edited, parts

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
    packed = {f"{name}.weight.{part}" for name in LAYERS for part in ("values", "indices")}
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


def as_earlier_versions_wrote(path: Path, rename: Callable[[str], str]) -> None:
    tensors, metadata = parts(path)
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    layers = {rename(name): about for name, about in json.loads(metadata["layers"]).items()}
    aliases = {rename(name): rename(kept) for name, kept in json.loads(metadata.get("aliases", "{}")).items()}
    save_file(tensors, path, {**metadata, "layers": json.dumps(layers), "aliases": json.dumps(aliases)})


RENAMES: dict[str, Callable[[str], str]] = {
    "compile": lambda name: f"_orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "compile of DDP": lambda name: f"_orig_mod.module.{name}",
    "DDP of compile": lambda name: f"module._orig_mod.{name}",
    "a compiled layer": lambda name: name.replace("1.1.", "1.1._orig_mod.") if "1.1." in name else name.replace("1.1", "1.1._orig_mod"),
}


@pytest.mark.parametrize("kind", RENAMES)
@pytest.mark.parametrize("into", ["plain", "compile", "DDP"])
def test_files_that_hold_the_names_of_wrappers_load(tmp_path: Path, kind: str, into: str) -> None:
    nm.save_compressed(nm.compress_(finished()), tmp_path / "m")
    as_earlier_versions_wrote(tmp_path / "m", RENAMES[kind])
    assert any("_orig_mod" in name or "module" in name for name in names(tmp_path / "m"))
    model = WRAPS.get(into, lambda model: model)(build())
    x = torch.randn(3, 16)
    assert equal_bits(nm.load_compressed(model, tmp_path / "m")(x), nm.compress_(finished())(x))


def test_a_child_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    """Only DDP's own name is dropped: a class of the user's may say ``self.module``."""
    outer, fresh = nn.Module(), nn.Module()
    outer.module, fresh.module = finished(), build()
    nm.save_compressed(nm.compress_(outer), tmp_path / "m")
    assert all(name.startswith("module.") for name in names(tmp_path / "m"))
    nm.load_compressed(fresh, tmp_path / "m")
    assert equal_bits(fresh.module[0].values, outer.module[0].values)
    as_earlier_versions_wrote(tmp_path / "m", RENAMES["DDP"])
    fresh.module = build()
    nm.load_compressed(fresh, tmp_path / "m")
    assert equal_bits(fresh.module[0].values, outer.module[0].values)


def test_one_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    nm.save_compressed(nm.compress_(finished()), tmp_path / "m")
    edited(tmp_path / "m", lambda tensors, metadata: tensors.update({"_orig_mod.0.bias": torch.ones(8)}))
    with pytest.raises(CheckpointError, match="holds one tensor twice, with and without the name of a wrapper"):
        nm.load_compressed(build(), tmp_path / "m")
