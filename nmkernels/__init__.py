"""nmkernels: N:M structured sparsity for transformers, from training recipes down to kernels.

In a training script:

    import nmkernels as nm

    recipe = nm.recipes.STEP("2:4", total_steps=10_000)
    handle = nm.sparsify_(model, recipe)
    optimizer = handle.attach(recipe.optimizer(model.parameters(), lr=3e-4))
    ...                                     # the training loop is unchanged
    handle.finish()
    nm.compress_(model)
    nm.save_compressed(model, "model.safetensors")
"""

import nmkernels_autoload

from . import autograd, integrations, nn, ops, optim, recipes
from ._version import __version__
from .audit import audit, flops, quantization_report
from .export import load_compressed, save_compressed, save_dense
from .gemm.tune import tune
from .nn.compress import compress_
from .nn.compressed import CompressedLinear
from .nn.linear import SparseLinear
from .ops import Compressed
from .ops.explain import explain
from .pattern import (
    BackendError,
    CheckpointError,
    DtypeError,
    NMError,
    Pattern,
    PatternError,
    RecipeError,
    ShapeError,
)
from .prune import prune_
from .recipes import densify_, sparsify_

__all__ = [
    "BackendError",
    "CheckpointError",
    "Compressed",
    "CompressedLinear",
    "DtypeError",
    "NMError",
    "Pattern",
    "PatternError",
    "RecipeError",
    "ShapeError",
    "SparseLinear",
    "__version__",
    "audit",
    "autograd",
    "compress_",
    "densify_",
    "explain",
    "flops",
    "integrations",
    "load_compressed",
    "nn",
    "ops",
    "optim",
    "prune_",
    "quantization_report",
    "recipes",
    "save_compressed",
    "save_dense",
    "sparsify_",
    "tune",
]

nmkernels_autoload.watch()
