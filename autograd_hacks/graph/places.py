"""Places along axes that are as long as values say: packed samples, entries that a mask has chosen.

If other samples change, a sample's entries there get other places.  So nothing may depend on a place along such an axis: no
part of it with given bounds, no table of positions beside it, and where an index points to is no value for anything else.
Its length, which Python can read, depends on other samples: so the numbers that operations get must be those of forwards
that were checked as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import log, prod, sqrt
from typing import Any

from autograd_hacks.graph.axes import AXES, axis
from autograd_hacks.graph.label import Shape
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.tape_laws import OVERWRITING, RAGGED, UNIFORM, UNWRITTEN, Step, Unshown, operation
from autograd_hacks.graph.values import MASKS, Indexed
from autograd_hacks.probe.tape import FRESH, Site, Tape

_RESHAPING = frozenset("view _unsafe_view _reshape_alias reshape unflatten flatten".split())  # noqa: SIM905 a list of words to be read
CARRIED = frozenset("clone copy cat stack _to_copy expand permute transpose squeeze unsqueeze alias detach flip".split())  # noqa: SIM905
NUMBER = "a number"
"""The kind of a number that an operation gets."""
_OF_SAMPLES = "an index of samples"
_ALONG = "dim dims dimension".split()  # noqa: SIM905


def is_ragged(tape: Tape) -> bool:
    """Whether values say how long an axis of some tensor is."""
    return any(
        (name := operation(entry.func).name) in RAGGED
        or (name == "index" and any(tape.read[x[0]][0].dtype in MASKS for x in entry.args[1] if x is not None))
        for entry in tape.entries
    )


def numbers(tape: Tape) -> set[Site]:
    """The numbers among operations' arguments, without sizes and axes."""
    found: set[Site] = {
        (NUMBER, x.item()) for n, x in tape.values.items() if tape.sources[n].kind == FRESH and x.numel() == 1
    }
    for entry in tape.entries:
        for a, x in zip(entry.func._schema.arguments, entry.args):
            is_number = type(x) in (int, float) and (str(a.type) in ("number", "float", "Tensor") or a.name == "k")
            if (
                is_number
                and "arange" not in entry.func._schema.name
                and not (a.has_default_value() and a.default_value == x)
            ):
                found.add((NUMBER, x))
        found |= {(NUMBER, x) for _, x in entry.kwargs or () if type(x) is float}
    return found


def look_like_sizes(found: Collection[Site], sizes: Collection[int]) -> bool:
    """Whether a number may have been computed from the length of an axis, unless that is short."""
    made = {f(n) for n in sizes if n > 4 for f in (float, sqrt, log, lambda n: 1 / n, lambda n: 1 / sqrt(n))}
    return any(abs(x - y) <= 1e-6 * y for _, x in found for y in made)


