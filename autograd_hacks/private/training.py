"""Private training, from the batches to epsilon, for loops and trainers."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks import add_hooks, backward, clear_backprops
from autograd_hacks.errors import ON_PRIVATE
from autograd_hacks.extending import (
    BatchDim,
    Hooked,
    check_module,
    check_state,
    has_processes,
    leaves_of,
    recorder_of,
    spread_of,
)
from autograd_hacks.private.accounting import Accountant, History, noise_for, spent
from autograd_hacks.private.bounds import QuantileClip
from autograd_hacks.private.clip_and_noise import PrivateStep, clip_and_noise_
from autograd_hacks.private.noise import SecureNoise, seed_of
from autograd_hacks.private.poisson import OF_POISSON, Mark, PoissonBatches, PrivateLoader, Users, check_data
from autograd_hacks.private.stepping import NoisyGrads, check_accumulation, check_optimizers
from autograd_hacks.support.draws import Secret
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.ranges import check_bound, checked


class PrivateTraining:
    """Differentially private training (DP-SGD), from the batches to ε::

        private = PrivateTraining(max_norm=1.0, noise_multiplier=1.1, expected_batch_size=64, delta=1e-5)
        with private.attach(model, optimizer):
            for x, y in private.loader(data):
                private.backward(F.cross_entropy(model(x), y, reduction="none"))
                if private.step():                       # of several micro-batches with the last one
                    optimizer.step()
                    optimizer.zero_grad()
        private.epsilon()

    Batches are drawn by Poisson sampling from a secret seed, gradients are clipped and noised by `clip_and_noise_`, and
    steps are counted for an accountant.  The batch and the noise of step t depend only on the seed and t, so training that
    resumes from a checkpoint has the same bits.  ``history`` lists (noise multiplier, sampling rate, number of steps) of the
    steps so far, and ``planned`` is the number of steps that may spend ``epsilon``.

    max_norm, clip: as in `clip_and_noise_`
    noise_multiplier: as in `clip_and_noise_`; or give ``epsilon`` and ``steps``
    expected_batch_size: as in `clip_and_noise_`; with ``groups`` it counts users
    delta: δ of (ε, δ)-differential privacy, below 1 / size of the data, or below 1 / number of users
    epsilon: the ε that ``steps`` steps may spend; the noise multiplier follows from it
    steps: how many steps may spend ``epsilon``
    seed: for tests only, because whoever knows or guesses the seed can remove the noise; by default 128 random bits of the
    operating system. A seed below 2⁶⁴ warns. A larger one protects only if drawn at random, as by ``secrets.randbits(128)``.
    A copy of the training, also by pickle or fork, draws a seed of its own; only `state_dict` keeps it
    secure: draw noise by `SecureNoise`, which can't be repeated
    accountant: the class of the accountant. ``opacus.accountants.RDPAccountant`` is the default; ``PRVAccountant`` and
    dp-accounting's are tighter
    loss_type: 'mean' or 'sum', how the loss is reduced over samples, if the loop calls ``loss.backward()`` on a scalar. The
    loss must then be a mean or sum of losses that each depend on one sample's outputs. `backward` doesn't need it
    batch_dim, replace: as in `add_hooks`
    groups: each sample's user, whole numbers or names in the order of the data: protects users instead of samples. Users are
    drawn, each with all of its samples; these are clipped together and stay in one micro-batch
    per_user: with ``groups``, how many samples of a user a batch may have; they are chosen at random in each step
    """

    @checked(ON_PRIVATE)
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
        groups: Tensor | Sequence[Any] | None = None,
        per_user: int | None = None,
        replace: Callable[..., Any] | None = None,
    ) -> None:
        wrong = ""
        if (noise_multiplier is None) == (epsilon is None):
            wrong = f"noise_multiplier={noise_multiplier} and epsilon={epsilon}; expected exactly one"
        elif isinstance(clip, QuantileClip) and isinstance(max_norm, Mapping):
            wrong = f"a QuantileClip and max_norm={max_norm}; expected a single bound to start from"
        elif groups is None and per_user is not None:
            wrong = f"per_user={per_user} without groups; expected groups=, each sample's user"
        if wrong:
            raise ValueError(f"PrivateTraining was given {wrong}" + ON_PRIVATE)
        check_bound("PrivateTraining", max_norm, noise_multiplier or epsilon, ON_PRIVATE)
        self.max_norm, self.noise_multiplier, self.expected_batch_size = max_norm, noise_multiplier, expected_batch_size
        self.delta, self.clip, self.accountant = delta, clip, accountant
        self.loss_type, self.batch_dim, self.replace = loss_type, batch_dim, replace
        self._users = None if groups is None else Users(groups, per_user)
        self.history: History = []
        self.size: int | None = None
        self._target, self.planned = epsilon, steps
        self._seed = seed_of(seed)
        self._secure = SecureNoise() if secure else None
        self._marks: deque[Mark] = deque()  # of the micro-batches that the loader has yielded and no step has taken
        self._part: PrivateStep | None = None  # of the micro-batches so far of a step that has others
        self._noise: tuple[Any, float] | None = None  # a request and the noise multiplier found for it
        self._epochs: tuple[int, int] = 0, 0  # the first step of epoch 0, and the number of steps in an epoch
        self._scale: float | None = None  # of the losses that `backward` had since the last step
        self._model: nn.Module | None = None
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._hooked: Hooked | None = None
        self._noisy: NoisyGrads | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, with another seed: noise that two trainings share cancels in their difference."""
        return vars(self) | {"_drawn": (-1, 0)}

    @property
    def _seed(self) -> int:
        """Another one in each process, so that forks share no noise either."""
        if self._drawn[0] != os.getpid():
            self._seed = seed_of(None)
        return self._drawn[1]

    @_seed.setter
    def _seed(self, seed: int) -> None:
        self._drawn = os.getpid(), seed

    @property
    def steps(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def attach(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> PrivateTraining:
        """Hooks the model for private steps of its optimizers.  As a context it removes the hooks at the end.

        Raises ValueError if an optimizer steps parameters of other models, because those would get no noise.
        """
        check_module("attach", model, ON_PRIVATE)
        check_optimizers(model, optimizers)
        self.detach()
        self._hooked = add_hooks(model, param_grad=False, independent=True, batch_dim=self.batch_dim, replace=self.replace)
        self._model, self._optimizers, self._noisy = model, optimizers, NoisyGrads(model)
        return self

    def detach(self) -> None:
        """Removes the hooks."""
        hooked, self._hooked, self._model, self._optimizers, self._part = self._hooked, None, None, (), None
        if self._noisy is not None:
            self._noisy.close()
            self._noisy = None
        if hooked is not None:
            hooked.__exit__()

    def __enter__(self) -> PrivateTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @checked(ON_PRIVATE)
    def loader(
        self,
        data: Any,
        steps: int | None = None,
        parts: int = 1,
        micro_batch_size: int | None = None,
        padded: bool = False,
        first: int | None = None,
        **options: Any,
    ) -> PrivateLoader:
        """A ``DataLoader`` of Poisson-sampled batches, cut into micro-batches.

        With several processes, each gets its part of every batch.  A micro-batch is never empty: it is padded with sample 0,
        and padding doesn't enter the step.

        data: a data set with ``__len__`` and ``__getitem__``
        steps: steps of an epoch, size / expected_batch_size by default
        parts: micro-batches of a step, 1 by default
        micro_batch_size: the largest number of samples in a micro-batch; a step then has more micro-batches if needed
        padded: pad every micro-batch to ``micro_batch_size``, so that all have one shape
        first: the step at which epoch 0 began, for trainers that call ``set_epoch``. By default the step at which epochs of
        this length began
        options: of ``DataLoader``. A ``collate_fn`` must keep the samples' order. With users or padding, by which rows then
        are known, it runs a second time with one sample more, and if that changes the other rows there is a ValueError
        """
        size, unit = check_data(data, options), "samples"
        if padded and micro_batch_size is None:
            raise ValueError("loader was given padded=True without micro_batch_size, the size to pad to" + ON_PRIVATE)
        if self._users is not None:
            self._users.check(size, micro_batch_size)
            size, unit = len(self._users), "users"
        self._check_size(size, f"loader was given {size} {unit}")
        if self.expected_batch_size is None or not 0 < self.expected_batch_size <= size:
            given = f"PrivateTraining was given expected_batch_size={self.expected_batch_size}, and data of {size} {unit}"
            raise ValueError(f"{given}; expected a number above 0 and at most {size}" + ON_PRIVATE)
        if self.delta >= 1 / size:
            given = f"PrivateTraining was given delta={self.delta} for {size} {unit}"
            why = f"otherwise publishing one of the {unit} whole would count as private"
            raise ValueError(f"{given}; expected less than 1 / {size}: {why}" + ON_PRIVATE)
        self.size, rank, world = size, 0, 1
        if has_processes():
            rank, world = dist.get_rank(), dist.get_world_size()
            if isinstance(self.clip, QuantileClip) and world > 1:
                raise NotImplementedError("QuantileClip supports one process only" + ON_PRIVATE)
            shared = [self._seed]
            dist.broadcast_object_list(shared)
            self._seed = shared[0]
        epoch = ceil(size / float(self.expected_batch_size)) if steps is None else steps
        seed, done, begins = lambda: self._seed, lambda: self.steps, self._first if first is None else lambda _: first
        share = rank, world
        batches = PoissonBatches(
            size, self.rate, epoch, seed, done, parts, micro_batch_size, share, padded, begins, self._users
        )
        return PrivateLoader(data, batches, self._marks.append, self._begin, **options)

    def _check_size(self, size: int | None, given: str) -> None:
        if self.size is not None and size not in (None, self.size):
            raise ValueError(f"{given}, but the training began with {self.size}; expected the same data" + ON_PRIVATE)

    def _first(self, length: int) -> int:
        if length != self._epochs[1]:
            self._epochs = self.steps, length
        return self._epochs[0]

    @property
    def rate(self) -> float:
        """The probability with which a sample, or user, is in a batch.  Raises RuntimeError before `loader` is called."""
        if self.size is None or self.expected_batch_size is None:
            raise RuntimeError("the sampling rate is unknown before private.loader(data) is called" + ON_PRIVATE)
        return float(self.expected_batch_size) / self.size

    @property
    def multiplier(self) -> float:
        """The noise multiplier: the given one, or the one that ``epsilon`` needs."""
        if self._target is None:
            assert self.noise_multiplier is not None
            return float(self.noise_multiplier)
        if self.planned is None:
            given = f"PrivateTraining was given epsilon={self._target} without steps"
            raise ValueError(f"{given}; expected how many steps may spend it" + ON_PRIVATE)
        target, rate = self._target, self.rate
        asked = [target, self.delta, rate, self.planned]
        if self._noise is None or self._noise[0] != asked:
            left = max(1, self.planned - self.steps)
            self._noise = asked, noise_for(target, self.delta, rate, left, self.accountant, self.history)
        self.noise_multiplier = self._noise[1]
        return self._noise[1]

    def backward(self, losses: Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Runs the backward pass of a micro-batch.

        losses: N losses, one for each sample    scaler: the GradScaler that scales them

        Raises ValueError if gradient would arrive at parameters that aren't the attached model's: it would get no noise.
        """
        self._check_leaves(losses)
        scaled = losses if scaler is None else scaler.scale(losses)
        self._scale = 1.0 if scaler is None else scaler.get_scale()
        backward(scaled, "sum")

    def _check_leaves(self, losses: Tensor) -> None:
        if self._model is None or self._noisy is None:
            raise RuntimeError("backward(): no model is attached. Call it between attach(model) and detach()" + ON_PRIVATE)
        record, leaves = recorder_of(self._model).record, leaves_of(losses) if isinstance(losses, Tensor) else []
        given = [x() for x in tree_leaves(record.arguments) if isinstance(x, weakref.ref)]
        known = set(map(id, (*record.own_among(leaves), *self._model.parameters(), *self._model.buffers(), *given)))
        others = [leaf for leaf in leaves if id(leaf) not in known]
        # Other leaves may be of this batch, as embeddings that require grad for checkpoints are.
        stay = [tuple(leaf.shape) for leaf in others if isinstance(leaf, nn.Parameter) or leaf in self._noisy.seen]
        for leaf in others:
            self._noisy.seen[leaf] = True
        if stay:
            raise ValueError(
                f"backward(): the losses use {len(stay)} parameters outside of the attached model, of shapes "
                f"{stay[:3]}, which would get gradient without clipping and noise. Attach one module that holds all, such "
                "as the model and a criterion, or freeze them." + ON_PRIVATE
            )

    @checked(ON_PRIVATE)
    def step(self, scale: float | Tensor | None = None, scaler: torch.amp.GradScaler | None = None) -> PrivateStep | None:
        """Clips and adds up a micro-batch's gradients.  After the last micro-batch it sets ``.grad`` to the noisy mean.

        scale: the factor of the losses, if they were not scaled by `backward`
        scaler: the GradScaler that will unscale ``.grad`` in its step; ``.grad`` is multiplied by its scale

        Returns the step's `PrivateStep` after its last micro-batch: now call ``optimizer.step()``.  Returns None after the
        others.

        Raises RuntimeError if the batch was not drawn by `loader`, or if a step was left out; and what `clip_and_noise_`
        raises.
        """
        if self._model is None or self._noisy is None:
            raise RuntimeError("step(): no model is attached. Call it between attach(model) and detach()" + ON_PRIVATE)
        recorder = recorder_of(self._model)
        is_told = all(recorded.losses for recorded in recorder.record.passes)
        if self.loss_type is None and not is_told:
            raise ValueError(
                "step() doesn't know each sample's loss. Give N losses to private.backward(losses). If the loss is a plain "
                "mean over samples, use PrivateTraining(loss_type='mean'): not for one over tokens, or with class weights "
                "or ignored targets, which divides each sample's loss by a number that depends on others." + ON_PRIVATE
            )
        check_optimizers(self._model, self._optimizers)  # parameters may have been added or unfrozen
        mark = self._next()
        mark.check(sum(segment.batch_size() for segment in recorder.record.segments))
        check_accumulation(self._optimizers, mark.is_last, not is_told and scale is None)
        scale = self._scale if scale is None else scale
        if scale is None and scaler is not None and scaler.is_enabled():
            raise ValueError(
                "step() was given a scaler after a backward pass of your own. Call private.backward(losses, scaler), or "
                "private.step(scale=scaler.get_scale(), scaler=scaler); with scale=1 if that loss was not scaled"
                + ON_PRIVATE
            )
        if mark.world > 1 or has_processes():
            self._check_spread(self._model, mark)
        self._noisy.forget()
        done = 0 if self._part is None else len(self._part.norms)
        whole = self._clipped(self._model, mark, 1.0 if scale is None else scale)._first(done + mark.units)
        self._part, self._scale = None if mark.is_last else whole, None
        if not mark.is_last:
            # Between micro-batches, an optimizer must not step by a sum without noise, and zero_grad() must not lose it.
            for p in self._model.parameters():
                p.grad = None if p.requires_grad else p.grad
            return None
        kind = self.multiplier, mark.rate
        before = self.history.pop()[2] if self.history and self.history[-1][:2] == kind else 0
        self.history.append((*kind, before + 1))
        if isinstance(self.clip, QuantileClip):
            noise = self._secure or Secret.of(self._seed, "count", mark.step)
            self.clip._follow(whole.norms, whole.bound, whole.expected_batch_size, self.multiplier, noise)
        self._noisy.note(mark.step, scaler)
        return whole

    def _begin(self) -> None:
        """Begins a pass over the data.  An unfinished step of an earlier pass is dropped."""
        self._marks.clear()
        self._part = None
        if self._model is not None:
            clear_backprops(self._model)

    def _next(self) -> Mark:
        """The `Mark` of the micro-batch that is stepped by."""
        if not self._marks:
            raise RuntimeError(
                "step() found no batch from this training's loader. Draw batches by private.loader(data), and call step() "
                f"once for each: {OF_POISSON}" + ON_PRIVATE
            )
        mark = self._marks.popleft()
        if mark.step != self.steps or self._marks:
            raise RuntimeError(
                f"step() was called for a batch of step {mark.step} after {self.steps} steps, and {len(self._marks) + 1} "
                "batches of the loader wait; expected one call for each, in order" + ON_PRIVATE
            )
        if mark.rate != self.rate:
            raise RuntimeError(
                f"step(): the batch was drawn at a rate of {mark.rate:.6g}, but expected_batch_size="
                f"{self.expected_batch_size} means {self.rate:.6g}. Change it before loader(data) only" + ON_PRIVATE
            )
        if self._target is not None and self.planned is not None and self.steps >= self.planned:
            done = f"the {self.planned} steps that may spend epsilon={self._target} are done; another step would spend more"
            raise RuntimeError(f"step(): {done}. Plan for more from the start: PrivateTraining(steps=N)." + ON_PRIVATE)
        return mark

    def _check_spread(self, model: nn.Module, mark: Mark) -> None:
        """Raises ValueError if the loader spreads batches over other processes than the model sums over."""
        mesh = spread_of(model, recorder_of(model)).mesh
        over = 1 if mesh is None else mesh.size()
        if over != mark.world:
            raise ValueError(
                f"step(): the loader spreads each batch over {mark.world} processes, but the model sums over {over}. Wrap "
                "it by DistributedDataParallel or fully_shard over all processes." + ON_PRIVATE
            )

    def _clipped(self, model: nn.Module, mark: Mark, scale: float | Tensor) -> PrivateStep:
        expected, bound, clip = cast(Any, (self.expected_batch_size, self.max_norm, self.clip))  # the loader needs the first
        multiplier = self.multiplier if mark.is_last else 0.0
        if isinstance(self.clip, QuantileClip):  # its count covers a whole step
            bound, clip, multiplier = self.clip.bound or bound, "flat", self.clip.multiplier(multiplier)
        noise = self._secure or Secret.of(self._seed, "noise", mark.step)
        return clip_and_noise_(
            model, bound, multiplier, expected, mark.groups(), noise, self._part, self.loss_type, clip=clip,
            mask=torch.arange(mark.size, device="cpu") < mark.samples, scale=scale,
        )  # fmt: skip

    def _expect(self, batch_size: int) -> None:
        """Takes a trainer's batch size for the expected one, if none was given.  Raises ValueError if it counts users."""
        if self.expected_batch_size is None and self._users is not None:
            raise ValueError(
                "PrivateTraining was given groups without expected_batch_size; expected the mean number of users in a "
                f"batch, because the trainer's batch size of {batch_size} counts samples" + ON_PRIVATE
            )
        if self.expected_batch_size is None:
            self.expected_batch_size = batch_size

    @checked(ON_PRIVATE)
    def epsilon(self, delta: float | None = None) -> float:
        """ε of (ε, δ)-differential privacy spent so far, for a sample, or user, more or less.  δ defaults to ``delta``."""
        return spent(self.history, self.delta if delta is None else delta, self.accountant)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint must hold beside the model's and the optimizer's.  Keep it as secret as the data.

        Raises RuntimeError between the micro-batches of a step.
        """
        if self._part is not None:
            raise RuntimeError("state_dict() must not be called between the micro-batches of a step" + ON_PRIVATE)
        return {
            "seed": self._seed,
            "history": list(self.history),
            "size": self.size,
            "clip": self.clip.state_dict() if isinstance(self.clip, QuantileClip) else None,
            "noise": self._noise,
            "epochs": self._epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a checkpoint's state.  Raises ValueError if it had other data or another kind of clip."""
        check_state("PrivateTraining", state, self.state_dict(), ON_PRIVATE)
        self._check_size(state["size"], f"load_state_dict was given the state of a training on {state['size']} samples")
        if (state["clip"] is not None) != isinstance(self.clip, QuantileClip):
            raise ValueError(f"load_state_dict: the state is of another kind of clip than {self.clip!r}" + ON_PRIVATE)
        if type(state["seed"]) is not int:
            raise ValueError(
                f"load_state_dict: the state's seed is {state['seed']!r}; expected the whole number of state_dict(), by "
                "which noise and batches go on. Whoever knows it can take the noise off." + ON_PRIVATE
            )
        self._seed, self.size = seed_of(state["seed"]), state["size"]
        self.history = [(float(z), float(q), int(n)) for z, q, n in state["history"]]
        if state["noise"] is not None:
            self._noise = list(state["noise"][0]), float(state["noise"][1])
        self._epochs = state["epochs"][0], state["epochs"][1]
        if isinstance(self.clip, QuantileClip):
            self.clip.load_state_dict(state["clip"])
