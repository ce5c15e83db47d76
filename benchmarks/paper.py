"""What per-sample gradients of large language models cost, counted and not run: the table of docs/distributed.rst.

    python benchmarks/paper.py          writes docs/benchmark/paper.csv

The models run with hooks on the meta device, which has shapes and no numbers.  Bytes are those that the record holds; FLOPs
are what the forms' own cost functions (autograd_hacks/forms/cost.py) count, two for a multiplication.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.uses import LayerCall
from autograd_hacks.forms import Outer
from autograd_hacks.forms.cost import by_products, by_writing, memory_of_products, products
from autograd_hacks.forms.positions import multiplications

TABLE = Path(__file__).parents[1] / "docs" / "benchmark" / "paper.csv"
LENGTHS = {"2k": 2048, "8k": 8192}
RANK, DIM, SAMPLES = 16, 8192, 512
"""LoRA's; coordinates of a projection; samples of a gram matrix."""

PROCESSES, MEMORY = 64, 80 * 2**30
"""That share the parameters; and the bytes that each has."""


@dataclass(frozen=True)
class Size:
    """Of a language model like Llama."""

    blocks: int
    width: int
    hidden: int
    keys: int  # how wide keys are, and values
    words: int


SIZES = {"7 B": Size(32, 4096, 11008, 4096, 32000), "100 B": Size(80, 10240, 28672, 1280, 128256)}


class Lora(nn.Module):
    """A frozen linear layer, and a product of two narrow ones that trains."""

    def __init__(self, fan_in: int, fan_out: int, rank: int = RANK) -> None:
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(fan_in, rank, bias=False), nn.Linear(rank, fan_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class Block(nn.Module):
    """A transformer's.  Products stand for attention itself, which has no parameters."""

    def __init__(self, size: Size, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        width, hidden = size.width, size.hidden
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = linear(width, width), linear(width, size.keys), linear(width, size.keys)
        self.out, self.gate, self.up, self.down = (
            linear(width, width), linear(width, hidden), linear(width, hidden), linear(hidden, width),
        )  # fmt: skip
        self.times = width // size.keys

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mixed = self.query(h) * self.key(h).repeat(1, 1, self.times) + self.value(h).repeat(1, 1, self.times)
        x = x + self.out(mixed)
        h = self.second(x)
        found: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return found


def language_model(size: Size, lora: bool) -> nn.Sequential:
    """With LoRA the narrow layers alone train."""

    def linear(fan_in: int, fan_out: int) -> nn.Module:
        return Lora(fan_in, fan_out) if lora else nn.Linear(fan_in, fan_out, bias=False)

    blocks = [Block(size, linear) for _ in range(size.blocks)]
    ends = (nn.Embedding(size.words, size.width), nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False))
    model = nn.Sequential(ends[0], *blocks, *ends[1:])
    for module in (*ends, *(norm for block in blocks for norm in (block.first, block.second))) if lora else ():
        module.requires_grad_(False)
    return model


@dataclass
class Cost:
    """Of one sample, in FLOPs, and in bytes where that is said."""

    parameters: int = 0  # numbers
    trained: int = 0  # numbers
    step: float = 0  # the matrix products of a plain step
    sums: float = 0  # of these, of the weights' gradients; and a weighted sum, and rows written out
    held_bytes: int = 0  # in the record, until it is read
    factor_bytes: int = 0  # of these, the inputs and gradients of linear layers
    narrow_bytes: int = 0  # in the record of one call, the largest
    products: float = 0  # norms by products between positions
    smaller: float = 0  # norms by these or by rows, whatever are fewer, layer by layer
    chosen: float = 0  # norms as the forms choose, which count what is moved, too
    products_bytes: int = 0  # of products between positions, in single precision
    largest: int = 0  # the largest parameter's numbers
    projected: float = 0  # to DIM coordinates
    signs: int = 0  # that are drawn for that
    factors: int = 0  # numbers that a process sends for the sample's inner products with other processes' rows


def cost_of(model: nn.Module, words: Tensor) -> Cost:
    """Runs a step of the model, with hooks, on one sample.  words: 1 T"""
    parameters = dict(model.named_parameters())
    found = Cost(sum(p.numel() for p in parameters.values()))
    found.trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
    found.largest = max(p.numel() for p in parameters.values() if p.requires_grad)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        found.step += (6 if layer.weight.requires_grad else 4) * words.numel() * layer.weight.numel()
    with autograd_hacks.add_hooks(model, probe=False):
        model(words).square().sum().backward()  # gradients that are no expanded number
        (recorded,) = recorder_of(model).record.segments[0].passes
        uses = recorded.received
        calls = [[*(x for x, _ in use.versions), *(g for g in grads.at if g is not None)] for use, grads in uses.items()]
        layers = [use.layer if isinstance(use, LayerCall) else None for use in uses]
        linear = [own for layer, own in zip(layers, calls) if isinstance(layer, nn.Linear)]
        found.held_bytes, found.factor_bytes = (_bytes(x for own in of for x in own) for of in (calls, linear))
        found.narrow_bytes = max(map(_bytes, calls))
        for form in autograd_hacks.per_sample_grads(model).values():
            for leaf in form.leaves() if form is not None else ():
                found.signs += DIM * (leaf.shape[0] + leaf.shape[1:].numel())
                if isinstance(leaf, Outer):
                    _add(found, leaf)
    return found


def _add(found: Cost, form: Outer) -> None:
    """Adds a layer's matrix products.  Rows of norms and tables take sums alone, of T · D numbers."""
    pairs, numbers = [form.pair], form.shape.numel()
    between, written = 2 * products(pairs), 2 * numbers * form.positions
    found.sums += written
    found.products += between
    found.smaller += min(between, written)
    found.chosen += between if by_products(pairs) <= by_writing(pairs) else written
    found.products_bytes = max(found.products_bytes, 4 * memory_of_products(pairs))
    by_factors = form.positions * multiplications(form.pair)
    found.projected += 2 * DIM * by_factors if by_factors < numbers else written + 2 * DIM * numbers
    found.factors += form.held_size()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of memory that several share, once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def of_size(size: Size, lora: bool, positions: int) -> Cost:
    """The cost of a model on a sample of so many positions, from that of one block and of two: the others are like them."""
    words = torch.zeros(1, positions, dtype=torch.long, device="meta")
    with torch.device("meta"):
        one, two = (vars(cost_of(language_model(replace(size, blocks=n), lora).bfloat16(), words)) for n in (1, 2))
    return Cost(**{name: value + (size.blocks - 1) * (two[name] - value) for name, value in one.items()})


Show = Callable[[Cost], str]


def share(part: Callable[[Cost], float]) -> Show:
    def show(cost: Cost) -> str:
        percent = 100 * part(cost) / cost.step
        return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.1g} %"

    return show


