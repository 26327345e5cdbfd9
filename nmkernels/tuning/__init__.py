"""The one tuner: candidates that are checked, timed in turns and remembered on disk. It knows tensors and callables, no ops."""

from .measure import BUDGET, Candidate, Found, measure
from .table import TABLE, device_name, key
from .timer import Seconds, Task, Timer, cold
from .validator import Validator

__all__ = ["BUDGET", "TABLE", "Candidate", "Found", "Seconds", "Task", "Timer", "Validator", "cold", "device_name", "key", "measure"]
