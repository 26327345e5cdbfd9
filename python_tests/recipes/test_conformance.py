"""What every recipe must do, run for each entry of the roster."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import nmkernels as nm
from nmkernels.nn.adapter import ADAPTER
from nmkernels.recipes.compose import deployed
from python_tests.copy_model import COPY_METHODS, copy_model
from python_tests.recipes import training
from python_tests.recipes.loop import Adam, distance, loss_of, mlp, snapshot
from python_tests.recipes.roster import ROSTER, STEPS, SWITCH
from python_tests.recipes.training import DATA, DATA32, F32, metrics_of, net, optimizer_of, run, start, step, through_a_file

ENTRIES = pytest.mark.parametrize("entry", ROSTER.values(), ids=ROSTER.keys())
FIRST = {entry.recipe.name: key for key, entry in reversed(ROSTER.items())}
KEYS = [*FIRST.values(), "step_sste", "step_layerwise", "step_asp", "layerwise_sdgf", "asp_permute_late", "sste_packed", "fst_packed"]
KINDS = pytest.mark.parametrize("entry", [ROSTER[key] for key in KEYS], ids=KEYS)
"""One entry of each recipe, and those that keep another kind of state or multiply packed weights."""

FUSED = functools.partial(torch.optim.AdamW, fused=True)
ENDING = pytest.mark.filterwarnings("ignore:finish. the recipe")


# ---- the method


@pytest.mark.quick(1, per="entry.recipe.name")
@ENTRIES
def test_trajectory(entry):
    model, handle, optimizer = start(entry.recipe)
    params = {**snapshot(mlp()), **training.learned_part(model)}
    streams = {f"{name}.weight": int(layer.seed[0]) for name, layer in handle.layers.items()} if entry.draws else None
    training.train(model, optimizer, DATA)
    assert distance(snapshot(model), entry.loop(params, DATA, streams)) < 1e-10
    assert SWITCH.t_max < STEPS / 2, "the switch lies inside"


@pytest.mark.quick(3)
@KINDS
def test_fp32_agrees_with_float64(entry):
    if entry.tied:
        pytest.skip("rounding decides between equal scores")
    model, _, _ = run(entry.recipe, F32, DATA32)
    want, _, _ = run(entry.recipe, data=[(x.double(), y.double()) for x, y in DATA32])
    # a flipped choice of the sampler or the mask near a tie changes a step; those are single and small
    assert distance(snapshot(model), snapshot(want)) < (2e-2 if entry.draws else 1e-4)


@pytest.mark.quick(3)
@KINDS
def test_accumulation_is_the_whole_batch(entry):
    if entry.draws:
        pytest.skip("other microbatches draw other estimates")
    assert distance(snapshot(run(entry.recipe, parts=4)[0]), snapshot(run(entry.recipe)[0])) < 1e-9


@pytest.mark.quick(3)
@KINDS
def test_grad_scaler_and_skipped_steps(entry):
    makers = [entry.recipe.optimizer, *([torch.optim.AdamW, FUSED] if entry.any_optimizer else ())]
    for make, scale in itertools.product(makers, (1.0, 256.0)):
        model, handle, optimizer = start(entry.recipe, F32, make=make)
        scaler, taken = torch.amp.GradScaler("cpu", init_scale=scale), []
        for t, (x, y) in enumerate(DATA32):
            before, state = snapshot(model), copy.deepcopy(handle.state)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, (x * (torch.inf if t % 4 == 1 else 1.0), y))).backward()
            if t % 3 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if t % 4 == 1:
                assert distance(snapshot(model), before) == 0.0
                assert all(torch.equal(torch.as_tensor(handle.state[k]), torch.as_tensor(state[k])) for k in ("t", "stage") if k in state)
            else:
                taken.append((x, y))
        if scale == 1.0:
            want, said = snapshot(model), metrics_of(handle)
            other, theirs, _ = run(entry.recipe, F32, taken, make=make)
            assert entry.draws or (distance(snapshot(other), want) < 1e-5 and metrics_of(theirs) == pytest.approx(said, rel=1e-3, abs=1e-6))
        assert distance(snapshot(model), want) < 1e-5 and metrics_of(handle) == pytest.approx(said, rel=1e-3, abs=1e-6)


@pytest.mark.quick(4)
@KINDS
def test_a_closure_in_which_backward_runs_changes_nothing(entry):
    """As Lightning steps: zero_grad and backward come after the hooks that precede a step."""
    for make, keyword in itertools.product([entry.recipe.optimizer, *([FUSED] if entry.any_optimizer else ())], (True, False)):
        model, _, optimizer = start(entry.recipe, F32, make=make)
        for batch in DATA32[:10]:

            def closure(model=model, optimizer=optimizer, batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure=closure) if keyword else optimizer.step(closure))
        assert distance(snapshot(model), snapshot(run(entry.recipe, F32, DATA32[:10], make=make)[0])) == 0.0


# ---- checkpoints


@pytest.mark.quick(4)
@ENTRIES
def test_resume_is_bit_for_bit(entry):
    """In whatever order a trainer attaches, loads the model and loads the optimizer."""
    orders = (("attach", "model", "optimizer"), ("model", "optimizer", "attach"), ("optimizer", "attach", "model"))
    for cut, order in itertools.product(entry.cuts, orders):
        model, handle, optimizer = run(entry.recipe, F32, DATA32[:cut])
        weights, state = through_a_file(model.state_dict(), optimizer.state_dict())
        other = net(entry.recipe, F32, seed=5)
        again = nm.sparsify_(other, entry.recipe)
        theirs = optimizer_of(entry.recipe, other.parameters())
        actions = {
            "attach": lambda again=again, theirs=theirs: again.attach(theirs),
            "model": lambda other=other, weights=weights: other.load_state_dict(weights),
            "optimizer": lambda theirs=theirs, state=state: theirs.load_state_dict(state),
        }
        for action in order:
            actions[action]()
        training.train(model, optimizer, DATA32[cut:])
        training.train(other, theirs, DATA32[cut:])
        assert distance(snapshot(other), snapshot(model)) == 0.0
        assert metrics_of(again) == metrics_of(handle) and again.state.keys() == handle.state.keys()


@KINDS
def test_dense_checkpoint_and_model_copies(entry):
    model, _, optimizer = start(entry.recipe, F32)
    model.load_state_dict(mlp(seed=3).state_dict())
    assert all(".nm_" in key for key in set(model.state_dict()) - set(mlp().state_dict()))
    for batch in DATA32[:9]:
        step(model, optimizer, batch)
    x = DATA32[0][0]
    want, baselines = model(x), [copy_model(model, how) for how in COPY_METHODS]
    step(model, optimizer, DATA32[9])
    assert all(torch.equal(baseline(x), want) for baseline in baselines) and not torch.equal(model(x), want)


# ---- the end


@pytest.mark.quick(1, per="entry.recipe.name")
@ENTRIES
@ENDING
def test_finish_leaves_what_was_previewed(entry, tmp_path):
    model, handle, optimizer = run(entry.recipe, F32, DATA32)
    x = DATA32[0][0]
    with handle.deployable(), torch.no_grad():
        want = model(x)
    assert handle.finish() is model and torch.equal(model(x), want)
    # only a recipe that leaves adapters may add to the keys, on each of its layers
    adapters = {f"{name}.{part}" for name in handle.layers for part in ADAPTER} if entry.recipe.final == "nm+adapter" else set()
    assert [key for key in model.state_dict() if key not in adapters] == list(mlp().state_dict()) and adapters <= set(model.state_dict())
    assert "nm_recipe" not in optimizer.param_groups[0]
    assert handle.finished and handle.finish() is model
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    if entry.recipe.final == "dense":
        assert type(model[0]) is nn.Linear
        return
    for layer in handle.layers.values():
        assert nm.ops.is_nm(layer.grouped.detach(), layer.pattern) and (layer.columns is not None) == entry.spaced
    nm.compress_(model)
    torch.testing.assert_close(model(x), want)
    nm.save_compressed(model, tmp_path / "m.safetensors")
    assert torch.equal(nm.load_compressed(mlp(F32, seed=4), tmp_path / "m.safetensors")(x), model(x))


@KINDS
def test_finish_before_the_end_leaves_what_was_previewed(entry):
    for count in (1, STEPS // 2):
        model, handle, _ = run(entry.recipe, F32, DATA32[:count])
        with handle.deployable(), torch.no_grad():
            want = model(DATA32[0][0])
        early = handle.run.not_ready_reason()
        if early:
            with pytest.warns(UserWarning, match=early.split("(")[0].strip()):
                handle.finish()
        else:
            handle.finish()
        assert torch.equal(model(DATA32[0][0]), want)


@KINDS
def test_remove_gives_the_dense_model_back(entry):
    model, handle, optimizer = run(entry.recipe, F32, DATA32[:9])
    before, params = training.dense_part(model), [p for name, p in model.named_parameters() if name in dict(mlp().named_parameters())]
    assert handle.remove() is model and all(type(model[i]) is nn.Linear for i in (0, 2, 4))
    assert all(p is q for p, q in zip(model.parameters(), params, strict=True)) and distance(snapshot(model), before) == 0.0
    assert list(model.state_dict()) == list(mlp().state_dict()) and vars(model[0]).keys() == vars(mlp()[0]).keys()
    assert "nm_recipe" not in optimizer.param_groups[0] and not optimizer._optimizer_step_pre_hooks
    assert all(p.requires_grad for p in params)
    assert not any(hooks for key, hooks in vars(optimizer).items() if key.endswith("_hooks")) and not getattr(optimizer, "targets", {})
    (state,) = through_a_file(optimizer.state_dict())
    step(model, optimizer, DATA32[9])
    if sum(len(group["params"]) for group in optimizer.param_groups) == len(params):
        dense = net(entry.recipe, F32)
        dense.load_state_dict(before)
        ordinary = optimizer_of(entry.recipe, dense.parameters())
        ordinary.load_state_dict(state)
        step(dense, ordinary, DATA32[9])
        assert distance(snapshot(dense), snapshot(model)) == 0.0


# ---- the surroundings


@pytest.mark.quick(8)
@KINDS
def test_frozen_layer_stays_and_the_rest_learns(entry):
    model = net(entry.recipe, F32)
    model[0].weight.requires_grad_(False)
    model, handle, _ = run(entry.recipe, F32, DATA32, model=model)
    masked = nm.ops.prune(mlp(F32)[0].weight.detach(), model[0].pattern)
    kept = masked if handle.run.stage.held_mask else mlp(F32)[0].weight
    assert torch.equal(model[0].weight, kept)
    assert torch.equal(model[2].weight, mlp(F32)[2].weight) == entry.still
    assert all(torch.isfinite(v).all() for v in handle.metrics().values())


@pytest.mark.quick(8)
@KINDS
@ENDING
def test_bf16_autocast(entry):
    model, handle, optimizer = start(entry.recipe, F32)
    losses = []
    for batch in DATA32:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch[0])
        loss = nn.functional.mse_loss(y.float(), batch[1])
        loss.backward()
        assert y.dtype == torch.bfloat16
        assert model[0].weight.grad is None if entry.still else model[0].weight.grad.dtype == F32
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < losses[0]
    with handle.deployable(), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = model(DATA32[0][0])
    handle.finish()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(DATA32[0][0]), want)


@pytest.mark.quick(8)
@KINDS
def test_metrics_and_deployable_disturb_nothing(entry):
    model, handle, optimizer = start(entry.recipe, F32)
    for batch in DATA32:
        before = handle.run.stage
        with handle.deployable(), torch.no_grad():
            model(batch[0])
        step(model, optimizer, batch)
        got = handle.metrics()
        assert {"flip_rate", "density", "phase", "decay_ratio"} <= got.keys()
        assert all(isinstance(v, torch.Tensor) and v.dim() == 0 and torch.isfinite(v) for v in got.values())
        used = [layer.effective_weight() for layer in handle.layers.values()]
        # at a change of stage the figure is still that of the step that led there
        density = sum(int(u.count_nonzero()) for u in used) / sum(u.numel() for u in used)
        assert got["density"].item() == density or handle.run.stage != before
        assert 0 <= got["flip_rate"] <= 1 and got["phase"].item() == handle.run.stage.phase
    assert distance(snapshot(model), snapshot(run(entry.recipe, F32, DATA32)[0])) == 0.0


@pytest.mark.quick(8)
@KINDS
def test_two_models_at_once(entry):
    pairs = [start(entry.recipe, F32, seed) for seed in (0, 1)]
    for batch in DATA32:
        for model, _, optimizer in pairs:
            step(model, optimizer, batch)
    alone = run(entry.recipe, F32, DATA32, seed=1)[0]
    assert distance(snapshot(pairs[1][0]), snapshot(alone)) == 0.0 or (entry.draws and entry.recipe.setup.seed is None)


@pytest.mark.quick(2)
@KINDS
def test_compiled_equals_eager(entry):
    """Also what is deployed; with it in between, a graph for each step would meet torch's limit of them."""
    torch.compiler.reset()
    model, handle, optimizer = start(entry.recipe, F32)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in DATA32:
        step(forward, optimizer, batch)
        with handle.deployable(), torch.no_grad():
            torch.testing.assert_close(forward(batch[0]), model(batch[0]), atol=1e-5, rtol=1e-5)
    assert distance(snapshot(model), snapshot(run(entry.recipe, F32, DATA32)[0])) < 1e-5
    torch.compiler.reset()


