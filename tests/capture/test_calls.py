"""How a layer may be called: by keyword, at two paths, among the user's hooks, scripted or traced, in a wrapper."""

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_means, batch, check_batches, mlp, step
from torch.nn.parallel import DataParallel
from twin import Bare

import autograd_hacks


def test_the_users_hooks_keep_working_and_the_rows_follow_them(model: nn.Sequential) -> None:
    """A forward hook that changes the output, and one on the output that changes the gradient, before and after ours."""
    early = mlp()
    early[0].register_forward_hook(lambda layer, args, out: 3 * out)
    with autograd_hacks.add_hooks(early):
        early[2].register_forward_hook(lambda layer, args, out: out**2)
        early[2].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
        early[0].register_forward_hook(lambda layer, args, out: out.register_hook(lambda g: g.clamp(-0.1, 0.1)) and None)
        step(early, *batch())
        autograd_hacks.compute_grad1(early)
        assert_means(early)


def test_keyword_calls() -> None:
    model = Bare(lambda m, x: m.layer(input=x), layer=nn.Linear(3, 2).double())
    check_batches(model, batch()[0])


def test_lazy_layers_once_materialised() -> None:
    model = nn.Sequential(nn.LazyConv1d(2, 2), nn.Flatten(), nn.LazyLinear(2)).double()
    check_batches(model, torch.randn(4, 3, 5, dtype=torch.float64))


def test_layers_used_at_two_paths_are_one() -> None:
    layer = nn.Linear(3, 3).double()
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2).double())
    check_batches(model, batch()[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_child() -> None:
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 2))).double()
    check_batches(model, batch()[0])
    with pytest.raises(TypeError, match="scripted"):
        autograd_hacks.add_hooks(model[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_tracing_a_hooked_model(model: nn.Module) -> None:
    traced = torch.jit.trace(model, batch()[0])
    assert torch.equal(traced(batch()[0]), model(batch()[0]))


def test_data_parallel_is_refused_by_name() -> None:
    """But for one that runs the model itself, as it does without a GPU."""
    net, (x, y) = mlp(), batch()
    alone = DataParallel(net, device_ids=[])
    autograd_hacks.add_hooks(alone)
    squares(alone(x), y).mean().backward()
    autograd_hacks.compute_grad1(alone)
    assert_rows(net, one_backward_per_sample(net, squares, x, y))
    autograd_hacks.remove_hooks(alone)
    alone.device_ids = [0, 1]
    for way in (alone, nn.Sequential(alone)):
        with pytest.raises(TypeError, match=r"DataParallel.*DistributedDataParallel"):
            autograd_hacks.add_hooks(way)
    autograd_hacks.add_hooks(net)
    replica = net._replicate_for_data_parallel()  # what DataParallel runs, on each device
    with pytest.raises(TypeError, match=r"DataParallel.*DistributedDataParallel"):
        replica(x)
