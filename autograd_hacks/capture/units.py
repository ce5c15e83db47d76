"""Calls of modules that are run again, from where they begin to where they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.replay import ByRunningAgain
from autograd_hacks.probe.plan import Plan, Unit
from autograd_hacks.support.trees import like_its_kind, map_tensors
from autograd_hacks.support.untouched import RandomState, cuda_devices_of, random_state


@dataclass(frozen=True)
class OpenUnit:
    """A call that has begun."""

    path: str
    unit: Unit
    args: tuple[Any, ...]  # copies, where the call changes its arguments
    kwargs: dict[str, Any]
    random_state: RandomState
    way: ByRunningAgain


class OpenUnits:
    """The calls of a forward that have begun, one inside the other."""

    def __init__(self) -> None:
        self.open: list[OpenUnit] = []  # the outermost first

    def begin(self, path: str, module: nn.Module, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps what it takes to run a call again."""

        def keep(x: Tensor) -> Tensor:  # outside the graph, and a module may ask for gradients of its input as before
            return like_its_kind(x, x.detach().clone() if unit.copies else x.detach()).requires_grad_(x.requires_grad)

        args, kwargs, state = map_tensors(keep, args), map_tensors(keep, kwargs), random_state(cuda_devices_of(module))
        self.open.append(OpenUnit(path, unit, args, kwargs, state, ByRunningAgain.of(module, unit)))

    def end(self, path: str) -> OpenUnit | None:
        """The innermost call, if it is of the module at a path: it has ended."""
        return self.open.pop() if self.open and self.open[-1].path == path else None

    def around(self, path: str) -> bool:
        """Whether a module at a path is called inside an open call, and that is not what a call has left that failed."""
        return any(path.startswith(f"{begun.path}.") for begun in self.open)

    def names(self) -> set[str]:
        """The parameters whose rows an open call gives."""
        return {name for begun in self.open for name in begun.unit.parameters.values()}

    def names_at(self, path: str, plan: Plan) -> set[str]:
        """The parameters whose rows the module at a path gives, or one around it, run again."""
        unit = plan.units.get(path)
        if unit is None and not self.open:
            return set()
        return self.names() | (set() if unit is None else set(unit.parameters.values()))
