"""What it costs to trace and to prove: the first steps of a model with hooks, all proofs of a thousand steps, `verify`, and
memory.

Steps 1 to 16 of a few new models are run, each beside a plain step and a clipped one of a model that is long proven, on the
same batch; see `aims.proof_costs` for the thousand.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from aims import STEPS
from measuring import Held, batch_of, build, seconds, warm
from systems import CLIPPED, DEFAULT, PLAIN, SYSTEMS
from tqdm import tqdm
from workloads import Workload

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError

Numbers = list[float]
MODELS = 3


def proofs(workload: Workload, device: torch.device, models: int = MODELS) -> dict[str, Any]:
    """{'seconds': {what: of each model}, 'peak MB': {what: MB}}.  See `aims.of_proofs` for what is made of them."""
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
