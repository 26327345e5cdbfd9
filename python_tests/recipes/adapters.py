"""What the conformance suite asks of a model whose layers may have low-rank adapters."""

from nmkernels.nn import ADAPTER, adapter_of
from python_tests.recipes.loop import snapshot


def dense_keys(model, recipe):
    """Keys of the state dict without those of adapters, which only a recipe that leaves some may leave, on each of its layers."""
    layers = [name for name, module in model.named_modules() if adapter_of(module) is not None]
    assert bool(layers) == (recipe.final == "nm+adapter")
    left = {f"{name}.{part}" for name in layers for part in ADAPTER}
    return [key for key in model.state_dict() if key not in left]


def without_adapters(model):
    """The dense model's parameters, what an adapter adds put into its weight."""
    values = snapshot(model)
    for k in [k for k in values if k.endswith(".nm_right")]:
        left, right = values.pop(k.replace("right", "left")), values.pop(k)
        values[k.replace("nm_right", "weight")] += (left @ right).t() / len(right)
    return values
