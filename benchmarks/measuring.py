"""Clocks, memory, comparisons, and what a model's run in several ways gives."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from systems import Data, Found, Maker, Numbers, Step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from ways import WAYS, by_of, is_compiled, is_ours, oracle
from workloads import Batch, Workload

OUT_OF_MEMORY = "out of memory"
NORMS = "norms: ours, param_grad=False"
PEER_SAMPLES = 4
"""With which others are compared: they tell as much as a batch, and take less time."""
MODELS = 3
"""How many new models the first steps are timed on, of this library's ways."""


@dataclass(frozen=True)
class Case:
    """A model, and in which ways it is run, the first of which the others are measured by."""

    workload: Workload
    ways: tuple[str, ...]


def build(workload: Workload, maker: Maker, device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """A way on a model of its own, with the same weights for each."""
    torch.manual_seed(0)
    with device:  # where drawing billions of weights takes no time
        model = workload.model()
    return maker(workload, model.to(device, dtype))


def batch_of(workload: Workload, number: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
    """The batch of a step's number."""
    torch.manual_seed(number)
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in workload.batch(number).items()}


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """What a step takes; on a GPU by its own events."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return round(start.elapsed_time(end) / 1e3, 7)
    begin = time.perf_counter()
    step()
    return round(time.perf_counter() - begin, 7)


def interleaved(
    steps: Mapping[str, Callable[[Any], object]],
    batches: Callable[[int], Any],
    rounds: int,
    clock: Callable[[Callable[[], object]], float],
    failures: dict[str, str],
    label: str = "",
) -> dict[str, Numbers]:
    """{way: seconds of each round}; every round runs each way once on the same batch.  A way that fails has none.

    batches: of a round's number
    """
    times: dict[str, Numbers] = {way: [] for way in steps}
    shuffler = random.Random(0)
    for number in tqdm(range(rounds), desc=label, unit="round", leave=False, disable=not label):
        batch = batches(number)
        # In another order each time: what ran before leaves the allocator and the caches as it likes.
        for way in shuffler.sample(list(steps), len(steps)):
            if way not in failures:
                took = guarded(partial(clock, partial(steps[way], batch)), way, failures)
                times[way] += [] if took is None else [took]
    return {way: own for way, own in times.items() if way not in failures}


def guarded(run: Callable[[], Any], way: str, failures: dict[str, str], otherwise: Any = None) -> Any:
    """What it returns; where it raises, `otherwise`, and why is noted: whatever a way raises is a row of the table."""
    try:
        return run()
    except Exception as error:
        says = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        is_memory = isinstance(error, torch.OutOfMemoryError) or "not enough memory" in says or "out of memory" in says
        failures[way] = OUT_OF_MEMORY if is_memory else says
        return otherwise


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]:
            if storage.nbytes() and storage.data_ptr() not in known | self._seen:
                self._hold(storage)
        return out

    def _hold(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.discard(key)


def peak(workload: Workload, maker: Maker, device: torch.device) -> float:
    """MB of tensors alive at once in a way's second step, beside the model and the batch.

    What the first step left is counted, so that keeping memory between steps is no way to need none.
    """
    release(device)
    step, batch = build(workload, maker, device), batch_of(workload, 0, device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        step(batch)
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with Held() as held:
        step(batch)
        held.most = held.now
        step(batch)
    return held.most / 1e6


def release(device: torch.device) -> None:
    """Hooked models are cycles that hold large tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(found: Found, expected: Found) -> float:
    """The largest error, in its parameter's largest entry, or 1e-6 of all if that is zero but for rounding.

    Raises AssertionError where it is more than a thousandth.
    """
    worst, floor = 0.0, 1e-6 * max(1e-20, *(float(right.abs().max()) for right in expected.values()))
    for name, right in expected.items():
        if name not in found:
            raise ValueError(f"nothing for the parameter {name}")
        largest = float(right.abs().max())
        torch.testing.assert_close(found[name], right, rtol=1e-3, atol=1e-3 * largest + 1e-6, msg=f"wrong on {name}")
        worst = max(worst, float((found[name] - right).abs().max()) / max(largest, floor))
    return worst


def compare_whole(found: Found, expected: Found) -> float:
    """The same by lengths, in that of all parameters: for single precision, where a ReLU decides otherwise now and then."""
    whole = torch.stack([x.double().norm() for x in expected.values()]).norm()
    apart = {name: float((found[name].double() - x).norm() / whole) for name, x in expected.items()}
    worst = max(apart, key=apart.__getitem__)
    if not apart[worst] <= 1e-3:
        raise AssertionError(f"wrong on {worst}: {apart[worst]:.1e} from one backward pass per sample")
    return apart[worst]


def error_of(
    workload: Workload,
    way: str,
    samples: int | None,
    device: torch.device,
    dtype: torch.dtype,
    step: Step | None = None,
    by: Callable[[Found, Found], float] = compare,
) -> float | None:
    """How far a way is from one backward pass for each of the first samples of a batch, in two steps; None: not compared.

    step: the way's, if it is made already    by: what errors are, which raises for large ones
    """
    right = oracle(way, workload)
    if right is None or WAYS[way] is right:
        return None
    batch = {key: x[:samples] for key, x in batch_of(workload, 0, device, dtype).items()}
    expected = build(workload, right, device, dtype)(batch)
    step = step or build(workload, WAYS[way], device, dtype)
    return max(by(step(batch), expected) for _ in range(2))  # the library's first step is another one


def checked(case: Case, device: torch.device, failures: dict[str, str], samples: int | None) -> dict[str, float]:
    """{way: its largest error} against one backward pass per sample; in `failures` why others are not to be timed.

    This library is compared in the workload's precision, which is double if it doesn't say; what else fails in that gets
    single.  Where a model draws random numbers others would draw other ones, and are not compared.
    """
    errors: dict[str, float] = {}
    for way in tqdm([way for way in case.ways if not is_compiled(way)], desc="checks", leave=False):
        own, dtype = is_ours(way), case.workload.dtype
        for precision in (dtype,) if own else () if case.workload.drawn else (dtype, torch.float32):
            failures.pop(way, None)
            run = partial(error_of, case.workload, way, samples if own else PEER_SAMPLES, device, precision)
            error = guarded(run, way, failures)
            release(device)
            if way not in failures:
                errors |= {} if error is None else {way: error}
                break
    return errors


def measured(
    label: str,
    case: Case,
    rounds: int,
    device: torch.device,
    samples: int | None = None,
    memory: bool = True,
    check: Callable[[Case, torch.device, dict[str, str]], dict[str, float]] | None = None,
) -> Data:
    """What a case's run gave, by way: 'seconds' of each round; 'first', those of new models' first two steps; 'peak MB';
    'errors'; and 'failures', why ways have no figures.

    samples: so many of a batch are compared with one backward pass each, or all; or `check` finds the errors
    """
    failures: dict[str, str] = {}
    result: Data = {"ways": list(case.ways), "first": {}, "seconds": {}, "failures": failures}
    result["errors"] = check(case, device, failures) if check else checked(case, device, failures, samples)
    batches, clock = partial(batch_of, case.workload, device=device), partial(seconds, device=device)
    made = {way: warmed(case, way, device, result, check is None) for way in case.ways if way not in failures}
    steps = {way: step for way, step in made.items() if step is not None}
    result["seconds"] = interleaved(steps, batches, rounds, clock, failures, label)
    del made, steps
    release(device)
    result["peak MB"] = peaks(case, result["seconds"], device) if memory else {}
    return result


def compared(case: Case, device: torch.device, failures: dict[str, str]) -> dict[str, float]:
    """How far our norms of two samples are off from a backward pass of each alone in the same precision, of large models."""

    def apart(found: Found, right: Found) -> float:
        return float((found["norms"].double() / right["norms"].double() - 1).abs().max())

    run = partial(error_of, case.workload, NORMS, 2, device, torch.float32, by=apart)
    error = guarded(run, NORMS, failures)
    return {} if error is None else {NORMS: error}


def warmed(case: Case, way: str, device: torch.device, result: Data, check: bool) -> Step | None:
    """A way's step, of a model that has made two, which are timed; None where it fails."""
    batch = batch_of(case.workload, 0, device)

    def made() -> Step:
        for _ in range(MODELS if is_ours(way) else 1):
            step = build(case.workload, WAYS[way], device)
            result["first"].setdefault(way, []).append([seconds(partial(step, batch), device) for _ in range(2)])
        if check and is_compiled(way):  # here, so that it need not compile again
            error = error_of(case.workload, way, None, device, torch.float32, step, compare_whole)
            result["errors"] |= {} if error is None else {way: error}
        return step

    step: Step | None = guarded(made, way, result["failures"])
    return step


def peaks(case: Case, ways: Iterable[str], device: torch.device) -> dict[str, float]:
    """{way: MB}.  On a CPU of this library and references alone: counting takes long, and misses what compiles."""
    counted = [way for way in ways if is_ours(way) or (way == by_of(way) and not is_compiled(way)) or device.type != "cpu"]
    found = {way: guarded(partial(peak, case.workload, WAYS[way], device), way, {}) for way in counted}
    return {way: own for way, own in found.items() if own is not None}
