"""What is freed, and when: records, activations, models, and nothing that piles up."""

import gc
import weakref

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import alive, assert_right, batch, mlp
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.capture.calls import Layer, LayerCall
from autograd_hacks.reading.reader import Read


def test_what_was_read_is_freed_when_the_next_forward_begins(model: nn.Module) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    loss.backward()
    del loss
    (record,) = (hook.recorder.record for hook in model._forward_pre_hooks.values() if hasattr(hook, "recorder"))
    with torch.no_grad():
        model(x)
    model(x)  # not read yet
    autograd_hacks.compute_grad1(model)
    with torch.no_grad():
        model(x)
    autograd_hacks.compute_grad1(model)  # read, but no backward pass can come after a forward like that
    activation = weakref.ref(record.segments[0])
    output = model(x)
    assert activation() is None
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="was read already"):
        autograd_hacks.compute_grad1(model)
    squares(output, y).mean().backward()
    autograd_hacks.compute_grad1(model)


def test_what_was_read_is_kept_where_another_pass_may_add_to_it(model: nn.Module) -> None:
    x, y = batch()
    output = model(x)
    squares(output, y).mean().backward(retain_graph=True)
    autograd_hacks.compute_grad1(model)
    twice = [2 * p.grad1 for p in model.parameters()]
    model(x)
    squares(output, y).mean().backward()
    autograd_hacks.compute_grad1(model)
    assert_close([p.grad1 for p in model.parameters()], twice)


@crossed(read=["nothing", "grad1", "clip", "hess"], param_grad=[True, False])
def test_a_hooked_model_that_is_dropped_is_freed(read: str, param_grad: bool) -> None:
    """Also with a record that nobody has read, and without remove_hooks."""
    model = mlp()
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    for _ in range(2):
        output = model(batch()[0])
        if read == "hess":
            autograd_hacks.backprop_hess(output)
            autograd_hacks.compute_hess(model)
        else:
            output.sum().backward()
        if read == "grad1":
            autograd_hacks.compute_grad1(model)
        if read == "clip":
            autograd_hacks.clip_grad1_norm_(model, 1.0)
    gone = [weakref.ref(own) for own in (model, *model.parameters())]
    del model, output
    gc.collect()
    assert not any(own() is not None for own in gone)


def test_losses_that_are_kept_do_not_keep_the_inputs() -> None:
    model, kept, before = mlp(), [], alive(LayerCall)
    with autograd_hacks.add_hooks(model):
        for seed in range(4):
            x, y = batch(seed=seed)
            kept.append(squares(model(x), y).mean())
            kept[-1].backward()
            assert_right(model, x, y)
        assert alive(LayerCall) <= before + 2  # the last step's two layers


def test_hooks_that_come_and_go_keep_no_more_than_before() -> None:
    model, x = mlp(), torch.randn(5, 3).double()
    handle, found = autograd_hacks.add_hooks(model), []
    for n in range(12):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        handle.off()
        handle.on()
        if n in (6, 11):
            found.append((alive(Read), alive(Layer)))
    assert found[0] == found[1]
