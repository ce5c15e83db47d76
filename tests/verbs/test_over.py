"""A verb over a loader against plain backward passes, sample by sample; files, and going on with them."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from nets import perceptron
from oracle import squares
from rarely import crossed
from refused import check_each
from steps import rows_joined as rows
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.errors import NothingRecorded

pytestmark = pytest.mark.usefixtures("double")

X, OTHERS = torch.randn(11, 4).double(), torch.randn(6, 4).double()
BUDGETS = pytest.mark.parametrize("max_bytes", [0, 150, 2**28])


def loss(model: nn.Module, x: Any) -> Tensor:
    return squares(model(x if isinstance(x, Tensor) else x[0]))


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


def test_dictionaries_and_some_parameters_by_a_generator(net: nn.Module) -> None:
    found = autograd_hacks.over(net, X.split(4), loss, lambda g: g.norms(per_parameter=True), only=iter(["2.*"]))
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


def test_sums(net: nn.Module) -> None:
    found = autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.second_moment, total=True)
    assert_close(torch.cat([x.flatten() for x in found.values()]), rows(net, X).square().sum(0))


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


def read(m: nn.Module, x: Tensor) -> Tensor:
    own = m.head(x * m.scale.exp()) + m.conv(x[:, None]).flatten(1)[:, :2]
    return own * m.table((x[:, 0] > 0).long()).sum(1, keepdim=True)


def reader() -> nn.Module:
    """A convolution, a table, and a parameter that is read by way of others' values."""
    return Bare(read, conv=nn.Conv1d(1, 2, 3), head=nn.Linear(4, 2), scale=torch.randn(4), table=nn.Embedding(2, 4))


@crossed(make=[perceptron, reader], max_bytes=[0, 500, 2**28])
def test_rows_kept_from_batch_to_batch_are_those_of_each_checkpoint(make: Callable[[], nn.Module], max_bytes: int) -> None:
    """TracIn: Σ over checkpoints of the learning rate times ⟨g, g′⟩."""
    model, twin, seen = make().double(), make().double(), list[int]()
    autograd_hacks.add_hooks(model)

    class Others(list[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            seen.append(len(self))
            return super().__iter__()

    found, expected, others = torch.zeros(11, 6), torch.zeros(11, 6), Others(OTHERS.split(2))
    for rate in (0.1, 0.03):
        twin.load_state_dict(make().double().state_dict())
        model.load_state_dict(twin.state_dict())
        expected += rate * rows(twin, X) @ rows(twin, OTHERS).mT
        found += rate * autograd_hacks.over(
            model, X.split(4), loss, PerSampleGrads.gram, against=others, max_bytes=max_bytes
        )
    assert_close(found, expected)
    assert len(seen) == (2 if max_bytes == 2**28 else 6), "batches that are all kept are taken once for each checkpoint"


class Plain:
    """A batch of a class of the user's, without a repr of its own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, index: int) -> Tensor:
        return self.x


@pytest.mark.parametrize("kind", [lambda x: x, Plain])
def test_files_that_are_not_gone_on_with(net: nn.Module, tmp_path: Path, kind: Callable[[Tensor], Any]) -> None:
    path = tmp_path / "rows.npy"

    def go_on(x: Tensor = X, verb: Any = PerSampleGrads.norms, by: float = 1.0, out: str = path.name, **options: Any) -> Any:
        own = loss if by == 1 else lambda net, x: by * loss(net, x)
        return autograd_hacks.over(net, [kind(part) for part in x.split(4)], own, verb, out=tmp_path / out, **options)

    go_on(X[:8])
    check_each(
        (ValueError, "must not shuffle.*explain a-whole-data-set", lambda: go_on(X.flip(0))),
        (ValueError, "the loader has 1", lambda: go_on(X[:4])),
        (
            ValueError,
            r"another verb; this verb returned float64 rows of shape \(2,\)",
            lambda: go_on(verb=lambda g: g.project(2)),
        ),
        (ValueError, "other rows of the last batch.*another verb", lambda: go_on(X[:8], lambda g: g.norms() + 1)),
        (ValueError, "another verb; this verb returned float32", lambda: go_on(X[:8], lambda g: g.norms().float())),
        (ValueError, "from another verb", lambda: go_on(by=2)),
        (ValueError, "of other weights", lambda: go_on(only="0.*")),
        (ValueError, r"ends with \.npy or \.safetensors", lambda: go_on(out="rows.pt")),
    )
    assert_close(go_on(), rows(net, X).norm(dim=1))
    kept, net[0].weight.data = net[0].weight.data, net[0].weight + 1
    check_each((ValueError, "of other weights", go_on))
    net[0].weight.data = kept
    path.write_bytes(path.read_bytes()[:-3])
    check_each((ValueError, r" of the .* bytes written", go_on))
    (tmp_path / "rows.npy.progress").write_text("{")
    check_each((ValueError, "does not contain the notes of over", go_on))
    (tmp_path / "rows.npy.progress").unlink()
    check_each((ValueError, "only one of the two files exists", go_on))
    assert go_on(verb=lambda grads: grads.norms().half(), out="half.npy").dtype == torch.float16
    check_each((TypeError, r"rows\.float\(\)", lambda: go_on(verb=lambda grads: grads.norms().bfloat16(), out="b.npy")))


# What it is given: loaders, checkpoints and verbs of all kinds, some of which change while it runs


def move(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p += by


@BUDGETS
@pytest.mark.parametrize("factor", [None, 1.001, -1.0])
def test_weights_that_change_between_batches(net: nn.Module, max_bytes: int, factor: float | None) -> None:
    """factor: of what changes behind torch's back"""
    expected, (first, *_) = list[Tensor](), net.parameters()

    def online() -> Iterator[Tensor]:
        for x in X.split(4):
            expected.append(rows(net, x) @ rows(net, OTHERS).mT)
            yield x
            if factor is None:
                move(net, 0.1)
            else:
                first.data.mul_(factor)  # which counts as no change

    found = autograd_hacks.over(net, online(), loss, PerSampleGrads.gram, against=OTHERS.split(2), max_bytes=max_bytes)
    assert_close(found, torch.cat(expected))


@BUDGETS
@pytest.mark.parametrize("kind", ["NumPy", "torch"])
def test_batches_in_memory_that_is_filled_anew(net: nn.Module, max_bytes: int, kind: str) -> None:
    class Refilled:
        def __iter__(self) -> Iterator[Tensor]:
            memory = torch.empty(2, 4)
            array = memory.numpy()
            for x in OTHERS.split(2):
                if kind == "NumPy":  # of which torch doesn't hear
                    array[:] = x.numpy()
                else:
                    memory.copy_(x)
                yield torch.from_numpy(array) if kind == "NumPy" else memory

    found = autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.gram, against=Refilled(), max_bytes=max_bytes)
    assert_close(found, rows(net, X) @ rows(net, OTHERS).mT)


@pytest.mark.parametrize("max_bytes", [0, 150])
def test_other_data_in_another_order_each_time(net: nn.Module, max_bytes: int) -> None:
    shuffled = DataLoader(TensorDataset(OTHERS), batch_size=2, shuffle=True)

    def over(size: int, **options: Any) -> None:
        autograd_hacks.over(net, X.split(size), loss, PerSampleGrads.gram, against=shuffled, **options)

    check_each((ValueError, "or another order; it must not shuffle", lambda: over(2, max_bytes=max_bytes)))


def test_a_loader_that_shuffles_is_warned_of(net: nn.Module) -> None:
    shuffled = DataLoader(TensorDataset(X), batch_size=2, shuffle=True)
    with pytest.warns(UserWarning, match="row k is not sample k"):
        autograd_hacks.over(net, shuffled, lambda net, batch: loss(net, batch[0]), PerSampleGrads.norms)
    autograd_hacks.over(net, shuffled, lambda net, batch: loss(net, batch[0]), PerSampleGrads.second_moment, total=True)


def test_loaders_without_a_length(net: nn.Module) -> None:
    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(X)

    loader = DataLoader(Endless(), batch_size=4)
    assert_close(autograd_hacks.over(net, loader, loss, PerSampleGrads.norms), rows(net, X).norm(dim=1))
    autograd_hacks.curvature.compute_hess_over(net, loader, kind="diag", hess_type="LeastSquares")


def test_optimizers_in_the_backward_pass_do_not_step(net: nn.Module) -> None:
    expected, seen = rows(net, X).norm(dim=1), list[Tensor]()

    def step(p: Tensor) -> None:
        seen.append(p)
        p.data += 1

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    assert_close(autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms), expected)
    assert not seen
    loss(net, X).sum().backward()
    assert len(seen) == 4, "they are there again"


