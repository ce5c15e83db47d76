"""Each system's gradients against one backward pass per sample, before it is timed."""

from __future__ import annotations

import gc

import peers
import torch
from measuring import batch_of, build
from systems import CLIPPING, LOOP, OURS, REFERENCES, Found, Maker, Step, each_loss, mean_of_clipped
from tqdm import tqdm
from workloads import ARCHITECTURE, Batch, Workload

PEER_SAMPLES = 4


def checked(
    task: str,
    name: str,
    workload: Workload,
    chosen: dict[str, Maker],
    device: torch.device,
    errors: dict[str, float] | None = None,
    samples: int | None = None,
) -> dict[str, str]:
    """{system: why it fails}, each compared with the loop in double precision.  Raises where this library is wrong.

    Peers get a few samples, which tell as much and take less time; those that fail in double precision get single.
    Where a model draws random numbers they would draw others, and are not compared.

    errors: gets those of this library    samples: so many for it, all if None
    """
    loop = each_loss if workload.drawn else peers.ORACLES[task]
    left = {system: maker for system, maker in chosen.items() if system not in (*REFERENCES, LOOP)}
    ours = {s: left.pop(s) for s in OURS if s in left}
    wrong = differing(name, workload, ours, loop, samples, device, workload.dtype, errors)
    failures: dict[str, str] = {}
    for dtype in () if workload.drawn else (workload.dtype, torch.float32):
        failures = differing(name, workload, left, loop, PEER_SAMPLES, device, dtype)
        left = {system: left[system] for system in failures}
    return wrong | failures


def differing(
    name: str,
    workload: Workload,
    chosen: dict[str, Maker],
    loop: Maker,
    samples: int | None,
    device: torch.device,
    dtype: torch.dtype,
    errors: dict[str, float] | None = None,
) -> dict[str, str]:
    """{system: why it fails}, on the first samples of a batch."""
    if not chosen:
        return {}
    batch = {key: x[:samples] for key, x in batch_of(workload, 0, device, dtype).items()}
    expected = build(workload, loop, device, dtype)(batch)
    failures = {}
    for system, maker in tqdm(chosen.items(), desc=f"checks, {name}", leave=False):
        try:
            right = mean_of_clipped(expected) if system == CLIPPING else expected
            worst = compare_twice(build(workload, maker, device, dtype), batch, right)
            if errors is not None:
                errors[system] = worst
        except Exception as error:  # whatever a peer raises
            failures[system] = reason(system, error, workload)
        gc.collect()  # hooked models are cycles that hold large tensors
    return failures


def compare_twice(step: Step, batch: Batch, expected: Found) -> float:
    return max(compare(step(batch), expected) for _ in range(2))  # the library's first step is another one


def compare(found: Found, expected: Found) -> float:
    """The largest error, in its parameter's largest entry, or 1e-6 of all if that is zero but for rounding."""
    worst, floor = 0.0, 1e-6 * max(1e-20, *(float(right.abs().max()) for right in expected.values()))
    for name, right in expected.items():
        if name not in found:
            raise ValueError(f"nothing for the parameter {name}")
        largest = float(right.abs().max())
        torch.testing.assert_close(found[name], right, rtol=1e-3, atol=1e-3 * largest + 1e-6, msg=f"wrong on {name}")
        worst = max(worst, float((found[name] - right).abs().max()) / max(largest, floor))
    return worst


def reason(system: str, error: Exception, workload: Workload) -> str:
    """The error's first line; this library's own errors are raised again, save where a table says what it can't do yet."""
    if system in OURS and workload.kind != ARCHITECTURE:
        raise error
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
