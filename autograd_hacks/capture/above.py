"""What capture asks of files and floors above.  Each of them registers its functions here when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.nn as nn

from autograd_hacks.capture.ran import Ran


class Above:
    """The functions of floors above.  Those of reading/ and verbs/ say there what they do.

    learn(model, recorder): called as a forward with gradients begins: finds the whole parameters
    together(model, recorder, read, show): reads a finished forward, and shows independence if ``read`` says that it is due.
    Other processes may have to take part, so each forward with gradients calls it
    spread_of(model, recorder, group): the processes that have samples of the latest record
    alone(model): a context in which a model runs, forwards and backwards, without communication.  If shards must be
    gathered, all processes must enter it at once; then each may run the model any number of times
    gathered(model, names): the modules whose sharded weights rows need.  names: the parameters that are read from the graph
    """

    read_forward: Callable[[Any, Ran], bool]
    assume: Callable[[Ran], None]
    between: Callable[[Any, nn.Module, Ran], None]
    created: Callable[..., None]
    show: Callable[[Any, nn.Module, Ran], None]
    learn: Callable[[nn.Module, Any], None]
    together: Callable[[nn.Module, Any, Callable[[], bool], Callable[[], None]], None]
    spread_of: Callable[[nn.Module, Any, Any], Any]
    alone: Callable[[nn.Module], AbstractContextManager[None]]
    gathered: Callable[[nn.Module, frozenset[str]], list[nn.Module]]
    accumulate: Callable[[nn.Module], Any]
    describe: Callable[[nn.Module, bool], Any]
    mixing_in: Callable[[Any], tuple[dict[Any, str], frozenset[Any]]]


ABOVE = Above()
