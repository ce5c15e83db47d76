"""
How sure is the model?
======================

A network that has learned a hundred digits by heart is sure of what it says, also of digits that are askew.  A
Laplace approximation makes a distribution over the weights of the network as it is: its Gauss-Newton matrix, in Kronecker
factors.  laplace-torch does all of it; here once with its own backend, and once with ours
(:doc:`/integrations/laplace`). ::

    python docs/examples/uncertainty.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/uncertainty.png'

from __future__ import annotations

import copy
import math
import sys
import time
import warnings

from common import command_line, handwritten_digits, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

warnings.simplefilter("ignore")  # laplace-torch's and its other backends'
try:
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    from autograd_hacks.integrations.laplace import AutogradHacksGGN
except ImportError as missing:
    print(f"the demo needs {missing.name}: pip install 'autograd-hacks[laplace]'", file=sys.stderr)
    sys.exit(2)

HELD_OUT = 250  # images

parser = command_line(
    "Fits a Laplace approximation to a network of handwritten digits, by two backends.",
    train=(100, "images to learn"),
    epochs=(200, "rounds through them"),
    test=(500, "others to be asked about"),
    angles=(9, "up to half a turn, by which these are rotated"),
)
options = parser.parse_args()
torch.manual_seed(options.seed)

# %%
# A network that is too sure
# --------------------------

images, labels = handwritten_digits()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
known, held_out, test, _ = order.split(
    [options.train, HELD_OUT, options.test, len(order) - options.train - HELD_OUT - options.test]
)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for batch in known[torch.randperm(len(known))].split(50):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()

# %%
# Two posteriors
# --------------
# The same but for who makes the factors, and the outputs' Jacobians that predictions need.  Images that are held out choose
# how narrow the prior is.

data, others = (DataLoader(TensorDataset(images[own], labels[own]), batch_size=100) for own in (known, held_out))
turned = list(torch.linspace(0, math.pi, options.angles))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0]])
    return F.grid_sample(x, F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), False), align_corners=False)


def nll(p: Tensor, y: Tensor) -> Tensor:
    """Of all held-out images; laplace-torch 0.3's own goes on with the sums of the priors before."""
    return F.nll_loss(p.log(), y)


names = {"laplace-torch's backend": CurvlinopsGGN, "autograd_hacks": AutogradHacksGGN}
said: dict[str, list[Tensor]] = {"the network alone": [model(rotate(images[test], a)).softmax(1).detach() for a in turned]}
print(f"{'':26}{'fit s':>8}{'predict s':>11}{'prior precision':>17}{'log marginal likelihood':>25}")
for name, backend in names.items():
    posterior = Laplace(
        copy.deepcopy(model), "classification", subset_of_weights="all", hessian_structure="kron", backend=backend
    )
    start = time.perf_counter()
    posterior.fit(data)
    fitted = time.perf_counter()
    posterior.optimize_prior_precision(
        method="gridsearch",
        loss=nll,
        val_loader=others,
        link_approx="probit",
        log_prior_prec_min=0,
        log_prior_prec_max=3,
        grid_size=7,
    )
    before = time.perf_counter()
    said[name] = [
        torch.cat([posterior(x, link_approx="probit").detach() for x in rotate(images[test], a).split(250)])
        for a in tqdm(turned, desc=name, unit="angle")
    ]
    seconds = fitted - start, time.perf_counter() - before
    print(
        f"{name:26}{seconds[0]:8.2f}{seconds[1]:11.2f}{float(posterior.prior_precision.mean()):17.2f}"
        f"{float(posterior.log_marginal_likelihood()):25.3f}"
    )
theirs, ours = (said[name] for name in names)
furthest = max(float((a - b).abs().max()) for a, b in zip(theirs, ours))
print(f"the furthest that a probability is from the other backend's: {furthest:.0e}")
torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)

# %%
# Is it right as often as it says?
# --------------------------------
# Of images about which the model is 70 % sure it should know 70 %: of upright ones, and with those turned by up to 45°.


def reliability(p: Tensor) -> tuple[Tensor, float]:
    """Confidence and accuracy in six bins of equally many images, 2 6; and their mean distance, the calibration error."""
    confidence, guess = p.max(1)
    both = torch.stack([confidence, (guess == labels[test].repeat(len(p) // len(test))).float()])
    bins = torch.stack([both[:, own].mean(1) for own in confidence.argsort().tensor_split(6)], 1)
    return bins, float((bins[0] - bins[1]).abs().mean())


figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
degrees = [math.degrees(a) for a in turned]
tilted = sum(a <= 46 for a in degrees)
for (name, each), marker, color in zip(said.items(), ("s-", "o", "-"), ("tab:gray", "crimson", "tab:blue")):
    bins, error = reliability(torch.cat(each[:tilted]))
    print(f"{name:26} calibration error: {reliability(each[0])[1]:.3f} upright, {error:.3f} up to 45°")
    left.plot(*bins, marker, color=color, label=f"{name}: error {error:.3f}")
    right.plot(degrees, [float(torch.special.entr(p).sum(1).mean()) for p in each], marker, color=color, label=name)
left.plot([0.3, 1], [0.3, 1], ":", color="black")
left.set(xlabel="confidence", ylabel="accuracy", title=f"{len(test)} images that it has not seen, turned by up to 45°")
right.plot(
    degrees, [float((p.argmax(1) == labels[test]).float().mean()) for p in each], "--", color="tab:green", label="accuracy"
)
right.set(xlabel="turned by, degrees", ylabel="mean entropy; accuracy", title="how unsure it is")
for axes in (left, right):
    axes.legend()
    axes.grid(alpha=0.3)

# %%
# Of digits that are a little askew the network alone is much too sure, and the posterior less so.  Lying on their side
# nearly all are fours to it, and it is sure: a posterior about the weights that it has found does not mend that.

save(figure, options, "uncertainty.png")