class Places:
    """Follows such axes along a tape.

    loose: {a tensor's number: its axes that are as long as values say}
    lengths: of such axes of the arguments; tensors that are made with such a length have such an axis, too
    is_reached: whether a tensor depends on arguments with samples
    """

    is_strict = True  # whether no part of such an axis may be taken

    def __init__(
        self,
        loose: dict[int, frozenset[int]],
        lengths: Collection[int],
        is_reached: Callable[[int], bool],
        samples: int = -1,
    ) -> None:
        self.loose, self.is_reached, self.lengths, self.samples = loose, is_reached, lengths, samples
        self.uniform, self.counting = set[int](), set[int]()  # alike at all places; each place's own number
        self.origins: dict[int, frozenset[int]] = {}  # by the number of whole numbers, those that they were taken from
        # Those that point to places along such an axis, and those that point to samples or are places.
        self.pointers, self.of_samples = set[int](), set[int]()
        self.uses: list[tuple[str, int]] = []  # where whole numbers are used as values

    def pass_(self, step: Step, ins: Sequence[int | None], outs: Sequence[int]) -> None:
        """Follows axes through an operation.  Raises Unshown where something depends on a place along one."""
        there = [n for n in ins if n is not None]
        if step.name in UNIFORM | UNWRITTEN or (
            all(n in self.uniform for n in there) and (there or step.name in OVERWRITING)
        ):
            self.uniform.update(outs)
        is_count = step.name == "arange" and step.given.get("start", 0) == 0 and step.given.get("step", 1) == 1
        if is_count or (step.name in CARRIED and there and self.counting.issuperset(there)):
            self.counting.update(outs)
        if not there:
            axes = [[d for d, size in enumerate(shape or ()) if size in self.lengths] for shape in step.outs]
            self.loose |= dict(zip(outs, map(frozenset, axes)))
        self._note_uses(step, ins, outs)
        if not (self._may_begin(step, there) or any(self.loose.get(n) for n in there)):
            return
        for o, n in enumerate(outs):
            if n and (found := self._through(step, ins, o)):
                self.loose[n] = frozenset(found)

    def _may_begin(self, step: Step, there: Sequence[int]) -> bool:
        return step.name in RAGGED or bool(step.operation.read)

    def _note_uses(self, step: Step, ins: Sequence[int | None], outs: Sequence[int]) -> None:
        """Notes which whole numbers are taken along, and which are used as values."""
        own = [self.origins.get(n, frozenset()) if n is not None else frozenset() for n in ins]
        if step.name in ("nonzero", "repeat_interleave") and self.is_strict and self.origins:
            self.origins.update((n, frozenset([n])) for n in outs)
            self.of_samples.update(outs)
        elif step.name in CARRIED or step.operation.read or step.operation.makes_view:
            are_counts = step.name == "bincount" and self.is_strict  # which are no places
            given = [] if are_counts else own[:1] if step.operation.read else own  # others are indices
            self.origins.update((n, frozenset().union(*given)) for n in outs if any(given))
        elif not (step.name in ("eq", "ne") and all(own)):
            self.uses += [(step.name, origin) for origins in own for origin in origins]

    def check_uses(self) -> None:
        """Raises Unshown if where an index points to is a value of anything."""
        for name, origin in self.uses:
            if origin in self.pointers or (origin in self.of_samples and name != _OF_SAMPLES):
                raise Unshown(f"{name} computes with an index, whose values depend on how many entries other samples have")

    def _through(self, step: Step, ins: Sequence[int | None], o: int) -> set[int]:
        name, out = step.name, step.outs[o] or ()
        own = [self.loose.get(n, frozenset()) if n is not None else frozenset() for n in ins]
        if name in RAGGED:
            return {0}
        if step.operation.read:
            return self._chosen(step, ins, own)
        if name in ("cat", "stack"):
            d = axis(step.given["dim"], len(out))
            constants = [
                n for n in ins if n is not None and not self.is_reached(n) and n not in self.uniform | self.counting
            ]
            if name == "cat" and constants and any(d in axes for axes in own):
                raise Unshown("cat puts constants beside entries whose places depend on other samples")
            return {e + (name == "stack" and e >= d) for axes in own for e in axes}
        if name in _RESHAPING:
            return self._reshaped(own[0], step.ins[0] or (), out)
        if name in MOVES and name not in AXES:
            return self._moved(step, own[0], out)
        links = step.links(o)
        if links is None:
            return set(range(len(out)))
        found = {e for axes, of in zip(own, links) for d, e in enumerate(of) if d in axes and e >= 0}
        if len(out) == len(step.ins[0] or ()):  # what works along an axis leaves it as it is
            found |= {d for d, e in enumerate(links[0]) if d in own[0] and e < 0 and out[d] == (step.ins[0] or ())[d] > 1}
        is_mixed = any(n is not None and self.is_reached(n) for n in ins)
        for n, of, shape in zip(ins, links, step.ins):
            is_beside = is_mixed and n is not None and not self.is_reached(n) and n not in self.uniform
            if is_beside and any(e in found and (shape or ())[d] > 1 for d, e in enumerate(of)):
                raise Unshown(f"{name} takes a tensor with a value for each place, and places depend on other samples")
        return found

    def _chosen(self, step: Step, ins: Sequence[int | None], own: Sequence[frozenset[int]]) -> set[int]:
        """Of what an index or a mask chooses, or writes."""
        name, out, shape = step.name, step.outs[0] or (), step.ins[0] or ()
        if name in ("bincount", "_embedding_bag", "_embedding_bag_forward_only"):
            return set()
        if name.startswith(("index_add", "index_copy", "index_reduce", "scatter", "masked_scatter")) or "index_put" in name:
            by_index, d = not (name.startswith("masked") or "index_put" in name), axis(step.given.get("dim", 0), len(shape))
            self._check_index(ins[1], bool(own[0]) or not by_index, shape, d, by_index)
            return set(own[0])
        if name == "index_select" or name == "gather":
            d = axis(step.given["dim"], len(out))
            self._check_index(ins[1], d in own[0], shape, d, self.is_reached(ins[0] or 0))
            return (set(own[0]) - {d}) | ({d} if own[1] and name == "index_select" else set(own[1]))
        if name == "embedding":
            self._check_index(ins[1], 0 in own[0], shape, 0, self.is_reached(ins[0] or 0))
            return set(own[1])
        by, d = Indexed(step.values, shape), 0
        found = {by.place_of(e) for e in own[0] if e not in by.dims}
        for n, x, axes in zip(ins[1:], step.values, own[1:]):
            is_mask = x is not None and x.dtype in MASKS
            if x is not None and not is_mask:
                self._check_index(n, d in own[0], shape, d, self.is_reached(ins[0] or 0))
                found |= {by.start + by.axes - x.ndim + e for e in axes}
            if is_mask:
                found.add(by.start)
            d += x.ndim if is_mask else 1
        return found

    def _check_index(self, index: int | None, is_loose: bool, shape: Shape, d: int, of_batch: bool = False) -> None:
        if index is None:
            return
        origins = self.origins.get(index, frozenset())
        if is_loose:
            self.pointers |= origins
        else:
            is_of_samples = of_batch and shape[d] == self.samples  # whose places depend on other samples, too
            self.of_samples |= origins if is_of_samples else frozenset()
            self.uses += [(_OF_SAMPLES if is_of_samples else "an index of another axis", origin) for origin in origins]
        if is_loose and not self.is_reached(index) and index not in self.counting:
            raise Unshown(f"an index that is the same for all batches chooses from axis {d} of shape {tuple(shape)}")

    def _moved(self, step: Step, own: frozenset[int], out: Shape) -> set[int]:
        """Of operations that take parts of axes, or turn them."""
        shape = step.ins[0] or ()
        if step.name == "constant_pad_nd":
            along = {
                len(shape) - 1 - k for k in range(len(step.given["pad"]) // 2) if any(step.given["pad"][2 * k : 2 * k + 2])
            }
        else:
            given: Any = next((step.given[name] for name in _ALONG if name in step.given), range(len(shape)))
            along = {axis(d, len(shape)) for d in (given if isinstance(given, list | tuple | range) else [given])}
        is_whole = len(out) == len(shape) and step.name == "slice" and tuple(out) == tuple(shape)
        if self.is_strict and not is_whole and along & own:
            raise Unshown(f"{step.name} takes given places of an axis on which places depend on other samples")
        less = min(along, default=0) if len(out) < len(shape) else len(shape)
        return {d - (d > less) for d in own}

    def _reshaped(self, own: frozenset[int], old: Shape, new: Shape) -> set[int]:
        found = set[int]()
        for d in own:
            at = [
                e for e in range(len(new)) if prod(new[:e]) == prod(old[:d]) and new[e] % max(1, old[d]) == 0 and new[e] > 1
            ]
            found |= set(at[-1:]) if at else set(range(len(new)))
        return found
