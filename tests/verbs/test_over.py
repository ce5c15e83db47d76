"""A verb over a loader against plain backward passes, sample by sample; files, and going on with them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
from nets import perceptron
from oracle import squares
from rarely import crossed
from steps import alive
from steps import rows_joined as rows
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import PerSampleGrads

pytestmark = pytest.mark.usefixtures("double")

X, OTHERS = torch.randn(11, 4).double(), torch.randn(5, 4).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model(x))


@pytest.fixture
def net() -> nn.Module:
    model = perceptron()
    autograd_hacks.add_hooks(model)
    return model


def test_norms_of_all(net: nn.Module) -> None:
    net[0].weight.grad = kept = torch.ones_like(net[0].weight)
    assert_close(autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms), rows(net, X).norm(dim=1))
    assert net[0].weight.grad is kept
    assert (kept == 1).all()
    assert net[0].bias.grad is None


def test_dictionaries_and_some_parameters(net: nn.Module) -> None:
    found = autograd_hacks.over(net, X.split(4), loss, lambda g: g.norms(per_parameter=True), only="2.*")
    assert list(found) == ["2.weight", "2.bias"]
    assert found["2.bias"].shape == (11,)


def test_passes_for_some_parameters_go_no_further_than_these(net: nn.Module) -> None:
    seen = list[Tensor]()
    net[0].register_forward_hook(lambda layer, args, output: output.register_hook(seen.append) and None)
    for only, passes in (("2.*", 0), (None, 3)):
        autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms, only=only)  # which are proven, too
        seen.clear()
        found = autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms, only=only)
        assert len(seen) == passes
        expected = rows(net, X)
        seen.clear()
        assert_close(
            found, (expected if only is None else expected[:, -net[2].weight.numel() - len(net[2].bias) :]).norm(dim=1)
        )


def test_inner_products_of_two_sets(net: nn.Module) -> None:
    found = autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.gram, against=OTHERS.split(2))
    assert_close(found, rows(net, X) @ rows(net, OTHERS).mT)


def test_sums(net: nn.Module) -> None:
    found = autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.second_moment, total=True)
    assert_close(torch.cat([x.flatten() for x in found.values()]), rows(net, X).square().sum(0))


def test_checkpoints_with_learning_rates(net: nn.Module, tmp_path: Path) -> None:
    """TracIn: Σ over checkpoints of the learning rate times ⟨g, g′⟩."""
    before = [p.detach().clone() for p in net.parameters()]
    states = [perceptron().state_dict() for _ in range(2)]
    torch.save(states[1], tmp_path / "second.pt")
    twin, expected = perceptron(), torch.zeros(11, 5)
    for state, rate in zip(states, (0.1, 0.03)):
        twin.load_state_dict(state)
        expected += rate * rows(twin, X) @ rows(twin, OTHERS).mT
    given = [(states[0], 0.1), (tmp_path / "second.pt", 0.03)]
    found = autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.gram, against=[OTHERS], checkpoints=given)
    assert_close(found, expected)
    for p, own in zip(net.parameters(), before):
        assert_close(p.detach(), own, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["rows.npy", "rows.safetensors"])
def test_a_file_that_is_gone_on_with(net: nn.Module, tmp_path: Path, name: str) -> None:
    path, read = tmp_path / name, list[int]()

    def project(grads: PerSampleGrads) -> Tensor:
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(grads.samples)
        return grads.project(8, seed=3)

    with pytest.raises(KeyboardInterrupt):
        autograd_hacks.over(net, X.split(4), loss, project, out=path)
    with path.open("ab") as file:  # a batch that was not written to its end
        file.write(b"12345")
    assert read == [4, 4]
    read.append(0)  # from here on it doesn't raise
    found = autograd_hacks.over(net, X.split(4), loss, project, out=path)
    assert read == [4, 4, 0, 4, 3], "the last batch in the file, to see that it is the same"
    expected = autograd_hacks.over(net, X.split(4), loss, lambda g: g.project(8, seed=3))
    assert_close(found, expected)
    if path.suffix == ".npy":
        assert_close(torch.tensor(np.load(path)), expected)
    else:
        load = pytest.importorskip("safetensors.torch").load_file
        assert_close(load(path)["rows"], expected)
    assert_close(autograd_hacks.over(net, X.split(4), loss, project, out=path), expected)
    assert read[5:] == [3], "nothing was left to do"


@pytest.mark.slow
def test_one_batch_is_held_at_a_time(net: nn.Module) -> None:
    held = list[int]()

    def counted(grads: PerSampleGrads, *_: PerSampleGrads) -> Tensor:
        held.append(alive(PerSampleGrads))
        return grads.norms()[:, None]

    autograd_hacks.over(net, X.split(4), loss, counted)
    autograd_hacks.over(net, X.split(4), loss, counted, against=OTHERS.split(2), budget=0)
    assert set(held[:3]) == {1}
    assert set(held[3:]) == {2}


class Read(nn.Module):
    """A convolution, a table, and a parameter that is read by way of others' values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 2, 3), nn.Linear(4, 2)
        self.scale, self.table = nn.Parameter(torch.randn(4)), nn.Embedding(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = self.head(x * self.scale.exp()) + self.conv(x[:, None]).flatten(1)[:, :2]
        return own * self.table((x[:, 0] > 0).long()).sum(1, keepdim=True)


@crossed(make=[perceptron, Read], budget=[0, 500, 2**28])
def test_rows_kept_from_batch_to_batch_are_those_of_each_checkpoint(make: Callable[[], nn.Module], budget: int) -> None:
    model, twin, seen = make().double(), make().double(), list[int]()
    autograd_hacks.add_hooks(model)
    states = [make().double().state_dict() for _ in range(2)]

    class Others(list[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            seen.append(len(self))
            return super().__iter__()

    given, expected = [(states[0], 0.1), (states[1], 0.03)], torch.zeros(11, 5)
    for state, rate in given:
        twin.load_state_dict(state)
        expected += rate * rows(twin, X) @ rows(twin, OTHERS).mT
    others = Others(OTHERS.split(2))
    found = autograd_hacks.over(
        model, X.split(4), loss, PerSampleGrads.gram, against=others, checkpoints=given, budget=budget
    )
    assert_close(found, expected)
    assert len(seen) == (2 if budget == 2**28 else 6), "batches that are all kept are taken once for each checkpoint"


def test_files_that_are_not_gone_on_with(net: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    autograd_hacks.over(net, X[:8].split(4), loss, PerSampleGrads.norms, out=path)
    with pytest.raises(ValueError, match=r"(?s)must not shuffle.*explain a-whole-data-set"):
        autograd_hacks.over(net, X.flip(0).split(4), loss, PerSampleGrads.norms, out=path)
    with pytest.raises(ValueError, match="the loader has 1"):
        autograd_hacks.over(net, X[:4].split(4), loss, PerSampleGrads.norms, out=path)
    with pytest.raises(ValueError, match=r"another verb; this verb returned float64 rows of shape \(2,\)"):
        autograd_hacks.over(net, X.split(4), loss, lambda g: g.project(2), out=path)
    with pytest.raises(ValueError, match="another verb; this verb returned float32 rows"):
        autograd_hacks.over(net, X[:8].split(4), loss, lambda g: g.norms().float(), out=path)
    with pytest.raises(ValueError, match=r"other rows of the last batch.*another verb"):
        autograd_hacks.over(net, X[:8].split(4), loss, lambda g: g.norms() + 1, out=path)
    with pytest.raises(ValueError, match="from another verb"):
        autograd_hacks.over(net, X.split(4), lambda net, x: 2 * loss(net, x), PerSampleGrads.norms, out=path)
    with pytest.raises(ValueError, match="of other weights"):
        autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms, out=path, only="0.*")
    net[0].weight.data += 1
    with pytest.raises(ValueError, match="of other weights"):
        autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms, out=path)
    (tmp_path / "rows.npy.progress").unlink()
    with pytest.raises(ValueError, match="only one of the two files exists"):
        autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms, out=path)
    with pytest.raises(ValueError, match=r"ends with \.npy or \.safetensors"):
        autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms, out=tmp_path / "rows.pt")
