"""Batches in which each sample is with a probability of its own, cut into micro-batches, and a loader of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from autograd_hacks.errors import ON_PRIVATE


class Mark(NamedTuple):
    """Of a micro-batch.  It travels with its samples, through workers and whatever fetches ahead.

    step: whose it is, from 0 on    is_last: whether it ends that
    samples: how many are no padding; they come first    size: how many there are with that
    rate: the probability by which each was drawn    world: over how many processes the batch is spread
    """

    step: int
    is_last: bool
    samples: int
    size: int
    rate: float
    world: int

    def mask(self) -> Tensor:
        """Which samples are no padding: booleans."""
        return torch.arange(self.size, device="cpu") < self.samples


class Marked(NamedTuple):
    """A micro-batch with its mark."""

    mark: Mark
    batch: Any


def seeded(seed: int, *names: object) -> torch.Generator:
    """A generator of its own for each purpose and step, so that each can be drawn again without those before."""
    key = sha256(repr((seed, *names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") - 2**63)


class PoissonBatches(Sampler[list[Any]]):
    """The samples of micro-batches, each list with its `Mark` in front.

    size: of the data    rate: the probability by which each sample is in a batch    steps: of an epoch
    seed: secret; step t draws by it and t alone    done: how many steps are done, asked as an epoch begins
    parts: micro-batches of a step, or the least where ``most``, samples in a micro-batch, asks for more
    share: (rank, world), which part of each batch is this process's
    padded: whether micro-batches are filled up to ``most``, so that all have one shape
    first: the step with which epoch 0 begins, of epochs of that many steps; asked as an epoch begins

    All processes have equally many micro-batches, of equally many samples, which takes padding at times: at least one, of
    sample 0 where nobody was drawn.
    """

    def __init__(
        self,
        size: int,
        rate: float,
        steps: int,
        seed: Callable[[], int],
        done: Callable[[], int],
        parts: int = 1,
        most: int | None = None,
        share: tuple[int, int] = (0, 1),
        padded: bool = False,
        first: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.first = first
        self.size, self.rate, self.steps, self.seed, self.done = size, rate, steps, seed, done
        self.parts, self.most, self.share, self.padded = parts, most, share, padded
        self._epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """The next pass begins with the first step of that epoch, and not with the first that isn't done."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.steps * self.parts

    def __iter__(self) -> Iterator[list[Any]]:
        first = self.first(self.steps)
        start = self.done() - first if self._epoch is None else self._epoch * self.steps
        for step in range(start, (start // self.steps + 1) * self.steps):
            yield from self._micro_batches(first + step)

    def drawn(self, step: int) -> list[int]:
        """A whole batch, of all processes."""
        draws = torch.rand(self.size, generator=seeded(self.seed(), "batch", step), dtype=torch.float64, device="cpu")
        found: list[int] = (draws < self.rate).nonzero()[:, 0].tolist()
        return found

    def _micro_batches(self, step: int) -> Iterator[list[Any]]:
        rank, world = self.share
        whole = self.drawn(step)
        own, largest = whole[rank::world], -(-len(whole) // world)
        parts = max(self.parts, 1 if self.most is None else -(-largest // self.most))
        length = max(1, -(-largest // parts))
        if self.padded and self.most is not None:
            length = self.most
        for part in range(parts):
            samples = own[part::parts]
            mark = Mark(step, part == parts - 1, len(samples), length, self.rate, world)
            yield [mark, *samples, *[0] * (length - len(samples))]


class _WithMarks(Dataset[Any]):
    """A data set that hands marks on."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        return index if isinstance(index, Mark) else self.data[index]


class _Collate:
    """Makes a `Marked` batch of a mark and samples.  It goes to workers, and is no closure therefore."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, found: list[Any]) -> Marked:
        return Marked(found[0], self.collate(found[1:]))


class PrivateLoader(DataLoader[Any]):
    """What `PrivateTraining.loader` returns: a ``DataLoader`` of Poisson-sampled batches that tells the training of each."""

    def __init__(
        self,
        data: Any,
        batches: PoissonBatches,
        arrived: Callable[[Mark], None],
        begins: Callable[[], None],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        self._arrived, self._begins, self.batches = arrived, begins, batches
        super().__init__(_WithMarks(data), batch_sampler=batches, collate_fn=_Collate(collate_fn), **options)

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Any:
        self._begins()
        return self.unmarked(super().__iter__())

    def unmarked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches themselves, also of another loader that has taken over this one's batches."""
        for batch in batches:
            if isinstance(batch, Marked):
                self._arrived(batch.mark)
                yield batch.batch
            else:
                yield batch


def check_data(data: object, options: dict[str, Any]) -> int:
    """How many samples there are.  Raises for what can't be drawn from at random."""
    if not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
        raise TypeError(
            f"loader was given {type(data).__name__}; expected a data set with __len__ and __getitem__: each of its samples "
            "is in a batch with the same probability, which a stream can't give" + ON_PRIVATE
        )
    ours = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
    if wrong := sorted(ours.intersection(options)):
        raise TypeError(
            f"loader was given {', '.join(wrong)}; batches are drawn by Poisson sampling, for which epsilon is computed: "
            "leave it out, and say expected_batch_size, micro_batch_size or parts" + ON_PRIVATE
        )
    return len(data)
