"""Checks of compiled steps: randomly weighted rows against the original graph, and compiled code against its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autograd_hacks.compiled.labels import Joint, Labels
from autograd_hacks.compiled.taken_apart import Run, TakenApart, over
from autograd_hacks.errors import ON_COMPILING, VerificationFailed
from autograd_hacks.reading.certificate import agree, rounding_of_products
from autograd_hacks.support.contexts import CONV


class Certificate:
    """The checks of one compilation, in its steps 1, 2, 16, 128, ..."""

    def __init__(self, joint: Joint, labels: Labels) -> None:
        self.joint, self.labels = joint, labels
        made = (node.meta.get("val") for node in joint.graph.nodes)
        # Under autocast, gradients are computed in the precision of their terms.
        self.dtypes = {x.dtype for x in made if isinstance(x, Tensor) and x.is_floating_point()}
        outputs: Any = joint.graph.output_node().args[0]
        self._places = [outputs.index(output) for output in joint.tangents.values()]
        self.steps, self._is_due = 0, False
        # The last forward's arguments, if its step is checked, and the shapes of its outputs.
        self._given: tuple[list[Any], list[torch.Size]] | None = None

    def run_forward(self, compiled: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        is_due = self._is_due or is_milestone(self.steps + 1)
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in args] if is_due else None
        found = compiled(args)
        self._given = None if copies is None else (copies, [found[n].shape for n in self._places])
        return found

    def begin_backward(self, graph: fx.GraphModule | None, args: list[Any]) -> Callable[[list[Any]], None] | None:
        """Checks the rows of this step before it runs.  Returns a function that checks the compiled results, or None.

        graph: the graph that the backward was compiled from; None if the graph itself runs
        """
        self.steps += 1
        self._is_due |= is_milestone(self.steps)
        given, self._given = self._given, None
        tangents = [x.detach() for x in args[len(args) - len(self.joint.tangents) :]]
        # Of several forwards the pass may belong to an earlier one, of other sizes. Then the next step is checked.
        if not self._is_due or given is None or given[1] != [x.shape for x in tangents]:
            return None
        self._is_due = False
        with torch.no_grad():
            self._check_rows(given[0], tangents)
            if graph is None:
                return None
            expected = Run(graph.graph).run(*args)
        return partial(_check_compiled, expected, max(torch.finfo(dtype).eps for dtype in self.dtypes))

    def _check_rows(self, given: list[Any], tangents: list[Tensor]) -> None:
        """Compares weighted sums of rows with the gradients of weighted losses in the original graph."""
        nodes, values = self.joint.graph.find_nodes(op="placeholder"), [*given, *tangents]
        devices = [x.device for x in tangents if x.is_cuda][:1]
        with torch.random.fork_rng(devices):  # both runs have the same masks, and the user's generators don't change
            apart = TakenApart(self.joint, self.labels, values)
        powers = torch.randint(-3, 4, (apart.samples,), generator=torch.Generator().manual_seed(self.steps), device="cpu")
        w = (2.0**powers).to(tangents[0].device)
        weighted = [
            x * over(w, x, self.labels[node]) if node in self.joint.tangents else x for node, x in zip(nodes, values)
        ]
        with torch.random.fork_rng(devices):
            graph: Any = self.joint.graph
            made = Run(graph).run(*weighted, enable_io_processing=False)
            sums = dict(zip(graph.output_node().args[0], made))
        whole = [torch.linalg.vector_norm(sums[node].double()) for node in self.joint.gradients.values()]
        scale = float(torch.linalg.vector_norm(torch.stack([x.cpu() for x in whole])))
        for name, gradient in self.joint.gradients.items():
            form, expected = apart.forms.get(gradient), sums[gradient]
            if form is None:
                is_right = not bool(expected.any())
            else:
                # Sums that cancel, such as those of a bias before a norm, leave rounding errors in proportion to all terms.
                weights, received = w.to(form.sum_dtype.to_real()), partial(float, scale / 64)
                is_right = agree(form, weights, expected, self.dtypes, received, rounding_of_products(CONV, expected))
            if not is_right:
                raise VerificationFailed(
                    f"wrong per-sample gradients: a randomly weighted sum of the rows of {name} differs from the gradient "
                    "of the weighted losses in the same graph." + ON_COMPILING
                )


def _check_compiled(expected: Any, eps: float, found: list[Any]) -> None:
    """Raises VerificationFailed if compiled code computed other numbers than its graph.

    eps: the machine epsilon of the coarsest dtype in the graph
    """
    pairs = [
        (number, x.nan_to_num(0, 0, 0).double(), y.nan_to_num(0, 0, 0).double())
        for number, (x, y) in enumerate(zip(found, expected))
        if isinstance(x, Tensor) and isinstance(y, Tensor) and y.is_floating_point() and y.numel()
    ]
    # Sums that cancel, such as the gradient of a bias of keys, are only rounding errors, in proportion to all other results.
    whole = max((float(torch.linalg.vector_norm(y)) for _, _, y in pairs), default=0.0)
    for number, x, y in pairs:
        allowed = max(1e-3, 8 * eps) * torch.linalg.vector_norm(y) + 8 * eps * whole
        if torch.linalg.vector_norm(x - y) > allowed:
            raise VerificationFailed(
                f"compiled code is wrong: result {number} of the backward pass, of shape {tuple(y.shape)}, differs from the "
                "graph that was compiled. This is a fault of torch's compiler. Run the graph itself: "
                "compile(..., backend=None)." + ON_COMPILING
            )


def is_milestone(steps: int) -> bool:
    """Whether compiled rows are compared: in steps 1, 2, 16, 128, 1024, ..."""
    return steps == 1 or (steps & (steps - 1) == 0 and steps.bit_length() % 3 == 2)
