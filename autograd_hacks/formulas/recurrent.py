"""RNN, LSTM, GRU and their cells.  Every time step is computed again as linear maps, with one backward pass through all.

In a step one map takes the input to i and one takes the state to h; the gates are functions of i and h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.formulas.call import Call, needs_batch
from autograd_hacks.formulas.lstm import lstm

State = tuple[Tensor, ...]
"""h, or h and c, each N H"""


def count_sequences(layer: nn.RNNBase, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    x = args[0] if args else kwargs["input"]
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0]) if len(x.batch_sizes) else 0
    assert isinstance(x, Tensor)  # torch has refused all else
    return x.shape[0 if layer.batch_first or x.ndim < 3 else 1]


def recurrent(layer: nn.RNNBase, call: Call) -> Mapping[str, Form]:
    """x: T N I, or N T I with batch_first, or packed    states: layers·directions N H.

    Every layer, direction and time step is computed again by linear maps.  A weight's gradient sums over its map's uses."""
    x, packing = call.argument(0, "input"), None
    if isinstance(x, PackedSequence):
        packing = _Packing(x)
        x = packing.pad(x.data)
    else:
        needs_batch(x, at_least=3, layout="(N, T, I) for batch_first, else (T, N, I)")
        x = x.transpose(0, 1) if layer.batch_first else x
    states = _states(layer, call.argument(1, "hx"), x)
    if isinstance(layer, nn.LSTM) and not (packing or layer.proj_size) and not x.is_meta:
        return lstm(layer, call, x, states)
    maps, last, directions = _Maps(call), list[State](), 2 if layer.bidirectional else 1
    with call.running_again():
        for depth in range(layer.num_layers):
            sides = []
            for direction in range(directions):
                suffix = f"_l{depth}" + "_reverse" * direction
                out, state = _run(layer, maps, suffix, x, states[depth * directions + direction], packing, direction == 1)
                sides.append(out)
                last.append(state)
            x = torch.cat(sides, 2)
            if layer.dropout and call.training and depth < layer.num_layers - 1:
                # Packed, as in the forward pass, so that the random numbers fall on the same entries.
                x = packing.pad(F.dropout(packing.pack(x), layer.dropout)) if packing else F.dropout(x, layer.dropout)
        out = packing.pack(x) if packing else x.transpose(0, 1) if layer.batch_first else x
        return maps.forms([out, *[torch.stack(parts) for parts in zip(*last)]])


def cell(layer: nn.RNNCellBase, call: Call) -> Mapping[str, Form]:
    """x: N I    states: N H.  The step is computed again as linear maps."""
    x, state = call.argument(0, "input"), call.argument(1, "hx")
    needs_batch(x, at_least=2, layout="(N, input_size)")
    parts = state if isinstance(state, tuple) else () if state is None else (state,)
    states = tuple(parts) or (x.new_zeros(len(x), layer.hidden_size),) * (2 if isinstance(layer, nn.LSTMCell) else 1)
    maps = _Maps(call)
    with call.running_again():
        return maps.forms(_step(layer, maps(x, "ih"), maps(states[0], "hh"), states))


def _run(
    layer: nn.RNNBase, maps: _Maps, suffix: str, x: Tensor, state: State, packing: _Packing | None, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction.  x: T N I.  Returns the outputs, T N H, and the last state."""
    by_input = maps(x, "ih" + suffix)
    outputs = [state[0]] * len(x)
    for t in reversed(range(len(x))) if backwards else range(len(x)):
        after = _step(layer, by_input[t], maps(state[0], "hh" + suffix), state)
        if layer.proj_size:
            after = (maps(after[0], "hr" + suffix), *after[1:])
        if packing:  # a sequence that has ended, or not yet begun, keeps its state
            after = tuple(torch.where(packing.running[t], new, old) for new, old in zip(after, state))
        state = after
        outputs[t] = state[0]
    return torch.stack(outputs), state


