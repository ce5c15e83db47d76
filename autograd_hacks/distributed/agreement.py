"""What processes that hold shards of one model do together: the plans of its forwards, and failing.

A process that ran the model once more than the others would wait for them forever.  So one flag is added up as a forward
with gradients begins: does any process need a plan, or a proof?  Then all gather their weights, those that need it run the
model by themselves, and of plans for one signature that of the most samples is everybody's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn

from autograd_hacks.capture.recorder import Known, Recorder
from autograd_hacks.capture.records import Record
from autograd_hacks.capture.wrappers import gathering, has_processes
from autograd_hacks.distributed.cut import cuts_of
from autograd_hacks.distributed.shards import alone, learn, versions_of_shards
from autograd_hacks.errors import ProcessesDisagree
from autograd_hacks.probe.compare import Gather
from autograd_hacks.probe.plan import Plan
from autograd_hacks.probe.planner import Asked
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import NO_TASK, current_task

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """What a process says of a forward that begins."""

    settings: str  # how the model was hooked
    error: str = ""
    signature: str = ""
    samples: int = 0
    plan: bytes = b""


def summed(numbers: Sequence[float], mesh: DeviceMesh) -> list[float]:
    """Numbers added up over all processes of a mesh."""
    from torch.distributed.tensor import DTensor, Partial

    own = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
    total = DTensor.from_local(own, mesh, [Partial()] * mesh.ndim, run_check=False).full_tensor()
    found: list[float] = total.tolist()
    return found


def from_all(mine: T, mesh: DeviceMesh) -> list[T]:
    """What each process of a mesh has, in their order."""
    found: list[Any] = [mine]
    for axis in range(mesh.ndim - 1, -1, -1):
        group = mesh.get_group(axis)
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, found, group=group)
        found = [one for each in lists for one in each]
    return found


def agreed(
    own: Callable[[], T], counts: Callable[[T], Sequence[float]], size: int, mesh: DeviceMesh
) -> tuple[T, list[float]]:
    """What a process finds by itself, and counts of that added up over all.  Where one fails all raise, and none waits.

    size: how many counts there are
    """
    found: Any = None
    failure: Exception | None = None
    try:
        found = own()
    except Exception as error:  # to be told to the others, which would wait
        failure = error
    failed, *total = summed([1, *[0] * size] if failure is not None else [0, *counts(found)], mesh)
    if failed:
        said = from_all("" if failure is None else f"{type(failure).__name__}: {failure}", mesh)
        if failure is not None:
            raise failure
        raise ProcessesDisagree(_told(said, "could not read its per-sample gradients, which sums over all need"))
    return found, total


def _told(said: Sequence[str], what: str) -> str:
    return "; ".join(f"process {rank} {what}: {text}" for rank, text in enumerate(said) if text)


@contextmanager
def together(model: nn.Module, recorder: Recorder, known: Known) -> Iterator[None]:
    """A context in which the plan of a forward that begins is made and proven; see `Together`."""
    is_due = isinstance(known, Asked) or known[0].pending
    if not has_processes() or recorder.is_proving or current_task() != NO_TASK:
        yield
        return
    if not (parts := gathering(model)):
        if is_due:
            recorder.planner.gather = _of_parts(model, recorder.record)
        with alone(model) if is_due else nullcontext():
            yield
        return
    record, mesh = recorder.record, mesh_of(parts)
    if mesh is None:  # it runs by itself already
        yield
        return
    is_new = not record.gathered
    if not summed([is_due or is_new], mesh)[0]:
        record.shards = versions_of_shards(dict(model.named_parameters()))
        yield
        return
    settings, asked = _settings(model, recorder), isinstance(known, Asked)
    if is_new:
        learn(model, recorder)
    recorder.planner.gather = _of_parts(model, record)
    record.shards = versions_of_shards(dict(model.named_parameters()))

    def agree(signature: object, plan: Plan, samples: int) -> Plan:
        nonlocal asked
        asked = False
        return _chosen(Said(settings, "", str(signature), samples, _packed(plan)), plan, mesh)

    def undo() -> None:
        recorder.planner.agree = _own

    with restored(undo), alone(model):
        recorder.planner.agree = agree
        if not asked:
            _check(from_all(Said(settings), mesh))
        try:
            yield
        except Exception as error:
            if asked:  # and the others wait to be told
                from_all(Said(settings, f"{type(error).__name__}: {error}"), mesh)
            raise


def _of_parts(model: nn.Module, record: Record) -> Gather:
    """Gathers from the processes that have parts of a model's tensors, which run it together."""
    cut = next(iter(cuts_of(model, record).values()), None)
    return (lambda x: [x]) if cut is None else lambda x: from_all(x, cut.mesh)


def _own(signature: object, plan: Plan, samples: int) -> Plan:
    return plan


def mesh_of(parts: Sequence[nn.Module]) -> DeviceMesh | None:
    """Of the processes that hold the shards; None while all is gathered."""
    meshes = [p.device_mesh for part in parts for p in part.parameters() if hasattr(p, "device_mesh")]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _settings(model: nn.Module, recorder: Recorder) -> str:
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    planner = recorder.planner
    return (
        f"mode={planner.mode!r}, probe={planner.probes}, param_grad={recorder.param_grad.wanted}, "
        f"{len(trained)} parameters that train, {trained[-1:]} the last"
    )


def _check(said: Sequence[Said]) -> None:
    """Raises on all processes where one has failed, or where they have hooked the model in different ways."""
    if any(one.error for one in said):
        raise ProcessesDisagree(_told([one.error for one in said], "could not make a plan of the forward"))
    other = next((rank for rank, one in enumerate(said) if one.settings != said[0].settings), None)
    if other is not None:
        raise ProcessesDisagree(
            f"processes have hooked the model they share in different ways: process 0 by {said[0].settings} (its input: "
            f"{said[0].signature or 'one it knows'}); process {other} by {said[other].settings} (its input: "
            f"{said[other].signature or 'one it knows'}). Call add_hooks in the same way on all, and freeze the same "
            "parameters."
        )


def _packed(plan: Plan) -> bytes:
    try:
        return pickle.dumps(plan)
    except (pickle.PicklingError, AttributeError, TypeError):  # a class of the user's in it, which others can't find
        return b""


def _chosen(mine: Said, plan: Plan, mesh: DeviceMesh) -> Plan:
    """Of the plans for this process's signature that of the most samples, and of the first process that has so many."""
    said = from_all(mine, mesh)
    _check(said)
    alike = [one for one in said if one.signature == mine.signature and one.plan]
    best = max(alike, key=lambda one: one.samples, default=mine)
    if best.plan == mine.plan:
        return plan
    other: Plan = pickle.loads(best.plan)
    other.forwards, other.summed, other.unread, other.deepest = plan.forwards, plan.summed, plan.unread, plan.deepest
    return other
