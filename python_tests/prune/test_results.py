"""``prune_(folder=)``: a run that was interrupted goes on where it stopped, with equal bits, and never from another run's results."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace

import pytest
import torch

import nmkernels as nm
from nmkernels.pattern import Pattern
from nmkernels.prune import prune as engine
from nmkernels.prune import prune_
from nmkernels.prune.results import Results, digest
from python_tests import moe
from python_tests.integrations.folders import content
from python_tests.prune.test_prune import BLOCKS, Rare, ViT, assert_same, images, rows, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 2 tokens per input feature")
P = Pattern("2:4")


class Stopped(Exception):
    pass


@pytest.fixture
def solved(monkeypatch):
    """The shapes of all matrices that are solved."""
    shapes, own = [], engine.solve
    monkeypatch.setattr(engine, "solve", lambda method, weight, *args: (shapes.append(tuple(weight.shape)), own(method, weight, *args))[1])
    return shapes


def run(model, folder, stop_at=None, data=None, **options):
    def progress(done, total, what):
        if done == stop_at:
            raise Stopped

    return prune_(model, P, data or images(), folder=folder, progress=progress, **{"method": "sparsegpt", **options})


@pytest.mark.parametrize("sequential", [True, False])
def test_an_interrupted_run_goes_on(tmp_path, solved, sequential):
    want = ViT()
    report = run(want, None, sequential=sequential).report
    assert len(solved) == 13
    for stop in (1, 3):
        model, folder = ViT(), tmp_path / str(stop)
        before = weights(model)
        with pytest.raises(Stopped):
            run(model, folder, stop, sequential=sequential)
        assert_same(before, weights(model))
        assert sorted(p.name for p in folder.iterdir()) == ["run.json", *(f"unit-{i:04}.safetensors" for i in range(stop))]
        (folder / ".unit-0009.safetensors.abcdefgh.tmp").mkdir()  # what a kill while writing leaves
        solved.clear()
        again = run(model, folder, sequential=sequential).report
        assert len(solved) == 13 - 4 * stop
        assert_same(weights(want), weights(model))
        for name, row in again.pruned.items():
            assert replace(row, seconds=0.0, memory=0) == replace(report.pruned[name], seconds=0.0, memory=0)
    # a finished run is only read
    solved.clear()
    model = ViT()
    handle = run(model, folder, sequential=sequential)
    assert not solved and handle.layers.keys() == handle.report.pruned.keys()
    assert_same(weights(want), weights(model))


def test_idle_layers_and_experts_are_kept(tmp_path):
    for make, data in ((Rare, rows()), (moe.mixture, rows(2, 60, 16))):
        model, other = make().float(), make().float()
        first = prune_(model, P, data, method="wanda", folder=tmp_path / make.__name__)
        second = prune_(other, P, data, method="wanda", folder=tmp_path / make.__name__)
        assert first.report.pruned == second.report.pruned and len(first.report.pruned) >= 4
        assert_same(weights(model), weights(other))


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("pattern", {"pattern": "1:4"}),
        ("method", {"method": "wanda(refit=3)"}),
        ("sequential", {"sequential": False}),
        ("values", {"values": "int8"}),
        ("permute", {"permute": True}),
        ("blocks", {"blocks": []}),
        ("data", {"data": images(2)}),
        ("layers", {"filter_fn": lambda m, n: n == "tail"}),
        ("weights", {"model": lambda: nudged(ViT(), "layers.1.attention.out.weight")}),
        ("weights", {"model": lambda: nudged(ViT(), "layers.0.norm.bias")}),
        ("weights", {"model": lambda: nudged(ViT(), "token")}),
        ("configuration", {"model": lambda: with_epsilon(ViT())}),
    ],
)
def test_another_run_s_folder_is_refused(tmp_path, field, changed):
    with pytest.raises(Stopped):
        run(ViT(), tmp_path, 1, method="wanda")
    with pytest.raises(nm.CheckpointError, match=f"results of another run: its {field} is .*Pass another folder, or delete this one"):
        model = changed.pop("model", ViT)()
        prune_(model, **{"pattern": P, "data": images(), "folder": tmp_path, "method": "wanda", **changed})


def nudged(model, key):
    """With one number of a tensor changed."""
    with torch.no_grad():
        model.state_dict()[key].view(-1)[1] += 0.01
    return model


def with_epsilon(model):
    model.layers[1].norm.eps = 0.1
    return model


def test_another_forward_is_seen(tmp_path):
    def louder(model, batch):
        return model(1.1 * batch)

    with pytest.raises(Stopped):
        run(ViT(), tmp_path, 2)
    with pytest.raises(
        nm.CheckpointError, match="layer 'layers.0.*' of the dense model got different inputs then. Has forward= or a library"
    ):
        run(ViT(), tmp_path, forward=louder)
    run(ViT(), tmp_path, forward=lambda model, batch: model(batch))


def test_one_run_at_a_time_uses_a_folder(tmp_path):
    """The second is refused by the name of the first, before it has changed anything, and gets the folder when that has ended."""
    folder = tmp_path / "runs"

    def second(done, total, what):
        if done == 1:
            before = content(folder)
            with pytest.raises(
                nm.CheckpointError, match=rf"{folder} is in use: process {os.getpid()} on .*Wait for it to end, or use another"
            ):
                run(ViT(), folder)
            assert content(folder) == before and ".lock" in before

    want = ViT()
    prune_(want, P, images(), folder=folder, progress=second, method="sparsegpt")
    assert not (folder / ".lock").exists()
    model = ViT()
    run(model, folder)
    assert_same(weights(want), weights(model))


def test_data_is_told_apart_by_what_it_holds():
    a = {"x": torch.arange(2000.0), "y": [torch.tensor(3), 4]}
    assert digest(a) == digest({"x": torch.arange(2000.0), "y": [torch.tensor(3), 4]})
    for other in (
        {**a, "x": torch.arange(2000.0).index_fill(0, torch.tensor([1000]), 0.0)},
        {**a, "x": torch.arange(2000.0).view(2, 1000)},
        {**a, "x": torch.arange(2000)},
        {**a, "y": [torch.tensor(2), 4]},
        {"z": a["x"], "y": a["y"]},
    ):
        assert digest(a) != digest(other)
    assert digest(torch.ones(4, 2, dtype=torch.bfloat16).t()) == digest(torch.ones(2, 4, dtype=torch.bfloat16))
    assert digest([torch.empty(0), True, None, torch.tensor([True])])


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "a lost page", "other metadata", "another unit"])
@pytest.mark.parametrize("sequential", [True, False])
def test_a_damaged_unit_is_named(tmp_path, damage, sequential):
    run(ViT(), tmp_path, sequential=sequential)
    path = tmp_path / "unit-0003.safetensors"
    whole = path.read_bytes()
    if damage == "another unit":
        path.write_bytes((tmp_path / "unit-0000.safetensors").read_bytes())
    elif damage == "other metadata":
        from safetensors.torch import save_file

        save_file({"a": torch.ones(2)}, path)
    else:
        path.write_bytes({"cut": whole[:-100], "empty": b"", "noise": os.urandom(4000), "a lost page": whole[:-256] + bytes(256)}[damage])
    model = ViT()
    before = weights(model)
    way_out = "to start again" if damage == "another unit" else "delete it, and this unit is pruned again"
    with pytest.raises(nm.CheckpointError, match=f"{path}.*{way_out}"):
        run(model, tmp_path, sequential=sequential)
    assert_same(before, weights(model))
    path.unlink()
    run(model, tmp_path, sequential=sequential)
    want = ViT()
    run(want, None, sequential=sequential)
    assert_same(weights(want), weights(model))


def test_a_deleted_unit_is_named(tmp_path):
    with pytest.raises(
        nm.CheckpointError, match=r"unit-0003.safetensors was deleted meanwhile; start again, and this unit is pruned again\."
    ):
        Results(tmp_path / "folder", {}).load(3)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "3", '"x"'])
def test_a_damaged_folder_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(nm.CheckpointError, match="run.json is damaged.*delete .* to start again|results of another run"):
        run(ViT(), tmp_path)


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(nm.CheckpointError, match="holds other files .model.safetensors.; pass an empty or a new folder"):
        run(ViT(), tmp_path)
    with pytest.raises(nm.CheckpointError, match="could not be written"):
        run(ViT(), tmp_path / "model.safetensors")
    run(ViT(), tmp_path / "new" / "folder", blocks=[])
    assert json.loads((tmp_path / "new" / "folder" / "run.json").read_text())["format"] == "nmkernels-prune-2"


def test_a_full_disk_leaves_the_model_as_it_was(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = ViT(width=64)
    dense = weights(model)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(nm.CheckpointError, match="unit-0000.safetensors could not be written: File too large .* free in "):
            run(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_same(dense, weights(model))
    run(model, tmp_path)
    assert not any(torch.equal(model.get_submodule(f"layers.2.{name}").weight, dense[f"layers.2.{name}.weight"]) for name in BLOCKS)
