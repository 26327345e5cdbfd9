"""The step that also writes the forms of the new weights, in CUDA: the reference's bits, and the statistics of the step without forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import nmkernels as nm
from nmkernels import ops, reference, testing
from nmkernels.backends.cuda import core
from nmkernels.ops.adamw_pack import nm_masked_adamw_pack_, nm_pack_forms_
from nmkernels.reference.adamw import mask_of
from nmkernels.reference.adamw_pack import split
from nmkernels.train import ahead
from python_tests.conformance import moved
from python_tests.for_each import for_each
from python_tests.ops.samples import adamw_pack, pack_forms

BF16 = torch.bfloat16
ROWS: dict[str, bool] = {}
WAYS = [("magnitude", ROWS), ("magnitude", {"dense": True}), ("threshold", ROWS), ("threshold", {"dense": True})]
WAYS += [("held", ROWS), ("held", {"columns": True})]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"frozen": True},
    {"scaled": True, "eps_inside": True, "maximize": True, "clamp": 0.5},
    {"scaled": True, "inf": True},
]
PARAMS, GRADS, SQUARES = 10, 11, 13
"""Positions of arguments."""


def copied(args: Any, device: str) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, moved(args, device))


def tensors(args: Any) -> list[Tensor]:
    return [x.cpu() for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]


def same(ours: Any, device: str, args: Any) -> None:
    """All that is written has the reference's bits; the statistics are those of the step alone."""
    entry, step = ours("nm_masked_adamw_pack_"), ours("nm_masked_adamw_")
    want, got, alone = copied(args, "cpu"), copied(args, device), copied(split(args)[1], device)
    assert entry.supports(*got)[0], entry.supports(*got)[1]
    reference.masked_adamw_pack_(*want)
    stats, expected = entry.fn(*got).cpu(), step.fn(*alone).cpu()
    testing.assert_equal_bits(tensors(got), tensors(want))
    torch.testing.assert_close(stats, expected, rtol=1e-12, atol=0, equal_nan=True)


@for_each("select, parts", WAYS)
def test_bits_of_the_reference(select, parts, ours, device):
    torch.manual_seed(0)
    for layout in ("canonical", "mma.sp", "wgmma.sp"):
        for options in OPTIONS:
            args = adamw_pack(select, layout, ((64, 64), (128, 192), (192, 64)), **parts, **options)
            same(ours, device, args)
            args[GRADS][:] = [g.to(BF16) for g in args[GRADS]]
            same(ours, device, args)


@for_each("select, parts", WAYS)
def test_edge_values_and_masks_with_fewer(select, parts, ours, device):
    torch.manual_seed(1)
    some = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, float("inf"), float("nan"), 1e-40, 3e38])
    args = adamw_pack(select, "wgmma.sp", **parts)
    for i, w in enumerate(args[PARAMS]):
        chosen = torch.rand(w.shape) < 0.5
        for which in (PARAMS, GRADS):
            args[which][i] = torch.where(chosen, some[torch.randint(len(some), w.shape)], args[which][i])
    masks = split(args)[1].masks
    if masks:
        masks[:] = [bits & ops.mask_bits(torch.rand(w.shape) < 0.7) for bits, w in zip(masks, args[PARAMS], strict=True)]
    same(ours, device, args)


def test_tensors_at_odd_addresses(ours, device):
    torch.manual_seed(2)
    args = list(adamw_pack("magnitude", "wgmma.sp", dense=True))
    for i in (5, PARAMS, GRADS, SQUARES):
        args[i] = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in args[i]]
    entry = ours("nm_masked_adamw_pack_")
    want, got = copied(args, "cpu"), moved(args, device)
    reference.masked_adamw_pack_(*want)
    entry.fn(*got)
    written = 5, 9, PARAMS, SQUARES
    testing.assert_equal_bits(tensors([got[i] for i in written]), tensors([want[i] for i in written]))


def test_what_it_leaves_to_others(ours, device):
    entry = ours("nm_masked_adamw_pack_")

    def says(word: str, args: Any) -> None:
        can, why = entry.supports(*moved(args, device))
        assert not can and word in why, why

    says("multiples of 64", adamw_pack("magnitude", "canonical", ((64, 60),)))
    says("amsgrad", adamw_pack("magnitude", "canonical", amsgrad=True))
    says("log", adamw_pack("magnitude", "canonical", geometric=True))
    args = adamw_pack("magnitude", "canonical")
    says("dtype", (*args[:GRADS], [x.half() for x in args[GRADS]], *args[GRADS + 1 :]))
    says("bfloat16", (*args[:5], [x.half() for x in args[5]], *args[6:]))
    says("all three", adamw_pack("held", "canonical", columns=True, dense=True))
    says("contiguous gradients", (*args[:GRADS], [x.t().contiguous().t() for x in args[GRADS]], *args[GRADS + 1 :]))


