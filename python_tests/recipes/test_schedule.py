import pytest

import nmkernels as nm
from nmkernels.recipes.schedule import resolve_step


@pytest.mark.parametrize(
    ("value", "total", "want"),
    [
        (None, None, None),
        (0.1, 1000, 100),
        (250, None, 250),
        (250, 10, 250),
        (0, None, 0),
        (0.0, 10, 0),
        (1.0, 10, 10),
        (1, 10, 1),
        (0.25, 10, 2),
    ],
)
def test_counts_and_shares(value, total, want):
    assert resolve_step("STEP", "t_min", value, total) == want


@pytest.mark.parametrize("value", [-1, -0.1, 1.01, float("nan"), True])
def test_out_of_range(value):
    with pytest.raises(nm.RecipeError, match="STEP: t_min="):
        resolve_step("STEP", "t_min", value, 100)


def test_a_share_needs_the_whole():
    with pytest.raises(nm.RecipeError, match="total_steps is needed"):
        resolve_step("STEP", "t_max", 0.5, None)
