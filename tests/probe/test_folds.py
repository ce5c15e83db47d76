"""Rows that several samples' positions are folded into, in any order, or chosen from."""

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import check_batches, check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks


def test_folded_images() -> None:
    def video(m: nn.Module, clips: Tensor) -> Tensor:
        frames = m.norm(m.conv(clips.flatten(0, 1)))
        by_time = m.norm(m.conv(clips.transpose(0, 1).flatten(0, 1))).unflatten(0, (clips.shape[1], len(clips)))
        x = frames.unflatten(0, clips.shape[:2]) + by_time.transpose(0, 1)
        return m.out(torch.tanh(x.flatten(2)))

    model = Bare(video, conv=nn.Conv2d(1, 2, 2), norm=nn.GroupNorm(1, 2), out=nn.Linear(8, 2)).double()
    check_batches(model, torch.randn(4, 3, 1, 3, 3).double(), torch.randn(3, 5, 1, 3, 3).double(), verify=1)


@pytest.mark.parametrize("fold", ["N·T", "T·N", "H·N·T"])
def test_a_length_of_one_at_first(fold: str) -> None:
    def folded_net(m: nn.Module, x: Tensor) -> Tensor:
        order = {"N·T": (0, 1, 2, 3), "T·N": (1, 0, 2, 3), "H·N·T": (2, 0, 1, 3)}[fold]
        shape = [x.shape[axis] for axis in order]
        back = [order.index(axis) for axis in range(4)]
        return m.layer(x.permute(order).reshape(-1, 3)).view(shape).permute(back)

    model = Bare(folded_net, layer=nn.Linear(3, 3)).double()
    check_batches(model, *(torch.randn(n, t, 2, 3).double() for n, t in ((4, 1), (2, 3), (4, 1), (4, 4), (3, 2))), verify=1)


def test_a_square_mask_of_samples_by_positions() -> None:
    def masked(m: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[mask] = m.layer(x[mask])
        return out

    model, x = Bare(masked, layer=nn.Linear(3, 3)).double(), torch.randn(4, 4, 3).double()
    with autograd_hacks.add_hooks(model):
        for mask in (torch.eye(4).bool().flip(1), torch.ones(4, 4).bool(), torch.rand(4, 4) < 0.5):
            check_losses(model, lambda m=mask: squares(model(x, m)))
