"""What it costs to trace and to prove: the first steps of a model with hooks, all proofs of a thousand steps, `verify`, and
memory.

Steps 1 to 16 of a few new models are run, each beside a plain step and a clipped one of a model that is long proven, on the
same batch.  Proofs come in the steps 1, 2, 16, 128 and 1024, and what they left open is tried in all other powers of two.
So 128 and 1024 are taken to cost what step 16 does, and 32, 64, 256 and 512 what step 8 does.
"""

from __future__ import annotations

import gc
import statistics
from functools import partial
from typing import Any

import torch
from measuring import Held, batch_of, build, seconds, warm
from systems import CLIPPED, DEFAULT, PLAIN, SYSTEMS
from tqdm import tqdm
from workloads import Workload

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError

Numbers = list[float]
STEPS = 16
LATER = {8: (32, 64, 256, 512), 16: (128, 1024)}
"""{the number of a step that is run: those of steps that are taken to cost as much}"""
MODELS = 3


def proofs(workload: Workload, device: torch.device, models: int = MODELS) -> dict[str, Any]:
    """{'seconds': {what: of each model}, 'peak MB': {what: MB}}.  See `summary` for the former's use."""
    times: dict[str, Numbers] = {"plain": [], "clipped": [], "verify": [], **{str(n): [] for n in range(1, STEPS + 1)}}
    plain, later = (warm(workload, build(workload, SYSTEMS[CLIPPED][name], device), device) for name in (PLAIN, DEFAULT))
    for number in range(STEPS):  # its proofs are behind it then, for a while
        later(batch_of(workload, number, device))
    for _ in tqdm(range(models), desc="first steps", leave=False):
        model = workload.model().to(device)
        workload.losses(model, batch_of(workload, 0, device)).mean().backward()  # so that gradients have their memory
        new = SYSTEMS[CLIPPED][DEFAULT](workload, model)
        for number in range(1, STEPS + 1):
            batch = batch_of(workload, 0, device)
            times["plain"].append(seconds(partial(plain, batch), device))
            times[str(number)].append(seconds(partial(new, batch), device))
            times["clipped"].append(seconds(partial(later, batch), device))
        try:
            times["verify"].append(seconds(partial(autograd_hacks.verify, model), device))
        except PerSampleGradientError:  # what it doesn't do
            del times["verify"][:]
    del plain, later, new, model
    memory = {"clipped step": peaks(workload, device, STEPS + 1)[-1]}
    memory["first step"], memory["second step"] = peaks(workload, device, 2)
    return {"seconds": times, "peak MB": memory}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """What `proofs` has found, in plain steps and in peaks of a clipped step."""
    middle = {name: statistics.median(own) for name, own in found["seconds"].items() if own}
    plain, clipped = middle["plain"], middle["clipped"]
    beyond = {n: max(0.0, middle[str(n)] - clipped) for n in range(1, STEPS + 1) if n & (n - 1) == 0}
    all_of_them = sum(own * (1 + len(LATER.get(n, ()))) for n, own in beyond.items())
    told = {"clipped": clipped, "first": middle["1"], "second": middle["2"], "proofs": all_of_them}
    told |= {"verify": middle["verify"]} if "verify" in middle else {}
    memory = found["peak MB"]
    most = max(memory["first step"], memory["second step"])
    return {name: own / plain for name, own in told.items()} | {"memory": most / memory["clipped step"]}


def peaks(workload: Workload, device: torch.device, steps: int) -> Numbers:
    """MB of tensors alive at once in each of a model's first clipped steps, beside the model and the batch."""
    gc.collect()
    step, batch = build(workload, SYSTEMS[CLIPPED][DEFAULT], device), batch_of(workload, 0, device)
    found = []
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            step(batch)
            found.append((torch.cuda.max_memory_allocated() - before) / 1e6)
        return found
    with Held() as held:
        for _ in range(steps):
            held.most = held.now
            step(batch)
            found.append(held.most / 1e6)
    return found
