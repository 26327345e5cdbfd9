"""Several ranks prune one model, each on its share of the data: as one process does on all of it, and never each for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import nmkernels as nm
from nmkernels.pattern import Pattern
from nmkernels.prune import prune as engine
from nmkernels.prune import prune_
from python_tests import moe
from python_tests.distributed.ranks import needs_gloo, on_ranks, raised
from python_tests.prune.test_prune import ViT, assert_same, images, mlp, rows, weights

pytestmark = [needs_gloo, pytest.mark.filterwarnings("ignore:.*fewer than 2 tokens per input feature")]
P = Pattern("2:4")


def routed(model, batch):
    """The second of a pair says how many of the three experts get tokens."""
    return model(*batch)


MIXED = [(x, 2 + (i == 1)) for i, x in enumerate(rows(3, 60, 16))]  # the second rank alone has tokens for the third expert


def all_rows(handle):
    return {name: replace(row, seconds=0.0, memory=0) for name, row in handle.report.pruned.items()}


def pruned(make, data, **options):
    model = make()
    handle = prune_(model, P, data, **options)
    return weights(model), all_rows(handle), handle.report.remark


def mixture():
    return moe.mixture(dtype=torch.float32)


def rounded(data, at_once, make=mlp):
    """The integers of a model that is rounded while it is pruned, or later."""
    handle = prune_(model := make(), P, data, method="wanda", values="int4" if at_once else None)
    handle.finish(allow_unused=True)
    return weights(nm.compress_(model) if at_once else nm.compress_(model, values="int4", data=data))


def on_one_rank(folder):
    rank = dist.get_rank()
    share, own = images()[rank::2], Path(folder) / str(rank)  # two batches and one; the second rank's folder stays empty
    results = {"vit": pruned(ViT, share, method="sparsegpt"), "experts": pruned(mixture, MIXED[rank::2], forward=routed)}
    results |= {f"rounded {at_once}": rounded(rows(4)[rank::2], at_once) for at_once in (True, False)}
    results |= {f"experts rounded {at_once}": rounded(MIXED[rank::2], at_once, mixture) for at_once in (True, False)}

    solved, solve = [], engine.solve
    engine.solve = lambda *args: (solved.append(1), solve(*args))[1]

    def stop(done, total, what):
        assert done < 2, "stopped"

    results["stopped"] = raised(lambda: prune_(ViT(), P, share, method="sparsegpt", folder=own, progress=stop))
    results["before"] = len(solved)
    results["again"] = pruned(ViT, share, method="sparsegpt", folder=own)
    results["after"], engine.solve = len(solved), solve
    results["files"] = sorted(path.name for path in own.iterdir()) if own.exists() else []
    dist.barrier()
    if rank == 0:
        (own / "unit-0002.safetensors").write_bytes(b"damaged")
    model = ViT()
    results["damaged"] = raised(lambda: prune_(model, P, share, method="sparsegpt", folder=own))
    results["other data"] = raised(lambda: prune_(model, P, [x + rank for x in share], method="sparsegpt", folder=own))

    def failing(model, batch):
        assert rank == 0, "no memory"
        return model(batch)

    def unsolved(*args):
        assert rank == 1, "no memory"
        return solve(*args)

    results["forward"] = raised(lambda: prune_(model, P, share, method="wanda", forward=failing))
    results["empty"] = raised(lambda: prune_(model, P, share if rank == 0 else [], method="wanda"))
    results["models"] = raised(lambda: prune_(ViT(seed=rank), P, share, method="wanda"))
    results["arguments"] = raised(lambda: prune_(model, P, share, method=("wanda", "sparsegpt")[rank]))
    engine.solve = unsolved
    results["solve"] = raised(lambda: prune_(model, P, share, method="wanda"))
    assert_same(weights(model), weights(ViT()))
    return results


def test_two_ranks(tmp_path):
    first, second = on_ranks(2, on_one_rank, tmp_path, str(tmp_path / "folders"))
    for name, want in (("vit", pruned(ViT, images(), method="sparsegpt")), ("experts", pruned(mixture, MIXED, forward=routed))):
        (got, report, remark), (other, same_report, same_remark) = first[name], second[name]
        assert_same(got, other)
        assert report == same_report and remark == same_remark and " on 3 batches with digest " in remark
        for key, value in want[0].items():
            assert torch.equal(got[key] == 0, value == 0), key
            assert torch.allclose(got[key], value, atol=1e-5), key
        for key, row in want[1].items():
            assert report[key].tokens == row.tokens and report[key].error == pytest.approx(row.error, rel=1e-3, abs=1e-6)
    assert first["experts"][1]["experts.gate_up_proj[2]"].tokens == 40
    for at_once in (True, False):
        got, want = first[f"rounded {at_once}"], rounded(rows(4), at_once)
        assert_same(got, second[f"rounded {at_once}"])
        for key in ("0.values", "3.values", "5.values"):
            assert (got[key] != want[key]).float().mean() < 0.03  # sums have another order
        got, want = first[f"experts rounded {at_once}"], rounded(MIXED, at_once, mixture)
        assert_same(got, second[f"experts rounded {at_once}"])
        for key in ("gate_up_proj", "down_proj"):
            assert (got[f"experts.nm_{key}.values"] != want[f"experts.nm_{key}.values"]).float().mean((1, 2)).max() < 0.03
    # resumed
    assert first["stopped"].endswith("stopped") and second["stopped"].endswith("stopped")
    assert first["before"] + second["before"] == 8 and first["after"] + second["after"] == 13 and min(first["before"], second["before"]) > 1
    for rank in (first, second):
        assert_same(rank["again"][0], first["vit"][0])
    assert first["files"] == ["run.json", *(f"unit-{i:04}.safetensors" for i in range(5))] and second["files"] == []
    # an error of one is an error of both
    for name, said in (
        ("damaged", "unit-0002.safetensors is damaged"),
        ("other data", "its data is"),
        ("forward", "no memory"),
        ("solve", "no memory"),
        ("empty", "data has no batch"),
        ("models", "ranks 0 and 1 have different arguments or models"),
        ("arguments", "ranks 0 and 1 have different arguments or models"),
    ):
        assert said in first[name] and said in second[name], (name, first[name], second[name])
    assert first["forward"].startswith("RecipeError: prune_: rank 1 has failed with AssertionError")
    assert first["damaged"].startswith("CheckpointError") and second["damaged"].startswith("CheckpointError")


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,)))
    return raised(lambda: prune_(model, P, rows(), method="wanda"))


@pytest.mark.slow
def test_sharded_weights_are_refused(tmp_path):
    for said in on_ranks(2, sharded, tmp_path):
        assert "weights are sharded. Prune before fully_shard" in said
