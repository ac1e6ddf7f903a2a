"""Functions of which torch.compile makes one kernel on a GPU, where passes over memory decide.

A CPU runs what is written, operation by operation: its caches hold what stands between two of them,
and a compiled form rounds otherwise.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SHAPES = 256  # torch's own limit of compilations per function is 8, after which it runs eagerly


class Compiled:
    """A function that is compiled anew for every shape and type of its tensors, and for no values.

    Numbers that change from call to call are tensors of no dimension. Where torch has no compiler
    for the device (no Triton), a line says so and `function` runs as it is written, as it does
    under a dispatch mode.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._run: Callable[..., None] | None = None
        self._known: set[Any] = set()

    @property
    def runs_compiled(self) -> bool:
        """Whether it has been called, and has not run as it is written."""
        return self._run not in (None, self.function)

    def __call__(self, *args: Any) -> None:
        if self._run is None:
            self._run = torch.compile(self.function, dynamic=False)
        key = tuple((arg.shape, arg.dtype) for arg in args if isinstance(arg, Tensor))
        limit: Any = contextlib.nullcontext()
        if key not in self._known:
            limit = torch._dynamo.config.patch(recompile_limit=_SHAPES)
        try:
            with limit:
                self._run(*args)
        except torch._dynamo.exc.TorchDynamoException as error:  # before anything was computed
            cause = str(error).strip().partition("\n")[0]
            print(f"{self.function.__name__} is not compiled: {cause}", file=sys.stderr)
            self._run = self.function
            self._run(*args)
        self._known.add(key)