@for_each("select, parts", WAYS)
def test_changed_weights_are_packed_again(select, parts, ours, device):
    """One row in 64 is compared: a change there makes all forms again, and one elsewhere is not seen."""
    torch.manual_seed(3)
    args = adamw_pack(select, "wgmma.sp", ((128, 192),), **parts)
    ours("nm_masked_adamw_pack_").fn(*(there := copied(args, device)))
    to, a = split(there)
    w, bits = a.params[0], a.masks[0] if a.masks else None
    pieces = [part[0] if part else None for part in to.parts]
    scale = to.scales[0] if to.scales else None
    before = [None if x is None else x.clone() for x in pieces]
    changed = torch.zeros(1, dtype=torch.int32, device=device)
    code = {"magnitude": 0, "held": 2, "threshold": 3}[select]

    def check(count: int) -> int:
        addresses = [0 if x is None else x.data_ptr() for x in (*pieces, scale)]
        mask = 0 if bits is None else bits.data_ptr()
        call = w.data_ptr(), *w.shape, mask, code, 2, *addresses, count % 64, changed.data_ptr(), count + 1, *core.queue(w)
        core.core(w).renew_changed_forms(*call)
        return int(changed)

    assert [check(count) for count in (0, 1, 63, 64)] == [0] * 4
    w[64 + 5] *= 1.5  # row 5 of the second band
    assert check(4) == 0
    testing.assert_equal_bits([x for x in pieces if x is not None], [x for x in before if x is not None])
    assert check(5) == 6
    mask = None if bits is None else mask_of(bits.cpu(), 192)
    factor = None if scale is None else scale.cpu()
    want = reference.pack(w.cpu(), 2, 4, select, mask, factor, BF16, True, bool(to.values_t), "wgmma.sp", bool(to.dense))
    testing.assert_equal_bits([x.cpu() for x in pieces if x is not None], [x for x in want if x.numel()])
    assert check(6) == 6  # the mark of the check that found it stays


@for_each("recipe", ["srste", "sste", "fst"])
def test_training_is_the_same_to_the_bit(recipe, device, monkeypatch):
    """Whether steps write the forms, or forward passes make them, for all weights at once or each for itself; on the path of GPUs."""
    if device == "cpu":
        monkeypatch.setattr("nmkernels.nn.effective.fingerprint", lambda *tensors: None)
        monkeypatch.setattr("nmkernels.nn.effective.readable", lambda weight: False)
        monkeypatch.setattr("nmkernels.optim.adamw.in_one_pass", lambda args: True)
        monkeypatch.setattr("nmkernels.optim.adamw.nm_masked_adamw_pack_", partial(nm_masked_adamw_pack_, backend="cuda-emulated"))
        monkeypatch.setattr("nmkernels.train.ahead.nm_pack_forms_", partial(nm_pack_forms_, backend="cuda-emulated"))

    def trained(forms: str, at_once: bool) -> tuple[list[Tensor], int, int]:
        torch.manual_seed(0)
        chances, whole = [], ahead.in_one_pass

        def chosen_kernel(*args: Any) -> bool:
            chances.append(at_once and (device == "cpu" or whole(*args)))
            return chances[-1]

        monkeypatch.setattr(ahead, "in_one_pass", chosen_kernel)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
        chosen = nm.recipes.get(f"{recipe}:2:4", packed=True, total_steps=100, **({"mvue": None} if recipe != "srste" else {}))
        handle = nm.sparsify_(model, chosen, filter_fn=lambda module, name: True)
        optimizer = handle.attach(chosen.optimizer(model.parameters(), lr=1e-2), forms=forms)
        packed = 0
        for _ in range(5):
            with torch.autocast(device, torch.bfloat16):
                loss = model(torch.randn(32, 64, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            packed += len(optimizer.packed)
        monkeypatch.setattr(ahead, "in_one_pass", whole)
        return [p.detach().clone() for p in model.parameters()], packed, sum(chances)

    want, *none = trained("forward", False)
    got, *packed = trained("step", False)
    also, *many = trained("forward", True)
    assert none == [0, 0] and packed[0] == 10 and many[0] == 0 and many[1]
    testing.assert_equal_bits(got, want)
    testing.assert_equal_bits(also, want)


@for_each("select, parts", WAYS)
def test_many_weights_in_one_launch(select, parts, ours, device):
    """Each has the reference's bits, at any address; with a held mask the indices may be left as they are."""
    entry = ours("nm_pack_forms_")
    for layout in ("canonical", "mma.sp", "wgmma.sp"):
        torch.manual_seed(4)
        args = list(pack_forms(select, layout, shapes=((64, 64), (128, 192), (192, 64), (64, 256)), **parts))
        args[10][1] = torch.cat([torch.zeros(1), args[10][1].flatten()])[1:].view(128, 192)
        args[5][2] = torch.cat([args[5][2].new_zeros(1), args[5][2].flatten()])[1:].view(args[5][2].shape)
        assert entry.supports(*moved(args, device))[0]
        for kept in (False, True) if select == "held" else (False,):
            if kept:
                args[6], args[8] = [], []
                args[10] = [w * 2 for w in args[10]]
            want, got = copied(args, "cpu"), moved(args, device)
            reference.pack_forms_(*want)
            entry.fn(*got)
            testing.assert_equal_bits(tensors(got), tensors(want))


def test_packing_alone_leaves_the_rest_to_others(ours, device):
    entry = ours("nm_pack_forms_")

    def says(word: str, args: Any) -> None:
        can, why = entry.supports(*moved(args, device))
        assert not can and word in why, why

    args = pack_forms("held", "canonical")
    says("multiples of 64", pack_forms("magnitude", "canonical", shapes=((64, 60),)))
    says("2:4", (1, *args[1:]))
    says("contiguous bits", (*args[:-1], [x.t().contiguous().t() for x in args[-1]]))
    says("float32", (*args[:10], [x.bfloat16() for x in args[10]], args[11]))
