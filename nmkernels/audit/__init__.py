"""Estimate what N:M gains for a model on a device: a roofline, measurements if the device is available, and advice."""

from ..tuning import Task
from .audit import audit
from .flops import Flops, LayerFlops, flops
from .report import Advice, Audit, LayerAudit
from .world import Sharded, World, WorldAudit

__all__ = ["Advice", "Audit", "Flops", "LayerAudit", "LayerFlops", "Sharded", "Task", "World", "WorldAudit", "audit", "flops"]
