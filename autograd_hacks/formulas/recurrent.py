"""RNN, LSTM, GRU and their cells: backpropagation through time, by one law.

A step computes gates by two linear maps, of the input and of the state; entry j of the new state depends on entry j of each
gate and of the old state alone.  The layer returned its state h after every step, so the gates of all steps are computed
again at once, and their derivatives too.  Only the cell state c and the gradients at states need loops over time.
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

State = tuple[Tensor, ...]
"""h, or h and c, each N H"""


def count_sequences(layer: nn.RNNBase, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    x = args[0] if args else kwargs["input"]
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0]) if len(x.batch_sizes) else 0
    assert isinstance(x, Tensor)  # torch has refused all else
    return x.shape[0 if layer.batch_first or x.ndim < 3 else 1]


@torch.no_grad()
def recurrent(layer: nn.RNNBase, call: Call) -> Mapping[str, Form]:
    """x: T N I, or N T I with batch_first, or packed    states: layers·directions N H."""
    x: Tensor | PackedSequence = call.argument(0, "input")
    packed = x if isinstance(x, PackedSequence) else None
    if not isinstance(x, PackedSequence):
        needs_batch(x, at_least=3, layout="(N, T, I) for batch_first, else (T, N, I)")

    def by_time(y: Tensor) -> Tensor:
        return _padded(packed, y) if packed is not None or not layer.batch_first else y.transpose(0, 1)

    data = x.data if packed is not None else by_time(x.data)
    running = None if packed is None else _padded(packed, torch.ones_like(data[:, :1], dtype=torch.bool))
    states = _states(layer, call.argument(1, "hx"), data, count_sequences(layer, call.args, call.kwargs))
    inputs, hidden, masks = _layers(layer, call, data, packed, states)
    hidden.append(by_time(call.outputs[0]).to(data.dtype))
    g, *last = call.grads
    g = torch.zeros_like(hidden[-1]) if g is None else by_time(g)
    forms: dict[str, Form] = {}
    directions = 2 if layer.bidirectional else 1
    for depth in reversed(range(layer.num_layers)):
        by_input = []
        for side, parts in enumerate(zip(hidden[depth].chunk(directions, 2), g.chunk(directions, 2))):
            place, suffix = depth * directions + side, f"_l{depth}" + "_reverse" * side
            ends = [None if end is None else end[place] for end in last]
            turned = [y.flip(0) if side else y for y in (inputs[depth], *parts, *([] if running is None else [running]))]
            found, by_gates = _through_time(layer, call, suffix, states[place], ends, turned)
            forms |= found
            if depth:
                by_input.append((by_gates.flip(0) if side else by_gates) @ call.read("weight_ih" + suffix))
        if depth:
            g, mask = torch.stack(by_input).sum(0), masks[depth - 1]
            g = g if mask is None else g * mask
    return forms


@torch.no_grad()
def cell(layer: nn.RNNCellBase, call: Call) -> Mapping[str, Form]:
    """x: N I    states: N H."""
    x, state = call.argument(0, "input"), call.argument(1, "hx")
    needs_batch(x, at_least=2, layout="(N, input_size)")
    parts = state if isinstance(state, tuple) else () if state is None else (state,)
    states = tuple(parts) or (x.new_zeros(len(x), layer.hidden_size),) * (2 if isinstance(layer, nn.LSTMCell) else 1)
    h = call.outputs[0].to(x.dtype)
    forms, _ = _through_time(layer, call, "", states, call.grads, [x[None], h[None], torch.zeros_like(h)[None]])
    return forms


def _padded(packed: PackedSequence | None, data: Tensor) -> Tensor:
    """rows ... -> T N ..., in the user's order, with zeros after each sequence's end; ``data`` if nothing is packed"""
    padded = data if packed is None else pad_packed_sequence(PackedSequence(data, packed.batch_sizes))[0]
    # Torch would copy the order to the host.
    return padded if packed is None or packed.unsorted_indices is None else padded[:, packed.unsorted_indices]


def _layers(
    layer: nn.RNNBase, call: Call, data: Tensor, packed: PackedSequence | None, states: Sequence[State]
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """The layers' inputs, T N ·; the outputs of all but the last, computed again; and dropout's masks on these."""
    inputs, hidden, masks = [_padded(packed, data)], list[Tensor](), list[Tensor | None]()
    directions = len(states) // layer.num_layers
    sizes, order = (None, None) if packed is None else (packed.batch_sizes, packed.sorted_indices)
    run = getattr(torch, layer.mode.lower())
    with call.running_again(), torch.no_grad():
        for depth in range(layer.num_layers - 1):
            names = [n for n in layer._flat_weights_names if n.removesuffix("_reverse").endswith(f"_l{depth}")]
            start = [torch.stack(parts) for parts in zip(*states[depth * directions : (depth + 1) * directions])]
            start = start if order is None else [part[:, order] for part in start]
            given = data, *(() if sizes is None else (sizes,)), start if len(start) > 1 else start[0]
            settings = layer.bias, 1, 0.0, False, directions == 2, *([False] if sizes is None else [])
            data = run(*given, [call.read(n) for n in names], *settings)[0]
            hidden.append(_padded(packed, data))
            # Packed, as in the forward pass, so that the random numbers fall on the same entries.
            mask = F.dropout(torch.ones_like(data), layer.dropout) if layer.dropout and call.training else None
            masks.append(mask if mask is None else _padded(packed, mask))
            data = data if mask is None else data * mask
            inputs.append(_padded(packed, data))
    return inputs, hidden, masks


def _states(layer: nn.RNNBase, given: State | Tensor | None, x: Tensor, samples: int) -> list[State]:
    """The state before the first step, for each layer and direction."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    if given is not None:
        return list(zip(*(s.to(x.dtype) for s in (given if isinstance(given, tuple) else (given,)))))
    h, c = (x.new_zeros(samples, size) for size in (layer.proj_size or layer.hidden_size, layer.hidden_size))
    return [(h, c) if isinstance(layer, nn.LSTM) else (h,)] * count


