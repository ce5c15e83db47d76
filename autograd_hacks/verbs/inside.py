"""Per-sample gradient norms from inside a compiled graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.taps import Basin, Tap, WithTap, formula_inside, put_tap, take_tap
from autograd_hacks.errors import ON_INSIDE, NothingRecorded, UnseenGradient, UnsupportedLayer, VerificationFailed, where
from autograd_hacks.reading.scale import check_loss_type, check_scale
from autograd_hacks.support.contexts import cuda_devices_of, random_state, with_random_state
from autograd_hacks.support.display import Shown, Table
from autograd_hacks.support.kinds import is_whole
from autograd_hacks.support.restored import kept, undone_by
from autograd_hacks.support.trees import tensors_of
from autograd_hacks.support.untouched import untouched
from autograd_hacks.verbs.hooking import add_hooks
from autograd_hacks.verbs.per_sample import per_sample_grads


class NormsInside(Shown):
    """Norms of per-sample gradients from inside a compiled graph; see `norms_inside`, which makes it."""

    def __init__(self, model: nn.Module, param_grad: bool) -> None:
        self.model, self._basin = model, Basin(param_grad)
        self._layers = {path: m for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
        self._found: tuple[Tensor, Tensor] | None = None
        _check_parameters(model)
        for place, (path, layer) in enumerate(self._layers.items()):
            if (formula := formula_inside(layer)) is not None:
                put_tap(layer, Tap(self._basin, layer, formula, path, place))

    def _table(self) -> Table:
        title = f"<norms inside a {type(self.model).__name__}: {len(self._layers)} layers>"
        rows = [
            (path, type(layer).__name__, str(sum(p.numel() for p in layer.parameters(recurse=False))))
            for path, layer in self._layers.items()
        ]
        return Table(title, [("layer", "kind", "numbers"), *rows])

    @contextmanager
    def batch(self, samples: int) -> Iterator[None]:
        """A context for one forward and one backward pass, in which every layer adds its samples' squared norms up.

        samples: N

        Raises ValueError for ``samples`` < 1, and UnsupportedLayer where parameters that train are of other layers now, or
        shared.  The forward raises BatchSizeError where a layer's input has not N entries on axis 0, and SamplesMixed for a
        BatchNorm in training.  At its end, without ``param_grad``, UnseenGradient where ``.grad`` has changed all the same.
        """
        if not is_whole(samples) or samples < 1:
            raise ValueError(f"batch was given {samples!r}; expected the number of samples, 1 or more" + ON_INSIDE)
        _check_parameters(self.model, self._basin)
        basin, first = self._basin, next(p for p in self.model.parameters() if p.requires_grad)
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        made = [torch.zeros(n, dtype=dtype, device=first.device, requires_grad=True) for n in (samples, len(self._layers))]
        before = {name: _grad_of(p) for name, p in self.model.named_parameters()}
        with kept(basin), undone_by(partial(setattr, self, "_found", None)):  # else of a part of the layers, perhaps
            self._found = basin.squares, basin.uses = made[0], made[1]
            yield
        past = [name for name, p in self.model.named_parameters() if _grad_of(p) not in (None, before.get(name))]
        if past and not basin.param_grad:
            self._found = None
            raise UnseenGradient(
                f"gradient has reached {', '.join(past)} past the layer's own call in this pass, which computes none for "
                "parameters there: read by another function, or a penalty in the loss. Norms would miss that; use add_hooks."
            )

    def norms(self, loss_type: str = "mean", scale: float | Tensor = 1.0) -> Tensor:
        """The norm of each sample's gradient over all parameters, from the last `batch`.

        loss_type: 'mean' or 'sum', whichever the loss does over the batch    scale: what the loss was multiplied by

        Returns N.  Raises NothingRecorded where no backward pass has come through a layer, UnsupportedLayer where some have
        come through one twice, and ValueError for another loss_type or scale.
        """
        check_loss_type(loss_type)
        check_scale(scale)
        squares, uses = (None, None) if self._found is None else (x.grad for x in self._found)
        if squares is None or uses is None:
            raise NothingRecorded(
                "norms() needs a forward and a backward pass within batch(N), and none has come through a layer. "
                "Run `with inside.batch(len(x)): loss_fn(model(x), y).backward()` first."
            )
        twice = [path for path, count in zip(self._layers, uses.tolist()) if count > 1]
        if twice:
            raise UnsupportedLayer(
                f"gradient has come {int(uses.max())} times through {where(twice[0], self._layers[twice[0]])}, and the "
                "norm of a sum doesn't follow from the norms. Call each layer once in a forward pass, and run one backward "
                "pass within batch(N); or use add_hooks and per_sample_grads(model).norms()."
            )
        factor = len(squares) if loss_type == "mean" else 1
        return squares.sqrt() * factor / (scale.to(squares.device) if isinstance(scale, Tensor) else scale)

    def remove(self) -> None:
        """Leaves the layers as they were."""
        for layer in self._layers.values():
            take_tap(layer)


def norms_inside(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, param_grad: bool = False
) -> NormsInside:
    """Has norms of per-sample gradients computed inside the model's own graph, which may be compiled: no hooks, no record.

    Each layer's backward adds its samples' squared norms to the gradient of a vector of N numbers, so it lives in what
    ``torch.compile(model, fullgraph=True)`` makes, under activation checkpointing, DistributedDataParallel
    (in ``no_sync()``) and ``fully_shard``, before which it is to be called.  Norms are all there is.  As the first of two
    passes they clip::

        inside = autograd_hacks.norms_inside(model, (x,))
        compiled = torch.compile(model)
        with inside.batch(len(x)):                                      # for each step
            loss_fn(compiled(x), y).mean().backward()
        weights = (max_norm / inside.norms()).clamp(max=1)
        (weights * loss_fn(compiled(x), y)).mean().backward()           # .grad is that of the clipped samples

    args, kwargs: a batch of the model's, samples on axis 0, on which the norms are compared once with those of `add_hooks`;
    that leaves nothing behind. 3 samples or more tell whether they mix
    param_grad: whether the pass for norms fills ``.grad``, too; without, it takes less time than a plain one

    Layers: Linear, Embedding, Conv1d to Conv3d, LayerNorm, RMSNorm, GroupNorm, BatchNorm in evaluation, and GPT-2's Conv1D,
    each called once in a forward, with its samples on axis 0, N of them.

    Raises UnsupportedLayer for parameters that train of other layers, that are shared, or that are read past their layer;
    VerificationFailed where norms differ; ValueError where the model has hooks or norms inside; and what hooks say of the
    batch: SamplesMixed, BatchSizeError.

    Source: the norms of Goodfellow 2015 (arXiv:1510.01799), and clipping by two passes of Lee and Kifer 2021
    (arXiv:2009.03106).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"norms_inside was given an object of type {type(model).__name__}; expected a torch.nn.Module" + ON_INSIDE
        )
    if any(isinstance(part, WithTap) for part in model.modules()):
        raise ValueError(
            "norms_inside was given a model that has norms inside. Call remove() on what it returned then" + ON_INSIDE
        )
    _check_parameters(model)
    state, draws = random_state(cuda_devices_of(model)), torch.Generator().manual_seed(0)
    gradients: list[Tensor] = []

    def step(copied: Callable[[Any], Any]) -> None:
        """A forward and a backward pass, from gradients at the outputs that the first one draws."""
        given, options = copied((tuple(args), dict(kwargs or {})))
        with with_random_state(state):
            outputs = [x for x in tensors_of(model(*given, **options)) if x.requires_grad and x.is_floating_point()]
        if not gradients:
            gradients.extend(torch.randn(x.shape, generator=draws, device="cpu").to(x) for x in outputs)
        torch.autograd.backward(outputs, gradients)

    expected = _by_hooks(model, step, (args, kwargs))
    inside = NormsInside(model, param_grad)
    with undone_by(inside.remove):
        with untouched(model, (args, kwargs)) as copied, inside.batch(len(expected)), torch.enable_grad():
            step(copied)
            found = inside.norms("sum")
        inside._found = None  # they are no batch's
        error = (found - expected).abs() / expected.clamp(min=torch.finfo(expected.dtype).tiny)
        coarsest = max(torch.finfo(x.dtype).eps for x in (*gradients, *model.parameters()) if x.is_floating_point())
        wrong = (~(error <= 10 * coarsest**0.5)).nonzero()[:, 0].tolist()
        if wrong:
            raise VerificationFailed(
                f"norms from inside are not those of the hooks: {found[wrong[0]]:.6g} for sample {wrong[0]}, and "
                f"{expected[wrong[0]]:.6g} by hooks. Is a parameter read past its layer's own call? Use add_hooks."
            )
    return inside


