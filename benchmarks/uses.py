"""Whole uses of per-sample gradients, each beside the system that is trusted with it.

A way makes everything anew in each round, hooks and engines too, and returns its numbers; these are compared before anything
is timed.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import given
import torch
import torch.nn as nn
import uses_of_others as others
from given import BATCH, Given
from measuring import guarded, interleaved, seconds
from systems import Data
from torch import Tensor
from ways import installed_version

import autograd_hacks

TITLE = "Whole uses"
OURS, UNPROVEN = "ours", "ours, probe=False"


def furthest(own: Tensor, other: Tensor) -> float:
    """In the largest number."""
    return float((own - other).abs().max() / other.abs().max())


def ranks_apart(own: Tensor, other: Tensor) -> float:
    """1 - the rank correlation."""
    return 1 - float(torch.corrcoef(torch.stack([x.flatten().argsort().argsort().double() for x in (own, other)]))[0, 1])


@dataclass(frozen=True)
class Use:
    """what: for people, of what and how many    theirs: {peer: its way}, of one package
    apart: how far numbers are from another way's    limit: how far they may be"""

    what: str
    ours: given.Use
    package: str
    theirs: dict[str, given.Use]
    apart: Callable[[Tensor, Tensor], float] = furthest
    limit: float = 1e-4


# By this library


def hooked(of: Given) -> nn.Sequential:
    model = of.model()
    autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
    return model


def grams(of: Given) -> Tensor:
    model, found = hooked(of), []
    for batch in of.loader(batch=64):
        autograd_hacks.backward(given.losses(model, batch), "sum")
        found.append(autograd_hacks.per_sample_grads(model).gram().sum(0))
    return torch.cat(found)


def private(of: Given) -> Tensor:
    model, noise = given.private_net(), torch.Generator().manual_seed(3)
    autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
    optimizer = torch.optim.SGD(model.parameters(), given.RATE)
    for batch in given.poisson(of):
        autograd_hacks.backward(given.losses(model, batch), "sum")
        autograd_hacks.private.clip_and_noise_(model, given.BOUND, given.NOISE, given.BATCH, noise=noise)
        optimizer.step()
    return given.weights(model)


def tracin(of: Given) -> Tensor:
    """Σ rate · rows, over the checkpoints of a training."""
    model, found, gram = hooked(of), torch.zeros(()), autograd_hacks.PerSampleGrads.gram
    for state, rate in of.checkpoints:
        model.load_state_dict(state)
        found = found + rate * autograd_hacks.over(model, of.loader(), given.losses, gram, against=of.loader(of.test))
    return found


def ekfac(of: Given) -> Tensor:
    def influence(grads: autograd_hacks.PerSampleGrads, model: nn.Module) -> Tensor:
        rows, solved = grads.dense(), grads.preconditioned(autograd_hacks.attribution.Metric.from_ekfac(model)).dense()
        return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)

    model, draws = hooked(of), torch.Generator().manual_seed(5)
    autograd_hacks.curvature.compute_hess_over(model, of.loader(), kind="ekfac", draws=1, generator=draws)
    found: Tensor = autograd_hacks.over(model, of.loader(), given.losses, lambda grads: influence(grads, model))
    return found


USES = {
    "Gram matrix": Use("{samples} in batches of 64", grams, "torchjd", {"TorchJD's autogram": others.torchjd_grams}),
    "private training": Use(
        "{steps} steps, Poisson batches of 32", private, "opacus",
        {"Opacus": others.opacus_private, "Opacus, ghost": partial(others.opacus_private, ghost=True)},
    ),
    "TracIn": Use("{samples} × {queries}, 4 checkpoints", tracin, "captum", {"captum's TracInCP": others.captum}),
    "EK-FAC influence": Use(
        "{samples}, one drawn label", ekfac, "kronfluence", {"kronfluence": others.kronfluence}, ranks_apart, 0.02
    ),
}  # fmt: skip
PACKAGES = {use.package for use in USES.values()}


def cases(rounds: int, quick: bool) -> dict[str, Callable[[], Data]]:
    """{use: what measures it}"""
    of = given.given(800, 40, 200) if quick else given.given()
    samples = len(of.train)
    sizes = {"samples": samples, "queries": len(of.test), "steps": 2 * samples // BATCH}
    return {f"{name}, {use.what.format(**sizes)}": partial(measured, use, rounds, of) for name, use in USES.items()}


def measured(use: Use, rounds: int, of: Given) -> Data:
    """What `measuring.measured` gives of a case; a peer whose numbers are other ones fails."""
    failures, errors = dict[str, str](), dict[str, float]()
    ways = {OURS: partial(use.ours, of), UNPROVEN: partial(use.ours, replace(of, probe=False))}
    with quiet():
        right = ways[OURS]()
        for peer, make in use.theirs.items():
            if installed_version(use.package) is None:
                failures[peer] = "not installed"
                continue
            theirs = guarded(partial(make, of), peer, failures)
            if theirs is not None:
                errors[peer] = use.apart(right, theirs)
                if errors[peer] <= use.limit:
                    ways[peer] = partial(make, of)
                else:
                    failures[peer] = f"its numbers are {errors[peer]:.1e} from ours; expected {use.limit:.0e} at most"
        steps = {way: (lambda _, run=run: run()) for way, run in ways.items()}
        times = interleaved(steps, lambda number: None, rounds, clock, failures)
    return {"ways": list(dict.fromkeys([*ways, *use.theirs])), "seconds": times, "errors": errors, "failures": failures}


def clock(step: Callable[[], object]) -> float:
    gc.collect()  # what the way before has left is not this one's
    return seconds(step, torch.device("cpu"))


@contextmanager
def quiet() -> Iterator[None]:
    """A context without peers' warnings and logs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
