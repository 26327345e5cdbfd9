"""A captured step is the eager one: on the CPU, where ``fake_graph`` stands for CUDA's graphs."""

import contextlib
import copy
import sys
import warnings

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels import testing
from python_tests.recipes.loop import Adam, loss_of
from python_tests.recipes.roster import ROSTER
from python_tests.recipes.training import DATA32, F32, start
from python_tests.train.fake_graph import captured, fake_graphs

ENTRIES = pytest.mark.parametrize("entry", ROSTER.values(), ids=ROSTER.keys())
METHODS = pytest.mark.parametrize("key", ["srste", "sste", "step", "fst", "asp", "slope", "mdgf", "sdgf", "maskllm"])
SWITCHED = pytest.mark.filterwarnings("ignore:STEP. AutoSwitch")
WARM_UP = 2


@pytest.fixture(autouse=True)
def fake(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        fake_graphs(monkeypatch)


class Training:
    """A run of a recipe of the roster; ``eager`` is its step, and ``step`` that or the captured one."""

    def __init__(self, key, capture, scaled=False, **keywords):
        recipe = ROSTER[key].recipe if isinstance(key, str) else key
        self.model, self.handle, self.optimizer = start(recipe, F32, **{"capturable": True, **keywords})
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=scaled)
        self.step = self.captured = nm.recipes.CapturedStep(self.handle, self.eager, WARM_UP) if capture else None
        self.step = self.captured or self.eager

    def eager(self, x, y):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, (x, y))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def seen(self):
        """Everything that can be seen of the run."""
        state = self.optimizer.state_dict()
        text = [group.pop("nm_recipe") for group in state["param_groups"] if "nm_recipe" in group]
        return text, [self.handle.metrics(), self.handle.state_dict(), state["state"], self.model.state_dict(), self.scaler.state_dict()]


def train(runs, data, between=lambda t, run: None):
    """Train every run on ``data``; they stay the same. Returns how many steps of the last one were replays."""
    replays = 0
    for t, batch in enumerate(data):
        losses = []
        for run in runs:
            losses.append(run.step(*batch))
            between(t, run)
        testing.assert_equal_bits(losses, losses[:1] * len(losses), f"loss of step {t}")
        replays += runs[-1].captured is not None and runs[-1].captured.captured
        testing.assert_equal_bits(runs[-1].seen(), runs[0].seen(), f"after step {t}")
    return replays


@pytest.mark.quick(1, per="entry.recipe.name")
@ENTRIES
@SWITCHED
def test_replays_are_the_eager_steps(entry):
    """Over renewals and changes of phase: weights, moments, masks, metrics and checkpoints, after each step."""
    runs = [Training(entry.recipe, capture) for capture in (False, True)]
    assert train(runs, DATA32) >= len(DATA32) // 2


@METHODS
@SWITCHED
def test_skipped_steps_and_a_schedule_of_the_learning_rate(key):
    runs = [Training(key, capture, scaled=True, lr=torch.tensor(Adam().lr)) for capture in (False, True)]
    schedules = {id(run): torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.1, 20) for run in runs}
    data = [(x * (torch.inf if t % 4 == 1 else 1.0), y) for t, (x, y) in enumerate(DATA32)]
    assert train(runs, data, lambda t, run: schedules[id(run)].step()) >= 8
    assert runs[1].handle.metrics()["flip_rate"].isfinite()


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda make: make.__name__)
@pytest.mark.parametrize("key", ["srste", "fst", "asp"])
def test_torchs_optimizers(key, make, monkeypatch):
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda **keywords: ["cpu"])

    def built(params, lr, weight_decay, capturable, **keywords):
        own = {"momentum": 0.9} if make is torch.optim.SGD else {"capturable": capturable, **keywords}
        return make(params, lr=lr, weight_decay=weight_decay, foreach=False, **own)

    assert train([Training(key, capture, make=built) for capture in (False, True)], DATA32) >= 16


