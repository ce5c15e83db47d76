"""Times a clipped step: the norms of all samples' gradients, and the mean of the clipped ones.

    python benchmarks/clipped.py --peers --output bench-output

Against a plain forward and backward pass, one backward pass for each sample, ``torch.func``, and Opacus' ghost clipping
where it is installed (``pip install --no-deps opacus``).  Rounds are interleaved, and every result is first compared with
the loop's, in double precision, where ReLU decides alike in every batch size.
Memory is that of tensors alive at once, by torch's own account of each operation's results, beside the model and the batch.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import platform
import statistics
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from run import Rows, Step, check, measure
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workloads import CLIPPED, Batch, Workload

import autograd_hacks

PLAIN, SKIPPED, DEFAULT, STREAMED = "plain", "autograd_hacks, param_grad=False", "autograd_hacks", "streaming, two passes"
LOOP, VMAP, OPACUS = "one backward per sample", "torch.func", "Opacus, ghost clipping"
MAX_NORM = 1.0
MEMORY_AIM = 1.15  # of the streaming way, in plain peaks


def gradients(model: nn.Module) -> Rows:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def checked(workload: Workload, peers: bool) -> tuple[dict[str, Step], dict[str, str]]:
    """{name: a step that returns the clipped gradient}, and why others can't run or are wrong."""
    precise, batch = systems(workload, peers, torch.float64), cast(workload.batch(0), torch.float64)
    expected = {name: g.clone() for name, g in systems(workload, True, torch.float64)[LOOP](batch).items()}
    failures = {}
    for name, step in precise.items():
        try:
            for _ in range(2):  # the library's first step is another one
                check(name, step(batch), expected)
        except Exception as error:  # whatever a peer raises
            if name in (SKIPPED, DEFAULT, STREAMED):
                raise
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    steps = systems(workload, peers, torch.float32)
    for step in [step for name, step in steps.items() if name not in failures]:
        for _ in range(2):
            step(workload.batch(0))
    return {name: step for name, step in steps.items() if name not in failures}, failures


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def systems(workload: Workload, peers: bool, dtype: torch.dtype) -> dict[str, Step]:
    """{name: a step that returns the clipped gradient}"""
    torch.manual_seed(0)
    plain_model = workload.model().to(dtype)
    default, skipped, streamed = (copy.deepcopy(plain_model) for _ in range(3))
    autograd_hacks.add_hooks(default)
    autograd_hacks.add_hooks(skipped, param_grad=False)
    autograd_hacks.add_hooks(streamed)
    parameters = {name: p.detach() for name, p in plain_model.named_parameters()}

    def plain(batch: Batch) -> Rows:
        plain_model.zero_grad()
        workload.losses(plain_model, batch).mean().backward()
        return {}

    def ours(model: nn.Module) -> Step:
        def step(batch: Batch) -> Rows:
            model.zero_grad()
            workload.losses(model, batch).mean().backward()
            autograd_hacks.clip_grad1_norm_(model, MAX_NORM)
            return gradients(model)

        return step

    def two_passes(batch: Batch) -> Rows:
        streamed.zero_grad()
        losses = workload.losses(streamed, batch)
        with autograd_hacks.streaming(streamed, budget=2**21) as found:
            losses.mean().backward(retain_graph=True)
        streamed.zero_grad()
        with autograd_hacks.pause_hooks():
            (losses * (MAX_NORM / found.norms).clamp(max=1)).mean().backward()
        return gradients(streamed)

    def loop(batch: Batch) -> Rows:
        plain_model.zero_grad()
        samples = len(batch["y"])
        for n in range(samples):
            loss = workload.losses(plain_model, {name: x[n : n + 1] for name, x in batch.items()}).sum()
            own = torch.autograd.grad(loss, list(plain_model.parameters()))
            norm = torch.stack([g.norm() for g in own]).norm()
            for p, g in zip(plain_model.parameters(), own):
                part = g * (MAX_NORM / norm).clamp(max=1) / samples
                p.grad = part if p.grad is None else p.grad.add_(part)
        return gradients(plain_model)

    def torch_func(batch: Batch) -> Rows:
        def loss(weights: Rows, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(plain_model, weights, (x[None],)), y[None])

        rows = vmap(grad(loss), (None, 0, 0))(parameters, batch["x"], batch["y"])
        norms = torch.stack([own.flatten(1).norm(dim=1) for own in rows.values()]).norm(dim=0)
        weights = (MAX_NORM / norms).clamp(max=1) / len(norms)
        return {name: torch.tensordot(weights, own, 1) for name, own in rows.items()}

    steps: dict[str, Step] = {PLAIN: plain, SKIPPED: ours(skipped), DEFAULT: ours(default), STREAMED: two_passes}
    if peers:
        steps |= {LOOP: loop, VMAP: torch_func, OPACUS: opacus(plain_model)}
    return steps


