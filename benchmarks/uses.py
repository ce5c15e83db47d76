"""Whole uses of per-sample gradients, each beside the system that is trusted with it.

A way makes everything anew in each round, hooks and engines too, and returns its numbers; these are compared before
anything is timed.  Every round runs each way once, in an order of its own, and ratios are those of a round's times.
"""

from __future__ import annotations

import gc
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from given import BATCH, DIM, Given, Make
from measuring import Numbers, seconds
from peers import installed_version
from torch import Tensor
from tqdm import tqdm
from uses_of_others import bergson, captum, kronfluence, opacus_private, posterior, torchjd_grams, traker
from uses_of_ours import LAST, collected, ekfac, grams, private, projected, self_influence, tracin
from uses_report import OURS, UNPROVEN


def furthest(own: Tensor, other: Tensor) -> float:
    """In the largest number."""
    return float((own - other).abs().max() / other.abs().max())


def ranks_apart(own: Tensor, other: Tensor) -> float:
    """1 - the rank correlation."""
    return 1 - float(torch.corrcoef(torch.stack([x.flatten().argsort().argsort().double() for x in (own, other)]))[0, 1])


def products_apart(own: Tensor, other: Tensor) -> float:
    """1 - the correlation of the inner products that two random maps keep."""
    return 1 - float(torch.corrcoef(torch.stack([(x @ x.T).flatten().double() for x in (own, other)]))[0, 1])


@dataclass(frozen=True)
class Use:
    """ours, theirs: what makes a way; by its name    packages: what these are in
    apart: how far numbers are from another way's    limit: how far they may be
    hooks: whether it is ours to hook the model, so that it may be left unproven"""

    what: str  # for people: of what, how many
    ours: Make
    theirs: dict[str, Make]
    packages: dict[str, str]
    apart: Callable[[Tensor, Tensor], float] = furthest
    limit: float = 1e-4
    hooks: bool = True


USES = {
    "Gram matrix": Use(
        "{samples} in batches of 64", grams, {"TorchJD's autogram": torchjd_grams}, {"TorchJD's autogram": "torchjd"}
    ),
    "private training": Use(
        "{steps} steps, Poisson batches of 32",
        private,
        {"Opacus": opacus_private, "Opacus, ghost clipping": partial(opacus_private, ghost=True)},
        {"Opacus": "opacus", "Opacus, ghost clipping": "opacus"},
    ),
    "TracIn": Use(
        "{samples} × {queries}, 4 checkpoints", tracin, {"captum's TracInCP": captum}, {"captum's TracInCP": "captum"}
    ),
    "TracIn, last layer": Use(
        "{samples} × {queries}, 4 checkpoints",
        partial(tracin, only=LAST),
        {"captum's TracInCPFast": partial(captum, last=True)},
        {"captum's TracInCPFast": "captum"},
    ),
    "self-influence": Use(
        "{samples}, 4 checkpoints", self_influence, {"captum's TracInCP": partial(captum, itself=True)},
        {"captum's TracInCP": "captum"},
    ),
    "projections": Use(
        f"{{samples}} to {DIM}, to a file", projected, {"traker": traker}, {"traker": "traker"}, products_apart, 0.15
    ),
    "rows of linear layers": Use(
        "{batches} batches of 32 × 24", collected, {"bergson's collector": bergson}, {"bergson's collector": "bergson"}
    ),
    "EK-FAC influence": Use(
        "{samples}, one drawn label", ekfac, {"kronfluence": kronfluence}, {"kronfluence": "kronfluence"}, ranks_apart, 0.02
    ),
    "Laplace, Kronecker factors": Use(
        "{samples}, {queries} predictions",
        partial(posterior, own=True),
        {"laplace-torch with curvlinops": posterior},
        {"laplace-torch with curvlinops": "laplace-torch"},
        furthest,
        1e-2,
        hooks=False,
    ),
}  # fmt: skip

Data = dict[str, Any]


def uses(rounds: int, device: torch.device, of: Given, parts: list[str] | None = None) -> dict[str, Data]:
    """{use: what, {way: seconds of each round}, {peer: how far its numbers are}, {peer: why it fails}}.

    parts: of names of uses, or all.  Raises RuntimeError where a peer's numbers are other ones.
    """
    found: dict[str, Data] = {}
    for name, use in USES.items():
        if not parts or any(part in name for part in parts):
            with quiet():
                found[name] = timed(name, use, rounds, device, of)
    return found


def timed(name: str, use: Use, rounds: int, device: torch.device, of: Given) -> Data:
    ways, apart, failures = {OURS: use.ours(of)}, dict[str, float](), dict[str, str]()
    if use.hooks:
        ways[UNPROVEN] = use.ours(replace(of, probe=False))
    ours = ways[OURS]()
    for peer, make in use.theirs.items():
        if installed_version(use.packages[peer]) is None:
            failures[peer] = "not installed"
            continue
        try:
            way = make(of)
            theirs = way()
        except Exception as error:  # whatever a peer raises
            failures[peer] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            continue
        apart[peer] = use.apart(ours, theirs)
        if not apart[peer] <= use.limit:
            raise RuntimeError(f"{name}: {peer}'s numbers are {apart[peer]:.1e} from ours; expected {use.limit:.0e} at most")
        ways[peer] = way
    times: dict[str, Numbers] = {system: [] for system in ways}
    shuffler = random.Random(0)
    for _ in tqdm(range(rounds), desc=name, unit="round", leave=False):
        for system in shuffler.sample(list(ways), len(ways)):
            gc.collect()  # what the way before has left is not this one's
            times[system].append(seconds(ways[system], device))
    return {"what": use.what.format(**sizes(of)), "seconds": times, "apart": apart, "failures": failures}


def sizes(of: Given) -> dict[str, int]:
    samples = len(of.train)
    return {"samples": samples, "queries": len(of.test), "steps": 2 * samples // BATCH, "batches": samples // BATCH}


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
