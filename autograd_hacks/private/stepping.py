"""What optimizers may do in private training: step the model's parameters, by the noisy gradient as it is, and once."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autograd_hacks.errors import ON_PRIVATE
from autograd_hacks.extending import some
from autograd_hacks.support.internals import disable_dynamo
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.trees import ByTensor, stepped_outside

PART = 2**16
"""How many numbers of a gradient are read at once: more of them would not fit into a processor's cache."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""{bytes of a number: integers of that size}"""


class NoisyGrads:
    """Refuses optimizers' steps by anything other than the last private step's gradient, and second steps by that one.

    It sees every ``step()`` of every optimizer in the process, and so what trainers and loops did to ``.grad`` after the
    noise was added, whatever it was: it compares a sum over all of its bits.  A closure's gradients are compared after the
    closure, which is where trainers compute them.

    model: the model in private training; optimizers of other parameters are not looked at
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._step = -1  # the number of the last private step
        # The sum that an optimizer must find, and the one for an optimizer that unscales in its own step, as fused ones do;
        # None for parameters that have had their step.
        self._due: dict[nn.Parameter, tuple[Tensor, Tensor | None] | None] = {}
        self.seen: ByTensor[bool] = ByTensor()  # leaves of earlier losses that aren't the model's
        own = weakref.ref(self)  # hooks of all optimizers would keep a model alive that is never detached

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            noisy = own()
            return None if noisy is None else noisy._before(optimizer, args, kwargs)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            noisy = own()
            if noisy is not None:
                noisy._due |= dict.fromkeys(noisy._due.keys() & set(_parameters(optimizer)))

        # A compiler may trace the optimizer's step.
        self._handles = [
            register_optimizer_step_pre_hook(disable_dynamo(before)),
            register_optimizer_step_post_hook(disable_dynamo(after)),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Ends it: optimizers step by what they find."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Until the next `note` there is no gradient that an optimizer may step by for the first time."""
        self._due = dict.fromkeys(self._due)

    def note(self, step: int, scaler: torch.amp.GradScaler | None = None) -> None:
        """Takes what is in ``.grad`` for the gradient of a private step.

        scaler: the GradScaler that will unscale ``.grad``, which is multiplied by its scale for that
        """
        self._step, self._due = step, {}
        scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else None
        for p in self.model.parameters():
            if p.grad is None or not p.requires_grad:  # what is frozen has got no noise
                continue
            if scale is None:
                self._due[p] = _sum(p.grad), None
                continue
            p.grad *= scale
            inverse = torch.tensor(1 / scale, dtype=torch.float32, device=p.grad.device)  # as GradScaler has it
            self._due[p] = _sum(p.grad * inverse), _sum(p.grad)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        names = {p: name for name, p in self.model.named_parameters()}
        if not any(p in names for p in _parameters(optimizer)):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._check(optimizer, names)
            return None

        def checked() -> Any:
            found = closure()
            self._check(optimizer, names)
            return found

        return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)

    def _check(self, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
        """Raises RuntimeError unless the gradients that an optimizer finds are those of the last private step."""
        ours, kind = [p for p in _parameters(optimizer) if p in names and p.grad is not None], type(optimizer).__name__
        if unknown := [names[p] for p in ours if p not in self._due]:
            found = f"optimizer.step() ({kind}) found a gradient without noise, of {some(unknown)}"
            raise RuntimeError(f"{found}. Call private.step() before it, and set no .grad by yourself" + ON_PRIVATE)
        if used := [names[p] for p in ours if self._due[p] is None]:
            raise RuntimeError(
                f"optimizer.step() ({kind}) would step {some(used)} a second time by the gradient of private step "
                f"{self._step}. Call it once after a private.step() that returns a PrivateStep, then zero_grad()"
                + ON_PRIVATE
            )
        unscales = getattr(optimizer, "grad_scale", None) is not None
        sums = [(_sum(p.grad), due[unscales]) for p in ours if p.grad is not None and (due := self._due[p])]
        # Sums are compared on their device, so that only one number has to come from there.
        same = [x.new_zeros((), dtype=torch.bool) if due is None else x == due for x, due in sums]
        if not same or bool(torch.stack([x.to(same[0].device) for x in same]).all()):
            return
        changed = [names[p] for p, x in zip(ours, same) if not x]
        raise RuntimeError(
            f"optimizer.step() ({kind}) found a gradient that is not the one of private step {self._step}, of "
            f"{some(changed)}: it was changed after its noise was added. Turn off what clips or divides .grad: "
            "clip_grad_norm_ and clip_grad_value_ (torch's and accelerate's), max_grad_norm, gradient_clip_val, "
            "GradientNormClipping, a division by the number of micro-batches. If there is a GradScaler, give it to "
            "private.backward and private.step, and step by scaler.step(optimizer)" + ON_PRIVATE
        )


def check_optimizers(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Raises ValueError if an optimizer steps parameters that aren't the model's."""
    if others := [tuple(p.shape) for own in optimizers for p in stepped_outside(model, own)]:
        raise ValueError(
            f"attach was given an optimizer that steps {len(others)} parameters outside of the model, of shapes "
            f"{others[:3]}, without clipping and noise. Attach the module that has all of them, or freeze them." + ON_PRIVATE
        )


def check_accumulation(optimizers: tuple[torch.optim.Optimizer, ...], is_last: bool, is_divided: bool) -> None:
    """Raises an error if accelerate accumulates gradients otherwise than the private step does.

    is_last: whether optimizers must step after this micro-batch    is_divided: whether accelerate's backward may have run
    """
    for state in [getattr(optimizer, "gradient_state", None) for optimizer in optimizers]:  # of accelerate's optimizers
        if state is not None and is_divided and state.num_steps > 1:
            raise ValueError(
                f"step(): accelerator.backward divides the loss by gradient_accumulation_steps={state.num_steps}, so "
                "samples are clipped at another norm. Leave it out: loader(parts=) or (micro_batch_size=) accumulates"
                + ON_PRIVATE
            )
        if state is not None and is_last and not state.sync_gradients:
            raise RuntimeError(
                "step(): within accelerator.accumulate() the next optimizer.step() does nothing, so a noisy gradient would "
                "be lost. Leave accumulate() out: private.step() returns None until the optimizer must step" + ON_PRIVATE
            )


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sum(g: Tensor) -> Tensor:
    """A sum of a gradient's bits that tells any two gradients apart, for all practical purposes: a 0-dim tensor.

    Each number's bits are multiplied by a random number for its place, modulo 2⁶⁴, so no order of addition matters.
    """
    own = part_of(g.detach())
    own = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    first, *others = own.contiguous().view(BITS[own.element_size()]).flatten().split(PART)
    factors = _factors(own.device)
    found = (first * factors[: len(first)]).sum()
    for part in others:
        found += (part * factors[: len(part)]).sum()
    return found


@lru_cache
def _factors(device: torch.device) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (PART,), generator=draws, device="cpu").to(device)
