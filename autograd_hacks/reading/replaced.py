"""Runs of copies of a model, with other samples instead of some, or with some samples alone, and what they change."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.hooks import hooked_copy
from autograd_hacks.capture.kinds import Within
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import PerSampleGradientError, ProbeFailed
from autograd_hacks.reading.gate import read
from autograd_hacks.support.contexts import drawn_from, is_seeded, without_autocast
from autograd_hacks.support.copies import Copy
from autograd_hacks.support.internals import tree_map
from autograd_hacks.support.layout import Layout, differs, likeliest, rounding_of
from autograd_hacks.support.parts import is_part
from autograd_hacks.support.philox import key_of, noise
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import tensors_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NUMBERS = (bool, int, float, str)
_NOTHING = nullcontext()


class Seen(NamedTuple):
    """The results of one run."""

    outputs: list[Tensor]
    left: dict[str, Tensor]  # by name, the buffers, and numbers: modules', and a sum of each parameter
    rows: dict[str, Tensor]  # by parameter, its rows along a random direction, N, if they were read
    eps: float  # of the coarsest numbers that some samples alone met


class _Undrawn(TorchDispatchMode):
    """Random numbers are all 1, so that a sample alone gets those that it got among others.  Permutations stay drawn.

    So do numbers after a seed that the forward sets, which belong to the places of a batch."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # it would be imported

    eps = 0.0  # of the coarsest numbers that the run has computed

    def __init__(self, draws: Sequence[torch.Generator], takes_permutations: bool) -> None:
        """draws: generators that are older than the forward    takes_permutations: if not, places may be drawn"""
        super().__init__()
        self.seeded, self.takes_permutations = set[torch.Generator](), takes_permutations
        for own in (torch.default_generator, *torch.cuda.default_generators, *draws):  # nothing has just been seeded
            torch.rand(1, generator=own, device=own.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_drawing = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawing and ((draws := drawn_from(args, kwargs or {})) in self.seeded or is_seeded(draws)):
            self.seeded.add(draws)
            return func(*args, **kwargs or {})
        if func is torch.ops.aten.native_dropout.default:
            return func(args[0], args[1], False)
        out = func(*args, **kwargs or {})
        made = (x.dtype for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor))
        self.eps = max([self.eps, *(torch.finfo(kind).eps for kind in made if kind.is_floating_point)])
        if is_drawing and isinstance(out, Tensor) and not out.is_floating_point() and not self.takes_permutations:
            raise ProbeFailed("the forward draws whole numbers, which are others in another batch")
        return out.fill_(1) if is_drawing and isinstance(out, Tensor) and out.is_floating_point() else out


def alone_among(parts: Callable[..., Any], kept: Tensor, arguments: Arguments) -> Arguments:
    """The arguments for some samples alone, as a function of the user's gives them.  kept: N booleans"""
    args, kwargs = arguments
    found = parts(kept.nonzero()[:, 0], *args, **kwargs)
    return ((), found) if isinstance(found, dict) else (found if isinstance(found, tuple) else (found,), {})


