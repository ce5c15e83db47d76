"""Documents packed into one sample: which document each position belongs to, and how rows of positions are combined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autograd_hacks.errors import ON_SEGMENTS, BatchSizeError, UnseenGradient
from autograd_hacks.forms import Concatenation, Form, Grouping, gathered
from autograd_hacks.forms.factored import Paired
from autograd_hacks.support.internals import tree_flatten, tree_unflatten
from autograd_hacks.support.layout import POSITIONS, Layout
from autograd_hacks.support.trees import tensors_of

Segments: TypeAlias = str | Tensor | Callable[..., Tensor]
"""The name of an argument that separates documents, `TOKENS`, a number for each position, or a function of the arguments."""

TOKENS = "tokens"
"""A value of ``segments``: each position is a document of its own."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Which document each position of a batch belongs to.

    ids: B T, in [0, count), negative for padding
    count: D, the number of rows
    is_of_tokens: whether each position has a row of its own, for its part of the sample's loss
    leaks: parameters without rows of documents, known when the forward has ended
    """

    ids: Tensor
    count: int
    is_of_tokens: bool = False
    leaks: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows of documents

    @property
    def losses(self) -> int:
        """The number by which a mean over losses was divided."""
        return len(self.ids) if self.is_of_tokens else self.count

    def layout(self, shape: Sequence[int], at: Layout | None, features: int = 0) -> Layout | None:
        """Where the positions are in a tensor whose samples' place is known; None if that can't be determined.

        features: how many of its last axes belong to a position
        """
        samples, positions = self.ids.shape
        if at == Layout() and tuple(shape[:2]) == (samples, positions) and len(shape) - features >= 2:
            # If two axes have the same size, nothing shows which one has the positions of tokens.
            is_doubtful = self.is_of_tokens and positions > 1 and positions in shape[2 : len(shape) - features]
            return None if is_doubtful else Layout(0, POSITIONS)
        # Rows may have been reordered.  Labels of documents show it, but nothing shows it for tokens.
        is_merged = at is not None and at.axis == 0 and (at.fold == "N·T" or 1 in (samples, positions))
        is_merged &= not self.is_of_tokens
        return Layout() if is_merged and len(shape) > features and shape[0] == samples * positions else None

    def check_padding(self, grads: Sequence[Tensor | None], place: str) -> None:
        """Raises if gradient arrived at positions of padding, because no document's row would include it."""
        for g in grads if self._kept is not None else ():
            is_read = None if g is None else self.over(g, torch.ones(self.count, device="cpu"))
            if g is not None and is_read is not None and bool((g.detach() * (is_read == 0)).any()):
                raise UnseenGradient(
                    f"{place}: got gradient at padding (positions with a negative number). The loss reads these positions, "
                    "or documents attend to them, but no document's row would include this gradient. Multiply their losses "
                    "by 0, or use ignore_index, and mask them in attention." + ON_SEGMENTS
                )

    def over(self, x: Tensor, values: Tensor) -> Tensor | None:
        """A value for each document, shaped so that it multiplies a tensor; 0 for padding.  values: D

        The tensor's positions may be on axis 1, on axis 2 after heads, or folded into axis 0; else returns None."""
        # Padding is -1, so it reads the zero at the end, which is there without documents, too.
        of_positions = torch.cat([values, values.new_zeros(1)]).to(x)[self.ids.to(x.device)]
        if tuple(x.shape[:2]) == tuple(self.ids.shape):
            return of_positions.view(*self.ids.shape, *[1] * (x.ndim - 2))
        if x.ndim > 2 and (x.shape[0], x.shape[2]) == tuple(self.ids.shape):
            return of_positions.view(len(x), 1, x.shape[2], *[1] * (x.ndim - 3))
        if x.ndim and x.shape[0] == self.ids.numel():
            return of_positions.view(-1, *[1] * (x.ndim - 1))
        return None

    def replaced(self, segments: Segments, args: Sequence[Any], kwargs: Mapping[str, Any], kept: Tensor) -> Any:
        """The arguments with the tokens of some documents replaced by tokens of other positions; None if nothing changes.

        kept: D booleans, False for documents to replace
        """
        leaves, spec = tree_flatten((args, kwargs))
        changed = False
        for n, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.shape[:2] == self.ids.shape and x.dtype != torch.bool:
                is_kept = self.over(x.new_zeros(x.shape, dtype=torch.float32), kept.float())
                rolled = x.detach().flatten(0, 1).roll(1, 0).view(x.shape)
                new = x.detach().where(is_kept > 0, rolled) if is_kept is not None else x
                tried = [*leaves[:n], new, *leaves[n + 1 :]]
                if not torch.equal(new, x) and self._fit(segments, tree_unflatten(tried, spec)):
                    leaves, changed = tried, True
        return tree_unflatten(leaves, spec) if changed else None

    def _fit(self, segments: Segments, arguments: Any) -> bool:
        try:
            return torch.equal(documents_of(segments, *arguments).ids, self.ids)
        except ValueError:
            return False

    def owners(self, shape: Sequence[int], at: Layout | None, device: torch.device) -> Tensor | None:
        """The document of each entry in a tensor of some shape, up to broadcasting; None if that can't be determined."""
        where = self.layout(shape, at)
        if where is None:
            return None
        axes = self.ids.shape if where.fold else (self.ids.numel(),)
        return self.ids.to(device).reshape(*axes, *[1] * (len(shape) - len(axes)))

    def rows(self, form: Form) -> Form:
        """Rows of documents, from rows of positions (B T)."""
        device = form.like.device
        if self._kept is not None:
            form = form[self._kept.to(device)]
        if self._order is not None:  # each document has one position
            return form[self._order.to(device)] if len(self._order) else form
        ids, classes = self._ids.to(device), self._classes
        if not isinstance(form, Paired) or len(classes) == 1:
            return gathered(form, ids, self.count)
        parts = [gathered(form[at.to(device)], own.to(device), len(documents)) for documents, at, own in classes]
        return Grouping(Concatenation(parts), torch.cat([documents for documents, *_ in classes]).to(device), self.count)

    @cached_property
    def most(self) -> int:
        """The largest number of documents in a sample; 0 for rows of tokens, which aren't checked."""
        if self.is_of_tokens or not self.ids.numel():
            return 0
        first = self.ids.masked_fill(self.ids < 0, self.count).amin(1)
        return max(0, int((self.ids.amax(1) - first).max()) + 1)

    @cached_property
    def _kept(self) -> Tensor | None:
        """The positions that are not padding; None for all."""
        return (self.ids.flatten() >= 0).nonzero()[:, 0] if bool((self.ids < 0).any()) else None

    @cached_property
    def _ids(self) -> Tensor:
        """The document of each position that is not padding."""
        return self.ids.flatten() if self._kept is None else self.ids.flatten()[self._kept]

    @cached_property
    def _order(self) -> Tensor | None:
        """Where each document's only position is; empty if they are in order; None if documents have several positions."""
        if len(self._ids) != self.count:
            return None
        order = self._ids.argsort()
        return order[:0] if torch.equal(self._ids[order], self._ids) else order

    @cached_property
    def _classes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Groups of documents of similar length, each padded to its longest: the documents' numbers, their positions,
        and which document of the group each position belongs to."""
        sizes = torch.bincount(self._ids, minlength=self.count)
        classes = (2 * sizes.clamp(min=1).float().log2()).ceil().long()  # lengths within a factor of √2
        found = []
        for number in classes.unique().tolist():
            documents = (classes == number).nonzero()[:, 0]
            place = torch.full((self.count,), -1, dtype=torch.long, device=documents.device)
            place[documents] = torch.arange(len(documents), device=documents.device)
            at = (place[self._ids] >= 0).nonzero()[:, 0]
            found.append((documents, at, place[self._ids[at]]))
        return found


def check_segments(segments: object, verb: str, batch_dim: object, probe: object, independent: bool) -> None:
    """Raises TypeError if segments don't tell documents, and ValueError for a model hooked in a way that excludes them.

    verb: the function that was given segments    batch_dim, probe, independent: as in `add_hooks`
    """
    is_of_positions = isinstance(segments, Tensor) and segments.ndim == 2 and not segments.is_floating_point()
    if not (is_of_positions or isinstance(segments, str) or (callable(segments) and not isinstance(segments, Tensor))):
        what = f"type {type(segments).__name__}"
        if isinstance(segments, Tensor):
            what = f"{segments.dtype} and shape {tuple(segments.shape)}"
        raise TypeError(
            f"{verb} was given segments of {what}; expected the name of an argument of the model, a number for each "
            "position of a batch, (B, T) whole numbers, or a function of the model's arguments that returns such"
            + ON_SEGMENTS
        )
    if independent or not probe or batch_dim != 0:
        raise ValueError(
            f"{verb} was given segments, and add_hooks independent={independent}, probe={probe!r}, batch_dim={batch_dim!r}. "
            "With segments, samples must be on axis 0, and only the gradient check can show that documents are independent. "
            "Leave these arguments of add_hooks out. For private training make each document a padded sample." + ON_SEGMENTS
        )


def documents_of(segments: Segments, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Documents:
    """The documents of a forward's batch.

    Raises ValueError if the argument is missing or doesn't cover the batch.
    """
    told = kwargs.get(segments) if isinstance(segments, str) else None
    several = [x for x in tensors_of((args, kwargs)) if x.ndim >= 2]
    several = [x for x in several if x is not told] or several  # positions may be given once for all samples
    ids = [x for x in several if x.ndim == 2 and not x.is_floating_point() and x.dtype != torch.bool]
    like = max(ids, key=Tensor.numel, default=next(iter(several), None))  # and not a mask, T T or B 1 T T
    if like is None:
        raise ValueError(
            "segments: no argument of the model has samples and positions, (B, T) or (B, T, ...), so there is nothing that "
            "could contain documents." + ON_SEGMENTS
        )
    samples, positions = like.shape[:2]
    if isinstance(segments, Tensor):
        return _by_ids(segments, samples, positions, "the tensor that add_hooks or over was given as segments")
    if segments == TOKENS:
        # Row t · N + n is position t of sample n.
        rows = torch.arange(samples * positions, device="cpu").view(positions, samples).T
        return Documents(rows, samples * positions, is_of_tokens=True)
    if callable(segments):
        what = f"the function {getattr(segments, '__name__', 'given')!r}"
        return _by_ids(segments(*args, **kwargs), samples, positions, what)
    what = f"the argument {segments!r}"
    if told is None:
        raise ValueError(
            f"add_hooks(segments={segments!r}): the model got no argument of this name; it got "
            f"{', '.join(kwargs) or 'none by name'}. Pass it by name: model(..., {segments}=...)." + ON_SEGMENTS
        )
    if "position" in segments:
        return _by_positions(told, samples, positions, what)
    if isinstance(told, Tensor) and told.ndim == 1 and "cu_seq" in segments:
        return _by_ends(told, samples, positions, what)
    return _by_ids(told, samples, positions, what)


def _by_ids(told: object, samples: int, positions: int, what: str) -> Documents:
    """told: B T, a number for each document within its sample; negative for padding"""
    ids = _checked(told, (samples, positions), what, "a whole number for each position, negative for padding")
    given, ranks = ids.unique(return_inverse=True)  # hashes may be too large to multiply
    keys = ranks + len(given) * torch.arange(samples, device=ids.device)[:, None]
    known, numbers = keys[ids >= 0].unique(return_inverse=True)
    found = torch.full_like(ids, -1)
    found[ids >= 0] = numbers
    return Documents(found, len(known))


def _by_positions(told: object, samples: int, positions: int, what: str) -> Documents:
    """told: B T or 1 T, the position of each token in its document"""
    if isinstance(told, Tensor) and told.ndim == 2 and told.shape == (1, positions):
        told = told.expand(samples, positions)
    ids = _checked(told, (samples, positions), what, "the position of each token in its document, 0 for the first")
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1] + 1
    if bool((ids[begins] != 0).any()):
        wrong = int(ids[begins][ids[begins] != 0][0])
        raise ValueError(
            f"segments: {what} has {wrong} at the start of a document; expected 0, 1, 2, ... in each document, because "
            "documents are found by their 0." + ON_SEGMENTS
        )
    return _by_ids(begins.cumsum(1), samples, positions, what)


def _by_ends(told: Tensor, samples: int, positions: int, what: str) -> Documents:
    """told: D + 1, the start of each document in the batch's concatenated positions, and the number of positions"""
    ends, size = told.detach().long().cpu(), samples * positions
    if len(ends) < 1 or int(ends[0]) != 0 or int(ends[-1]) != size or bool((ends.diff() < 0).any()):
        raise ValueError(
            f"segments: {what} is {ends.tolist()[:8]}{' ...' if len(ends) > 8 else ''}; expected the start of each "
            f"document, ascending from 0 to {size}, the number of positions in {samples} × {positions}." + ON_SEGMENTS
        )
    lengths = ends.unique().diff()
    ids = torch.arange(len(lengths), device="cpu").repeat_interleave(lengths)
    return Documents(ids.view(samples, positions), len(lengths))


def _checked(told: object, shape: tuple[int, int], what: str, expected: str) -> Tensor:
    if not isinstance(told, Tensor) or told.is_floating_point() or tuple(told.shape) != shape:
        given = f"{told.dtype} of shape {tuple(told.shape)}" if isinstance(told, Tensor) else type(told).__name__
        raise ValueError(
            f"segments: {what} is {given}; expected whole numbers of shape {shape} for the whole batch, {expected}."
            + ON_SEGMENTS
        )
    return told.detach().long()


def check_told(where: Layout | None, what: str, shape: Sequence[int]) -> Layout:
    """Raises if it is unknown which positions rows belong to."""
    if where is None:
        raise BatchSizeError(unassigned(what, shape) + ON_SEGMENTS)
    return where


def unassigned(what: str, shape: Sequence[int]) -> str:
    return (
        f"{what}: made a tensor of shape {tuple(shape)}, in which the positions can't be assigned to documents. "
        "Positions must be on axis 1 after the samples, or folded into axis 0. Leave its parameters out "
        "(add_hooks(only=...)), or give each document as a padded sample of its own."
    )
