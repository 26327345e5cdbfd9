"""Estimate what N:M gains for a model on a device: a roofline, measurements if the device is available, and advice."""

from ..timing import Task
from .audit import audit
from .flops import Flops, LayerFlops, flops
from .report import Advice, Audit, LayerAudit
from .rounding import LayerRounding, QuantizationReport, quantization_report
from .whole import WholeStep

__all__ = [
    "Advice",
    "Audit",
    "Flops",
    "LayerAudit",
    "LayerFlops",
    "LayerRounding",
    "QuantizationReport",
    "Task",
    "WholeStep",
    "audit",
    "flops",
    "quantization_report",
]
