"""Export to formats that run without Python: ONNX for finished models, AOTInductor packages for finished or compressed ones."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..nn.compressed import CompressedLinear
from ..nn.weight import NMWeight
from ..pattern import RecipeError


def save_onnx(model: nn.Module, path: str | os.PathLike[str], args: tuple[Any, ...], **options: Any) -> None:
    """Write a finished model as ONNX, with dense constant weights that have N:M zeros.

    Args:
        model: after ``handle.finish()`` and before ``compress_``; call ``eval()`` first.
        path: file to write.
        args: example inputs of the model, a tuple.
        options: of ``torch.onnx.export``, such as ``dynamic_shapes`` or ``opset_version``. Requires the packages onnx and onnxscript.

    Raises:
        RecipeError: a layer is still in training, or already compressed: ONNX has no N:M weights.
    """
    _check_no_training("save_onnx", model)
    for name, module in model.named_modules():
        if isinstance(module, CompressedLinear) or (hasattr(module, "values") and hasattr(module, "indices")):
            raise RecipeError(
                f"save_onnx: layer {name!r} is compressed, and ONNX has no N:M weights. Export the finished model before compress_, or a "
                "dense model loaded from a file of nm.save_dense."
            )
    torch.onnx.export(model, args, os.fspath(path), dynamo=True, **options)


def save_aoti(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> str:
    """Compile a finished or compressed model with AOTInductor into a package, and return its path.

    ``torch._inductor.aoti_load_package(path)`` returns a function that runs it, in a process that has imported nmkernels: the GEMMs of
    compressed layers are its ops. Requires a C++ compiler.

    Args:
        path: file to write, its name ending in ``.pt2``.
        args, kwargs: example inputs of the model.
        dynamic_shapes: as for ``torch.export.export``, such as ``({0: torch.export.Dim("batch")},)``; None: the shapes of ``args``.
        options: of inductor, such as ``max_autotune=True``.

    Raises:
        RecipeError: a layer is still in training.
    """
    _check_no_training("save_aoti", model)
    from torch._inductor import aoti_compile_and_package  # takes seconds

    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        return str(aoti_compile_and_package(program, package_path=os.fspath(path), inductor_configs=options or None))


def _check_no_training(verb: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, NMWeight) and not module.finished and module.transform is not None:
            raise RecipeError(
                f"{verb}: layer {name!r} is still in training, where its mask is recomputed at every call. Call handle.finish() first, "
                "which makes its weight a constant."
            )
