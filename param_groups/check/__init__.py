"""The coordinate check: whether a plan makes a model train alike at every size.

`Check` is what a file's `task(width, seed)` returns; `param-groups check FILE.py` runs it.
In Python: `measure` trains, `fit` gives slopes with verdicts, `judge` the verdicts on the numbers.
"""

from param_groups.check.judging import Judged, judge
from param_groups.check.measuring import Check, Measurement, measure
from param_groups.check.slopes import Slope, failed, fit, summary, table

__all__ = [
    "Check",
    "Judged",
    "Measurement",
    "Slope",
    "failed",
    "fit",
    "judge",
    "measure",
    "summary",
    "table",
]
