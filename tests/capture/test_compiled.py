"""What torch.compile makes of hooked models and of their parts: rows as ever, and compiled code wherever none are noted."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_same, one_backward_per_sample, squares
from rarely import crossed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import autograd_hacks

Run = Callable[[Tensor], Tensor]


class Graphs:
    """A compiler's backend that counts how often what it has compiled runs."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Net(nn.Module):
    """A table, two blocks and a head; the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.first = Block(nn.Linear(3, 4))
        self.second = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.table(tokens)))).mean(1)


def batch(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (n, 3)), torch.randn(n, 2).double()


def check(hooked: nn.Module, model: nn.Module, plain: nn.Module, run: Run, param_grad: bool) -> None:
    """A step's rows, read from what was hooked, and its ordinary gradients."""
    x, y = batch()
    rows = list(one_backward_per_sample(plain, squares, x, y).values())
    model.zero_grad()
    squares(run(x), y).mean().backward()
    autograd_hacks.compute_grad1(hooked, "mean", set_grad=not param_grad)
    assert_same(dict(enumerate(p.grad1 for p in model.parameters())), dict(enumerate(rows)))
    for p, own in zip(model.parameters(), rows):
        torch.testing.assert_close(p.grad, own.mean(0))


def ran(graphs: Graphs, run: Run) -> int:
    """How many graphs of compiled code a forward runs."""
    before = graphs.ran
    run(batch()[0])
    return graphs.ran - before


