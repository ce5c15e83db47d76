"""Poisson-sampled batches of samples or users, split into micro-batches, and their loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import chain, pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from autograd_hacks.errors import ON_PRIVATE
from autograd_hacks.extending import kind_of
from autograd_hacks.support.draws import Secret, uniform
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.ranges import is_whole
from autograd_hacks.support.trees import Unpacked, is_packed, unpacked

OF_POISSON = "epsilon is computed for Poisson-sampled batches and does not hold for others, such as a shuffled loader's"
WOULD_CLIP = "which would clip the noisy gradient; samples are clipped already. Leave it out."
N_LOSSES = "expected N losses, one for each sample (reduction='none'): in a mean, one sample's loss depends on the others"

ONCE_MORE = 30
"""How often a batch is collated at most to see which of its parts are random."""


class Users:
    """Users and the numbers of their samples.

    groups: each sample's user, as whole numbers or names, in the order of the data
    per_user: how many samples of a user may be in a batch; the others are left out of it at random. None for all
    """

    def __init__(self, groups: Tensor | Sequence[Any], per_user: int | None = None) -> None:
        given: Any = groups.tolist() if hasattr(groups, "tolist") else groups
        ids = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
        wrong = [f"of {kind_of(own)}" for own in ids if not isinstance(own, str) and not is_whole(own)]
        if wrong or not ids:
            raise TypeError(
                f"PrivateTraining was given groups={kind_of(groups)} {''.join(wrong[:1])}; expected each sample's user: a "
                "tensor of whole numbers, or a list of whole numbers or names" + ON_PRIVATE
            )
        self.per_user, self.count = per_user, len(ids)
        of: dict[int | str, list[int]] = {}
        for n, own in enumerate(ids):
            of.setdefault(own, []).append(n)
        self._samples = list(of.values())

    def __len__(self) -> int:
        return len(self._samples)

    def samples_of(self, drawn: Sequence[int], draws: Callable[[int], Tensor]) -> list[list[int]]:
        """The samples of drawn users, numbered as they first appear, that are in a batch.  draws: returns random numbers"""
        whole = [self._samples[user] for user in drawn]
        if self.per_user is None:
            return whole
        sizes = [len(own) for own in whole]
        order = [x.argsort()[: self.per_user].tolist() for x in draws(sum(sizes)).split(sizes)]
        return [[own[i] for i in sorted(chosen)] for own, chosen in zip(whole, order)]

    def check(self, size: int, micro_batch_size: int | None) -> None:
        """Raises ValueError unless each sample has a user, and each user's samples fit into a micro-batch."""
        if size != self.count:
            given = f"PrivateTraining was given groups of {self.count} samples, and data of {size}"
            raise ValueError(f"{given}; expected each sample's user, in the order of the data" + ON_PRIVATE)
        most = min(max(len(own) for own in self._samples), size if self.per_user is None else self.per_user)  # of a user
        if micro_batch_size is not None and most > micro_batch_size:
            raise ValueError(
                f"loader was given micro_batch_size={micro_batch_size}, but a user has {most} samples, which must be in one "
                "micro-batch, because they are clipped together. Allow larger micro-batches, or give "
                "PrivateTraining(per_user=)" + ON_PRIVATE
            )


class Mark(NamedTuple):
    """Describes a micro-batch.  It travels with the samples through workers and prefetching."""

    step: int  # the number of its step, from 0
    is_last: bool  # whether it is the step's last micro-batch
    numbers: Sequence[int]  # of its samples in the data, with padding
    samples: int  # without padding; they come first
    rate: float  # the probability with which each sample, or user, was drawn
    world: int  # the number of processes that share the batch
    users: tuple[int, ...] | None = None  # of each sample, padding as one more behind them; None if samples are drawn

    @property
    def size(self) -> int:
        """The number of samples with padding."""
        return len(self.numbers)

    @property
    def units(self) -> int:
        """The number of samples without padding, or of their users."""
        return self.samples if self.users is None else len(set(self.users[: self.samples]))

    def groups(self) -> Tensor | None:
        """The number of each sample's user, with padding."""
        return None if self.users is None else torch.tensor(self.users, dtype=torch.long, device="cpu")

    def check(self, losses: int) -> None:
        """Raises ValueError unless each sample has a loss.  losses: 0 if nothing was recorded, which isn't refused here"""
        if losses not in (0, self.size):
            raise ValueError(
                f"step(): {self.size} samples were drawn, but {losses} have losses; expected one loss for each. Give K "
                "views as (N, K, ...), with the mean of K losses; split a batch by loader(micro_batch_size=)" + ON_PRIVATE
            )