def opacus(model: nn.Module) -> Step:
    """Norms by its hooks, then a second backward pass, as its documentation has it."""
    wrapped: list[Any] = []

    def step(batch: Batch) -> Rows:
        if not wrapped:
            kind = importlib.import_module("opacus.grad_sample").GradSampleModuleFastGradientClipping
            wrapped.append(kind(copy.deepcopy(model), max_grad_norm=MAX_NORM, use_ghost_clipping=True))
        net = wrapped[0]
        net.zero_grad()
        losses = F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
        net.enable_hooks()
        losses.mean().backward(retain_graph=True)
        weights = net.get_clipping_coef()
        net.zero_grad()
        net.disable_hooks()
        (losses * weights).mean().backward()
        found = {name.removeprefix("_module."): g for name, g in gradients(net).items()}
        net.enable_hooks()
        return found

    return step


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known | self._seen:
                self._hold(x.untyped_storage())
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


def peak(step: Step, batch: Batch) -> float:
    """MB of tensors at once."""
    with Held() as held:
        step(batch)
    return held.most / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only workloads with this in their name; may be repeated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peers", action="store_true", help="time a loop, torch.func and Opacus too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="folder for the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for name, workload in CLIPPED.items():
        if options.workload and not any(part in name for part in options.workload):
            continue
        steps, failures = checked(workload, options.peers)
        batch = workload.batch(0)
        memory = {system: peak(step, batch) for system, step in steps.items()}
        results[name] = {
            "seconds": measure(workload, steps, options.rounds, name),
            "peak MB": memory,
            "failures": failures,
        }
    report(results, options.threads)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        about = {"torch": torch.__version__, "machine": platform.machine(), **vars(options), "output": None}
        (options.output / "clipped.json").write_text(json.dumps({"about": about, "results": results}, indent=1))


def report(results: dict[str, Any], threads: int) -> None:
    print(f"\nmedians, {threads} threads, torch {torch.__version__}; x: in plain steps, and in plain peaks of memory")
    print(f"{'':46}{'ms':>9}{'time x':>9}{'aim':>6}{'MB':>9}{'memory x':>10}{'aim':>6}")
    for name, result in results.items():
        print(name)
        medians = {system: statistics.median(values) for system, values in result["seconds"].items()}
        for system, seconds in medians.items():
            memory = result["peak MB"][system]
            aims = (
                f"{CLIPPED[name].beyond_write:.1f}" if system == SKIPPED else "",
                f"{MEMORY_AIM:.2f}" if system == STREAMED else "",
            )
            print(
                f"    {system:42}{1e3 * seconds:9.1f}{seconds / medians[PLAIN]:9.2f}{aims[0]:>6}"
                f"{memory:9.1f}{memory / result['peak MB'][PLAIN]:10.2f}{aims[1]:>6}"
            )
        for system, why in result["failures"].items():
            print(f"    {system:42} fails: {why[:90]}")


if __name__ == "__main__":
    main()