@pytest.mark.parametrize("key", ["step", "fst", "asp", "sste"])
@SWITCHED
def test_eager_steps_between_replays(key):
    """Smaller batches by the step itself, steps of one layer, and evaluations; metrics of a step stay what they were."""
    runs = [Training(key, capture) for capture in (False, True)]

    metrics, copied = {}, {}

    def of_one_layer(run, x):
        run.optimizer.zero_grad()
        loss = run.model[0](x).square().mean()
        loss.backward()
        run.optimizer.step()
        return loss

    for t, (x, y) in enumerate(DATA32):
        losses = [of_one_layer(run, x) if t % 8 == 5 else run.eager(x[:3], y[:3]) if t % 8 == 3 else run.step(x, y) for run in runs]
        for run in runs if t % 4 == 1 else ():
            losses.append(run.model(x))
            with run.handle.deployable() if t > 1 else contextlib.nullcontext():
                losses.append(run.model(x))
        testing.assert_equal_bits([losses[0], *losses[2:4]], [losses[1], *losses[4:]], f"step {t}")
        testing.assert_equal_bits(runs[1].seen(), runs[0].seen(), f"after step {t}")
        testing.assert_equal_bits(metrics, copied, f"metrics of step {t - 1}")
        metrics = runs[1].handle.metrics()
        copied = copy.deepcopy(metrics)
    assert runs[1].captured.captured


@pytest.mark.parametrize("key", ["srste", "sste"])
def test_a_graph_reads_no_effective_weight_from_before_it(key):
    weights = []
    for capture in (False, True):  # one after the other: an optimizer that steps has every other model make its weights again
        run = Training(key, capture)
        for t, (x, y) in enumerate(DATA32[:8]):
            (run.eager if t == 5 else run.step)(x, y)
            if t == WARM_UP - 1:
                run.model(x)
        weights.append(dict(run.model.state_dict()))
        run.handle.detach(run.optimizer)
    testing.assert_equal_bits(*weights)


@pytest.mark.parametrize("key", ["step", "fst", "asp", "sste"])
@pytest.mark.parametrize("change", ["renew_masks", "checkpoint", "handle", "moments", "group"])
@SWITCHED
def test_what_changes_memory_is_captured_again(key, change):
    def changed(t, run, saved={}):  # noqa: B006
        if change == "group" and t == 10:
            run.optimizer.add_param_group({"params": [list(run.model.parameters())[-1]], "lr": torch.tensor(1e-2)})
        if t == 4:
            saved[run] = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.handle.state_dict()))
        if t == 10 and change == "renew_masks":
            run.handle.renew_masks()
        if t == 10 and change == "checkpoint":
            run.model.load_state_dict(saved[run][0])
            run.optimizer.load_state_dict(saved[run][1])
        if t == 10 and change == "handle":
            run.handle.load_state_dict(saved[run][2])
        if t == 10 and change == "moments":
            for state in run.optimizer.state.values():
                state["exp_avg"] = state["exp_avg"] * 0.5

    def without_bias(params, **keywords):
        params = list(params)
        return nm.optim.MaskedAdamW([p for p in params if change != "group" or p is not params[-1]], **keywords)

    runs = [Training(key, capture, make=without_bias) for capture in (False, True)]
    assert train(runs, DATA32, changed) >= 10


@pytest.mark.parametrize("steps", [WARM_UP, 5])
def test_a_write_to_pruned_weights_is_noticed_before_a_replay(steps):
    runs = [Training("asp", capture) for capture in (False, True)]
    train(runs, DATA32[:steps])
    for run in runs:
        run.model[0].load_state_dict({name: value + 1.0 for name, value in run.model[0].state_dict().items()})
        with pytest.warns(UserWarning, match="not zero outside their held masks"):
            run.step(*DATA32[5])
    assert runs[1].captured.captured
    testing.assert_equal_bits(runs[1].seen(), runs[0].seen())


def test_arguments_and_results():
    run = Training("srste", True)

    def step(batch, factor, *, optimizer=run.optimizer):
        loss = loss_of(run.model, (batch["x"], batch["y"])) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "factor": factor}

    captured = nm.recipes.CapturedStep(run.handle, step, warm_up=1)
    batches = [{"x": x, "y": y} for x, y in DATA32[:4]]
    losses = [captured(batch, 2.0)["loss"] for batch in batches]
    assert captured.captured and len({loss.item() for loss in losses}) == 4 and not any(loss.requires_grad for loss in losses)
    with pytest.raises(nm.ShapeError, match=r"fixed sizes: .*2.0 at the first call, and .*3.0 now"):
        captured(batches[0], 3.0)
    with pytest.raises(nm.ShapeError, match="call the step itself"):
        captured({"x": DATA32[0][0][:2], "y": DATA32[0][1][:2]}, 2.0)
    with pytest.raises(nm.RecipeError, match="requires a gradient"):
        captured({"x": DATA32[0][0].clone().requires_grad_(), "y": DATA32[0][1]}, 2.0)


