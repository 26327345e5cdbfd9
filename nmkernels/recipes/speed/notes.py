"""What the figures of an audit rest on, in sentences."""

from __future__ import annotations

from ..._capability import compiled_core
from .advice import Case
from .report import Audit


def notes(audit: Audit, case: Case, measured: bool) -> tuple[str, ...]:
    """Of the prediction, of the measurement, and of what is counted; ``case`` is one of the layers."""
    device, dtype = case.device, str(case.layer.dtype).removeprefix("torch.")
    rate, memory = device.rate(case.layer.dtype) / 1e12, device.bandwidth / 1e12
    figures = f"dense {dtype} products at {rate:.3g} TFLOP/s, memory of {memory:.3g} TB/s"
    if device.power is not None:
        ratio = device.ratio["fprop"]
        said = (
            f"Predicted by a roofline, not measured: {device.name}, {figures}, of which {100 * device.share:.0f} % are reached, and 2:4 "
            f"products {ratio:g} times as fast as dense where arithmetic bounds them. That ratio is {device.low:g} to {device.high:g} "
            f"and not 2, because sparse products draw more of the {device.power:g} W and the clock falls; it differs from card to card."
        )
    else:
        ratios = ", ".join(f"{role} {value:.2f}" for role, value in device.ratio.items())
        said = (
            f"Predicted by a roofline of {device.name}, as a short measurement found it: {figures}; sparse over dense products of "
            f"{audit_pattern(audit)}: {ratios}."
        )
    found = [said]
    if device.turned and not compiled_core().ok:
        found.append(f"Without the compiled core, whose place the plain reference took: {compiled_core().reason}.")
    if measured:
        found.append(
            "Measured: medians, in turns, on random numbers; masking and packing as passes of their own. "
            "nm.tune makes layers choose by such figures."
        )
    if case.trains:
        passes = f", {audit.accumulate} passes per optimizer step" if audit.accumulate > 1 else ""
        recipe = f" of {audit.recipe}" if audit.recipe else ""
        found.append(
            f"A step{recipe}: {audit.tokens} tokens{passes}; its three products, with masking and packing of the weights and estimates of "
            "gradients. The optimizer's own update, which a dense step has too, is not in it."
        )
    else:
        found.append(f"Inference with {audit.tokens} tokens at once.")
    if case.trains and not audit.steps:
        found.append("No product of this recipe's training has a sparse weight or an estimated gradient, so no step is predicted to gain.")
    if not audit.other:
        found.append("Only linear layers are counted: no attention scores, norms, embeddings; other=FLOPs per token adds them.")
    return tuple(found)


def audit_pattern(audit: Audit) -> str:
    """The patterns of the sparse layers."""
    return ", ".join(dict.fromkeys(layer.pattern for layer in audit.layers if layer.pattern)) or "N:M"
