"""LSTM with hand-written backpropagation through time: a faster version of `recurrent` for the usual LSTM.

The layer returned its state h at every step.  So the gates of all steps are computed at once from x and h.  Only the cell
state c and the gradients need loops over time, while `recurrent` runs every step again under autograd.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.formulas.call import Call


@torch.no_grad()
def lstm(layer: nn.LSTM, call: Call, x: Tensor, states: Sequence[tuple[Tensor, ...]]) -> dict[str, Form]:
    """x: T N I    states: h and c before the first step for each layer and direction, each N H.  Without projections."""
    out = call.outputs[0].transpose(0, 1) if layer.batch_first else call.outputs[0]
    directions, size = 2 if layer.bidirectional else 1, layer.hidden_size
    ways = [[_Direction(call, depth, side) for side in range(directions)] for depth in range(layer.num_layers)]
    inputs, masks, hidden = [x], list[Tensor | None](), list[Tensor]()
    with call.running_again(), torch.no_grad():
        for depth, sides in enumerate(ways[:-1]):
            starts = zip(*states[depth * directions : (depth + 1) * directions])
            before = [torch.stack(parts).to(x.dtype) for parts in starts]
            weights = [weight for direction in sides for weight in direction.weights()]
            found = torch.lstm(inputs[depth], before, weights, layer.bias, 1, 0.0, False, layer.bidirectional, False)
            hidden.append(found[0])
            mask = F.dropout(torch.ones_like(hidden[-1]), layer.dropout) if layer.dropout and call.training else None
            masks.append(mask)
            inputs.append(hidden[-1] if mask is None else hidden[-1] * mask)
    hidden.append(out.to(x.dtype))
    g, g_last, g_cell = (*call.grads, None, None)[:3]
    g = torch.zeros_like(hidden[-1]) if g is None else g.transpose(0, 1) if layer.batch_first else g
    forms: dict[str, Form] = {}
    for depth in reversed(range(layer.num_layers)):
        by_input = []
        for side, direction in enumerate(ways[depth]):
            place, part = depth * directions + side, slice(side * size, (side + 1) * size)
            ends = [None if end is None else end[place] for end in (g_last, g_cell)]
            by_gates, earlier = direction.back(inputs[depth], hidden[depth][..., part], g[..., part], states[place], *ends)
            left = by_gates.transpose(0, 1)
            forms["weight_ih" + direction.suffix] = Outer(left, direction.in_order(inputs[depth]).transpose(0, 1))
            forms["weight_hh" + direction.suffix] = Outer(left, earlier.transpose(0, 1))
            if layer.bias:
                forms |= {name + direction.suffix: Dense(left.sum(1)) for name in ("bias_ih", "bias_hh")}
            if depth:
                by_input.append(direction.in_order(by_gates @ call.read("weight_ih" + direction.suffix)))
        if depth:
            g, mask = torch.stack(by_input).sum(0), masks[depth - 1]
            g = g if mask is None else g * mask
    return forms


@dataclass
class _Direction:
    """One layer in one direction, forwards or backwards in time."""

    call: Call
    depth: int
    side: int

    @property
    def suffix(self) -> str:
        return f"_l{self.depth}" + "_reverse" * self.side

    def weights(self) -> list[Tensor]:
        """The weights of the input and of the state, and the biases, if there are any."""
        names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.call.layer.bias else ()))
        return [self.call.read(name + self.suffix) for name in names]

    def in_order(self, x: Tensor) -> Tensor:
        """x: T ..., forwards in time.  Returns it in this direction's order.  Also converts back."""
        return x.flip(0) if self.side else x

    def back(
        self, x: Tensor, h: Tensor, g: Tensor, state: tuple[Tensor, ...], g_last: Tensor | None, g_cell: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Backpropagation through time.

        x: T N I
        h, g: T N H, the states and the gradients at them
        g_last, g_cell: N H, the gradients at the last h and c
        Returns the gradients at the gates, T N 4H, and the states before each step, T N H, in this direction's order.
        """
        x, h, g = self.in_order(x), self.in_order(h), self.in_order(g)
        before = torch.cat([state[0][None].to(h.dtype), h[:-1]])
        weight_ih, weight_hh, *biases = self.weights()
        gates = F.linear(x, weight_ih, *biases[:1]) + F.linear(before, weight_hh, *biases[1:])
        take, keep, new, show = gates.unflatten(2, (4, -1)).unbind(2)
        take, keep, new, show = take.sigmoid(), keep.sigmoid(), new.tanh(), show.sigmoid()
        cells, added = [state[1].to(h.dtype)], take * new
        for t in range(len(x)):
            cells.append(torch.addcmul(added[t], keep[t], cells[t]))
        cell = torch.stack(cells)
        seen = cell[1:].tanh()
        self.call.check_same([h], [show * seen])
        # Derivatives of c by the first three gates, and of h by the last gate and by c.
        in_cell = torch.stack([added * (1 - take), cell[:-1] * keep * (1 - keep), take * (1 - new * new)], 2)
        in_state, through = seen * show * (1 - show), show * (1 - seen * seen)
        by_gates = g.new_empty(*g.shape[:2], 4, g.shape[2])
        by_state = g[-1] if g_last is None else g[-1] + g_last
        by_cell = torch.zeros_like(by_state) if g_cell is None else g_cell
        for t in reversed(range(len(x))):
            by_cell = torch.addcmul(by_cell, by_state, through[t])
            torch.mul(in_cell[t], by_cell[:, None], out=by_gates[t, :, :3])
            torch.mul(in_state[t], by_state, out=by_gates[t, :, 3])
            by_cell = by_cell * keep[t]
            if t:
                by_state = torch.addmm(g[t - 1], by_gates[t].flatten(1), weight_hh)
        return by_gates.flatten(2), before
