"""Lightning's Trainer with the callback ``Sparsity``: as a plain loop, resumed to the bit, logged, evaluated as it would be deployed."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from python_tests.distributed.ranks import needs_gloo, on_ranks
from python_tests.recipes.loop import Adam, batches, distance, loss_of, mlp, snapshot
from python_tests.recipes.training import train

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
import lightning.pytorch as L
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import Logger
from lightning.pytorch.tuner import Tuner

from nmkernels.integrations.lightning import Sparsity

R = nm.recipes
STEPS = 8
RECIPES = {
    "step": R.STEP("2:4", t_min=2, t_max=6, threshold=1e-30),
    "asp": R.ASP("2:4", start=3),
    "srste": R.SRSTE("2:4", decay=1e-2),
    "sste": R.SSTE("2:4"),
    "slope": R.SLoPe("2:4", total_steps=STEPS, rank=2, start=5),
}
KEYWORDS = Adam(lr=1e-2).keywords
DATA = batches(STEPS // 2, torch.float32)
"""An epoch: a plain loader does not go on in the middle of one."""


@pytest.fixture(autouse=True, scope="module")
def _quick():
    """The search for a batch size collects garbage at each size, which looks at every object of every library."""
    gc.freeze()
    yield
    gc.unfreeze()


class Net(L.LightningModule):
    """Makes its optimizer and logs its loss, as people write it; ``late`` ones make their layers and data only in the hooks."""

    def __init__(self, kind: type[torch.optim.Optimizer] = MaskedAdamW, late: bool = False) -> None:
        super().__init__()
        self.kind, self.late, self.seen = kind, late, []
        self.inner = nn.ModuleList() if late else mlp(torch.float32)
        self.data = None

    def setup(self, stage: str) -> None:
        self.data = DATA

    def configure_model(self) -> None:
        if self.late and not len(self.inner):
            self.inner = mlp(torch.float32)
        self.configured = [type(module) for module in self.inner]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = loss_of(self.inner, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append((self.inner[2].effective_weight() != 0).double().mean().item())
        self.log("val", loss_of(self.inner, batch))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), **KEYWORDS)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=None)

    val_dataloader = test_dataloader = train_dataloader


class Kept(Logger):
    """Keeps what is logged."""

    name = version = "kept"

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of that."""


def trainer_of(folder: Path, *callbacks: Any, **given: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    fixed = {"accelerator": "cpu", "devices": 1, "max_steps": STEPS, "limit_val_batches": 0, "enable_checkpointing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**fixed, **quiet, **given})


def fit(trainer: Any, net: Net, **given: Any) -> Net:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net, **given)
    return net


def is_pruned(net: Net) -> bool:
    return all(isinstance(net.inner[i], nm.SparseLinear) and nm.ops.is_nm(net.inner[i].weight, "2:4") for i in (0, 2))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [MaskedAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("name", RECIPES)
def test_fitting_and_resuming_is_a_plain_loop(tmp_path, name, kind):
    """Its optimizers step by a closure, in which the backward pass is."""
    recipe = RECIPES[name]
    if recipe.setup.optimizer is not None and kind is torch.optim.AdamW:
        with pytest.raises(nm.RecipeError, match="freezes the second moment, which AdamW cannot.*nm.optim.MaskedAdamW"):
            fit(trainer_of(tmp_path, Sparsity(recipe)), Net(kind))
        return
    want = Net(kind)
    handle = nm.sparsify_(want, recipe)
    train(want.inner, handle.attach(kind(want.parameters(), **KEYWORDS)), DATA * 2)
    expected = handle.metrics()

    saver = L.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    first = Sparsity(recipe, finish=False)
    net = fit(trainer_of(tmp_path, saver, first, enable_checkpointing=True), Net(kind))
    assert not first.handle.finished and distance(snapshot(net), snapshot(want)) == 0.0
    for key, value in first.handle.metrics().items():
        assert value.item() == expected[key].item(), key
    second, other = Sparsity(recipe), Net(kind)
    fit(trainer_of(tmp_path, second), other, ckpt_path=str(tmp_path / "step=4.ckpt"))
    assert second.handle.finished and is_pruned(other)
    first.handle.finish()
    handle.finish()
    for done in (net, other):
        assert distance(snapshot(done), snapshot(want)) == 0.0


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self.inner, batch))
        optimizer.step()


