"""The users of a data set, for privacy of all of a user's samples together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from autograd_hacks.errors import ON_PRIVATE
from autograd_hacks.support.ranges import is_whole
from autograd_hacks.verbs.arguments import kind_of


class Users:
    """Users and the numbers of their samples.

    groups: each sample's user, as whole numbers or names, in the order of the data
    per_user: how many samples of a user may be in a batch; the others are left out of it at random. None for all
    """

    @classmethod
    def of(cls, groups: Tensor | Sequence[Any] | None, per_user: int | None) -> Users | None:
        """None without ``groups``.  Raises ValueError for ``per_user`` without them."""
        if groups is None and per_user is not None:
            raise ValueError(
                f"PrivateTraining was given per_user={per_user} without groups; expected groups=, each sample's user"
                + ON_PRIVATE
            )
        return None if groups is None else cls(groups, per_user)

    def __init__(self, groups: Tensor | Sequence[Any], per_user: int | None = None) -> None:
        ids = groups.tolist() if hasattr(groups, "tolist") else groups
        if not isinstance(ids, Iterable) or isinstance(ids, str) or not (ids := list(ids)):
            raise TypeError(
                f"PrivateTraining was given groups={kind_of(groups)}; expected the user of each sample of the data, as a "
                "tensor of whole numbers, or a list of these or of names" + ON_PRIVATE
            )
        if wrong := [own for own in ids if not isinstance(own, str) and not is_whole(own)]:
            raise TypeError(
                f"PrivateTraining was given groups with {kind_of(wrong[0])}; expected whole numbers or names, one for each "
                "sample of the data" + ON_PRIVATE
            )
        self.per_user, self.count = per_user, len(ids)
        of: dict[int | str, list[int]] = {}
        for n, own in enumerate(ids):
            of.setdefault(own, []).append(n)
        self._samples = list(of.values())

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def most(self) -> int:
        """The largest number of samples of one user in a batch."""
        largest = max(len(own) for own in self._samples)
        return largest if self.per_user is None else min(largest, self.per_user)

    def samples_of(self, drawn: Sequence[int], draws: Callable[[int], Tensor]) -> list[list[int]]:
        """The samples of drawn users that are in a batch.

        drawn: the users' numbers, in the order in which they first appear in the data
        draws: returns so many random numbers
        """
        whole = [self._samples[user] for user in drawn]
        if self.per_user is None:
            return whole
        sizes = [len(own) for own in whole]
        order = [x.argsort()[: self.per_user].tolist() for x in draws(sum(sizes)).split(sizes)]
        return [[own[i] for i in sorted(chosen)] for own, chosen in zip(whole, order)]

    def check(self, size: int, micro_batch_size: int | None) -> None:
        """Raises ValueError unless each sample has a user, and each user's samples fit into a micro-batch."""
        if size != self.count:
            raise ValueError(
                f"PrivateTraining was given groups of {self.count} samples, and data of {size}; expected the user of each "
                "sample, in the order of the data" + ON_PRIVATE
            )
        if micro_batch_size is not None and self.most > micro_batch_size:
            raise ValueError(
                f"loader was given micro_batch_size={micro_batch_size}, but a user has {self.most} samples, which must be "
                "in one micro-batch, because they are clipped together. Give a larger one, or PrivateTraining(per_user=)"
                + ON_PRIVATE
            )
