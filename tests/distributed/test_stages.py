"""Pipelines: each process has a stage of the model, or several, and its samples' gradients by those."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from cut_nets import NEAR, joint, one_backward_per_sample
from processes import WORLD, Both
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import NotReduced, UnseenGradient

N, BOUND = 8, 3.0


class Twice(nn.Module):
    """A layer that runs twice, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.tanh(self.layer(self.norm(x))))


def parts() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(3, 4), Twice(), Twice(), nn.Linear(4, 2)]


def squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().sum()


class Pipeline:
    """The stages of this process, and a step of all."""

    def __init__(self, kind: type[PipelineScheduleMulti | PipelineScheduleSingle], independent: bool = False) -> None:
        layers, rank, self.rank = parts(), dist.get_rank(), dist.get_rank()
        self.stages = {"": nn.Sequential(*layers[2 * rank : 2 * rank + 2])}
        if issubclass(kind, PipelineScheduleMulti):
            self.stages = {f"{n}": layers[n] for n in (rank, rank + WORLD)}
        count, device = WORLD * len(self.stages), torch.device("cpu")
        for net in self.stages.values():
            autograd_hacks.add_hooks(net, independent=independent)
        own = [PipelineStage(net, int(n or rank), count, device) for n, net in self.stages.items()]
        self.schedule = kind(own if len(own) > 1 else own[0], 4, loss_fn=squares, scale_grads=False)

    def step(self, x: Tensor, y: Tensor) -> None:
        with ExitStack() as contexts:
            for net in self.stages.values():
                net.zero_grad()
                contexts.enter_context(autograd_hacks.accumulate(net))
            self.schedule.step(x) if self.rank == 0 else self.schedule.step(target=y)

    def named(self, name: str, net: nn.Module) -> str:
        """A parameter's name in the whole model."""
        found = next(n for n, stage in self.stages.items() if stage is net)
        if found:
            return f"{found}.{name}"
        number, rest = name.split(".", 1)
        return f"{2 * self.rank + int(number)}.{rest}"


def steps(kind: type[PipelineScheduleMulti | PipelineScheduleSingle]) -> None:
    one, pipeline = nn.Sequential(*parts()), Pipeline(kind)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (one, *pipeline.stages.values())]
    for step in range(4):
        draws = torch.Generator().manual_seed(step)
        x, y = torch.randn(N, 3, generator=draws), torch.randn(N, 2, generator=draws)
        rows = one_backward_per_sample(one, x, y, squares)
        norms = joint(rows)
        pipeline.step(x, y)
        given = None
        if len(pipeline.stages) > 1:
            net = next(iter(pipeline.stages.values()))
            with pytest.raises(NotReduced, match=r"4 stages .* norms="):
                autograd_hacks.clip_grad1_norm_(net, BOUND, "sum")
            own = [autograd_hacks.per_sample_grads(net, "sum").norms().square() for net in pipeline.stages.values()]
            total = sum(own)
            dist.all_reduce(total)
            given = total.sqrt()
        weights = (BOUND / norms).clamp(max=1)
        for net in pipeline.stages.values():
            autograd_hacks.compute_grad1(net, "sum")
            assert_close(autograd_hacks.clip_grad1_norm_(net, BOUND, "sum", norms=given), norms, **NEAR)
            for name, p in net.named_parameters():
                known = pipeline.named(name, net)
                assert_close(p.grad1, rows[known], **NEAR)
                assert_close(p.grad, torch.tensordot(weights, rows[known], 1), **NEAR)
        for name, p in one.named_parameters():
            p.grad = torch.tensordot(weights, rows[name], 1)
        for optimizer in optimizers:
            optimizer.step()
        for net in pipeline.stages.values():
            for name, p in net.named_parameters():
                assert_close(p, one.get_parameter(pipeline.named(name, net)), **NEAR)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS, ScheduleInterleaved1F1B])
def test_stages_clip_by_the_norms_over_all(both: Both, kind: type[PipelineScheduleMulti]) -> None:
    both(steps, kind)


def private() -> None:
    """One seed on all stages, as scripts set it, and yet no two stages draw the same noise."""
    one, pipeline = nn.Sequential(*parts()), Pipeline(ScheduleGPipe, independent=True)
    (net,), noise = pipeline.stages.values(), list[Tensor]()
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    rows = one_backward_per_sample(one, x, y, squares)
    weights = (BOUND / joint(rows)).clamp(max=1) / 4
    for scale in (0.0, 1.0):
        torch.manual_seed(0)
        pipeline.step(x, y)
        autograd_hacks.clip_and_noise_(net, BOUND, scale, 4, loss_type="sum")
        left = [p.grad - torch.tensordot(weights, rows[pipeline.named(name, net)], 1) for name, p in net.named_parameters()]
        noise.append(torch.cat([own.flatten() for own in left])[:10])
    assert_close(noise[0], torch.zeros(10), **NEAR)
    theirs = [torch.zeros(10) for _ in range(WORLD)]
    dist.all_gather(theirs, noise[1])
    assert ((theirs[0] - theirs[1]).abs() > 1e-3).all()


def test_stages_draw_noise_of_their_own(both: Both) -> None:
    both(private)


def split() -> None:
    pipeline = Pipeline(ScheduleInterleavedZeroBubble)
    for _ in range(2):
        pipeline.step(torch.randn(N, 3), torch.randn(N, 2))
        for number, net in pipeline.stages.items():
            if number != "0":  # whose passes have nothing to be split
                for read in (autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
                    with pytest.raises(UnseenGradient, match="zero-bubble"):
                        read(net, "sum")


def test_split_backward_passes_are_refused_by_name(both: Both) -> None:
    both(split)


def test_given_norms() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    autograd_hacks.add_hooks(net)
    net(x).square().sum(1).mean().backward()
    autograd_hacks.compute_grad1(net)
    given = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert_close(autograd_hacks.clip_grad1_norm_(net, 2.0, norms=given), given)
    assert_close(net.weight.grad, torch.tensordot(torch.tensor([1.0, 1.0, 0.5, 0.25]) / 4, net.weight.grad1, 1))
    for wrong in (given[:3], given[None], 2.0):
        with pytest.raises(ValueError, match="expected 4 norms, one for each sample"):
            autograd_hacks.clip_grad1_norm_(net, 2.0, norms=wrong)
