"""torch.compile of a sparse model: the same numbers as eager, also across a change of phase."""

import pytest
import torch
import torch._dynamo.testing

import nmkernels as nm
from nmkernels.optim import MaskedAdamW
from nmkernels.recipes import ASP, SRSTE, STEP
from python_tests.recipes.loop import batches, distance, mlp, snapshot
from python_tests.recipes.running import step

pytestmark = pytest.mark.slow

F32 = torch.float32
STEP_T0_3 = STEP(t_min=1, t_max=2, threshold=1e-30)
RECIPES = [SRSTE(decay=0.1), STEP_T0_3, ASP(start=3)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(recipe, backend, steps=6, evaluate=False):
    model = mlp(F32)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(MaskedAdamW(model.parameters(), lr=1e-2))
    forward = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    x, outputs = batches(1, F32, seed=7)[0][0], []
    for batch in batches(steps, F32):
        step(forward, optimizer, batch)
        if evaluate:
            with handle.deployable(), torch.no_grad():
                outputs.append(forward(x))
    return snapshot(model), handle, outputs


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda r: r.name)
def test_evaluating_does_not_recompile_each_time(recipe):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, _, outputs = run(recipe, counter, steps=14, evaluate=True)
    assert counter.frame_count <= 5  # dense and masked, with and without gradients, and the switch between them
    _, _, want = run(recipe, None, steps=14, evaluate=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs, want, strict=True))


@pytest.mark.slow
def test_inductor():
    got, _, _ = run(STEP_T0_3, "inductor", steps=5)
    want, _, _ = run(STEP_T0_3, None, steps=5)
    assert distance(got, want) < 1e-5
