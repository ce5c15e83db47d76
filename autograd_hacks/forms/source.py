"""What the forms of a module that is run again ask of whoever runs it."""

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Something that runs a call again.  Samples are those at an index, or all."""

    @property
    def row_size(self) -> int:
        """How many numbers the rows of all its parameters have for a sample."""

    def prepare(self) -> None:
        """Works the rows out, for what is asked next."""

    def forget(self) -> None:
        """Frees the rows that were worked out."""

    def rows(self, name: str, index: Tensor | None, keep: bool) -> Tensor:
        """A parameter's rows, ``(N, *shape)``.  keep: whether they will be asked for again"""

    def weighted_sum(self, name: str, w: Tensor) -> Tensor:
        """The parameter's gradient where sample n's counts w[n]-fold.  w: N, of all samples.  Returns shape."""
