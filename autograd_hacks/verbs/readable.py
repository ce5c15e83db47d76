"""Reading forms while what they are made of is untouched, for this process's rows and for sums over those of all.

No mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from torch import Tensor

from autograd_hacks.distributed.spread import Spread
from autograd_hacks.errors import StaleRecord
from autograd_hacks.forms import Form
from autograd_hacks.support.trees import version_of
from autograd_hacks.support.untouched import autocast_to, outside_inference

T = TypeVar("T")


class Readable(Mapping[str, Form]):
    """Forms by the parameter's name."""

    spread: Spread
    _versions: list[tuple[str, Tensor, int]]
    """Whose forms hold what, and how often that had been overwritten when they were made."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which the gradients are what they were when they were taken."""
        self._check()
        with outside_inference(), self.spread.weights(), self._open():
            yield

    @contextmanager
    def summing(
        self, own: Callable[[], T], counts: Callable[[T], Sequence[float]] = lambda _: (), size: int = 0
    ) -> Iterator[tuple[T, Sequence[float]]]:
        """`reading`, for sums over the samples of all processes; with what `Spread.agreed` makes of its arguments."""

        def checked() -> T:
            self._check()
            return own()

        with outside_inference(), self.spread.weights():
            found = self.spread.agreed(checked, counts, size)
            with self._open():
                yield found

    @contextmanager
    def _open(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for device in {form.like.device for form in self.values()}:
                contexts.enter_context(autocast_to(None, device))
            try:
                yield
            finally:
                for form in self.values():
                    form.release()

    def _check(self) -> None:
        self.spread.check()
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise StaleRecord(
                    f"what the per-sample gradients of {name!r} are made of, a tensor of shape {tuple(tensor.shape)}, was "
                    f"overwritten in place since they were taken (version {version_of(tensor)}; expected {version}). Read "
                    "them before that, or give the layer a copy: x.clone()."
                )
