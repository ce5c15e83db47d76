"""What memory is held, and which tensors are alive."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from measuring import Held
from torch import Tensor


@contextmanager
def at_most(bytes_held: int, what: str = "it") -> Iterator[None]:
    gc.collect()
    with Held() as held:
        yield
    assert held.most <= bytes_held, f"{what} held {held.most} bytes, of {bytes_held}"


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())
