"""The benchmark's architectures in a small size, from their losses: labels and rows against one backward pass a sample, in
three steps with other batches."""

import pytest
import torch
from architectures import ARCHITECTURES
from families import TINY
from measuring import batch_of
from one_at_a_time import judge, traced
from rarely import rarely
from test_benchmark_models import USUAL
from torch import Tensor

from autograd_hacks.graph.label import At
from autograd_hacks.graph.memo import Memo
from autograd_hacks.support.internals import tree_leaves

ASKED = {"AsStridedBackward0", "torch::autograd::CopySlices"}
"""Kinds that are asked in each forward: views that C++ keeps to itself."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*USUAL, *rarely(*(name for name in ARCHITECTURES if name not in USUAL))])
def test_three_steps(name: str) -> None:
    workload = ARCHITECTURES[name](TINY)
    try:
        model = workload.model().to(workload.dtype)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} isn't installed")
    memo = Memo()
    for step in range(3):
        batch = batch_of(workload, step, torch.device("cpu"), workload.dtype)
        losses = workload.losses(model, batch)
        trace, memory = traced([losses], model, [x for x in tree_leaves(batch) if isinstance(x, Tensor)])
        walk = memo.walk(trace, {0: At(0)}, len(losses), memory)
        assert not walk.mixes, [(trace.kinds[k].name, place, why) for k, place, why in walk.mixes]
        assert {trace.kinds[k].name for k, _, _ in walk.asked} <= ASKED
        found = judge([losses], len(losses), model, walk=walk, trace=trace)
        assert not found.wrong
        assert not found.early
        assert found.rows < (1e-8 if workload.dtype == torch.float64 else 1e-3)
