"""Square roots of losses' Hessians at a model's output: vectors s₁ … s_K for each sample with Σₖ sₖ sₖᵀ = H.

A loss is the mean over the samples of ℓₙ, and ℓₙ the mean over T positions of a position's loss, so that H of a sample is a
block for each position, over T.  Without positions T is 1.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Root:
    """What is to be known of a position's loss, by its output.

    column: one of the C columns of a square root of its Hessian, for the outputs z, (N, C), of N samples, and its number;
    N C
    drawn: a random vector whose s sᵀ has the Hessian for its mean, for outputs (N, T, C), independent over positions; N T C
    """

    column: Callable[[Tensor, int], Tensor]
    drawn: Callable[[Tensor, torch.Generator | None], Tensor]
    averages: bool = True  # over the positions


def cross_entropy_column(z: Tensor, c: int) -> Tensor:
    """ℓ = -log softmax(z)[y] has H = diag(p) - p pᵀ = Σ_c p_c (e_c - p)(e_c - p)ᵀ, whatever the label y is."""
    p = z.softmax(-1)
    return (_one_hot(z, c) - p) * p[:, c, None].sqrt()


def cross_entropy_draw(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """The gradient p - e_y for a label y that is drawn from p."""
    p = z.softmax(-1)
    labels = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(z.shape[:2])
    return p - F.one_hot(labels, z.shape[-1]).to(p.dtype)


def binary_column(z: Tensor, c: int) -> Tensor:
    """ℓ = Σ_c BCE(sigmoid(z_c), y_c) has H = diag(p (1 - p)), whatever the labels are."""
    p = z[:, c, None].sigmoid()
    return _one_hot(z, c) * (p * (1 - p)).sqrt()


def binary_draw(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """The gradient p - y for labels y that are drawn from p."""
    p = z.sigmoid()
    return p - torch.bernoulli(p, generator=generator)


def identity_column(z: Tensor, c: int) -> Tensor:
    """ℓ = ½ ‖z - y‖² has H = 1."""
    return _one_hot(z, c).expand(z.shape)


def normal_draw(z: Tensor, generator: torch.Generator | None) -> Tensor:
    """A vector of independent standard normal numbers."""
    return torch.randn(z.shape, dtype=z.dtype, device=z.device, generator=generator)


def _one_hot(z: Tensor, c: int) -> Tensor:
    """e_c, (1, C)."""
    return F.one_hot(torch.tensor([c], device=z.device), z.shape[-1]).to(z.dtype)


ROOTS = {
    "CrossEntropy": Root(cross_entropy_column, cross_entropy_draw),
    "BinaryCrossEntropy": Root(binary_column, binary_draw),
    "LeastSquares": Root(identity_column, normal_draw),
    "Jacobian": Root(identity_column, normal_draw, averages=False),
}
"""By ``hess_type``.  Sources: Dangel et al. 2020, "BackPACK" (arXiv:1912.10985), for roots; Martens 2014, "New insights and
perspectives on the natural gradient method" (arXiv:1412.1193), for drawn labels."""


def directions(
    hess_type: str, output: Tensor, samples: int | None, generator: torch.Generator | None
) -> tuple[int, Iterator[Tensor]]:
    """How many vectors there are, and these, each of the output's shape, a vector for every sample.

    output: (N, C) or (N, T, C)    samples: how many to draw; None for an exact root, which has T · C columns
    """
    root = ROOTS[hess_type]
    z = output.detach().to(torch.promote_types(output.dtype, torch.float32))
    z = z if z.ndim == 3 else z[:, None]
    share = 1 / math.sqrt(max(1, z.shape[1])) if root.averages else 1.0
    if samples is not None:
        drawn = (root.drawn(z, generator) * (share / math.sqrt(samples)) for _ in range(samples))
        return samples, (s.view(output.shape).to(output.dtype) for s in drawn)
    return z.shape[1] * z.shape[2], _columns(output, z, root, share)


def _columns(output: Tensor, z: Tensor, root: Root, share: float) -> Iterator[Tensor]:
    for position in range(z.shape[1]):
        for c in range(z.shape[2]):
            s = torch.zeros_like(z)
            s[:, position] = root.column(z[:, position], c) * share
            yield s.view(output.shape).to(output.dtype)
