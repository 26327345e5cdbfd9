"""Estimate what N:M gains for a model on a device: a roofline, measurements if the device is available, and advice."""

from .audit import audit
from .flops import flops
from .rounding import quantization_report

__all__ = ["audit", "flops", "quantization_report"]