# ---- what cannot be captured


def test_refused_optimizers():
    x, y = DATA32[0]
    with pytest.raises(nm.RecipeError, match="capturable=True"):
        Training("srste", True, capturable=False).step(x, y)
    with pytest.raises(nm.RecipeError, match="a tensor on meta, which a graph cannot read"):
        run = Training("srste", True)
        run.optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="meta")
        run.step(x, y)
    run = Training("srste", True)
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 1.0, 0.1, 20)
    for _ in range(WARM_UP + 1):
        run.step(x, y)
    before = copy.deepcopy(run.model.state_dict())
    schedule.step()
    with pytest.raises(nm.RecipeError, match=r"param_groups\[0\]\['lr'\] is .* now and was .* at the capture"):
        run.step(x, y)
    testing.assert_equal_bits(dict(run.model.state_dict()), dict(before))


def test_refused_steps(monkeypatch):
    run = Training("srste", True)
    with monkeypatch.context() as patch, pytest.raises(nm.RecipeError, match="sharded weights"):
        patch.setattr(type(run.handle.run), "sharded", True)
        run.step(*DATA32[0])
    x, y = DATA32[0]

    def of(step):
        captured = nm.recipes.CapturedStep(run.handle, step, warm_up=1)
        captured(x, y)
        return captured(x, y)

    with pytest.raises(nm.RecipeError, match="waits for the GPU"):
        of(lambda x, y: run.eager(x, y).item())
    with pytest.raises(nm.RecipeError, match="no attached optimizer"):
        of(lambda x, y: loss_of(run.model, (x, y)).backward())
    with pytest.raises(nm.RecipeError, match="more than once"):
        of(lambda x, y: (run.eager(x, y), run.eager(x, y)))
    assert torch.is_tensor(of(run.eager)), "after a failure it can be captured"
    with pytest.raises(nm.RecipeError, match="warm_up=0"):
        nm.recipes.CapturedStep(run.handle, run.eager, warm_up=0)
    captured = nm.recipes.CapturedStep(run.handle, run.eager)
    run.handle.detach(run.optimizer)
    with pytest.raises(nm.RecipeError, match="handle.attach"):
        captured(x, y)
    run.handle.finish()
    with pytest.raises(nm.RecipeError, match="finished"):
        captured(x, y)


def test_a_graph_of_ones_own_does_not_advance_the_schedule():
    for key, warns in (("srste", False), ("fst", True)):
        run, graph = Training(key, False), torch.cuda.CUDAGraph()
        run.step(*DATA32[0])
        with warnings.catch_warnings(record=True) as seen, captured(graph):
            warnings.simplefilter("always")
            run.step(*DATA32[1])
        assert any("CapturedStep" in str(warning.message) for warning in seen) == warns


def test_on_a_cpu_every_call_is_eager(monkeypatch):
    monkeypatch.undo()
    run = Training("srste", True, capturable=False)
    for batch in DATA32[:5]:
        run.step(*batch)
    assert not run.captured.captured


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", ["srste:2:4", "sste:2:4(seed=0)", "fst:2:4(every=3, seed=0)", "step:2:4(switch=fixed, start=8)", "asp:2:4(start=8)"]
)
def test_on_a_gpu(recipe):
    """Up to what cuBLAS rounds otherwise in a graph."""
    weights, replays = [], 0
    for capture in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda()
        handle = nm.sparsify_(model, nm.recipes.get(recipe, total_steps=24))
        lr = torch.tensor(1e-3, device="cuda")
        optimizer = handle.attach(handle.recipe.optimizer(model.parameters(), lr=lr, capturable=True))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)

        def step(x, model=model, optimizer=optimizer):
            with torch.autocast("cuda", torch.bfloat16):
                loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = nm.recipes.CapturedStep(handle, step) if capture else step
        losses = []
        for t in range(24):
            torch.manual_seed(t)
            losses.append(run(torch.randn(512, 512, device="cuda")))
            schedule.step()
            replays += capture and run.captured
        weights.append((torch.stack(losses).detach(), handle.metrics()["density"], model[0].weight.detach()))
        handle.detach(optimizer)
    assert replays >= 12
    torch.testing.assert_close(*weights, rtol=1e-2, atol=1e-2)
