"""Does it pay? What N:M gains a model on a device: a roofline of the device, measurements where it is at hand, and what to change."""

from ..tuning import Task
from .audit import audit
from .flops import Flops, LayerFlops, flops
from .report import Advice, Audit, LayerAudit
from .world import Sharded, World, WorldAudit

__all__ = ["Advice", "Audit", "Flops", "LayerAudit", "LayerFlops", "Sharded", "Task", "World", "WorldAudit", "audit", "flops"]
