"""laplace-torch: backends for Gauss-Newton matrices, Kronecker factors, Jacobians and gradients."""

from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import add_hooks, pause_hooks, per_sample_grads, per_sample_jacobian
from autograd_hacks.curvature import KFAC, backprop_hess, compute_hess
from autograd_hacks.errors import UnsupportedLayer, needed

with needed("laplace"):
    from laplace.curvature import CurvatureInterface, EFInterface, GGNInterface
    from laplace.utils import Kron


class _Backend(CurvatureInterface):
    """The quantities that laplace-torch needs of a model or its last layer.  The model keeps its hooks."""

    def __init__(self, model: nn.Module, likelihood: str, *args: Any, **options: Any) -> None:
        super().__init__(model, likelihood, *args, **options)
        add_hooks(self._model)

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """The outputs' Jacobian by the parameters, N × C × P, and the outputs, N × C.

        enable_backprop: let gradients flow through them; laplace-torch's own code by torch.func then computes them
        """
        if enable_backprop:
            with pause_hooks():
                return cast(tuple[Tensor, Tensor], super().jacobians(x, True))
        f = self._outputs(x)
        return self._flat(per_sample_jacobian(self._model, f).dense(), 2), f.detach()

    def selected_output_jacobians(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The Jacobian of some outputs, N × K × P, and all outputs, N × C, by laplace-torch's own code."""
        with pause_hooks():
            return cast(tuple[Tensor, Tensor], super().selected_output_jacobians(*args, **options))

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the samples' losses, N × P, and the sum of the losses."""
        f = self._outputs(x)
        kind = nn.MSELoss if self.likelihood == "regression" else nn.CrossEntropyLoss
        losses = kind(reduction="none")(f, y)
        losses = losses.flatten(1).sum(1) if losses.ndim > 1 else losses
        return self._flat(per_sample_jacobian(self._model, losses).dense(), 1), losses.sum().detach()

    def _outputs(self, x: Any) -> Tensor:
        """The outputs, N × C.  For the last layer only, their graph begins at its input."""
        with torch.enable_grad():
            if not self.last_layer:
                return cast(Tensor, self.model(x))
            with torch.no_grad():
                _, features = self.model.forward_with_features(x)
            return cast(Tensor, self._model(features.detach()))

    def _flat(self, rows: dict[str, Tensor], axes: int) -> Tensor:
        joined = torch.cat([x.flatten(axes) for x in rows.values()], -1)
        return joined if self.subnetwork_indices is None else joined[..., self.subnetwork_indices]


class AutogradHacksGGN(_Backend, GGNInterface):
    """A backend for ``Laplace(..., backend=AutogradHacksGGN)``: generalised Gauss-Newton, or Fisher, matrices.

    Its 'full', 'diag' and 'kron' posteriors equal those of laplace-torch's default backend.  ``backend_kwargs`` may hold
    ``stochastic`` (sample labels from the model) and ``num_samples`` (how many for each sample).

    Raises UnsupportedLayer for 'kron' of parameters with other than one pair of Kronecker factors, such as embeddings and
    grouped convolutions; ValueError for outputs that are not N × C; and SamplesMixed for a model that mixes samples.
    """

    def full(self, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """The batch's loss, and the matrix summed over samples, P × P."""
        loss = self._passes(x, y)
        rows = self._flat(per_sample_grads(self._model).dense(), 1)
        return loss, rows.mT @ rows

    def diag(self, x: Any, y: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """The batch's loss, and the diagonal of the matrix, P."""
        loss = self._passes(x, y)
        return loss, self._flat(per_sample_grads(self._model).second_moment(), 0)

    def kron(self, x: Any, y: Tensor, N: int, **_: Any) -> tuple[Tensor, Kron]:
        """The batch's loss, and its Kronecker factors.  A, of the inputs, is this batch's share of the mean over all N."""
        loss = self._passes(x, y)
        compute_hess(self._model, "kfac")
        for layer in self._model.modules():
            weight, bias = (vars(p) if p is not None else {} for p in map(layer._parameters.get, ("weight", "bias")))
            if weight.get("kfac") and bias.get("kfac") and len(weight["kfac"][0]) > 1:
                bias["kfac"] = KFAC((bias["kfac"][0], weight["kfac"][1]))
        factors, samples = [], len(y)
        for p in self.params:
            kfac = vars(p).pop("kfac") or KFAC((p.new_zeros(2 * (p.shape[1:].numel(),)), p.new_zeros(2 * p.shape[:1])))
            if kfac[0].ndim != 2:
                name = next(name for name, own in self._model.named_parameters() if own is p)
                has = f"{name} has factors of shapes {tuple(kfac[0].shape)} and {tuple(kfac[1].shape)}"
                raise UnsupportedLayer(f"laplace-torch's Kron needs two matrices for each weight, but {has}. Use 'diag'.")
            a, b = kfac[0] * (samples / N), kfac[1] * samples
            factors.append([b] if p.ndim < 2 else [a, b] if kfac.is_turned else [b, a])
        return loss, Kron(factors)

    def _passes(self, x: Any, y: Tensor) -> Tensor:
        """The loss.  It records rows whose products add up to the matrix."""
        f = self._outputs(x)
        loss = self.factor * self.lossfunc(f, y)
        kind = "LeastSquares" if self.likelihood == "regression" else "CrossEntropy"
        backprop_hess(f, kind, self.num_samples if self.stochastic else None)
        return cast(Tensor, loss.detach())


class AutogradHacksEF(_Backend, EFInterface):
    """A backend for ``Laplace(..., backend=AutogradHacksEF)``: empirical Fisher matrices, 'full' and 'diag'."""
