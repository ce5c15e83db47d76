"""Copies, parts and whole graphs of hooked models that torch compiles."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from compiled_nets import Graphs, Net, batch, check, ran, squares
from oracle import one_backward_per_sample

import autograd_hacks
from autograd_hacks.support.contexts import as_written

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, as it compiles


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    torch._dynamo.reset()


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


@pytest.mark.filterwarnings("ignore:.* is compiled, but compiled code has no hooks")
def test_contexts_that_overlap_leave_the_compiler_as_it_was() -> None:
    graphs = Graphs()
    compiled = torch.compile(torch.sin, backend=graphs)
    first, second = as_written(), as_written()
    for context in (first, second):
        context.__enter__()
    for context in (first, second):
        compiled(torch.ones(2))
        assert graphs.ran == 0
        context.__exit__(None, None, None)
    compiled(torch.ones(2))
    assert graphs.ran == 1
