"""Private training from the batches to epsilon: what a loop, or a trainer, needs beside the model and the optimizer."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import Hooked, clear_backprops, recorder_of
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.distributed.spread import spread_of
from autograd_hacks.errors import ON_PRIVATE
from autograd_hacks.privacy.accounting import Accountant, History, add_steps, noise_for, spent
from autograd_hacks.privacy.bounds import QuantileClip
from autograd_hacks.privacy.noise import SecureNoise
from autograd_hacks.privacy.poisson import Mark, PoissonBatches, PrivateLoader, check_data, seeded
from autograd_hacks.privacy.private import clip_and_noise_
from autograd_hacks.privacy.promise import PrivateStep, together
from autograd_hacks.probe.batch import BatchDim
from autograd_hacks.support.draws import Noise
from autograd_hacks.verbs.arguments import check_count
from autograd_hacks.verbs.clipping import check_numbers
from autograd_hacks.verbs.hooking import add_hooks
from autograd_hacks.verbs.losses import backward


class PrivateTraining:
    """Differentially private training (DP-SGD), from the batches to ε::

        private = autograd_hacks.PrivateTraining(max_norm=1.0, noise_multiplier=1.1, expected_batch_size=64, delta=1e-5)
        with private.attach(model, optimizer):
            for x, y in private.loader(data):
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                if private.step():                       # of several micro-batches with the last one
                    optimizer.step()
                    optimizer.zero_grad()
        private.epsilon()

    Batches are drawn by Poisson sampling from a secret seed, gradients are clipped and noised by `clip_and_noise_`, and the
    steps are counted for an accountant.  Step t draws its batch and its noise by the seed and t alone, so that a training
    that goes on from a checkpoint has the same bits.

    max_norm, expected_batch_size, clip: as in `clip_and_noise_`    delta: δ of (ε, δ)-differential privacy, below 1 / size
    noise_multiplier: as in `clip_and_noise_`; or give epsilon, what ``steps`` steps may spend, in its place
    seed: for tests alone; whoever knows it can take the noise away. The operating system's random bits unless told
    secure: whether noise is drawn by `SecureNoise`, and can't be repeated
    accountant: makes one: ``opacus.accountants.RDPAccountant`` unless told, ``PRVAccountant`` or dp-accounting's, which are
    tighter    loss_type, batch_dim: of the loss and the model, where the loop calls ``loss.backward()`` of a scalar: 'mean'
    or 'sum' over samples, each by its own outputs alone. `backward` needs neither

    history: (noise multiplier, sampling rate, steps), what was done    steps: how many    planned: how many may spend
    epsilon
    """

    def __init__(
        self,
        max_norm: float | Mapping[str, float],
        noise_multiplier: float | None = None,
        expected_batch_size: float | None = None,
        delta: float = 1e-5,
        *,
        epsilon: float | None = None,
        steps: int | None = None,
        clip: str | QuantileClip | Callable[[Tensor], Tensor] = "flat",
        seed: int | None = None,
        secure: bool = False,
        accountant: Accountant = None,
        loss_type: str | None = None,
        batch_dim: BatchDim = 0,
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise ValueError(
                f"PrivateTraining was given noise_multiplier={noise_multiplier} and epsilon={epsilon}; expected one of them"
                + ON_PRIVATE
            )
        if isinstance(clip, QuantileClip) and isinstance(max_norm, Mapping):
            raise ValueError(
                f"PrivateTraining was given a QuantileClip and max_norm={max_norm}; expected one bound, from which it starts"
                + ON_PRIVATE
            )
        if not 0 < delta < 1:
            raise ValueError(f"PrivateTraining was given delta={delta}; expected a number between 0 and 1" + ON_PRIVATE)
        for key, number in {"noise_multiplier": noise_multiplier, "expected_batch_size": expected_batch_size}.items():
            if number is not None:
                check_numbers("PrivateTraining", **{key: number})
        self.max_norm, self.noise_multiplier, self.expected_batch_size = max_norm, noise_multiplier, expected_batch_size
        self.delta, self.clip, self.accountant = delta, clip, accountant
        self.loss_type, self.batch_dim = loss_type, batch_dim
        self.history: History = []
        self.size: int | None = None
        self._target, self.planned = epsilon, steps
        self._seed = secrets.randbits(62) if seed is None else seed
        self._secure = SecureNoise() if secure else None
        self._marks: deque[Mark] = deque()
        self._pieces: deque[Mark] = deque()  # of the first, which was split
        self._ahead = 1
        self._parts: list[PrivateStep] = []
        self._sums: list[tuple[nn.Parameter, Tensor | None]] = []
        self._noise: tuple[Any, float] | None = None  # for what it was asked, and the multiplier
        self._epochs: tuple[int, int] = 0, 0  # the first step of epochs that have so many
        self._scale: float | Tensor = 1.0
        self._model: nn.Module | None = None
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._hooked: Hooked | None = None

    @property
    def steps(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> PrivateTraining:
        """Hooks the model, which is then trained by steps of this.  A context, too, at whose end the hooks are taken off.

        optimizers: that step it. Raises ValueError where one of them steps parameters that aren't the model's, which would
        have no noise
        """
        _check_optimizers(model, optimizers)
        self.detach()
        self._hooked = add_hooks(model, param_grad=False, independent=True, batch_dim=self.batch_dim)
        self._model, self._optimizers = model, optimizers
        return self

    def detach(self) -> None:
        """Takes the hooks off."""
        hooked, self._hooked, self._model, self._optimizers = self._hooked, None, None, ()
        self._parts, self._sums = [], []
        if hooked is not None:
            hooked.__exit__()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def loader(
        self,
        data: Any,
        steps: int | None = None,
        parts: int = 1,
        micro_batch_size: int | None = None,
        padded: bool = False,
        first: int | None = None,
        ahead: int = 1,
        **options: Any,
    ) -> PrivateLoader:
        """A ``DataLoader`` of Poisson-sampled batches, cut into micro-batches.

        data: a data set with a length    steps: of an epoch, size / expected_batch_size unless told
        parts: how many micro-batches a step has    micro_batch_size: how many samples a micro-batch has at most; a step has
        as many as that takes    padded: whether all have exactly so many, one shape for all    first: the step with which
        epoch 0 began, for trainers that say which epoch it is; unless told the first of epochs of so many steps
        ahead: how many micro-batches what goes through the loader may hold before their `step`    options: of ``DataLoader``

        Of several processes each gets its part of every batch.  A micro-batch is never empty: padding, sample 0 where there
        is nobody else, has no part in the step.
        """
        size = check_data(data, options)
        check_count("loader: parts", parts, "micro-batches", ON_PRIVATE)
        if micro_batch_size is not None:
            check_count("loader: micro_batch_size", micro_batch_size, "samples", ON_PRIVATE)
        if padded and micro_batch_size is None:
            raise ValueError(
                "loader was given padded=True without micro_batch_size; expected the size to pad to" + ON_PRIVATE
            )
        if self.size not in (None, size):
            raise ValueError(
                f"loader was given {size} samples, and the training began with {self.size}; expected the same data, for "
                "which the steps so far are counted" + ON_PRIVATE
            )
        if self.expected_batch_size is None or not 0 < self.expected_batch_size <= size:
            raise ValueError(
                f"PrivateTraining was given expected_batch_size={self.expected_batch_size}, and data of {size} samples; "
                "expected a number above 0, no larger than that" + ON_PRIVATE
            )
        if self.delta >= 1 / size:
            raise ValueError(
                f"PrivateTraining was given delta={self.delta} for {size} samples; expected less than 1 / {size}: else one "
                "sample could be published as it is" + ON_PRIVATE
            )
        self.size, self._ahead, rank, world = size, ahead, 0, 1
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
            if isinstance(self.clip, QuantileClip) and world > 1:
                raise NotImplementedError("QuantileClip counts the samples of one process alone" + ON_PRIVATE)
            shared = [self._seed]
            dist.broadcast_object_list(shared)
            self._seed = shared[0]
        epoch = ceil(size / float(self.expected_batch_size)) if steps is None else steps
        batches = PoissonBatches(
            size,
            self.rate,
            epoch,
            lambda: self._seed,
            lambda: self.steps,
            parts,
            micro_batch_size,
            (rank, world),
            padded,
            self._first if first is None else lambda _: first,
        )
        return PrivateLoader(data, batches, self._marks.append, self._begin, **options)

    def _first(self, length: int) -> int:
        if length != self._epochs[1]:
            self._epochs = self.steps, length
        return self._epochs[0]

    @property
    def rate(self) -> float:
        """The probability by which a sample is in a batch."""
        if self.size is None or self.expected_batch_size is None:
            raise RuntimeError("the sampling rate is known when loader(data) was called" + ON_PRIVATE)
        return float(self.expected_batch_size) / self.size

    @property
    def multiplier(self) -> float:
        """The noise multiplier: as given, or as epsilon asks for it."""
        if self._target is None:
            assert self.noise_multiplier is not None
            return float(self.noise_multiplier)
        if self.planned is None:
            raise ValueError(
                f"PrivateTraining was given epsilon={self._target} and steps={self.planned}; expected how many steps "
                "may spend it" + ON_PRIVATE
            )
        target, rate = self._target, self.rate
        asked = [target, self.delta, rate, self.planned]
        if self._noise is None or self._noise[0] != asked:
            left = max(1, self.planned - self.steps)
            self._noise = asked, noise_for(target, self.delta, rate, left, self.accountant, self.history)
        self.noise_multiplier = self._noise[1]
        return self._noise[1]

    def backward(self, losses: Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """The backward pass of a micro-batch.  losses: N, of each sample    scaler: whose scale they get"""
        scaled = losses if scaler is None else scaler.scale(losses)
        self._scale = 1.0 if scaler is None else scaler.get_scale()
        backward(scaled, "sum")

    def step(self, scale: float | Tensor | None = None, scaler: torch.amp.GradScaler | None = None) -> PrivateStep | None:
        """Clips what a micro-batch has left, and adds it up; with a step's last one sets ``.grad`` to the sum with noise.

        scale: what the losses were multiplied by, where that wasn't `backward`'s doing
        scaler: that will unscale ``.grad`` in its step: the scale is put into that

        Returns the step's `PrivateStep`, after which the optimizer may step; None for a micro-batch that isn't the last.

        Raises RuntimeError where the batch was not drawn by `loader`, or steps were left out; and what `clip_and_noise_`
        raises.
        """
        if self._model is None:
            raise RuntimeError("no model is attached: step() comes between attach(model) and detach()" + ON_PRIVATE)
        recorder = recorder_of(self._model)
        if self.loss_type is None and not all(recorded.losses for recorded in recorder.record.passes):
            raise ValueError(
                "step() doesn't know each sample's loss. Give N losses to private.backward(losses): a mean over tokens, "
                "with class weights or ignored targets, divides each sample by what the others bring, and clipping doesn't "
                "bound what one of them changes. Where the loss is a mean over samples and nothing else, say "
                "PrivateTraining(loss_type='mean')." + ON_PRIVATE
            )
        _check_optimizers(self._model, self._optimizers)  # groups may have been added, or thawed
        mark = self._next()
        if mark.world > 1 or has_processes():
            self._check_spread(mark)
        for p, own in self._sums:
            p.grad = own
        self._sums = []
        found = self._clipped(mark, self._scale if scale is None else scale)
        self._parts.append(found._first(mark.samples))
        self._scale = 1.0
        if not mark.is_last:
            # An optimizer that steps amid must not find a sum that has no noise yet, and zero_grad() must not lose it.
            self._sums = [(p, p.grad) for p in self._model.parameters() if p.requires_grad]
            for p, _ in self._sums:
                p.grad = None
            return None
        whole, self._parts = together(self._parts), []
        add_steps(self.history, self.multiplier, mark.rate)
        if isinstance(self.clip, QuantileClip):
            noise = self._secure or seeded(self._seed, "count", mark.step)
            self.clip._follow(whole.norms, whole.bound, whole.expected_batch_size, self.multiplier, noise)
        if scaler is not None and scaler.is_enabled():
            for p in self._model.parameters():
                if p.grad is not None:
                    p.grad *= scaler.get_scale()
        return whole

    def _begin(self) -> None:
        """A pass over the data begins; what is left of an earlier one's last step is dropped."""
        self._marks.clear()
        self._pieces.clear()
        self._parts, self._sums = [], []
        if self._model is not None:
            clear_backprops(self._model)

    def _at_hand(self) -> Mark:
        """Of the micro-batch whose `step` is next: which step it is of, and how many samples, in front, are no padding."""
        if not self._marks and not self._pieces:
            raise RuntimeError(
                "step() found no batch of this training's loader. Draw batches by private.loader(data): epsilon is computed "
                "for Poisson sampling, and others, a shuffled loader's say, would promise more than they keep; call step() "
                "once for each" + ON_PRIVATE
            )
        return (self._pieces or self._marks)[0]

    def _next(self) -> Mark:
        mark, held = self._at_hand(), len(self._marks) + bool(self._pieces)
        (self._pieces or self._marks).popleft()
        if mark.step != self.steps or held > self._ahead:
            raise RuntimeError(
                f"step() was called for a batch of step {mark.step}, {self.steps} steps are done, and the loader has given "
                f"{held} batches since; expected one call for each batch that the loader gives, in order: noise and batches "
                "are drawn for it. Where something fetches n batches at once, say private.loader(data, ahead=n)" + ON_PRIVATE
            )
        if mark.rate != self.rate:
            raise RuntimeError(
                f"a batch was drawn at a rate of {mark.rate:.6g}, and expected_batch_size={self.expected_batch_size} stands "
                f"for {self.rate:.6g}, for which epsilon would be counted; change it between passes, and call "
                "loader(data) for the next" + ON_PRIVATE
            )
        if self._target is not None and self.planned is not None and self.steps >= self.planned:
            raise RuntimeError(
                f"epsilon={self._target} was to be spent by {self.planned} steps, and {self.steps} are done; another would "
                "spend more. Plan for more steps before: PrivateTraining(..., epsilon=, steps=)" + ON_PRIVATE
            )
        return mark

    def _check_spread(self, mark: Mark) -> None:
        """Raises where the loader takes processes for others than those over which the model adds up."""
        assert self._model is not None
        mesh = spread_of(self._model, recorder_of(self._model)).mesh
        over = 1 if mesh is None else mesh.size()
        if over != mark.world:
            raise ValueError(
                f"the loader has spread each batch over {mark.world} processes, and the model adds up over {over} of them; "
                "expected the same: else samples are left out, or have several parts. Wrap the model by "
                "DistributedDataParallel or fully_shard over all processes; under tensor or pipeline parallelism take a "
                "loader of your own and clip_and_noise_." + ON_PRIVATE
            )

    def _clipped(self, mark: Mark, scale: float | Tensor) -> PrivateStep:
        model, expected = self._model, self.expected_batch_size
        assert model is not None
        assert expected is not None
        clip: Any = self.clip
        bound: Any = self.max_norm
        multiplier = self.multiplier if mark.is_last else 0.0
        if isinstance(self.clip, QuantileClip):  # which counts the samples of a whole step
            bound, clip, multiplier = self.clip.bound or bound, "flat", self.clip.multiplier(multiplier)
        noise: Noise = self._secure or seeded(self._seed, "noise", mark.step)
        add = bool(self._parts)
        return clip_and_noise_(
            model, bound, multiplier, expected, noise=noise, add=add, loss_type=self.loss_type, clip=clip, mask=mark.mask(),
            scale=scale,
        )  # fmt: skip

    def _split(self, most: int) -> list[int]:
        """Cuts the micro-batch at hand into smaller ones of that many samples at most, and returns their sizes.  Each then
        has a `step` of its own."""
        mark = self._marks.popleft()
        starts = range(0, mark.size, most)
        sizes = [min(most, mark.size - start) for start in starts]
        cut = [
            Mark(
                mark.step,
                mark.is_last and i == len(sizes) - 1,
                min(max(mark.samples - start, 0), size),
                size,
                mark.rate,
                mark.world,
            )
            for i, (start, size) in enumerate(zip(starts, sizes))
        ]
        self._pieces.extend(cut)
        return sizes

    def epsilon(self, delta: float | None = None) -> float:
        """What was spent so far: ε of (ε, δ)-differential privacy, of one sample more or less."""
        return spent(self.history, self.delta if delta is None else delta, self.accountant)

    def state_dict(self) -> dict[str, Any]:
        """What a private checkpoint must hold beside the model and the optimizer.  It is as secret as the data."""
        if self._parts:
            raise RuntimeError(
                "state_dict() was called amid a step, between its micro-batches; call it after one" + ON_PRIVATE
            )
        clip = self.clip.state_dict() if isinstance(self.clip, QuantileClip) else None
        return {
            "seed": self._seed,
            "history": list(self.history),
            "size": self.size,
            "clip": clip,
            "noise": self._noise,
            "epochs": self._epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there.  Raises ValueError for the state of a training on other data."""
        if self.size is not None and state["size"] not in (None, self.size):
            raise ValueError(
                f"load_state_dict was given the state of a training on {state['size']} samples, and this one has {self.size}"
                "; expected the same data, for which the steps so far are counted" + ON_PRIVATE
            )
        self._seed, self.size = state["seed"], state["size"]
        self.history = [(float(z), float(q), int(n)) for z, q, n in state["history"]]
        if state["noise"] is not None:
            self._noise = list(state["noise"][0]), float(state["noise"][1])
        self._epochs = state["epochs"][0], state["epochs"][1]
        if isinstance(self.clip, QuantileClip) and state["clip"] is not None:
            self.clip.load_state_dict(state["clip"])


def _check_optimizers(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Raises ValueError where an optimizer steps parameters that aren't the model's."""
    ours = {id(p) for p in model.parameters()}
    trained = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if others := [tuple(p.shape) for p in trained if p.requires_grad and id(p) not in ours]:
        raise ValueError(
            f"attach was given an optimizer that steps {len(others)} parameters of shapes {others[:3]} which aren't the "
            f"model's: they would be trained without clipping and noise, and no guarantee would hold. Attach the module "
            "that has all of them, or freeze the others." + ON_PRIVATE
        )