def test_after_it_there_is_nothing_to_clip(net: nn.Module) -> None:
    autograd_hacks.over(net, X.split(4), loss, PerSampleGrads.norms)
    with pytest.raises(NothingRecorded, match="over has read its passes"):
        autograd_hacks.clip_grad1_norm_(net, 1.0)


@pytest.fixture
def buffered() -> nn.Module:
    """With buffers of kinds that have no size."""
    model = Bare(lambda m, x: m.layer(x) * m.a, layer=nn.Linear(4, 2))
    kinds = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.cfloat), torch.eye(2).to_sparse()
    for name, own in zip("abc", (*kinds, torch.zeros((), dtype=torch.uint8))):
        model.register_buffer(name, own)
    return model


@BUDGETS
def test_models_with_buffers_of_all_kinds(buffered: nn.Module, max_bytes: int) -> None:
    expected = rows(buffered, X) @ rows(buffered, OTHERS).mT
    autograd_hacks.add_hooks(buffered)
    found = autograd_hacks.over(
        buffered, X.split(4), loss, PerSampleGrads.gram, against=OTHERS.split(2), max_bytes=max_bytes
    )
    assert_close(found, expected)


def test_products_of_each_sample_with_itself_are_rows(net: nn.Module) -> None:
    diagonal = autograd_hacks.over(net, X[:8].split(4), loss, lambda grads: grads.gram().diagonal())
    assert_close(diagonal, rows(net, X[:8]).square().sum(1))


def test_the_readme_runs_without_numpy() -> None:
    """Which PyTorch doesn't need, so a new environment may not have it."""
    run = "import sys; sys.modules['numpy'] = None; import doctest; sys.exit(doctest.testfile(sys.argv[1], False)[0])"
    subprocess.run([sys.executable, "-W", "ignore", "-c", run, str(Path(__file__).parents[2] / "README.rst")], check=True)
