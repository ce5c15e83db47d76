"""
Laplace: how sure is the model?
===============================

A network that knows a hundred digits by heart is sure of its answers, even for rotated digits.  A Laplace approximation
turns the trained network into a distribution over weights.  It needs the network's Gauss-Newton matrix, here in Kronecker
factors.  laplace-torch does all of it, once with its own backend and once with ours (:doc:`/integrations/laplace`). ::

    pip install laplace-torch curvlinops-for-pytorch matplotlib scikit-learn tqdm
    python uncertainty.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/uncertainty.png'

import argparse
import copy
import math
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from autograd_hacks.integrations.laplace import AutogradHacksGGN

torch.set_num_threads(1)  # a network this small is slower with more threads
warnings.simplefilter("ignore")  # from laplace-torch and its own backend
HELD_OUT = 250  # images that choose the prior
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--train", type=int, default=100, help="images to learn")
parser.add_argument("--epochs", type=int, default=200, help="rounds through them")
parser.add_argument("--test", type=int, default=500, help="other images, for the questions")
parser.add_argument("--angles", type=int, default=9, help="rotations of the test images, up to half a turn")
options = parser.parse_args()

# %%
# A network that is too sure
# --------------------------

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
known, held_out, test = order[: options.train], order[options.train :][:HELD_OUT], order[-options.test :]
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for batch in torch.randperm(len(known)).split(50):
        optimizer.zero_grad()
        F.cross_entropy(model(images[known[batch]]), labels[known[batch]]).backward()
        optimizer.step()

# %%
# Two posteriors
# --------------
# The backend computes the Kronecker factors, and the Jacobians of the outputs that predictions need.  Everything else is the
# same.  Held-out images choose the width of the prior.


def rotated(images: Tensor, angle: float) -> Tensor:
    """The images, N 1 H W, rotated by an angle in degrees."""
    a = math.radians(angle)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0]])
    grid = F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def nll(p: Tensor, y: Tensor) -> Tensor:
    """Of all held-out images.  laplace-torch 0.3's own loss keeps adding to the sums of the priors before."""
    return F.nll_loss(p.log(), y)


data, others = (DataLoader(TensorDataset(images[own], labels[own]), batch_size=100) for own in (known, held_out))
angles = torch.linspace(0, 180, options.angles).tolist()
turned = [rotated(images[test], angle) for angle in angles]
said = {"the network alone": torch.stack([model(x).softmax(1).detach() for x in turned])}
search = {"log_prior_prec_min": 0, "log_prior_prec_max": 3, "grid_size": 7, "loss": nll, "val_loader": others}
print(f"{'':26}{'prior precision':>17}{'log marginal likelihood':>25}")
for name, backend in {"laplace-torch's backend": CurvlinopsGGN, "autograd_hacks": AutogradHacksGGN}.items():
    how = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": backend}
    posterior = Laplace(copy.deepcopy(model), "classification", **how)
    posterior.fit(data)
    posterior.optimize_prior_precision(method="gridsearch", link_approx="probit", **search)
    parts = [[posterior(x, link_approx="probit").detach() for x in own.split(250)] for own in tqdm(turned, desc=name)]
    said[name] = torch.stack([torch.cat(own) for own in parts])
    prior, likelihood = float(posterior.prior_precision.mean()), float(posterior.log_marginal_likelihood())
    print(f"{name:26}{prior:17.2f}{likelihood:25.3f}")
alone, theirs, ours = said.values()
print(f"the furthest that a probability is from the other backend's: {(ours - theirs).abs().max():.0e}")
torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)

# %%
# Is it right as often as it says?
# --------------------------------
# If the model is 70 % sure of some images, it should be right about 70 % of them.  For slightly rotated digits the network
# alone is much too sure, and the posterior less so.  For digits on their side both are too sure: the network takes nearly
# all of them for fours, and a posterior over its weights cannot correct that.

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
accuracy = (ours.argmax(2) == labels[test]).float().mean(1)
for (name, each), marker, color in zip(said.items(), ("s-", "o", "-"), ("tab:gray", "crimson", "tab:blue")):
    confidence = each.amax(2).mean(1)
    print(f"{name:26} mean confidence {confidence[0]:.3f} for upright images, accuracy {accuracy[0]:.3f}")
    axes.plot(angles, confidence, marker, color=color, label=f"confidence, {name}")
axes.plot(angles, accuracy, "--", color="tab:green", label="accuracy")
axes.set(xlabel="rotated by, degrees", ylabel="mean confidence, accuracy", ylim=(0, 1.05))
figure.legend(loc="outside upper center", ncols=2, fontsize=10)
plt.show()