def _after(layer: nn.RNNBase | nn.RNNCellBase, gates: Sequence[Tensor], state: Sequence[Tensor]) -> State:
    """The state after a step.

    gates: (..., gates·H), the sum of both maps' outputs, or for GRU both    state: c before the step, or for GRU h
    """
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        take, keep, new, show = gates[0].chunk(4, -1)
        c = keep.sigmoid() * state[0] + take.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c
    if isinstance(layer, nn.GRU | nn.GRUCell):
        (i_reset, i_update, i_new), (h_reset, h_update, h_new) = (own.chunk(3, -1) for own in gates)
        update, new = (i_update + h_update).sigmoid(), (i_new + (i_reset + h_reset).sigmoid() * h_new).tanh()
        return (new + update * (state[0] - new),)
    return (gates[0].tanh() if layer.nonlinearity == "tanh" else gates[0].relu(),)


def _cells(gates: Tensor, start: Tensor, running: Tensor | None) -> Tensor:
    """c before each step."""
    take, keep, new, _ = gates.chunk(4, -1)
    added, kept, cells = take.sigmoid() * new.tanh(), keep.sigmoid(), [start]
    if running is not None:
        added, kept = added.where(running, 0), kept.where(running, 1)
    for t in range(len(gates) - 1):
        cells.append(torch.addcmul(added[t], kept[t], cells[t]))
    return torch.stack(cells)


def _slopes(
    layer: nn.RNNBase | nn.RNNCellBase, gates: Sequence[Tensor], state: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The state after each step, and for each of its parts the derivatives by all gates and by ``state``: T N K H."""
    with torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in (*gates, *state)]
        after = _after(layer, leaves[: len(gates)], leaves[len(gates) :])
        slopes = [torch.autograd.grad(y.sum(), leaves, retain_graph=True) for y in after]
    size = after[0].shape[2]
    return [y.detach() for y in after], [torch.cat([y.unflatten(2, (-1, size)) for y in own], 2) for own in slopes]


def _through_time(
    layer: nn.RNNBase | nn.RNNCellBase,
    call: Call,
    suffix: str,
    start: State,
    last: Sequence[Tensor | None],
    seen: Sequence[Tensor],
) -> tuple[dict[str, Form], Tensor]:
    """One layer in one direction: the forms of its parameters, and the gradients at the input's map, T N gates·H.

    start: the state before the first step    last: gradients at the state after the last one
    seen: T N ·, in this direction's order: the input, h after each step, and its gradient; and for packed sequences whether
    one has a step t, T N 1: one that has ended, or not yet begun, keeps its state
    """
    (x, h, g), running = seen[:3], seen[3] if len(seen) > 3 else None
    start, is_gru = tuple(s.to(h.dtype) for s in start), isinstance(layer, nn.GRU | nn.GRUCell)
    names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if layer.bias else ()))
    weight_ih, weight_hh, *biases = (call.read(name + suffix) for name in names)
    projection = call.read("weight_hr" + suffix) if getattr(layer, "proj_size", 0) else None
    before = torch.cat([start[0][None], h[:-1]])
    if running is not None:
        before[1:] = before[1:].where(running[:-1], start[0])
    maps = [F.linear(x, weight_ih, *biases[:1]), F.linear(before, weight_hh, *biases[1:])]
    gates = maps if is_gru else [maps[0] + maps[1]]
    cells = [_cells(gates[0], c, running) for c in start[1:]]
    after, sides = _slopes(layer, gates, [before] if is_gru else cells)  # others have h in their gates
    full = after[0]
    shown = full if projection is None else full @ projection.mT
    call.check_same([h], [shown if running is None else shown.where(running, 0)])
    if running is not None:
        sides = [own.where(running[..., None], 0) for own in sides]
    count = maps[0].shape[2] // full.shape[2]  # of gates
    by_leaf, by_shown = torch.empty_like(sides[0]), torch.zeros_like(h)
    by = [torch.zeros_like(s) if end is None else end for s, end in zip(start, (*last, None, None))]
    for t in reversed(range(len(x))):
        by_shown[t] = by[0] = by[0] + g[t]
        at_full, *at_cells = by if projection is None else (by[0] @ projection, *by[1:])
        own = torch.mul(sides[0][t], at_full[:, None], out=by_leaf[t])
        for side, y in zip(sides[1:], at_cells):
            own.addcmul_(side[t], y[:, None])
        of_map, states = own[:, (len(gates) - 1) * count :][:, :count].flatten(1), own[:, len(gates) * count :].unbind(1)
        now = [torch.addmm(states[0], of_map, weight_hh)] if is_gru else [of_map @ weight_hh, *states]
        by = now if running is None else [new.where(running[t], old) for new, old in zip(now, by)]
    by_gates, by_map = (by_leaf[:, :, k * count : (k + 1) * count].flatten(2) for k in (0, len(gates) - 1))
    found = {"ih": (by_gates, x), "hh": (by_map, before)}
    if projection is not None:
        found["hr"] = by_shown if running is None else by_shown.where(running, 0), full
    forms: dict[str, Form] = {}
    for name, (left, right) in found.items():
        forms[f"weight_{name}{suffix}"] = Outer(left.transpose(0, 1), right.transpose(0, 1))
        forms[f"bias_{name}{suffix}"] = Dense(left.sum(0))  # the layer may not have it
    return forms, by_gates
