"""`add_hooks(param_grad=False)`: autograd computes no ordinary gradients of parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_backward_per_sample
from torch import Tensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, ParamGradSkipped, UnseenGradient


def squares(out: Tensor, y: Tensor) -> Tensor:
    return out.square().flatten(1).sum(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inside, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inside(self.inside(self.embed(x)).tanh()).relu_())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 2), reentrant
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inside, self.first(x), use_reentrant=self.reentrant))


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.inside = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x * self.token)


def vectors() -> Tensor:
    return torch.randn(3, 5, 4).double()


def words() -> Tensor:
    return torch.randint(7, (3, 5))


def pictures() -> Tensor:
    return torch.randn(3, 2, 6, 6).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), vectors),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        pictures,
    ),
    "tied": (Tied, words),
    "lstm": (lambda: Last(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)), vectors),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True), vectors),
    "reentrant": (lambda: Checkpointed(True), vectors),
    "checkpointed": (lambda: Checkpointed(False), vectors),
    "replayed": (lambda: nn.Sequential(nn.Linear(4, 4), Token(), nn.Linear(4, 2)), vectors),
}


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_rows_and_no_gradients(name: str, training: bool) -> None:
    build, batch = MODELS[name]
    model = build().double().train(training)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for step in range(3):
            x = batch()
            squares(model(x), x).mean().backward()
            assert all(p.grad is None and p.requires_grad for p in model.parameters())
            autograd_hacks.compute_grad1(model, set_grad=step == 2)
            grads = autograd_hacks.per_sample_grads(model)
            with autograd_hacks.pause_hooks():
                rows = one_backward_per_sample(model, squares, x, x)
            assert_rows(model, rows)
            assert_close(grads.norms(), torch.cat([r.flatten(1) for r in rows.values()], 1).norm(dim=1))  # type: ignore[union-attr]
        for p in model.parameters():
            assert_close(p.grad, p.grad1.mean(0))
        assert autograd_hacks.clip_grad1_norm_(model, 1e9).shape == (3,)
        for p in model.parameters():
            assert_close(p.grad, p.grad1.mean(0))
        autograd_hacks.verify(model) if name != "reentrant" else None
    model.zero_grad()
    squares(model(x), x).mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_autograd_computes_none() -> None:
    """The weight's gradient is a product that doesn't run, and the input is not kept for it by the graph."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    counts = []
    for param_grad in (True, False):
        with autograd_hacks.add_hooks(model, param_grad=param_grad):
            for _ in range(2):
                loss = squares(model(x), x).mean()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    loss.backward()
            counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
    assert counts[1] == counts[0] - 2


def test_a_gradient_that_was_there_stays() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x), x).mean().backward()
            assert all((p.grad == 1).all() for p in model.parameters())


def test_flags_after_an_exception() -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("in the middle")
            return x

    model, x = nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(2):
            squares(model(x), x).mean().backward()
        with pytest.raises(RuntimeError, match="mat1"):
            model(torch.randn(3, 5))
        assert all(p.requires_grad for p in model.parameters())
        model[1].fails = True
        with pytest.raises(KeyError):
            model(x)
        assert all(p.requires_grad for p in model.parameters())
        model[1].fails = False
        squares(model(x), x).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, x, x))


def test_gradient_past_the_owner_is_noticed_in_every_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for step in range(5):
            loss = squares(model(x), x).mean()
            (loss + model[0].weight.square().sum() if step % 2 else loss).backward()
            if step % 2:
                with pytest.raises(UnseenGradient, match=r"0\.weight"):
                    autograd_hacks.compute_grad1(model)
            else:
                autograd_hacks.compute_grad1(model)


def test_gradients_of_parameters_by_autograd_grad_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4, requires_grad=True)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            with pytest.raises(ParamGradSkipped, match=r"weighted_sum"):
                torch.autograd.grad(squares(model(x), x).mean(), list(model.parameters()))
            with pytest.raises(HigherOrderError, match="create_graph"):
                squares(model(x), x).mean().backward(create_graph=True)
            (by_input,) = torch.autograd.grad(squares(model(x), x).sum(), x)
            assert_close(by_input, 2 * model(x) @ model[1].weight @ model[0].weight)
            squares(model(x), x).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_backward_per_sample(model, squares, x.detach(), x))


def test_functional_call_with_other_tensors() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            others = {name: p * 2 for name, p in model.named_parameters()}
            squares(functional_call(model, others, (x,)), x).mean().backward()
            assert all(p.grad is not None for p in model.parameters())
            with pytest.raises(UnseenGradient):
                autograd_hacks.compute_grad1(model)
            model.zero_grad()
            squares(functional_call(model, dict(model.named_parameters()), (x,)), x).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_backward_per_sample(model, squares, x, x))


