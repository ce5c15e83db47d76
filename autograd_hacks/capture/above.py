"""What capture asks of files and floors above.  Each of them registers its functions here when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.nn as nn

from autograd_hacks.capture.ran import Ran


class Above:
    """The functions of floors above.

    read_forward(recorder, ran): reads a finished forward by laws.  Returns whether independence is still to be shown
    assume(ran): reads a graph whose outputs are assumed to have the samples on axis 0
    between(recorder, model, ran): compares whose the gradients at arguments are with whose the outputs are that these were
    computed from
    created(recorder, use, node, hook): called when a pass that makes a graph arrives at a node
    show(recorder, model, ran): records whether samples are independent
    learn(model, recorder): called as a forward with gradients begins: finds the whole parameters
    together(model, recorder, read, show): reads a finished forward, and shows independence if ``read`` says that it is due.
    Other processes may have to take part, so each forward with gradients calls it
    spread_of(model, recorder, group): the processes that have samples of the latest record
    alone(model): a context in which a model runs, forwards and backwards, without communication.  If shards must be
    gathered, all processes must enter it at once; then each may run the model any number of times
    gathered(model, names): the modules whose sharded weights rows need.  names: the parameters that are read from the graph
    accumulate(model): a context that appends the rows of several passes
    describe(model, trained): a table of the model's parameters
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


ABOVE = Above()
