"""torch.compile of a sparse model where the conformance suite does not look: evaluations in between, and inductor."""

import pytest
import torch
import torch._dynamo.testing

from nmkernels.recipes import SRSTE, STEP
from python_tests.recipes.loop import batches, distance, mlp, snapshot
from python_tests.recipes.running import F32, start, step

pytestmark = pytest.mark.slow

STEP_T0_3 = STEP(t_min=1, t_max=2, threshold=1e-30)


def run(recipe, backend, steps):
    """Parameters at the end, and what was computed as deployed after each step."""
    torch.compiler.reset()
    model, handle, optimizer = start(recipe, model=mlp(F32))
    forward = torch.compile(model, fullgraph=True, backend=backend) if backend else model
    x, outputs = batches(1, F32, seed=7)[0][0], []
    for batch in batches(steps, F32):
        step(forward, optimizer, batch)
        with handle.deployable(), torch.no_grad():
            outputs.append(forward(x))
    torch.compiler.reset()
    return snapshot(model), torch.stack(outputs)


@pytest.mark.parametrize("recipe", [SRSTE(decay=0.1), STEP_T0_3], ids=lambda r: r.name)
def test_evaluating_does_not_recompile_each_time(recipe):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.testing.assert_close(run(recipe, counter, 14)[1], run(recipe, None, 14)[1], atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 5  # dense and masked, with and without gradients, and the switch between them


def test_inductor():
    assert distance(run(STEP_T0_3, "inductor", 5)[0], run(STEP_T0_3, None, 5)[0]) < 1e-5