@pytest.mark.quick(4)
@KINDS
def test_several_optimizers(entry):
    model, other = net(entry.recipe), torch.optim.AdamW if entry.any_optimizer else entry.recipe.optimizer
    handle = nm.sparsify_(model, entry.recipe)
    first = optimizer_of(entry.recipe, [*model[0].parameters(), *model[4].parameters()])
    second = other(model[2].parameters(), **Adam().keywords)
    handle.attach(first, second)
    for batch in DATA:
        for optimizer in (first, second):
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in (first, second):
            optimizer.step()
    want, alone, _ = run(entry.recipe)
    assert distance(snapshot(model), snapshot(want)) < 1e-9
    # plain AdamW does not tell its largest update
    unknown = {"max_update": 0.0} if entry.any_optimizer else {}
    assert {**metrics_of(handle), **unknown} == pytest.approx({**metrics_of(alone), **unknown}, rel=1e-9)
    assert "nm_recipe" not in first.param_groups[0] and "nm_recipe" in second.param_groups[0]


def test_every_recipe_is_on_the_roster():
    assert {entry.recipe.name for entry in ROSTER.values()} == set(nm.recipes.names())


# ---- its FLOPs


@pytest.mark.quick(8)
@ENDING
@ENTRIES
def test_no_weight_is_denser_than_its_flops_are_counted(entry):
    spans = entry.recipe.profile(STEPS)
    per_step = [span for span in spans for _ in range(span.steps)]
    assert len(per_step) == STEPS
    model, handle, optimizer = start(entry.recipe)
    whole = "patterns" in handle.state  # layers with patterns of their own are counted together
    for span, batch in zip(per_step, DATA, strict=True):
        if whole:
            used = torch.cat([layer.effective_weight().flatten() for layer in handle.layers.values()])
            assert used.count_nonzero() <= span.fprop * used.numel() + 1e-6, f"all layers in {span}"
        for name, layer in handle.layers.items():
            used = layer.effective_weight()
            assert whole or used.count_nonzero() <= span.fprop * used.numel() + 1e-6, f"{name} in {span}"
            if span.dgrad < 1:
                symmetric = layer.transform is None or not layer.transform.traits.own_dgrad
                transposed = used if symmetric else layer.transform.for_dgrad(used, *layer._extras(layer.transform))
                assert transposed.count_nonzero() <= span.dgrad * transposed.numel() + 1e-6, f"{name} in {span}"
                assert not symmetric or nm.ops.is_nm(transposed.t(), layer.pattern), f"{name}: dgrad is cheaper only by N:M along out"
            assert span.wgrad == (layer.plan.n / layer.plan.m if layer.plan.wgrad in ("mvue", "magnitude") else layer.plan.wgrad != "none")
        step(model, optimizer, batch)
    handle.finish()
    weights = [model.get_parameter(f"{name}.weight") for name in handle.layers]
    for weight in [torch.cat([w.flatten() for w in weights])] if whole else weights:
        assert weight.count_nonzero() <= deployed(entry.recipe).fprop * weight.numel() + 1e-6
