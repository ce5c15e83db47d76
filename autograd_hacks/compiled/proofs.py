"""Proofs of compiled steps: rows by random weights against the untouched graph, and what is compiled against what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autograd_hacks.compiled.labels import Joint, Labels, behind
from autograd_hacks.compiled.taken_apart import TakenApart, over, run_operation
from autograd_hacks.errors import ON_COMPILING, VerificationFailed
from autograd_hacks.probe.plan import is_milestone
from autograd_hacks.reading.certificate import agree, rounding_of
from autograd_hacks.support.contexts import cuda_devices_of as cuda_devices_of
from autograd_hacks.support.precision import CONV


class Certificate:
    """Of one compilation: checked in its steps 1, 2, 16, 128, ...

    tangents: how many there are, which are the last of the backward's arguments
    """

    def __init__(self, joint: Joint, labels: Labels, gradients: Mapping[str, fx.Node], tangents: int) -> None:
        self.joint, self.labels, self.gradients, self.tangents = joint, labels, dict(gradients), tangents
        made = (node.meta.get("val") for node in joint.graph.nodes)
        # Under autocast gradients are computed in the precision of what they are made of.
        self.dtypes = {x.dtype for x in made if isinstance(x, Tensor) and x.is_floating_point()}
        self.steps = 0
        self._given: list[Any] | None = None  # what the last forward was given, where that is checked

    def note_forward(self, args: list[Any]) -> None:
        is_due = is_milestone(self.steps + 1)
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in args] if is_due else None
        self._given = copies

    def begin_backward(self, graph: fx.GraphModule | None, args: list[Any]) -> Callable[[list[Any]], None] | None:
        """Checks what this step is to show before it runs; returns what checks the compiled results, or None.

        graph: the backward that was compiled, as a graph; None where it runs as it is
        """
        self.steps += 1
        given, self._given = self._given, None
        if given is None or not is_milestone(self.steps):
            return None
        with torch.no_grad():
            self._check_rows(given, [x.detach() for x in args[len(args) - self.tangents :]])
            if graph is None:
                return None
            expected = _AsTraced(graph).run(*args)
        return partial(_check_compiled, expected, max(torch.finfo(dtype).eps for dtype in self.dtypes))

    def _check_rows(self, given: list[Any], tangents: list[Tensor]) -> None:
        """Rows, weighted, against the gradients of weighted losses in the graph that nobody has taken apart."""
        nodes, values = self.joint.graph.find_nodes(op="placeholder"), [*given, *tangents]
        devices = [x.device for x in tangents if x.is_cuda][:1]
        with torch.random.fork_rng(devices):  # masks are the same in both runs, and the user's generators stay
            apart = TakenApart(self.joint, self.labels, values)
        powers = torch.randint(-3, 4, (apart.samples,), generator=torch.Generator().manual_seed(self.steps), device="cpu")
        w = (2.0**powers).to(tangents[0].device)
        weighted = [
            x * over(w, x, self.labels[node]) if node in self.joint.tangents else x for node, x in zip(nodes, values)
        ]
        with torch.random.fork_rng(devices):
            sums = _run(self.joint, list(self.gradients.values()), weighted)
        whole = [torch.linalg.vector_norm(x.double()) for x in map(sums.__getitem__, self.gradients.values())]
        scale = float(torch.linalg.vector_norm(torch.stack([x.cpu() for x in whole])))
        for name, gradient in self.gradients.items():
            form, expected = apart.form_of(gradient), sums[gradient]
            if form is None:
                is_right = not bool(expected.any())
            else:
                # Of sums that cancel, as a bias's in front of a norm, what is left is rounding, by all that came there.
                weights, received = w.to(form.sum_dtype.to_real()), partial(float, scale / 64)
                is_right = agree(form, weights, expected, self.dtypes, received, rounding_of(CONV, expected))
            if not is_right:
                raise VerificationFailed(
                    f"wrong per-sample gradients: randomly weighted, the rows of {name} don't add up to the gradient of the "
                    "weighted losses in the same graph." + ON_COMPILING
                )


def _run(joint: Joint, wanted: list[fx.Node], values: list[Any]) -> dict[fx.Node, Any]:
    """Some nodes of a joint graph, as it is."""
    needed, given, found = behind(wanted), iter(values), dict[fx.Node, Any]()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node in needed and node.op == "get_attr":
            found[node] = getattr(joint.graph.owning_module, str(node.target))
        elif node in needed:
            args = fx.map_arg(node.args, found.__getitem__)
            kwargs = fx.map_arg(node.kwargs, found.__getitem__)
            found[node] = run_operation(node.target, args, kwargs)
    return found


class _AsTraced(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_operation(target, args, kwargs)


def _check_compiled(expected: Any, eps: float, found: list[Any]) -> None:
    """Raises VerificationFailed where compiled code has made other numbers than the graph that it was made from.

    eps: of the coarsest dtype that something was computed in
    """
    pairs = [
        (number, x.nan_to_num(0, 0, 0).double(), y.nan_to_num(0, 0, 0).double())
        for number, (x, y) in enumerate(zip(found, expected))
        if isinstance(x, Tensor) and isinstance(y, Tensor) and y.is_floating_point() and y.numel()
    ]
    # Sums that cancel, as those of a bias of keys, are rounding alone, by the size of all else.
    whole = max((float(torch.linalg.vector_norm(y)) for _, _, y in pairs), default=0.0)
    for number, x, y in pairs:
        allowed = max(1e-3, 8 * eps) * torch.linalg.vector_norm(y) + 8 * eps * whole
        if torch.linalg.vector_norm(x - y) > allowed:
            raise VerificationFailed(
                f"compiled code is wrong: result {number} of the backward pass, of shape {tuple(y.shape)}, is not what the "
                "graph makes that it was compiled from, by a fault of torch's compiler. compile(..., backend=None) runs the "
                "graph itself." + ON_COMPILING
            )