def test_attention_keeps_to_the_way_with_gradients() -> None:
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(3, 5, 4)
    with autograd_hacks.add_hooks(layer, param_grad=False):
        for _ in range(3):
            assert layer(x, x, x)[0].grad_fn is not None
            assert torch.backends.mha.get_fastpath_enabled()


def test_autocast_and_micro_batches() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(2):
            with autograd_hacks.accumulate(model):
                for part in (x[:2], x[2:]):
                    with torch.autocast("cpu", torch.bfloat16):
                        out = model(part)
                    squares(out.float(), part).mean().backward()
        autograd_hacks.compute_grad1(model, set_grad=True)
        assert all(p.grad1.shape[0] == 6 and p.grad1.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        for p in model.parameters():
            assert_close(p.grad, p.grad1.mean(0))


def test_hooks_added_again_take_the_other_contract() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    autograd_hacks.add_hooks(model)
    for param_grad in (False, True, False):
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        for _ in range(2):
            model.zero_grad()
            squares(model(x), x).mean().backward()
            assert all((p.grad is not None) == param_grad for p in model.parameters())


def test_a_scaler_and_an_optimizer() -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    with autograd_hacks.add_hooks(model, param_grad=False):
        for net in (model, plain):
            optimizer = torch.optim.SGD(net.parameters(), 0.5)
            for _ in range(5):
                optimizer.zero_grad()
                (F.cross_entropy(net(x), y) * 16).backward()
                if net is model:
                    autograd_hacks.clip_grad1_norm_(net, 16e9)
                for p in net.parameters():
                    p.grad /= 16
                optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert_close(p, q)


def test_wrappers_over_processes_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inside, x = nn.Linear(4, 2), torch.randn(3, 4)
        wrapped = DistributedDataParallel(inside)
        with pytest.raises(ParamGradSkipped, match="DistributedDataParallel"):
            autograd_hacks.add_hooks(wrapped, param_grad=False)
        autograd_hacks.add_hooks(inside, param_grad=False)
        squares(inside(x), x).sum().backward()
        with pytest.raises(ParamGradSkipped, match="DistributedDataParallel"):
            wrapped(x)
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(ParamGradSkipped, match="FSDP"):
            autograd_hacks.add_hooks(sharded, param_grad=False)
    finally:
        dist.destroy_process_group()


def test_a_penalty_on_input_gradients_is_noticed_in_every_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(3, 4, requires_grad=True)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for step in range(4):
            if step % 2:
                with pytest.raises(HigherOrderError):
                    torch.autograd.grad(squares(model(x), x).sum(), x, create_graph=True)
            else:
                squares(model(x), x).mean().backward()
                autograd_hacks.compute_grad1(model)


def test_functional_call_with_leaves_fills_theirs() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x), x).mean().backward()
            others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            squares(functional_call(model, others, (x,)), x).mean().backward()
            assert all(p.grad is not None for p in others.values())
            own = torch.autograd.grad(squares(functional_call(model, others, (x,)), x).mean(), list(others.values()))
            assert all(torch.equal(p.grad, g) for p, g in zip(others.values(), own))


def test_hooks_of_the_users_on_parameters_see_gradients() -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4), list[Tensor]()
    model[0].weight.register_hook(seen.append)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x), x).mean().backward()
            autograd_hacks.compute_grad1(model)
            assert_close(model[0].weight.grad1.mean(0), seen[-1] if seen[-1].shape == (5, 4) else seen[-2])
            assert model[0].weight.grad is None
    assert len(seen) == 6


def test_a_context_gives_the_contract_back() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    autograd_hacks.add_hooks(model)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(2):
            squares(model(x), x).mean().backward()
    assert model[0].weight.grad is None
    squares(model(x), x).mean().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("other_hooked", [False, True])
def test_a_layer_that_another_model_trains_keeps_its_gradient(other_hooked: bool) -> None:
    shared = nn.Linear(3, 3)
    skipped, other = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(shared, nn.Linear(3, 2))
    autograd_hacks.add_hooks(skipped, param_grad=False)
    if other_hooked:
        autograd_hacks.add_hooks(other)
    x = torch.randn(4, 3)
    for _ in range(2):
        other(x).sum().backward()
        assert shared.weight.grad is not None
        shared.weight.grad = None
        skipped[0](x).sum().backward()
        assert shared.weight.grad is not None
        shared.weight.grad = None
        skipped(x).sum().backward()
        assert shared.weight.grad is None
        autograd_hacks.compute_grad1(skipped, "sum")


def test_checkpoints_whose_backward_comes_after_another() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    autograd_hacks.add_hooks(model, param_grad=False)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for _ in range(3):
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
        model(y).square().sum().backward()
        loss.backward()
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            (expected,) = torch.autograd.grad(model(x[:1]).square().sum(), model[0].weight)
        assert_close(model[0].weight.grad1[0], expected)
