"""Joint actions of processes that hold shards of one model: checking its forwards, and failing.

Each process reads the graph of its own forward.  At the end of every forward with gradients all add up three flags: could a
process not read its forward, must one check that its samples are independent, and does one have news?  News are told to all:
how a process hooked the model, and which parameters it reads from the graph, because all must gather the same weights when
they read rows.  To check independence all gather all weights, since a process that did so alone would wait forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from autograd_hacks.distributed.shards import alone, learn, versions_of_shards
from autograd_hacks.errors import PerSampleGradientError, ProcessesDisagree
from autograd_hacks.extending import ABOVE, Recorder, gathering, has_processes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

READING = "could not read its per-sample gradients, but sums over samples need all of them"


def summed(numbers: Sequence[float], mesh: DeviceMesh) -> list[float]:
    """Numbers, added up over all processes of a mesh."""
    from torch.distributed.tensor import DTensor, Partial

    own = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
    return list[float](DTensor.from_local(own, mesh, [Partial()] * mesh.ndim, run_check=False).full_tensor().tolist())


def from_all(mine: T, mesh: DeviceMesh) -> list[T]:
    """The value of each process of a mesh, in the processes' order."""
    found: list[Any] = [mine]
    for axis in range(mesh.ndim - 1, -1, -1):
        group = mesh.get_group(axis)
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, found, group=group)
        found = [one for each in lists for one in each]
    return found


def agreed(
    own: Callable[[], T], counts: Callable[[T], Sequence[float]], size: int, mesh: DeviceMesh, what: str = READING
) -> tuple[T, list[float]]:
    """What this process finds, and its counts summed over all processes.  If one process fails, all raise.

    size: the number of counts    what: what a process could not do, for messages
    """
    found: Any = None
    failure: Exception | None = None
    try:
        found = own()
    except Exception as error:  # the others must know, because they would wait
        failure = error
    failed, *total = summed([1, *[0] * size] if failure is not None else [0, *counts(found)], mesh)
    if failed:
        said = from_all("" if failure is None else f"{type(failure).__name__}: {failure}", mesh)
        if failure is not None:
            raise failure
        raise ProcessesDisagree("; ".join(f"process {rank} {what}: {text}" for rank, text in enumerate(said) if text))
    return found, total


def begin(model: nn.Module, recorder: Recorder) -> None:
    """Called when a forward with gradients begins.  In the first one, all processes find the tensors that replace shards."""
    if gathering(model):
        if not recorder.record.gathered:
            learn(model, recorder)
        recorder.record.shards = versions_of_shards(dict(model.named_parameters()))


def together(model: nn.Module, recorder: Recorder, read: Callable[[], bool], check: Callable[[], None]) -> None:
    """Reads a finished forward, and checks it if ``read`` says so.  Processes that hold shards do so together."""
    record, what, past = recorder.record, "could not check its forward", recorder.record.read_past
    mesh = record.mesh if gathering(model) else None
    if mesh is None:
        try:
            if read():
                check()
        except PerSampleGradientError as error:
            if not has_processes():
                raise
            record.last.failed = type(error)(*error.args)  # without the frames
        return

    # What is new: how the model was hooked, or names read from the graph.
    own, (due, new) = agreed(
        read, lambda due: [due, not (record.is_settled and record.last.facts.nodes.keys() <= past)], 2, mesh, what
    )
    if due or new:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        settings = (
            f"probe={recorder.kinds.probes}, independent={recorder.kinds.independent}, param_grad="
            f"{recorder.backward.wants_grad}, {len(trained)} trainable parameters (last: {trained[-1:]}), "
            f"{len(record.left_out)} left out"
        )
        said = from_all((settings, frozenset(record.last.facts.nodes)), mesh)
        first, other = said[0][0], next((rank for rank, (one, _) in enumerate(said) if one != said[0][0]), None)
        if other is not None:  # seen on all processes
            raise ProcessesDisagree(
                f"processes hooked the model that they share in different ways. Process 0: {first}. Process {other}: "
                f"{said[other][0]}. Call add_hooks in the same way on all processes, and freeze the same parameters."
            )
        record.is_settled, record.read_past = True, past.union(*[names for _, names in said])
    if due:
        with alone(model):
            agreed(check if own else lambda: None, lambda _: (), 0, mesh, what)


ABOVE.learn, ABOVE.together = begin, together