def _step(layer: nn.RNNBase | nn.RNNCellBase, i: Tensor, h: Tensor, state: State) -> State:
    """The state after a step.  i, h: N gates·H, the outputs of the input's map and of the state's map"""
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        take, keep, new, show = (i + h).chunk(4, 1)
        c = keep.sigmoid() * state[1] + take.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c
    if isinstance(layer, nn.GRU | nn.GRUCell):
        (i_reset, i_update, i_new), (h_reset, h_update, h_new) = i.chunk(3, 1), h.chunk(3, 1)
        update, new = (i_update + h_update).sigmoid(), (i_new + (i_reset + h_reset).sigmoid() * h_new).tanh()
        return (new + update * (state[0] - new),)
    return ((i + h).tanh() if layer.nonlinearity == "tanh" else (i + h).relu(),)


def _states(layer: nn.RNNBase, given: State | Tensor | None, x: Tensor) -> list[State]:
    """The state before the first step, for each layer and direction."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if given is not None:
        return list(zip(*given)) if isinstance(given, tuple) else [(h,) for h in given]
    h, c = (x.new_zeros(x.shape[1], size) for size in (layer.proj_size or layer.hidden_size, layer.hidden_size))
    return [(h, c) if isinstance(layer, nn.LSTM) else (h,)] * count


class _Maps:
    """A layer's linear maps, which remember their inputs and outputs.

    A weight's factors are the map's inputs and the gradients at its outputs."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.uses: dict[str, list[tuple[Tensor, Tensor]]] = {}  # (x, y) by the map's name

    def __call__(self, x: Tensor, name: str) -> Tensor:
        """x Wᵀ + b with the named weight of the layer, and its bias if there is one.  x: N I, or T N I"""
        has_bias = f"bias_{name}" in self.call.state
        y = F.linear(x, self.call.read(f"weight_{name}"), self.call.read(f"bias_{name}") if has_bias else None)
        if not y.requires_grad:  # if nothing that it was computed from requires gradients
            y.requires_grad_()
        self.uses.setdefault(name, []).append((x.detach(), y))
        return y

    def forms(self, outputs: Sequence[Tensor]) -> dict[str, Form]:
        """{name: form} for the parameters of all maps, by one backward pass from the layer's outputs."""
        self.call.check_same(self.call.outputs, outputs)
        roots, given = zip(*((out, g) for out, g in zip(outputs, self.call.grads) if g is not None))
        ys = [y for uses in self.uses.values() for _, y in uses]
        grads = iter(torch.autograd.grad(roots, ys, given, allow_unused=True, materialize_grads=True))
        forms: dict[str, Form] = {}
        for name, uses in self.uses.items():
            left = torch.cat([_samples_first(next(grads)) for _ in uses], 1)
            forms[f"weight_{name}"] = Outer(left, torch.cat([_samples_first(x) for x, _ in uses], 1))
            forms[f"bias_{name}"] = Dense(left.sum(1))  # the layer may not have it
        return forms


def _samples_first(x: Tensor) -> Tensor:
    """x: N F, or T N F.  Returns N T F."""
    return x[:, None] if x.ndim == 2 else x.transpose(0, 1)


class _Packing:
    """Where each row of packed data goes in a padded batch, whose samples are in the user's order."""

    def __init__(self, packed: PackedSequence) -> None:
        self.packed = packed
        self.running = self.pad(torch.ones_like(packed.data[:, :1], dtype=torch.bool))  # T N 1: whether it has a step t

    def pad(self, data: Tensor) -> Tensor:
        """rows ... -> T N ..., with zeros after each sequence's end"""
        return pad_packed_sequence(self.packed._replace(data=data))[0]

    def pack(self, padded: Tensor) -> Tensor:
        """T N ... -> rows ..., the longest first in each step"""
        order, is_row = self.packed.sorted_indices, self.running[..., 0]
        return padded[is_row] if order is None else padded[:, order][is_row[:, order]]
