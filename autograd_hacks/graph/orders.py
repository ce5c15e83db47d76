"""Orders that values say, and whether they are undone.

Where sorting puts an entry depends on all samples.  Experts sort their tokens, compute, and undo it: then nothing
depends on a place in that order.  It does where such a place is a number, or where sorted entries meet others that aren't.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autograd_hacks.graph.axes import axis
from autograd_hacks.graph.label import Shape
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.places import CARRIED, Places
from autograd_hacks.graph.tape_laws import RAGGED, TAKING, Step, Unshown, operation
from autograd_hacks.probe.tape import Tape, numbers_in

ORDERS = frozenset("sort _unique2 unique_dim unique_consecutive".split())  # noqa: SIM905 a list of words to be read
"""Operations that put entries in an order that values say."""
Call = tuple[Step, Sequence["int | None"], Sequence[int]]
"""An operation, and the numbers of its tensors and of its results."""


def is_undone(calls: Iterable[Call], owners: Mapping[int, int], returned: Iterable[int]) -> bool:
    """Whether nothing is seen to depend on places in the order that the first operation has made.

    owners: by number, that of the first tensor with the same memory    returned: what the forward returns"""
    (step, _, outs), *rest = calls
    order = Order(step, outs, owners)
    try:
        for call in rest:
            order.pass_(*call)
        order.check_uses()
    except Unshown:
        return False
    return not any(order.loose.get(n) or order.origins.get(n) for n in returned)


def finds_back(tape: Tape, step: Step, number: int) -> bool:
    """Whether places that sorting gave are sorted along the same axis.  number: that of what is sorted"""
    shape, d = step.ins[0] or (), step.given["dim"]
    for before in reversed(tape.entries):
        own, numbers = operation(before.func), [n for n, *_ in before.outputs]
        if number in numbers and own.name in CARRIED:
            number = next(numbers_in(before.args))
        elif number in numbers:
            dim = dict(zip(own.arguments, before.args), **dict(before.kwargs or ())).get("dim", -1)
            is_same = before.outputs[0][1] == shape and (dim - d) % max(1, len(shape)) == 0
            return own.name == "sort" and number == numbers[-1] and is_same
    return False


class Order(Places):
    """Follows such an order along a tape.  Memory whose parts are written isn't followed."""

    is_strict = False

    def __init__(self, step: Step, outs: Sequence[int], owners: Mapping[int, int]) -> None:
        is_sort, shape, self.written = step.name == "sort", step.outs[0] or (), set[int]()
        self.owner_of = lambda n: owners.get(n, n)
        super().__init__({}, () if is_sort else shape[:1], lambda n: bool(self.loose.get(n)) or self._is_lost(n))
        ordered = outs[:2] if is_sort else [outs[0], *outs[2:]]
        self.loose.update(dict.fromkeys(ordered, frozenset([axis(step.given.get("dim", 0), len(shape))])))
        self._point([] if is_sort else outs[1:2])

    def _point(self, numbers: Sequence[int]) -> None:
        """Notes tensors of places in that order."""
        self.pointers.update(numbers)
        self.origins.update((n, frozenset([n])) for n in numbers)

    def _is_lost(self, number: int) -> bool:
        return self.owner_of(number) in self.written

    def pass_(self, step: Step, ins: Sequence[int | None], outs: Sequence[int]) -> None:
        self.outs = outs
        if step.operation.written and self.owner_of(step.given[step.operation.written[0]][0]) not in (*ins, *outs):
            self.written.add(self.owner_of(outs[0]))
        if step.name in TAKING and self._is_lost(ins[0] or 0):
            return
        if step.name == "sort" and axis(step.given["dim"], len(step.outs[0] or ())) in self.loose.get(ins[0] or 0, ()):
            self._point(outs[1:])
        else:
            super().pass_(step, ins, outs)

    def _may_begin(self, step: Step, there: Sequence[int]) -> bool:
        return any(self.origins.get(n) for n in there)

    def _through(self, step: Step, ins: Sequence[int | None], o: int) -> set[int]:
        out = step.outs[o] or ()
        if step.name in MOVES or step.name in RAGGED or step.operation.read or step.links(o) is not None:
            return super()._through(step, ins, o)
        pairs = [(shape or (), self.loose.get(n or 0, ())) for shape, n in zip(step.ins, ins)]  # it has no law
        return {d for shape, axes in pairs for d in axes if shape[d : d + 1] == out[d : d + 1]}

    def _chosen(self, step: Step, ins: Sequence[int | None], own: Sequence[frozenset[int]]) -> set[int]:
        d = {axis(step.given["dim"], len(step.ins[0] or ()))} if "dim" in step.given else {0}
        if step.name == "gather" and own[0] - d != own[1] - d:
            raise Unshown("gather takes entries that are in an order beside others that aren't")
        if step.name in TAKING or step.operation.read not in ("index", "indices"):
            return super()._chosen(step, ins, own)
        source = next((x[0] for name in ("source", "src", "values") if type(x := step.given.get(name)) is tuple), 0)
        index, put = ins[1 : len(ins) - bool(source)], self.loose.get(source, frozenset[int]())
        to = frozenset[int]().union(*own[1 : 1 + len(index)])
        if any(self.origins.get(n or 0) for n in index):
            return d
        if source in self.counting and to:
            self._point(self.outs)
        elif source and source not in self.uniform and bool(put) is not bool(to):
            raise Unshown(f"{step.name} puts entries that are in an order among others that aren't")
        return set(own[0]) | (set(to) - d if "scatter" in step.name else set())

    def _check_index(self, index: int | None, is_loose: bool, shape: Shape, d: int, of_batch: bool = False) -> None:
        if index is not None and bool(self.origins.get(index)) is not is_loose:
            raise Unshown(f"a place in an order is looked up along axis {d} of shape {tuple(shape)}, which isn't in it")
