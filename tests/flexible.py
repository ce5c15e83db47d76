"""A small model of packed documents by torch's flex_attention, which imports torch's compiler."""

import pytest
import torch.nn as nn
from packed import WORDS
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

quiet = pytest.mark.filterwarnings("ignore")  # torch compiles a part of it, with warnings of many kinds


class Flexible(nn.Module):
    """Two heads by a block mask.  leak: whether the mask forgets documents"""

    def __init__(self, leak: bool = False) -> None:
        super().__init__()
        self.words, self.norm, self.qkv = nn.Embedding(WORDS, 32), nn.RMSNorm(32), nn.Linear(32, 96)
        self.out, self.head, self.leak = nn.Linear(32, 32), nn.Linear(32, WORDS), leak

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        document, x = (position_ids == 0).cumsum(1), self.words(ids)

        def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (self.leak | (document[b, q] == document[b, k]))

        mask = create_block_mask(is_seen, len(ids), None, ids.shape[1], ids.shape[1], device=str(ids.device))
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        y = flex_attention(q, k, v, block_mask=mask)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))