class Marked(NamedTuple):
    """A micro-batch with its mark."""

    mark: Mark
    batch: Any


@dataclass(eq=False)
class PoissonBatches(Sampler[list[Mark]]):
    """A sampler of micro-batches.

    A step has ``parts`` lists, each of one micro-batch, or of several if a draw needs more.

    All processes get the same number of them, at least one, and of the same size: they are padded with sample 0.
    """

    size: int  # the number of samples in the data, or of users
    rate: float  # the probability with which each sample, or user, is in a batch
    steps: int  # of an epoch
    seed: Callable[[], int]  # returns the secret seed; the batch of step t depends only on it and t
    done: Callable[[], int]  # returns how many steps are done; called when an epoch begins
    parts: int = 1  # of a step: the number of lists, and the smallest number of micro-batches
    most: int | None = None  # the largest number of samples in a micro-batch
    share: tuple[int, int] = (0, 1)  # (rank, world), this process's part of each batch
    padded: bool = False  # whether micro-batches are padded to ``most``, so that all have one shape
    first: Callable[[int], int] = lambda _: 0  # of the steps of an epoch, returns where epoch 0 begins, as one begins
    users: Users | None = None  # the users who are drawn, with their samples; None if samples are drawn
    _epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass begin with the first step of that epoch, instead of the first step that isn't done.

        accelerate calls it, too, by its own loader."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.steps * self.parts

    def __iter__(self) -> Iterator[list[Mark]]:
        first = self.first(self.steps)
        start = self.done() - first if self._epoch is None else self._epoch * self.steps
        for step in range(start, (start // self.steps + 1) * self.steps):
            every = list(self._micro_batches(first + step))
            ends = [part * len(every) // self.parts for part in range(self.parts + 1)]
            for begin, end in pairwise(ends):
                yield every[begin:end]

    def drawn(self, step: int) -> list[int]:
        """The numbers of the samples, or users, of a whole batch, over all processes."""
        return list[int]((self._numbers(self.size, "batch", step) < self.rate).nonzero()[:, 0].tolist())

    def _numbers(self, count: int, purpose: str, step: int) -> Tensor:
        """Numbers in [0, 1)."""
        return uniform(Secret.of(self.seed(), purpose, step), count)

    def _micro_batches(self, step: int) -> Iterator[Mark]:
        rank, world = self.share
        whole = self.drawn(step)
        samples = [[n] for n in whole]
        if self.users is not None:
            samples = self.users.samples_of(whole, lambda count: self._numbers(count, "users", step))
        sizes = [[len(own) for own in samples[other::world]] for other in range(world)]
        largest, parts = max(sum(own) for own in sizes), self.parts
        if self.most is not None:
            parts = max(parts, -(-largest // self.most))
        while True:
            dealt = [_dealt(own, parts) for own in sizes]
            length = max(1, *[sum(own[n] for n in part) for own, all_parts in zip(sizes, dealt) for part in all_parts])
            if self.most is None or length <= self.most:
                break
            parts += 1
        length = self.most if self.padded and self.most is not None else length
        for i, part in enumerate(dealt[rank]):
            chosen = [(whole[rank::world][n], sample) for n in part for sample in samples[rank::world][n]]
            padding = length - len(chosen)
            users = None if self.users is None else (*[user for user, _ in chosen], *[self.size + rank] * padding)
            numbers = (*[sample for _, sample in chosen], *[0] * padding)
            yield Mark(step, i == parts - 1, numbers, len(chosen), self.rate, world, users)


def _dealt(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Numbers of units, dealt out to parts of nearly equal size: the largest first, each to the part that is smallest."""
    found, least = [list[int]() for _ in range(parts)], [(0, part) for part in range(parts)]
    for n in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size, part = heappop(least)
        found[part].append(n)
        heappush(least, (size + sizes[n], part))
    return found


class _ByMarks(Dataset[tuple[Mark, list[Any]]]):
    """The samples of micro-batches, with the marks that name them."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, mark: Mark) -> tuple[Mark, list[Any]]:
        return mark, [self.data[n] for n in mark.numbers]


def _collated(collate: Callable[[list[Any]], Any], found: list[tuple[Mark, list[Any]]]) -> list[Marked]:
    return [_marked(collate, *own) for own in found]


def _marked(collate: Callable[[list[Any]], Any], mark: Mark, samples: list[Any]) -> Marked:
    """Raises ValueError unless each sample is at its place in the batch, where users or padding are known by places."""
    if collate is default_collate or not (0 < mark.samples < mark.size or len(set(mark.users or ())) > 1):
        return Marked(mark, collate(samples))

    def batch_of(those: list[Any]) -> Any:
        return collate([copy(x) for x in those])  # it may take parts out of samples

    batch, longer = batch_of(samples), batch_of([*samples, samples[0]])
    tries = (list(_kept(batch, longer, batch_of(samples) if n else batch, len(samples))) for n in range(ONCE_MORE))
    if any(kept and all(kept) for kept in tries):
        return Marked(mark, batch)
    raise ValueError(
        "loader was given a collate_fn that puts samples in another order, as by length, or changes all values at random: "
        "with one sample more at the end, other rows of the batch changed. Which samples are padding, and whose they are, "
        "is known by their order. Sort in the model's forward; change values in the data set's __getitem__" + ON_PRIVATE
    )


def _kept(batch: Any, longer: Any, again: Any, size: int) -> Iterator[bool]:
    """Of each part of a batch that has a row for each sample, whether rows are in the order of the samples.

    longer: the batch of these samples with the first one also at the end, which must add a copy of the first row there
    again: the batch once more; parts that differ are random, and tell nothing
    """
    if hasattr(batch, "keys"):
        for key in set(batch.keys()).intersection(longer.keys(), again.keys()):
            yield from _kept(batch[key], longer[key], again[key], size)
    elif isinstance(batch, list | tuple) and len(batch) == len(longer):
        for own in () if is_packed(batch) else zip(batch, longer, again):
            yield from _kept(*own, size)
    elif isinstance(batch, list | tuple) or hasattr(batch, "shape"):
        pairs = [own for own in zip(_by_axis(batch), _by_axis(longer)) if [len(x) for x in own] == [size, size + 1]]
        if pairs and _same(batch, again):
            yield any(_same([*rows, rows[0]], list(more)) for rows, more in pairs)
    else:  # an object that holds tensors, or something else
        opened = [x if isinstance(x, Unpacked) else unpacked(x, everything=True) for x in (batch, longer, again)]
        a, b, c = [x.parts if isinstance(x, Unpacked) else [] for x in opened]
        yield from _kept(a, b, c, size)


def _by_axis(x: Any) -> list[Any]:
    """The rows of a tensor or array along each of its axes, or of a list."""
    return [x.swapaxes(0, axis) for axis in range(x.ndim)] if hasattr(x, "shape") else [x]


def _same(x: Any, y: Any) -> bool:
    """Whether trees of tensors, arrays and others are the same.  NaN is the same as NaN."""
    pairs = list(zip_longest(*[tree_leaves(unpacked(tree)) for tree in (x, y)]))
    shapes = [[getattr(part, "shape", None) for part in own] for own in pairs]
    is_alike = all(one == other for one, other in shapes)
    found = ((a == b) | (a != a) & (b != b) for a, b in pairs if is_alike)
    return is_alike and all(bool(own.all() if hasattr(own, "all") else own) for own in found)


class PrivateLoader(DataLoader[Any]):
    """A ``DataLoader`` of Poisson-sampled batches, as `PrivateTraining.loader` returns it.

    It reports each micro-batch to the training by ``arrived(mark)``.  With ``keeps_marks`` it yields lists of `Marked`, for
    trainers that report them themselves."""

    keeps_marks = False

    def __init__(
        self,
        data: Any,
        batches: PoissonBatches,
        arrived: Callable[[Mark], None],
        begins: Callable[[], None],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        self.arrived, self._begins, self.batches = arrived, begins, batches
        collate = partial(_collated, collate_fn or default_collate)  # workers unpickle it
        super().__init__(_ByMarks(data), batch_sampler=batches, collate_fn=collate, **options)

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Any:
        self._begins()
        lists = super().__iter__()
        return lists if self.keeps_marks else self._unmarked(lists)

    def _unmarked(self, lists: Iterator[list[Marked]]) -> Iterator[Any]:
        for mark, batch in chain.from_iterable(lists):
            self.arrived(mark)
            yield batch


def check_data(data: object, options: dict[str, Any]) -> int:
    """The number of samples.  Raises TypeError for data that can't be sampled at random, and for options of batching."""
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        given = f"loader was given {type(data).__name__}, which can't be sampled at random"
        raise TypeError(f"{given}; expected a data set with __len__ and __getitem__" + ON_PRIVATE)
    ours = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
    if wrong := sorted(ours.intersection(options)):
        raise TypeError(f"loader was given {', '.join(wrong)}, but {OF_POISSON}. Leave it out." + ON_PRIVATE)
    return len(data)