class Scaled(Net):
    """With a parameter that is read in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.scale * self.table(tokens)))).mean(1)


class Checkpointed(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.first, self.table(tokens), use_reentrant=False)
        return self.head(checkpoint(self.second, x, use_reentrant=False)).mean(1)


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):  # from 2.14 on, layers that are compiled one by one share one limit
        yield
    torch._dynamo.reset()


def outside(model: Net, backend: Graphs) -> nn.Module:
    return torch.compile(model, backend=backend)


def itself(model: Net, backend: Graphs) -> nn.Module:
    model.compile(backend=backend)
    return model


def function(model: Net, backend: Graphs) -> Run:
    return torch.compile(lambda x: model(x), backend=backend)


def block_itself(model: Net, backend: Graphs) -> nn.Module:
    model.first.compile(backend=backend)
    return model


def blocks_replaced(model: Net, backend: Graphs) -> nn.Module:
    model.first, model.second = (torch.compile(part, backend=backend) for part in (model.first, model.second))
    return model


def layers_themselves(model: Net, backend: Graphs) -> nn.Module:
    for layer in (model.table, model.first.inner, model.head):
        layer.compile(backend=backend)
    return model


def forward_of_block(model: Net, backend: Graphs) -> nn.Module:
    model.first.forward = torch.compile(model.first.forward, backend=backend)
    return model


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, as it compiles

WAYS: list[Callable[[Any, Graphs], Run]] = [
    outside,
    itself,
    function,
    block_itself,
    blocks_replaced,
    layers_themselves,
    forward_of_block,
]


@crossed(way=WAYS, hooks_first=[False, True], probe=[True, False], param_grad=[True, False])
def test_rows_of_a_compiled_model(
    way: Callable[[Net, Graphs], Run], hooks_first: bool, probe: bool, param_grad: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    if hooks_first:
        autograd_hacks.add_hooks(model, probe=probe, param_grad=param_grad)
        run = way(model, graphs)
        hooked: nn.Module = model
    else:
        run = way(model, graphs)
        hooked = run if isinstance(run, nn.Module) else model
        autograd_hacks.add_hooks(hooked, probe=probe, param_grad=param_grad)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            check(hooked, model, plain, run, param_grad)
    assert [str(w.message) for w in said if "is compiled" in str(w.message)] == [str(w.message) for w in said]
    assert len(said) == 1
    assert graphs.ran == 0
    with torch.no_grad():
        assert ran(graphs, run)
    with autograd_hacks.pause_hooks():
        assert ran(graphs, run)
    check(hooked, model, plain, run, param_grad)
    autograd_hacks.remove_hooks(hooked)
    assert ran(graphs, run)
    assert not any("compile" in vars(part) for part in model.modules())
    captured = capfd.readouterr()
    assert not captured.out + captured.err


@pytest.mark.filterwarnings("ignore:.* is compiled, but compiled code has no hooks")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's own, of a checkpoint in evaluation
@crossed(kind=[Scaled, Checkpointed], way=[outside, itself, block_itself, blocks_replaced], param_grad=[True, False])
def test_parameters_past_layers_and_checkpoints(
    kind: type[Net], way: Callable[[Net, Graphs], nn.Module], param_grad: bool
) -> None:
    model, graphs = kind().double(), Graphs()
    plain = copy.deepcopy(model)
    run = way(model, graphs)
    autograd_hacks.add_hooks(run, param_grad=param_grad)
    for _ in range(3):
        check(run, model, plain, run, param_grad)
    with torch.no_grad():
        assert ran(graphs, run)
    check(run, model, plain, run, param_grad)


@pytest.mark.filterwarnings("ignore:.* is compiled, but compiled code has no hooks")
def test_a_layer_that_torch_compile_has_returned() -> None:
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    model.head, model.table = (torch.compile(layer, backend=graphs) for layer in (model.head, model.table))
    with autograd_hacks.add_hooks(model):
        check(model, model, plain, model, True)
        autograd_hacks.verify(model, args=(batch()[0],))
        assert "head._orig_mod.weight" in str(autograd_hacks.describe(model))


# Copies, parts and whole graphs of hooked models that torch compiles


@pytest.mark.filterwarnings("ignore:.* is compiled, but compiled code has no hooks")
def test_hooks_on_the_model_and_on_what_was_compiled() -> None:
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=graphs)
    autograd_hacks.add_hooks(model)
    autograd_hacks.add_hooks(compiled)
    for _ in range(2):
        check(model, model, plain, compiled, True)
        check(compiled, model, plain, compiled, True)
        check(model, model, plain, model, True)
    autograd_hacks.remove_hooks(model)
    check(compiled, model, plain, compiled, True)
    autograd_hacks.remove_hooks(compiled)
    assert ran(graphs, compiled) == 1
    assert model._compiled_call_impl is None


@pytest.mark.filterwarnings("ignore:.* is compiled, but compiled code has no hooks")
@pytest.mark.parametrize("order", [0, 1])
def test_a_compiled_part_with_hooks_of_its_own(order: int) -> None:
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    model.second.compile(backend=graphs)
    inside = model.second._compiled_call_impl
    both = [model, model.second]
    for hooked in both[:: 1 - 2 * order]:
        autograd_hacks.add_hooks(hooked, probe=False)
    x, y = batch()
    rows = one_backward_per_sample(plain, squares, x, y)
    squares(model(x), y).mean().backward()
    for hooked in both:
        grads = autograd_hacks.per_sample_grads(hooked)
        for name, own in grads.items():
            torch.testing.assert_close(own.dense(), rows[name if hooked is model else f"second.{name}"])
    for hooked in both:
        autograd_hacks.remove_hooks(hooked)
    assert model.second._compiled_call_impl is inside
    assert not any("compile" in vars(part) for part in model.modules())


def test_copies_of_a_compiled_model_have_no_hooks() -> None:
    model = Net().double()
    autograd_hacks.add_hooks(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        graphs = Graphs()
        twin.compile(backend=graphs)
        assert twin._compiled_call_impl is not None
        squares(twin(batch()[0]), batch()[1]).sum().backward()
        assert graphs.ran
        assert model._compiled_call_impl.compiled is None
        assert all(p.grad is None for p in model.parameters())


def test_compiling_as_one_graph() -> None:
    """An error that names what to do where no part may run as it is written; hooks around what was compiled are right."""
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with autograd_hacks.add_hooks(compiled), pytest.warns(UserWarning, match="Net is compiled"):
        check(compiled, model, plain, compiled, True)
    assert ran(graphs, compiled) == 1
    autograd_hacks.add_hooks(model)
    with pytest.raises(Exception, match=r"add_hooks\(compiled\)"):
        compiled(batch()[0])
    with torch.no_grad():
        assert ran(graphs, compiled) == 1


@pytest.mark.filterwarnings("ignore:.* is compiled, but compiled code has no hooks")
def test_compiled_functions_of_tensors_alone_stay_compiled() -> None:
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    model.second[2].forward = torch.nn.functional.gelu
    gelu = torch.compile(torch.nn.functional.gelu, backend=graphs)
    model.second.register_forward_pre_hook(lambda layer, args: (gelu(args[0]),))
    plain.second.register_forward_pre_hook(lambda layer, args: (torch.nn.functional.gelu(args[0]),))
    autograd_hacks.add_hooks(model)
    check(model, model, plain, model, True)
    assert graphs.ran == 1


def test_a_compiled_loss_outside_of_the_model() -> None:
    """From its second size on, torch compiles a backward that may write into what the forward has saved."""
    model, compiled = nn.Linear(3, 2).double(), torch.compile(squares, backend="aot_eager")
    autograd_hacks.add_hooks(model)
    for size in (5, 4, 5):
        x, y = torch.randn(size, 3).double(), torch.randn(size, 2).double()
        autograd_hacks.backward(compiled(model(x), y))
        found = dict(autograd_hacks.per_sample_grads(model).dense())
        model.zero_grad()
        assert_same(found, one_backward_per_sample(copy.deepcopy(model), squares, x, y))
