"""TRAK's scores, from projected gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.errors import ON_STORES


@torch.no_grad()
def trak_scores(train: Sequence[Tensor], queries: Sequence[Tensor], margins: Sequence[Tensor]) -> Tensor:
    """How much each of D training samples raises the margin of each of E queries, (D, E): (1 - p) φ (ΦᵀΦ)⁻¹ φ′ᵀ.

    All three have an entry for each trained model; 1 - p and the rest are means over models.  The margin of a sample is
    log p / (1 - p).  Gradients of margins are projected by ``over(model, data, margins, partial(PerSampleGrads.project,
    dim=K, seed=m))``, with the same seed for both data sets.

    train: Φ, (D, K), with K far below D    queries: φ′, (E, K)    margins: of the training samples, D

    Raises ValueError for other shapes, and for K above D.
    Source: Park et al. 2023, "TRAK" (arXiv:2303.14186), equation 17.
    """
    shapes = [[tuple(x.shape) for x in own] for own in zip(train, queries, margins, strict=True)]
    if not shapes or any(len(a) != 2 or len(b) != 2 or a[1] != b[1] or a[1] > a[0] or of != a[:1] for a, b, of in shapes):
        raise ValueError(
            f"trak_scores was given shapes {shapes}; expected (D, K), (E, K) and (D,) for each model, K ≤ D" + ON_STORES
        )
    products = [x @ torch.linalg.solve((x.mT @ x).double(), y.mT.double()).to(x) for x, y in zip(train, queries)]
    doubts = torch.stack([torch.sigmoid(-own) for own in margins]).mean(0)
    return doubts[:, None] * torch.stack(products).mean(0)
