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

import copy
import time
import warnings

from common import command_line, furthest, handwritten_digits, needs, panels, reliability, rotated, save, tqdm, train

warnings.simplefilter("ignore")  # laplace-torch's and its other backends'
needs("laplace", "laplace")

import torch
import torch.nn as nn
import torch.nn.functional as F
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from autograd_hacks.integrations.laplace import AutogradHacksGGN

HELD_OUT = 250  # images

options = command_line(
    train=(100, "images to learn"),
    epochs=(200, "rounds through them"),
    test=(500, "others to be asked about"),
    angles=(9, "up to half a turn, by which these are rotated"),
)
torch.manual_seed(options.seed)

# %%
# A network that is too sure
# --------------------------

images, labels = handwritten_digits()
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
known, held_out, test = order[: options.train], order[options.train :][:HELD_OUT], order[-options.test :]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
train(model, torch.optim.Adam(model.parameters(), lr=1e-2), images[known], labels[known], options.epochs, batch_size=50)

# %%
# Two posteriors
# --------------
# The same but for who makes the factors, and the outputs' Jacobians that predictions need.  Images that are held out choose
# how narrow the prior is.

data, others = (DataLoader(TensorDataset(images[own], labels[own]), batch_size=100) for own in (known, held_out))
angles = torch.linspace(0, 180, options.angles).tolist()
turned = [rotated(images[test], angle) for angle in angles]


def nll(p: Tensor, y: Tensor) -> Tensor:
    """Of all held-out images; laplace-torch 0.3's own goes on with the sums of the priors before."""
    return F.nll_loss(p.log(), y)


said = {"the network alone": torch.stack([model(x).softmax(1).detach() for x in turned])}
search = {"log_prior_prec_min": 0, "log_prior_prec_max": 3, "grid_size": 7, "loss": nll, "val_loader": others}
print(f"{'':26}{'fit s':>8}{'predict s':>11}{'prior precision':>17}{'log marginal likelihood':>25}")
for name, backend in {"laplace-torch's backend": CurvlinopsGGN, "autograd_hacks": AutogradHacksGGN}.items():
    own = copy.deepcopy(model)
    posterior = Laplace(own, "classification", subset_of_weights="all", hessian_structure="kron", backend=backend)
    start = time.perf_counter()
    posterior.fit(data)
    fitted = time.perf_counter()
    posterior.optimize_prior_precision(method="gridsearch", link_approx="probit", **search)
    before = time.perf_counter()
    parts = [[posterior(x, link_approx="probit").detach() for x in own.split(250)] for own in tqdm(turned, desc=name)]
    said[name] = torch.stack([torch.cat(own) for own in parts])
    prior, likelihood = float(posterior.prior_precision.mean()), float(posterior.log_marginal_likelihood())
    print(f"{name:26}{fitted - start:8.2f}{time.perf_counter() - before:11.2f}{prior:17.2f}{likelihood:25.3f}")
alone, theirs, ours = said.values()
print(f"the furthest that a probability is from the other backend's: {furthest(ours, theirs):.0e}")
torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)

# %%
# Is it right as often as it says?
# --------------------------------
# Of images about which the model is 70 % sure it should know 70 %: of upright ones, and with those turned by up to 45°.

figure, (left, right) = panels()
tilted = sum(angle <= 46 for angle in angles)
for (name, each), marker, color in zip(said.items(), ("s-", "o", "-"), ("tab:gray", "crimson", "tab:blue")):
    bins, error = reliability(each[:tilted].flatten(0, 1), labels[test].repeat(tilted))
    print(f"{name:26} calibration error: {reliability(each[0], labels[test])[1]:.3f} upright, {error:.3f} up to 45°")
    left.plot(*bins, marker, color=color, label=f"{name}: error {error:.3f}")
    right.plot(angles, torch.special.entr(each).sum(2).mean(1), marker, color=color, label=f"entropy, {name}")
right.plot(angles, (ours.argmax(2) == labels[test]).float().mean(1), "--", color="tab:green", label="accuracy")
left.plot([0.3, 1], [0.3, 1], ":", color="black", label="as it should be")
left.set(xlabel="confidence", ylabel="accuracy", title=f"{len(test)} images not seen before, turned by up to 45°")
right.set(xlabel="turned by, degrees", ylabel="mean entropy, in nats; accuracy", title="how unsure it is", ylim=(0, 1.5))
left.legend()
right.legend()
save(figure, options, "uncertainty.png")

# %%
# Of digits that are a little askew the network alone is much too sure, and the posterior less so.  Lying on their side
# nearly all are fours to it, and it is sure: a posterior about the weights that it has found does not mend that.
