"""The tuner: checks candidates, times them in alternating rounds and stores the results on disk. It knows tensors and callables, not
ops."""

from .compare import BUDGET, Candidate, Measurement, measure
from .table import TABLE, device_name, key
from .timer import Seconds, Task, Timer, cold
from .validator import Validator

__all__ = ["BUDGET", "TABLE", "Candidate", "Measurement", "Seconds", "Task", "Timer", "Validator", "cold", "device_name", "key", "measure"]
