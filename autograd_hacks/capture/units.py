"""Calls of modules that are run again, from where they begin to where they end."""

from __future__ import annotations

from autograd_hacks.capture.replay import ByRunningAgain
from autograd_hacks.probe.plan import Plan


class OpenUnits:
    """The calls of a forward that have begun, one inside the other."""

    def __init__(self) -> None:
        self.open: list[ByRunningAgain] = []  # the outermost first

    def end(self, path: str) -> ByRunningAgain | None:
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