def _by_hooks(model: nn.Module, step: Callable[[Callable[[Any], Any]], None], arguments: Any) -> Tensor:
    """The norms by hooks, N."""
    with suppress(NothingRecorded):
        recorder_of(model)
        raise ValueError("norms_inside was given a model that has hooks. Call remove_hooks(model) first" + ON_INSIDE)
    with add_hooks(model):
        with untouched(model, arguments) as copied, torch.enable_grad():
            step(copied)
            norms = per_sample_grads(model, loss_type="sum").norms()
        past = recorder_of(model).record.plan.names & {name for name, p in model.named_parameters() if p.requires_grad}
    if past:
        raise UnsupportedLayer(
            f"{', '.join(sorted(past))}: read past the layer's own call, where norms_inside sees nothing. Let layers be "
            "called as modules, or use add_hooks."
        )
    return norms.detach()


def _grad_of(p: Tensor) -> tuple[int, int] | None:
    return None if p.grad is None else (id(p.grad), p.grad._version)


def _check_parameters(model: nn.Module, basin: Basin | None = None) -> None:
    """Raises UnsupportedLayer for parameters that train and whose norms can't be taken inside.

    basin: where they arrive, once layers have their taps
    """
    names = dict[int, str]()
    for path, module in model.named_modules(remove_duplicate=False):
        for local, p in module.named_parameters(prefix=path, recurse=False):
            if not p.requires_grad:
                continue
            tap = vars(module).get("_tap")
            taken = formula_inside(module) is not None if basin is None else tap is not None and tap.basin is basin
            if p.is_complex() or not taken or local.rpartition(".")[2] not in ("weight", "bias"):
                raise UnsupportedLayer(
                    f"{local} is of {where(path, module)}, whose norms can't be taken inside a graph, or which was not in "
                    "the model at norms_inside. Freeze it, requires_grad_(False), or use add_hooks and "
                    "per_sample_grads(model).norms()."
                )
            if names.setdefault(id(p), local) != local:
                raise UnsupportedLayer(
                    f"{local} and {names[id(p)]} are one parameter, and the norm of a sum doesn't follow from the norms of "
                    "its uses. Use add_hooks and per_sample_grads(model).norms()."
                )
