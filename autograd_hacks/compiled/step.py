"""A model whose compiled backward pass also computes rows, norms or clipped gradients."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from autograd_hacks.compiled.backend import Made, axes_of, check_kept, compiled
from autograd_hacks.compiled.labels import last_line, size
from autograd_hacks.compiled.taken_apart import TakenApart
from autograd_hacks.compiled.torch_names import (
    CALL,
    MOST,
    MOST_FIXED,
    BackendCompilerFailed,
    RecompileLimit,
    TorchDynamoException,
    compiling,
    plain_call,
)
from autograd_hacks.errors import (
    ON_COMPILING,
    ON_REDUCTION,
    NothingRecorded,
    PerSampleGradientError,
    UnseenGradient,
    UnsupportedOperation,
)
from autograd_hacks.extending import ANNOUNCED, BatchDim, Uncompiled, assumed, clip_weights, has_processes, some
from autograd_hacks.forms import Outer
from autograd_hacks.forms.base import written_bytes
from autograd_hacks.probe.batch import Batch
from autograd_hacks.support.draws import drawn
from autograd_hacks.support.internals import current_task
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.switch import NO_TASK, Switch
from autograd_hacks.support.trees import ByTensor, Tree

Gradients = Mapping[str, fx.Node]

_COUNT = count()
LARGE = 2**18
"""From this size in bytes on, rows reuse earlier memory; for smaller rows the lookup takes longer than it saves."""
SLOW = 2.0
"""Longer compilations, in seconds, are reported on stderr."""


class CompiledStep(nn.Module):
    """The result of `autograd_hacks.compile`: a module that is called like the model.

    ``model`` is the model itself.
    """

    def __init__(
        self, model: nn.Module, verb: str, batch: BatchDim, loss_type: str | None, param_grad: bool,
        settings: Mapping[str, Any], backend: str | None, dynamic: bool | None,
    ) -> None:  # fmt: skip
        """settings: of the verb, by their names in `compile`"""
        super().__init__()
        self.model, self.verb, self._batch = model, verb, batch
        self._loss_type, self._is_mean, self._said = loss_type, loss_type == "mean", set[str]()
        self._param_grad, self._settings = param_grad, settings
        self._results, self._pool = dict[str, Tensor](), Pool()
        _POOLS[id(self._pool)] = self._pool
        self._watched: ByTensor[RemovableHandle] = ByTensor()
        self._tree, self._named = Tree(model), dict[str, nn.Parameter]()
        self._task = NO_TASK  # the pass in which the graph ran last
        self._arriving: dict[str, tuple[int, int]] = {}  # its gradients' addresses and versions
        self._before = NO_TASK, ""  # the pass in which a parameter got gradient before the graph ran, and its name
        self._within = NO_TASK  # the pass in which the step was called last
        self._compiles, self._is_private = backend is not None, verb == "clip_and_noise"
        self._axes: Mapping[int, int] = {}  # of the samples, in the arguments of the forward that is traced, by id
        self._given = set[int]()  # the ids of the tensors among these arguments
        self._compilations, self._is_symbolic = 0, False  # whether the last one was of symbolic sizes
        self._failed: Exception | None = None  # why the backward that belongs to the last graph wasn't compiled
        self._made_of_samples: list[Any] = []  # in private steps, what the last forward made of samples
        self._ties: dict[str, str] | None = None
        self._compile(dynamic)

    def _compile(self, dynamic: bool | None) -> None:
        """Sets a function that compiles the model when it is called."""
        # A code object of its own: for each code object the compiler counts recompilations and learns which sizes change.
        own = _run.__code__.replace(co_name=f"_run_{next(_COUNT)}")
        run = types.FunctionType(own, _run.__globals__, own.co_name)
        self._dynamic, self._context = dynamic, compiling(MOST if dynamic is not False else MOST_FIXED)
        self._compiled: Callable[..., Any] = torch.compile(
            run, backend=partial(compiled, self), fullgraph=True, dynamic=dynamic
        )

    def __deepcopy__(self, memo: object) -> CompiledStep:
        raise TypeError("a compiled step can't be copied; copy its .model and compile the copy" + ON_COMPILING)

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a compiled step can't be pickled; save its .model's state_dict()" + ON_COMPILING)

    def install(self) -> None:
        """Makes the model's own calls run this step, in training mode with gradients.  For trainers that call the model.

        Raises ValueError if another step is installed.
        """
        if CALL in vars(self.model):
            raise ValueError("another compiled step is installed; uninstall() that step first" + ON_COMPILING)
        vars(self.model)[CALL] = self._instead

    def uninstall(self) -> None:
        """Makes the model's calls run as before."""
        vars(self.model).pop(CALL, None)

    def _instead(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.model.training and torch.is_grad_enabled()):
            return plain_call(self.model, *args, **kwargs)
        calls = vars(self.model)
        own = calls.pop(CALL)
        try:
            return self(*args, **kwargs)
        finally:
            calls[CALL] = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_grad_enabled()
            and Switch.on()
            and any(isinstance(vars(module).get(CALL), Uncompiled) for module in (self, self.model))
        ):
            raise UnsupportedOperation(
                f"the compiled step or its model has the hooks of add_hooks, and compiled code runs no hooks. "
                f"The step computes {self.verb!r} itself; autograd_hacks.compile lists what else it can. Call remove_hooks "
                "first, or the model instead of the step." + ON_COMPILING
            )
        batch = Batch.of(args, kwargs, self._batch)
        self._axes, self._given = axes_of(batch, self._batch), {id(x) for x in batch.leaves if isinstance(x, Tensor)}
        self._results, self._within = {}, current_task()
        before, began = self._compilations, perf_counter()
        is_new = self._see_ties()
        try:
            found = self._call(args, kwargs)
        except UnsupportedOperation as error:
            may_be_sizes = self._dynamic or (self._dynamic is None and before > 0)
            if not may_be_sizes or not torch.is_grad_enabled():
                raise
            self._compile(dynamic=False)
            found = self._call(args, kwargs)
            why = str(error).removesuffix(ON_COMPILING)
            print(
                f"autograd_hacks: {type(self.model).__name__} is compiled for each size of its arguments: {why}",
                file=sys.stderr,
            )
        if is_new or self._compilations > before:
            self._watch()
        check_kept(self._made_of_samples, found)
        self._made_of_samples = []
        took = perf_counter() - began
        if self._compilations > before and took > SLOW:
            print(f"autograd_hacks: {took:.1f} s to compile {type(self.model).__name__}, {self.verb!r}", file=sys.stderr)
        return found

    def _see_ties(self) -> bool:
        """Compiles again if other names share parameters than before, which torch's guards don't see.

        Returns whether the model has other parameters than when they were hooked.
        """
        if (named := self._tree.parameters()) is self._named:
            return False
        first = {id(p): name for name, p in reversed(named.items())}
        ties = {name: first[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        if self._ties not in (None, ties):
            self._compile(self._dynamic)
        self._ties = ties
        return True

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the compiled model.  Raises UnsupportedOperation if it can't be compiled."""
        self._failed = None
        try:
            with self._context:
                return self._compiled(self.model, args, kwargs)
        except (TorchDynamoException, RecompileLimit) as error:
            why: Exception = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if isinstance(why, PerSampleGradientError):
            raise why from None
        if isinstance(why, RecompileLimit):
            raise UnsupportedOperation(
                f"{type(self.model).__name__} was compiled {MOST_FIXED} times, for other sizes each. Pad batches and "
                "sequences to a few sizes." + ON_COMPILING
            ) from why
        line, *_ = str(why).strip().splitlines() or [""]
        raise UnsupportedOperation(
            f"{type(self.model).__name__} can't be captured as one graph: {type(why).__name__}: {line.rstrip('.')}"
            f"{last_line(str(why))}. Use add_hooks(model) for it; or call the model once before, if it prepares itself in "
            "its first forward." + ON_COMPILING
        ) from why

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the last backward pass's results beside gradients, for example 'norms'."""
        return tuple(self._results)

    @property
    def norms(self) -> Tensor:
        """The norms of the last backward pass before clipping, N."""
        if "norms" not in self._results:
            raise NothingRecorded(
                "there is no 'norms': no backward pass has run since the last forward, or the step was compiled for "
                f"{self.verb!r} only." + ON_COMPILING
            )
        return self._results["norms"]

    # Gradients from outside of the graph.

    def _watch(self) -> None:
        """Hooks the parameters."""
        self._named = self._tree.parameters()
        for name, p in self._named.items():
            if p.requires_grad and p not in self._watched:
                self._watched[p] = p.register_hook(partial(_arrived, weakref.ref(self), name))

    def __del__(self) -> None:
        for handle in self._watched.values():
            handle.remove()

    # The results of the graph.

    def _make(self, apart: TakenApart, gradients: Gradients) -> Made:
        made: Made = VERBS[self.verb](self, apart, gradients, apart.samples if self._is_mean else 1)
        if self.verb in ("rows", "norms") and not self._param_grad:
            made.gradients = dict.fromkeys(gradients)
        return made

    def _begin(self) -> None:
        """Returns the old rows' memory to the pool.  Raises ValueError if losses are reduced otherwise than is known."""
        announced = ANNOUNCED.get(current_task())
        used = self._loss_type or ("sum" if announced else assumed("sum", self._said))
        if announced and announced.loss_type != used:
            raise ValueError(
                f"{announced.what} used {announced.loss_type!r}, but the step was compiled for {used!r}. Call "
                f"autograd_hacks.backward(losses, {used!r}), or compile(..., loss_type={announced.loss_type!r})"
                + ON_REDUCTION
            )
        for name, p in self._named.items() if self.verb == "rows" else ():
            self._pool.give_back(name, vars(p).pop("grad1", None))

    def _deliver(self, results: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        task = current_task()
        if self._within not in (NO_TASK, task):
            raise UnseenGradient(
                "the compiled step was called in a backward pass, as by a reentrant checkpoint, which has a pass of its own "
                "inside of another, so gradient of other uses isn't seen. Use checkpoint(..., use_reentrant=False)."
                + ON_COMPILING
            )
        if _LATEST.get(self.model) == task:
            self._task = NO_TASK
            raise UnseenGradient(
                "the compiled step, or another one of the same model, was called several times for one loss, so each "
                "sample's gradient is a sum over calls. Call it once on all inputs, with twice as many samples: "
                "step(torch.cat([a, b])).chunk(2); or use add_hooks(model)." + ON_COMPILING
            )
        if self._before[0] == task:
            raise _unseen(self._before[1])
        if self.verb == "rows":
            for name, p in self._named.items():
                if p.requires_grad:
                    rows = results.get(name)
                    p.grad1 = None if rows is None else rows.to(p.dtype)  # type: ignore[attr-defined]  # torch has it not
        else:
            self._results = results
        noised = self._noised(gradients) if self.verb == "clip_and_noise" else {}
        self._task = _LATEST[self.model] = task
        self._arriving = {name: (g.data_ptr(), g._version) for name, g in {**gradients, **noised}.items()}
        return noised

    def _noised(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients with noise, in new memory, because two parameters' gradients may be one tensor."""
        if has_processes() and dist.get_world_size() > 1:
            raise NotImplementedError(
                "compile(model, 'clip_and_noise') does not support several processes: each would add noise, and the sum "
                "would have another deviation. Use 'clip' and add the noise once; or use add_hooks and clip_and_noise_."
                + ON_COMPILING
            )
        if old := [name for name, p in self._named.items() if p.requires_grad and p.grad is not None and p.grad.any()]:
            raise ValueError(
                f"compile(model, 'clip_and_noise') found gradient in .grad of {some(old)}, to which autograd would add the "
                "private one. Call zero_grad() before each step." + ON_COMPILING
            )
        multiplier, bound, expected = (
            float(self._settings[name] or 0) for name in ("noise_multiplier", "max_norm", "expected_batch_size")
        )
        found = dict[str, Tensor]()
        named = [(name, p) for name, p in self._named.items() if multiplier and p.requires_grad]
        for (name, p), noise in zip(named, drawn(self._settings["noise"], named, multiplier * bound / expected)):
            if name in gradients:
                found[name] = gradients[name] + noise
            else:  # no sample's loss reaches it
                p.grad = noise.clone() if p.grad is None else p.grad.add_(noise)
        return found


def _arrived(of: weakref.ref[CompiledStep], name: str, grad: Tensor | None) -> None:
    """Raises UnseenGradient if a parameter receives another gradient than the graph's, or notes one before it."""
    step = of()
    if grad is None or step is None:
        return
    if step._task != (task := current_task()):
        step._before = task, name  # the graph may run later in this pass
    # Autograd adds a gradient that arrives later in place, which the version shows.
    elif step._arriving.get(name) != (grad.data_ptr(), grad._version):
        step._task = NO_TASK
        raise _unseen(name)


def _unseen(name: str) -> UnseenGradient:
    return UnseenGradient(
        f"{name} received gradient from outside of the compiled graph, and it can't be split into samples. Causes are a "
        "weight penalty in the loss, a weight that the loss reads, a hook on the parameter, or a parameter that the "
        "model returns. Run a penalty's backward pass by itself; or use add_hooks(model)." + ON_COMPILING
    )


_LATEST: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""{model: the pass in which a graph of it ran last}"""

# Verbs.

_POOLS: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
"""{id: the memory of a step's earlier rows}"""


@torch.library.custom_op("autograd_hacks::rows_of_products", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _rows_of_products(left: Tensor, right: Tensor, key: int, name: str, shape: Sequence[int]) -> Tensor:
    """Rows, in an earlier pass's memory if nothing else refers to it: new memory costs more than the arithmetic."""
    form = Outer(left, right, torch.Size(shape))
    return form.dense(_POOLS[key].take(name, (form.samples, *form.shape), left))


@_rows_of_products.register_fake
def _(left: Tensor, right: Tensor, key: int, name: str, shape: Sequence[int]) -> Tensor:
    return left.new_empty((left.shape[0], *shape))


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _rows(step: CompiledStep, apart: TakenApart, gradients: Gradients, factor: Any) -> Made:
    rows, sums = dict[str, Tensor](), dict[str, Tensor | None]()
    for name, node in gradients.items():
        if (form := apart.forms.get(node)) is None:
            continue
        if type(form) is Outer and size(written_bytes(form)) >= LARGE:
            left = form.left * factor if step._is_mean else form.left
            rows[name] = _rows_of_products(left, form.right, id(step._pool), name, list(form.shape))
            if float(form.saving(fresh=True)) > 0:  # a sum of rows takes less time than a product over all positions
                sums[name] = rows[name].sum(0) / factor
        else:
            rows[name] = apart.rows(node) * factor if step._is_mean else apart.rows(node)
    return Made(sums, rows)


def _norms(step: CompiledStep, apart: TakenApart, gradients: Gradients, factor: Any) -> Made:
    kept = step._settings["max_bytes"] if step._param_grad else 0  # rows that make the ordinary gradient, too
    return Made(results={"norms": apart.rounded(apart.norms(kept) * factor)})


def _clip(step: CompiledStep, apart: TakenApart, gradients: Gradients, factor: Any) -> Made:
    """Σₙ gₙ · min(1, max_norm / ‖gₙ‖), or the mean."""
    norms = apart.norms(step._settings["max_bytes"]) * factor
    weights = clip_weights(norms, float(step._settings["max_norm"] or 0))
    if step.verb == "clip_and_noise":
        # Undo the loss's own reduction first.  Samples that are not finite add nothing.
        weights = weights * factor / float(step._settings["expected_batch_size"] or 1)
        sums = apart.weighted(weights, norms.isfinite())
    else:
        sums = apart.weighted(weights)
    return Made({name: sums.get(node) for name, node in gradients.items()}, {"norms": apart.rounded(norms)})


VERBS: dict[str, Callable[..., Made]] = {"rows": _rows, "norms": _norms, "clip": _clip, "clip_and_noise": _clip}
"""{verb of `compile`: a function that computes its results in the graph}"""