@dataclass(eq=False)
class Runs:
    """Runs copies of a model, each once."""

    recorder: Recorder
    within: Within
    copy: Copy
    samples: int
    makes_loss: bool
    are_parts: bool = False  # whether runs have some samples alone, and not other samples instead of some
    is_precise: bool = False  # whether they compute in double precision

    def run(self, arguments: Arguments, with_rows: bool, kept: Tensor | None = None, around: Any = _NOTHING) -> Seen:
        """kept: the samples that there are, if not all    around: a context in which the copy runs"""
        own, rows = self.copy.again(arguments), dict[str, Tensor]()
        model, (args, kwargs) = own.model, own.given
        if self.is_precise:
            model, (args, kwargs) = model.double(), tree_map(_doubled, own.given)
        with ABOVE.alone(model), own.running(), _Undrawn(own.draws, kept is not None) if self.are_parts else around as mode:
            for n, p in enumerate(p for p in model.parameters() if p.requires_grad):
                # Zeros hide what is behind them.  Small numbers change as little as possible of what values decide.
                if p.numel() and not is_part(p) and not p.detach().any():
                    p.data = noise(p.shape, key_of(f"zero {n}"), p.device, p.dtype) / 32
            try:
                if with_rows:
                    outputs, rows = self._with_rows(model, args, kwargs, kept)
                else:
                    precisely = without_autocast(model.parameters()) if self.is_precise else nullcontext()
                    with torch.enable_grad(), Switch.paused_here(), precisely:  # the forward may take derivatives itself
                        outputs = tensors_of(model(*args, **kwargs))
            except PerSampleGradientError:
                raise
            except Exception as error:  # the model may raise anything for other samples
                raise ProbeFailed(
                    "independence of samples: the check runs a copy of the model with other samples replaced, and it "
                    f"raised {type(error).__name__}: {error}. Training that is not "
                    "private can leave the check out: independent=False."
                ) from error
            left = {name: x.detach().clone() for name, x in model.named_buffers()} | _numbers(model)
            return Seen([x.detach().clone() for x in outputs], left, rows, getattr(mode, "eps", 0.0))

    def _with_rows(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Tensor | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        found, samples = dict[str, Tensor](), self.samples if kept is None else int(kept.sum())
        # Its values may be read in another way.  It starts no further runs.
        with hooked_copy(model, self.recorder, independent=False, within=self.within) as recorder:
            outputs = tensors_of(model(*args, **kwargs))
            losses = [x for x in outputs if x.numel() == 1 and x.grad_fn is not None and x.is_floating_point()]
            if not self.makes_loss:
                slots = [slot for slot, x in enumerate(outputs) if x.grad_fn is not None and not x.is_nested]
                losses = [along for slot in slots if (along := self._along(outputs[slot], slot, kept)) is not None]
            if not losses:
                return outputs, {}
            torch.autograd.backward(losses)
            for name, form in read(model, dict(model.named_parameters()), recorder, "sum").items():
                if form is not None and form.samples == samples:
                    like = form.like
                    found[name] = form.dot(noise(form.shape, key_of(name), like.device, like.dtype)).detach()
        return outputs, found

    def _along(self, x: Tensor, slot: int, kept: Tensor | None) -> Tensor | None:
        """An output along a random direction, times a number of each sample's, which it has in each run.

        None for some samples alone, if nothing says where they are."""
        at, made = self._at(slot), partial(noise, device=x.device, dtype=x.dtype)
        if at is None:
            return None if self.are_parts else (x * made(x.shape, key_of(slot))).sum().real
        of_each = made((self.samples,), key_of("samples"))
        of_each = of_each if kept is None else of_each[kept.to(x.device)]
        if not at.fits(x, len(of_each)):
            return None
        x = at.samples_first(x, len(of_each))
        return ((x * made(x.shape[1:], key_of(slot))).reshape(len(x), -1).sum(1) * of_each).sum().real

    def _at(self, slot: int) -> Layout | None:
        return self.within.outputs[slot] if slot < len(self.within.outputs) else None

    def differing(self, first: Seen, other: Seen, kept: Tensor, rounds: bool) -> tuple[str, tuple[int, ...]]:
        """The difference found for the kept samples, as text for messages, or "", and the outputs that show it.

        rounds: whether to ignore differences that rounding explains"""
        every = tuple(range(len(first.outputs)))
        if len(first.outputs) != len(other.outputs):
            return "how many tensors the model returns", every
        for slot, (x, y) in enumerate(zip(first.outputs, other.outputs)):
            at = self._at(slot) or self._by_size(x.shape)
            if self.are_parts and at is not None:
                count = int(kept.sum())
                x = at.samples_first(x, self.samples)[kept.to(x.device)]
                y, at = at.samples_first(y, count) if at.fits(y, count) else y, None
            if x.shape != y.shape:
                return f"the shape of the model's output number {slot}", (slot,)
            if (at is not None or self.are_parts) and _changes(x, y, at, kept, rounds):
                return f"the model's output number {slot} (shape {tuple(first.outputs[slot].shape)})", (slot,)
        for name in (*first.left, *other.left):
            one, another = first.left.get(name), other.left.get(name)
            is_other = one is None or another is None or one.shape != another.shape
            if is_other or _changes(first.left[name], other.left[name], self._by_size(first.left[name].shape), kept, rounds):
                return f"what the forward leaves in {name}", every
        return _differing_rows(first.rows, other.rows, kept, rounds), every

    def _by_size(self, shape: Sequence[int]) -> Layout | None:
        return likeliest(shape, self.samples, range(len(shape)))


def _doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    """The numbers among modules' attributes, numbers that stand for strings, and a number for each parameter, which changes
    if something is written there, also by ``.data``."""
    every = ((f"{path}.{name}", x) for path, own in model.named_modules() for name, x in vars(own).items())
    plain = {name.lstrip("."): key_of(x) >> 12 if type(x) is str else x for name, x in every if type(x) in _NUMBERS}
    sums = {
        name: p.detach().sum(dtype=torch.promote_types(p.dtype, torch.float64))
        for name, p in model.named_parameters()
        if not is_part(p)
    }
    return {name: torch.tensor(x, device="cpu") for name, x in plain.items()} | sums


def _changes(x: Tensor, y: Tensor, at: Layout | None, kept: Tensor, rounds: bool) -> bool:
    if torch.equal(x, y):
        return False
    difference = differs(x, y, rounding_of(x) if rounds else None)
    if at is not None:
        difference = at.samples_first(difference, len(kept))[kept.to(x.device)]
    return bool(difference.any())


def _differing_rows(first: Mapping[str, Tensor], other: Mapping[str, Tensor], kept: Tensor, rounds: bool) -> str:
    """The parameter whose rows changed; of some samples alone, by more than the number of samples that a mean has."""
    names = [name for name in first if name in other]
    if not names:
        return ""
    kept = kept.to(first[names[0]].device)
    pairs = [(first[name][kept], own[kept] if len(own := other[name]) == len(kept) else own) for name in names]
    eps, factors = max(torch.finfo(pair[0].dtype).eps for pair in pairs), {1.0}
    if any(len(other[name]) != len(kept) for name in names):
        factors.add(len(kept) / max(1, int(kept.sum())))
    # Rows that are zero but for rounding are compared with the others.
    most = 1e2 * eps * float(torch.stack([again.double().norm() for _, again in pairs]).norm()) if rounds else 1e-30
    for factor in factors:
        found = [n for n, (x, again) in zip(names, pairs) if (x * factor - again).norm() > 1e3 * eps * again.norm() + most]
        if not found:
            return ""
    return f"the rows of {found[0]}"