@pytest.mark.parametrize("how", ["manual", "accumulated"])
def test_other_kinds_of_steps(tmp_path, how):
    """By hand; and with accumulation and clipping, both of Lightning."""
    recipe, want = RECIPES["step"], Net()
    handle = nm.sparsify_(want, recipe)
    optimizer = handle.attach(MaskedAdamW(want.parameters(), **KEYWORDS))
    sparsity = Sparsity(recipe)
    if how == "manual":
        net = fit(trainer_of(tmp_path, sparsity), Manual())
        train(want.inner, optimizer, DATA * 2)
    else:
        net = fit(trainer_of(tmp_path, sparsity, accumulate_grad_batches=2, gradient_clip_val=0.1), Net())
        for i in range(STEPS):
            optimizer.zero_grad()
            for batch in DATA[2 * i % 4 :][:2]:
                (loss_of(want.inner, batch) / 2).backward()
            torch.nn.utils.clip_grad_norm_(want.parameters(), 0.1)
            optimizer.step()
    handle.finish()
    assert distance(snapshot(net), snapshot(want)) == 0.0


def on_a_rank(folder: str) -> dict[str, list[Any]]:
    """For each recipe the weights of an uninterrupted run, those of a resumed one, and the last phase."""
    rank, found = dist.get_rank(), {}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="of the test")  # the processes are there

    class Half(Net):
        def train_dataloader(self) -> Any:
            return DataLoader([tuple(part.chunk(2)[rank] for part in batch) for batch in DATA], batch_size=None)

    for name in ("step", "asp"):
        out, given = Path(folder, name), {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
        saver = L.callbacks.ModelCheckpoint(out, "{step}", every_n_train_steps=4, save_top_k=-1)
        one, two = Sparsity(RECIPES[name], finish=False), Sparsity(RECIPES[name], finish=False)
        whole = fit(trainer_of(out, saver, one, enable_checkpointing=True, **given), Half())
        resumed = fit(trainer_of(out, two, **given), Half(), ckpt_path=str(out / "step=4.ckpt"))
        found[name] = [snapshot(whole), snapshot(resumed), two.handle.metrics()["phase"].item()]
    return found


@needs_gloo
@pytest.mark.slow  # two processes
def test_ddp(tmp_path):
    first, second = on_ranks(2, on_a_rank, tmp_path, str(tmp_path))
    for name, (weights, resumed, phase) in first.items():
        want = Net()
        handle = nm.sparsify_(want, RECIPES[name])
        train(want.inner, handle.attach(MaskedAdamW(want.parameters(), **KEYWORDS)), DATA * 2)
        assert phase == handle.metrics()["phase"] > 0
        for other in (resumed, *second[name][:2]):
            assert distance(other, weights) == 0.0
        assert distance(weights, snapshot(want)) < 1e-6, "half a batch each"


def test_metrics_are_logged(tmp_path):
    kept, sparsity = Kept(), Sparsity("mdgf:2:4(end=0.75)", finish=False)
    trainer = trainer_of(tmp_path, sparsity, logger=kept, log_every_n_steps=4)
    fit(trainer, Net())
    assert sparsity.handle.recipe.total_steps == STEPS
    want = {f"nm/{name}": pytest.approx(value.item(), rel=1e-6) for name, value in sparsity.handle.metrics().items()}
    assert [step for step, _ in kept.rows] == [3, 7] and want["nm/density"] == 0.5
    assert {key: kept.rows[-1][1][key] for key in want} == want and kept.rows[0][1]["nm/density"] == 1.0
    assert {key: trainer.callback_metrics[key].item() for key in want} == want


def test_evaluation_is_of_what_finish_would_leave(tmp_path):
    sparsity, net = Sparsity("asp:2:4(start=7)", finish=False), Net()
    trainer = trainer_of(tmp_path, sparsity, limit_val_batches=1, limit_test_batches=1, val_check_interval=2, num_sanity_val_steps=1)
    fit(trainer, net)
    assert net.seen == [0.5] * 5, "before the first step, and in the dense phase"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.seen.clear()
        trainer.test(net, verbose=False)
    assert net.seen == [0.5]
    # without the callback, evaluation changes nothing of the training
    other = Sparsity("asp:2:4(start=7)", finish=False)
    assert distance(snapshot(fit(trainer_of(tmp_path, other), Net())), snapshot(net)) == 0.0
    assert sparsity.handle.metrics()["phase"] == 2.0


def test_an_evaluation_that_breaks_off_leaves_training_as_it_was(tmp_path):
    class Broken(Net):
        def validation_step(self, batch: Any, index: int) -> None:
            super().validation_step(batch, index)
            raise KeyError("of the user")

    sparsity, net = Sparsity("asp:2:4(start=7)"), Broken()
    with pytest.raises(KeyError, match="of the user"):
        fit(trainer_of(tmp_path, sparsity, limit_val_batches=1, val_check_interval=2), net)
    assert net.seen == [0.5] and not sparsity.handle.finished
    assert (net.inner[2].effective_weight() != 0).all()


@pytest.mark.parametrize("recipe", ["srste:2:4", "asp:2:4(start=5)"])
def test_the_best_checkpoint_is_finished_by_hand(tmp_path, recipe):
    """With the state of its optimizer, which has the masks of its weights."""
    saver = L.callbacks.ModelCheckpoint(tmp_path, monitor="val", mode="max", every_n_train_steps=0, every_n_epochs=1)
    sparsity, net = Sparsity(recipe, finish=False), Net()
    given = {"max_steps": -1, "max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 2, "enable_checkpointing": True}
    trainer = trainer_of(tmp_path, saver, sparsity, **given)
    fit(trainer, net)
    saved = torch.load(saver.best_model_path)
    assert not nm.ops.is_nm(saved["state_dict"]["inner.2.weight"], "2:4"), "training goes on from there"
    assert trainer.global_step == 6 and saved["global_step"] < 5
    net.load_state_dict(saved["state_dict"])
    trainer.optimizers[0].load_state_dict(saved["optimizer_states"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an end in the dense phase
        sparsity.handle.finish()
    assert is_pruned(net)
    with torch.no_grad():
        loss = sum(loss_of(net.inner, batch) for batch in DATA[:2]) / 2
    assert loss.item() == pytest.approx(saver.best_model_score.item(), rel=1e-6)


def test_layers_are_swapped_once_they_are_there(tmp_path):
    """After configure_model where that makes them, else before it, as it may shard them."""
    net = fit(trainer_of(tmp_path, Sparsity("srste:2:4")), Net())
    assert net.configured == [nm.SparseLinear, nn.GELU, nm.SparseLinear, nn.GELU, nn.Linear]
    sparsity, net = Sparsity("srste:2:4", filter_fn=lambda module, name: name == "inner.2"), Net(late=True)
    fit(trainer_of(tmp_path, sparsity), net)
    assert "configure_model" not in vars(net) and list(sparsity.handle.layers) == ["inner.2"]
    assert net.configured == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert nm.ops.is_nm(net.inner[2].weight, "2:4") and not nm.ops.is_nm(net.inner[0].weight, "2:4")


# ---- searches before training, several fits, and the end


class Tunable(Net):
    """With what Lightning's tuners change."""

    def __init__(self, recipe: R.Recipe = RECIPES["srste"]) -> None:
        super().__init__(recipe.optimizer)
        self.lr, self.batch_size = 1e-2, 2

    def train_dataloader(self) -> Any:
        x, y = (torch.cat(part) for part in zip(*DATA, strict=True))
        return DataLoader(list(zip(x, y, strict=True)), batch_size=self.batch_size)


class Midway(LearningRateFinder):
    """Searches before the second epoch."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            rates = [[group["lr"] for group in o.param_groups] for o in trainer.optimizers]
            self.lr_find(trainer, pl_module)
            for optimizer, lrs in zip(trainer.optimizers, rates, strict=True):
                for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                    group["lr"] = lr


SEARCHED = {"srste": RECIPES["srste"], "asp": R.ASP("2:4"), "sste": R.SSTE("2:4", mvue=None, seed=1), "step": RECIPES["step"]}


@pytest.mark.quick(1, per=["how"])
@pytest.mark.parametrize("how", ["Tuner.lr_find", "Tuner.scale_batch_size", "LearningRateFinder", "BatchSizeFinder", "midway"])
@pytest.mark.parametrize("name", SEARCHED)
def test_a_search_before_training_changes_nothing(tmp_path, name, how):
    recipe, given = SEARCHED[name], {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 4}
    want = fit(trainer_of(tmp_path, Sparsity(recipe), **given), Tunable(recipe))
    sparsity, net = Sparsity(recipe), Tunable(recipe)
    lr, size = {"num_training_steps": 3, "update_attr": False}, {"max_trials": 2, "init_val": 1}
    finders = {"LearningRateFinder": LearningRateFinder(**lr), "BatchSizeFinder": BatchSizeFinder(**size), "midway": Midway(**lr)}
    trainer = trainer_of(tmp_path, sparsity, *([finders[how]] if how in finders else []), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "Tuner.lr_find":
            Tuner(trainer).lr_find(net, num_training=3, update_attr=False)
        elif how == "Tuner.scale_batch_size":
            Tuner(trainer).scale_batch_size(net, **size)
    assert sparsity.handle is None or not sparsity.handle.finished
    fit(trainer, net)
    assert net.batch_size == 2 and sparsity.handle.finished
    assert distance(snapshot(net), snapshot(want)) == 0.0


def test_steps_are_those_after_the_search(tmp_path):
    given = {"max_steps": -1, "max_epochs": 2}
    sparsity, net = Sparsity("mdgf:2:4"), Tunable()
    trainer = trainer_of(tmp_path, sparsity, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Tuner(trainer).scale_batch_size(net, max_trials=2, init_val=2)
    assert net.batch_size == 4 and sparsity.handle.recipe.total_steps == trainer.estimated_stepping_batches * 2
    fit(trainer, net)
    assert sparsity.handle.recipe.total_steps == trainer.global_step and sparsity.handle.finished
    with pytest.raises(nm.RecipeError, match="made for .* steps, and now the trainer counts .*total_steps"):
        fit(trainer_of(tmp_path, Sparsity("mdgf:2:4"), BatchSizeFinder(max_trials=2, init_val=2), **given), Tunable())


@pytest.mark.parametrize("name", ["srste", "asp", "slope"])
def test_a_further_fit_goes_on(tmp_path, name):
    """With new optimizers, as Lightning has it."""
    want = Net()
    handle = nm.sparsify_(want, RECIPES[name])
    for _ in range(2):
        optimizer = handle.attach(MaskedAdamW(want.parameters(), **KEYWORDS))
        train(want.inner, optimizer, DATA)
        handle.detach(optimizer)
    sparsity, net = Sparsity(RECIPES[name], finish=False), Net()
    for _ in range(2):
        trainer = trainer_of(tmp_path, sparsity, max_steps=STEPS // 2)
        fit(trainer, net)
    for done in (handle, sparsity.handle):
        done.finish()
    assert distance(snapshot(net), snapshot(want)) == 0.0 and is_pruned(net)


def test_a_further_fit_resumes_from_a_checkpoint(tmp_path):
    """Of the same callback and module too, with second moments that STEP has frozen; without a checkpoint the new optimizer has none."""
    saver = L.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    sparsity, net = Sparsity(RECIPES["step"], finish=False), Net()
    fit(trainer_of(tmp_path, saver, sparsity, enable_checkpointing=True), net)
    want = snapshot(net)
    with pytest.raises(nm.RecipeError, match="frozen the second moment.*ckpt_path"):
        fit(trainer_of(tmp_path, sparsity), net)
    fit(trainer_of(tmp_path, sparsity), net, ckpt_path=str(tmp_path / "step=4.ckpt"))
    assert distance(snapshot(net), want) == 0.0


def test_a_finished_module_is_refused_before_anything_is_loaded(tmp_path):
    saver = L.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    sparsity, net = Sparsity("srste:2:4"), Net()
    trainer = trainer_of(tmp_path, saver, sparsity, enable_checkpointing=True)
    fit(trainer, net)
    for given in ({}, {"ckpt_path": str(tmp_path / "step=4.ckpt")}):
        with pytest.raises(nm.RecipeError, match="has finished.*finish=False.*score='existing'"):
            fit(trainer, net, **given)
    assert is_pruned(net)
    other = fit(trainer_of(tmp_path, sparsity), Net())  # a module of its own
    assert is_pruned(other) and sparsity.handle.model is other
    zeros = net.inner[0].weight == 0
    nm.densify_(net)
    fit(trainer_of(tmp_path, Sparsity(R.ASP("2:4", score="existing"))), net)
    assert torch.equal(net.inner[0].weight == 0, zeros)


def test_a_fit_that_failed_at_its_beginning_can_be_repeated(tmp_path):
    class Late(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            raise KeyError("of another callback")

    sparsity, net = Sparsity("step:2:4"), Net(torch.optim.AdamW)
    with pytest.raises(KeyError, match="of another callback"):
        fit(trainer_of(tmp_path, sparsity, Late()), net)
    assert "configure_model" not in vars(net)
    with pytest.raises(nm.RecipeError, match="freezes the second moment, which AdamW cannot"):
        fit(trainer_of(tmp_path, sparsity), net)
    net.kind = MaskedAdamW
    fit(trainer_of(tmp_path, sparsity), net)
    assert is_pruned(net)


def test_the_end_of_a_fit_keeps_the_run(tmp_path):
    class Spare(Net):
        def __init__(self, diverges: bool) -> None:
            super().__init__()
            self.spare, self.diverges = nn.Linear(16, 16), diverges

        def on_train_end(self) -> None:
            if self.diverges:
                self.inner[2].weight.data[0, 0] = torch.nan

    for diverges in (False, True):
        sparsity, net = Sparsity("srste:2:4"), Spare(diverges)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer_of(tmp_path, sparsity).fit(net)
        said = "\n".join(str(w.message) for w in caught)
        assert "never ran and are pruned like the others: spare" in said
        assert sparsity.handle.finished != diverges and ("could not be finished" in said) == diverges
        assert diverges or is_pruned(net)
        if diverges:
            assert "'inner.2' has NaN or infinite values" in said and torch.isnan(net.inner[2].weight).sum() == 1
            assert not nm.ops.is_nm(net.inner[0].weight, "2:4"), "as it was trained"
            with torch.no_grad():
                net.inner[2].weight[0, 0] = 0.0
            sparsity.handle.finish()
            assert is_pruned(net)


@pytest.mark.parametrize(
    ("recipe", "sparsity_first", "added"),
    [("srste:2:4", False, ""), ("sste:2:4", True, ""), ("sste:2:4", False, "nm_scale"), ("mdgf:2:4", True, "nm_flow")],
)
def test_an_average_of_the_module(tmp_path, recipe, sparsity_first, added):
    """Lightning's copies the module before it is trained, and pairs parameters and buffers by position."""
    fit(trainer_of(tmp_path, L.callbacks.EMAWeightAveraging(decay=0.5), Sparsity(recipe)), alone := Net())
    assert is_pruned(alone), "without buffers of its own all pairs are right"
    sparsity, average, net = Sparsity(recipe), L.callbacks.EMAWeightAveraging(decay=0.5), Net()
    net.inner[4].register_buffer("count", torch.zeros(3))
    trainer = trainer_of(tmp_path, *([sparsity, average] if sparsity_first else [average, sparsity]))
    if added:
        with pytest.raises(nm.RecipeError, match=f"added 'inner.0.{added}' to it. List Sparsity before it; if it is, average"):
            fit(trainer, net)
        trainer = trainer_of(tmp_path, sparsity)
    fit(trainer, net)
    assert is_pruned(net)


def test_what_cannot_work_is_refused(tmp_path):
    for name, way in (("FSDPStrategy", "ModelParallelStrategy"), ("DeepSpeedStrategy", "flat copies")):
        trainer = SimpleNamespace(strategy=type(name, (), {})())
        with pytest.raises(nm.RecipeError, match=f"fit: {name} .*{way}"):
            Sparsity("srste:2:4").setup(trainer, Net(), "fit")
    endless = trainer_of(tmp_path, Sparsity("mdgf:2:4"), max_steps=-1, max_epochs=-1)
    with pytest.raises(nm.RecipeError, match="neither max_steps nor a known length"):
        fit(endless, Net())
    with pytest.raises(nm.RecipeError, match="no recipe is called 'srst'"):
        fit(trainer_of(tmp_path, Sparsity("srst:2:4")), Net())
