"""What verbs are given and leave: directions, dimensions, names, and ``.grad``."""

from collections.abc import Collection, Mapping

import torch
import torch.nn as nn
from torch import Tensor

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers put into the names of the parameters inside."""


def set_grads(model: nn.Module, sums: Mapping[str, Tensor], reached: Collection[str], add: bool = False) -> None:
    """Sets ``param.grad`` of each parameter that trains; to None where the loss did not reach it.

    sums: {name: shape}, in memory of their own    reached: the names of those that it reached
    add: whether to add to what is there
    """
    for name, parameter in model.named_parameters():
        if name in sums:
            own, before = sums[name].detach().to(parameter.dtype), parameter.grad if add else None
            if name in reached:
                parameter.grad = own if before is None else own.add_(before)
            elif not add:
                parameter.grad = None


def check_dim(what: str, dim: object) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{what}={dim!r}; expected a whole number of coordinates")
    if dim < 1:
        raise ValueError(f"{what}={dim}; expected a number of coordinates, 1 or more")


def check_direction(v: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raises for what is no direction in the space of the parameters, {name: shape}."""
    if not isinstance(v, Mapping):
        raise TypeError(f"dot was given {type(v).__name__}; expected a dictionary {{name: tensor}} for all parameters")
    missing, extra = [name for name in shapes if name not in v], [name for name in v if name not in shapes]
    if missing or extra:
        raise ValueError(
            f"dot was given a direction without {', '.join(missing) or 'nothing'} and with "
            f"{', '.join(extra) or 'nothing'} too much; expected an entry for each parameter that trains, by the names "
            "of model.named_parameters()."
        )
    for name, shape in shapes.items():
        own = v[name]
        if not isinstance(own, Tensor) or own.shape != shape or not (own.is_floating_point() or own.is_complex()):
            raise ValueError(
                f"dot was given {kind_of(own)} for {name!r}; expected a floating-point tensor of shape {tuple(shape)}"
            )


def kind_of(value: object) -> str:
    """A value for people."""
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def unwrapped(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    for wrapper in WRAPPERS:
        while name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace("." + wrapper, ".")
    return name
