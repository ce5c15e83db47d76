"""The modules that run while reads are noted, one inside the other, and in which of them the mode is on.  No mathematics."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from autograd_hacks.capture.reads import Reads, Running
from autograd_hacks.probe.plan import Plan
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.support.restored import leave
from autograd_hacks.support.trees import tensors_of


class OpenReads:
    """The modules that run with `Reads` on, or would, one inside the other."""

    def __init__(self) -> None:
        self.reads: Reads | None = None
        self._calls: dict[str, int] = {}

    def aside(self) -> AbstractContextManager[None]:
        """A context in which the library's own code runs."""
        reads = self.reads
        return _NOTHING if reads is None else reads.aside()

    def replace(self, given: Any, other: Any) -> None:
        """The library hands something else on in the place of what a module is given or returns: whose its rows are is known
        of it, too."""
        if self.reads is not None and self.reads.rows:
            for x, new in zip(tensors_of(given), tensors_of(other)):
                if (labels := self.reads.rows.get(id(x))) is not None:
                    self.reads.label(new, labels)

    def begin(self, reads: Reads | None) -> None:
        """A forward begins, or checkpointing runs a part of one again."""
        self.leave_all()
        self.reads = reads

    def enter(self, path: str, module: nn.Module, again: bool, inputs: Any) -> None:
        """A module begins.  again: whether checkpointing runs it once more"""
        reads = self.reads
        if reads is not None:
            for x, at in zip(tensors_of(inputs), reads.plan.reading.sources.get(path, ())):
                if at is not None and at.fits(x, reads.samples):
                    reads.label(x, at.rows(len(x), reads.samples, x.device))
            number = self._calls[path] = self._calls.get(path, -1) + 1
            reads.running.append(Running(Frame(path, Plan.AGAIN if again else number), module))
            self._switch()

    def leave(self, path: str) -> None:
        """A module has ended, or failed."""
        reads = self.reads
        if reads is not None and any(running.frame.path == path for running in reads.running):
            ended = reads.running.pop()
            while ended.frame.path != path:
                ended = reads.running.pop()
            reads.end(ended.frame)
            self._switch()

    def resume(self) -> None:
        """Another mode has ended, and those that were entered inside with it."""
        if self.reads is not None:
            self._switch()

    def leave_all(self) -> None:
        if self.reads is not None:
            self.reads.running.clear()
            leave(self.reads)
        self.reads, self._calls = None, {}

    def _switch(self) -> None:
        """Has the mode on in the code of the modules that the plan knows, and off in others."""
        reads = self.reads
        assert reads is not None
        on = bool(reads.running) and reads.running[-1].frame.path in reads.plan.reading.paths
        top = torch._C._len_torch_function_stack() - 1
        is_top = top >= 0 and torch._C._get_function_stack_at(top) is reads
        if not on and is_top:
            torch._C._pop_torch_function_stack()
        elif on and not is_top and not _is_there(reads):
            torch._C._push_on_torch_function_stack(reads)
        reads.is_paused = not on  # where a mode of the user's stands before it


_NOTHING = nullcontext()


def _is_there(mode: TorchFunctionMode) -> bool:
    return any(torch._C._get_function_stack_at(n) is mode for n in range(torch._C._len_torch_function_stack()))
