"""Private steps: Opacus' own engine, with the same draws and the same noise, gives the same weights and the same epsilon."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from rarely import rarely
from refused import check_each
from steps import mlp
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset
from trained import needed, of_many
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, SamplesMixed

opacus = needed("opacus", "opacus.utils.batch_memory_manager")

from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

from autograd_hacks.integrations.opacus import DPOptimizer, PrivacyEngine  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

N, RATE = 24, 6


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(N, 1, 6, 6, generator=draws), torch.randint(3, (N,), generator=draws))


def trained(
    engine: type, model: nn.Module, split: int | None = None, seed: int = 0, reduction: str = "mean", **options: object
) -> tuple[list[torch.Tensor], float, list[int]]:
    """The weights after four epochs, what they cost, and the sizes of batches."""
    private = engine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = private.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data(), batch_size=RATE),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        loss_reduction=reduction,
        noise_generator=torch.Generator().manual_seed(7),
        **options,
    )
    torch.manual_seed(seed)
    sizes = []

    def epoch(batches: DataLoader) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            (losses.sum() if reduction == "sum" or not len(x) else losses.mean()).backward()
            optimizer.step()
            sizes.append(len(x))

    for _ in range(4):
        if split:
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=split, optimizer=optimizer) as parts:
                epoch(parts)
        else:
            epoch(loader)
    return [p.detach().clone() for p in model.parameters()], private.get_epsilon(1e-3), sizes


@pytest.mark.parametrize(("split", "reduction"), [(None, "mean"), (2, "sum"), *rarely((None, "sum"), (2, "mean"))])
def test_weights_and_epsilon_are_opacus_own(split: int | None, reduction: str) -> None:
    model = conv()
    theirs, their_epsilon, their_sizes = trained(opacus.PrivacyEngine, copy.deepcopy(model), split, 0, reduction)
    ours, epsilon, sizes = trained(PrivacyEngine, model, split, 0, reduction)
    assert sizes == their_sizes
    assert len(set(sizes)) > 1
    assert epsilon == their_epsilon > 0
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours[0], trained(PrivacyEngine, conv(), split, 1)[0][0])


@pytest.mark.usefixtures("double")  # 96 steps add up what single precision rounds
def test_empty_batches_are_steps_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.RATE", 1)
    model, found = conv(), []
    for engine in (opacus.PrivacyEngine, PrivacyEngine):
        found.append(trained(engine, copy.deepcopy(model), seed=3))
    (theirs, their_epsilon, sizes), (ours, epsilon, own) = found
    assert 0 in sizes
    assert sizes == own
    assert epsilon == their_epsilon
    assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def private(model: nn.Module, noise: float = 0.0, **options: object) -> DPOptimizer:
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    parameters = options.pop("parameters", model.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]
    return DPOptimizer(sgd, model=model, noise_multiplier=noise, max_grad_norm=1.0, expected_batch_size=4, **options)


@pytest.mark.parametrize("told", ["mean", "sum"])
def test_losses_by_backward(told: str) -> None:
    model = mlp()
    optimizer = private(model)
    found = []
    for by_backward in (False, True):
        optimizer.zero_grad()
        losses = model(torch.ones(4, 3).double().cumsum(0)).square().sum(1)
        if by_backward:
            autograd_hacks.backward(losses, told)
        else:
            losses.mean().backward()
        optimizer.pre_step()
        found.append([p.grad.clone() for p in model.parameters()])
    assert_close(*found)


def test_a_sample_that_is_not_finite_adds_nothing() -> None:
    model = mlp()
    other, x = copy.deepcopy(model), torch.randn(4, 3).double()
    for own, batch in (
        (private(model), x.clone().index_fill_(0, torch.tensor([1]), torch.nan)),
        (private(other), x[[0, 2, 3]]),
    ):
        own.model(batch).square().sum().backward()
        own.loss_reduction = "sum"
        own.step()
    assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_some_parameters_are_clipped_by_their_own_norm() -> None:
    model = mlp()
    last = list(model.parameters())[-2:]
    optimizer = private(model, parameters=last)
    (100 * model(torch.randn(1, 3).double())).sum().backward()
    optimizer.step()
    assert_close(torch.stack([p.grad.norm() for p in last]).norm().item(), 1 / 4)


def test_a_step_is_of_one_pass_which_is_used_once() -> None:
    model = mlp()
    optimizer = private(model)

    def passes(count: int) -> None:
        for _ in range(count):
            model(torch.randn(4, 3).double()).sum().backward()

    check_each((NothingRecorded, "", optimizer.step))
    with autograd_hacks.accumulate(model):
        passes(2)
    check_each((ValueError, "2 accumulated batches", optimizer.step))
    check_each((NothingRecorded, "without it", lambda: (passes(2), optimizer.step())))
    optimizer.zero_grad()
    autograd_hacks.clear_backprops(model)
    passes(1)
    optimizer.step()
    optimizer.zero_grad()
    check_each((NothingRecorded, "no backward pass since the last step", optimizer.step))
    passes(1)
    optimizer.step()
    check_each((ValueError, "haven't been cleared", lambda: (passes(1), optimizer.step())))  # Opacus' own


def test_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = private(model)
    model(torch.randn(4, 3).double()).sum().backward()
    monkeypatch.setattr("autograd_hacks.integrations.opacus.per_sample_grads", of_many)
    with pytest.raises(NotImplementedError, match="clip_and_noise_"):
        optimizer.step()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotImplementedError, match="distributed model"):
            trained(PrivacyEngine, nn.parallel.DistributedDataParallel(conv()))
    finally:
        torch.distributed.destroy_process_group()


def test_what_it_refuses() -> None:
    with pytest.raises(NothingRecorded):
        DPOptimizer(
            torch.optim.SGD(mlp().parameters()), model=mlp(), noise_multiplier=1, max_grad_norm=1, expected_batch_size=1
        )
    with pytest.raises(ValueError, match="doesn't have"):
        private(mlp(), parameters=mlp().parameters())
    with pytest.raises(ValueError, match=r"complex parameters.*Use clip_and_noise_"):
        private(nn.Linear(4, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"clipping='per_layer'; expected 'flat'.*PrivateTraining, clip= or several bounds"):
        trained(PrivacyEngine, conv(), clipping="per_layer")
    with pytest.raises(ValueError, match="'ghost', which is not needed here"):
        trained(PrivacyEngine, conv(), grad_sample_mode="ghost")


@pytest.mark.parametrize("by_engine", [True, False])
def test_samples_that_know_of_each_other_are_refused(by_engine: bool) -> None:
    """Of its values, by a way that has no gradient."""
    centred, draws = Bare(lambda m, h: h - h.mean(0).detach()), torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), centred, nn.Linear(3, 2))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    if by_engine:
        loader = DataLoader(TensorDataset(x, torch.zeros(6)), batch_size=6)
        model, optimizer, _ = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_generator=draws, **options
        )
    else:
        autograd_hacks.add_hooks(model)
        optimizer = DPOptimizer(optimizer, model=model, expected_batch_size=6, generator=draws, **options)
    before, state = [p.detach().clone() for p in model.parameters()], draws.get_state()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with pytest.raises(SamplesMixed, match="by the laws of operations"):
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert torch.equal(draws.get_state(), state)
