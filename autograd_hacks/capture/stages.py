"""Stages of a pipeline: which of them runs a model now.  No mathematics."""

from __future__ import annotations

import sys
import weakref
from typing import Any


def running_stage() -> weakref.ref[Any] | None:
    """The stage of ``torch.distributed.pipelining`` whose forward runs, if it is one of several."""
    module = sys.modules.get("torch.distributed.pipelining.stage")
    frame = sys._getframe(1) if module is not None else None
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    stage = None if frame is None else frame.f_locals.get("self")
    return None if getattr(stage, "num_stages", 1) < 2 else weakref.ref(stage)