def size_in(unit: float, part: Callable[[Cost], float]) -> Show:
    return lambda cost: f"{value:,.0f}" if (value := part(cost) / unit) >= 9.5 else f"{value:.2g}"


def state(cost: Cost) -> float:
    """Bytes of weights, and of gradients and Adam's moments, all in single precision, that a process has of the model."""
    return (4 * cost.parameters + 12 * cost.trained) / PROCESSES


def second(cost: Cost) -> float:
    """The second backward pass of a clip in two."""
    return (cost.step - cost.sums) / 2 + cost.sums


GIB, GB = 2**30, 1e9
ROWS: dict[str, Show] = {
    "parameters, 10⁹": size_in(1e9, lambda c: c.parameters),
    "of them trained, 10⁹": size_in(1e9, lambda c: c.trained),
    "plain step: TFLOP": size_in(1e12, lambda c: c.step),
    "plain step: gathered and reduced, GB": size_in(GB, lambda c: 2 * 2 * c.parameters + 4 * c.trained),
    f"weights, gradients, Adam's moments, of {PROCESSES} processes each, GiB": size_in(GIB, state),
    "hooks: held until read, GiB": size_in(GIB, lambda c: c.held_bytes),
    "hooks: of that factors of linear layers, GiB": size_in(GIB, lambda c: c.factor_bytes),
    f"hooks: samples for which {MEMORY // GIB} GiB are enough": lambda c: str(int((MEMORY - state(c)) / c.held_bytes)),
    "hooks: held in ``streaming``, GiB": size_in(GIB, lambda c: c.narrow_bytes),
    "norms: by products": share(lambda c: c.products),
    "norms: by rows written out": share(lambda c: c.sums),
    "norms: the fewer, layer by layer": share(lambda c: c.smaller),
    "norms: as forms choose": share(lambda c: c.chosen),
    "norms: products between positions, GiB": size_in(GIB, lambda c: c.products_bytes),
    "clip, ``param_grad=False``": share(lambda c: c.smaller),
    "clip": share(lambda c: c.smaller + c.sums),
    "clip in two passes": share(lambda c: c.smaller + second(c)),
    "clip in two passes, with checkpoints": share(lambda c: c.smaller + second(c) + (c.step - c.sums) / 2),
    "clip in two passes: gathered once more, GB": size_in(GB, lambda c: 2 * c.parameters),
    "clip: largest sum, GiB": size_in(GIB, lambda c: 4 * c.largest),
    "``grad1``": share(lambda c: c.sums),
    "``grad1``: rows, GiB": size_in(GIB, lambda c: 4 * c.trained),
    "``dot``": share(lambda c: c.sums),
    "``dot``: direction gathered, GB": size_in(GB, lambda c: 4 * c.trained),
    f"``project`` to {DIM}": share(lambda c: c.projected),
    f"``project`` to {DIM}: signs drawn for a batch, 10⁹": size_in(1e9, lambda c: c.signs),
    f"``gram`` of {SAMPLES} samples: factors sent round, GB": size_in(GB, lambda c: 2 * SAMPLES * c.factors),
    f"``gram`` of {SAMPLES} samples: projected to {DIM}, GB": size_in(GB, lambda c: 4 * SAMPLES * DIM),
}
"""What a line shows of a model's cost."""


def table() -> str:
    """The table, as CSV: a line for each of `ROWS`, a column for each model, with LoRA and without, and length."""
    columns = {
        f"{name}, LoRA, {length}" if lora else f"{name}, {length}": of_size(size, lora, positions)
        for lora in (False, True)
        for name, size in SIZES.items()
        for length, positions in LENGTHS.items()
    }
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["For a sample, in a process", *columns])
    writer.writerows([what, *(show(cost) for cost in columns.values())] for what, show in ROWS.items())
    return lines.getvalue()


if __name__ == "__main__":
    TABLE.write_text(table())
