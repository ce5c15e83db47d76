"""
Noise scale: how large a batch?
===============================

A batch's mean gradient is the gradient that you want, plus noise that falls as one over the batch size.  At the *gradient
noise scale* both are equally large: much smaller batches are mostly noise, and much larger ones are not much better
(McCandlish et al. 2018).  The noise scale grows during training, and differs between layers.  A callback measures it. ::

    pip install matplotlib scikit-learn tqdm
    python batch_size.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/batch_size.png'

import argparse
import copy
import math
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from tqdm import tqdm

import autograd_hacks
from autograd_hacks.integrations.steps import Steps

torch.set_num_threads(1)  # a network this small is slower with more threads
BATCH = 64
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=12, help="rounds through the images")
parser.add_argument("--draws", type=int, default=200, help="batches that the estimate is compared with")
options = parser.parse_args()

# %%
# Train, with the callback
# ------------------------
# The callbacks for Hugging Face's Trainer and Lightning consist of ``Steps``
# (:doc:`/integrations/index`).  Here a plain loop calls it.  Three copies of the model are kept for the comparison below.

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
torch.manual_seed(0)
convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
steps = Steps(per_parameter=True, smoothing=0.95, loss_type="mean")
whole = len(images) // BATCH * BATCH  # a small last batch would blur the running means
batches = [batch for _ in range(options.epochs) for batch in torch.randperm(len(images))[:whole].split(BATCH)]
copies: dict[int, nn.Module] = {}  # by the number of steps
steps.attach(model)
for number, batch in enumerate(tqdm(batches, desc="training", unit="batch"), start=1):
    optimizer.zero_grad()
    loss(model(images[batch]), labels[batch]).backward()
    steps.read()
    optimizer.step()
    if number in {round(len(batches) * share) for share in (0.1, 0.4, 1)}:
        copies[number] = copy.deepcopy(model)
steps.detach()

# %%
# Compared with BackPACK, and with batches
# ----------------------------------------
# BackPACK computes the variance of each entry of the gradient, and the sum of the variances, tr Σ, is the noise.  For drawn
# batches of B images the mean squared length of the gradients, by autograd, should be ``|G|² + tr Σ / B``.

try:
    import backpack
    from backpack.extensions import Variance
except ImportError:
    print("not compared with BackPACK: pip install backpack-for-pytorch")
    backpack = None


def noise_by_backpack(model: nn.Module) -> float:
    if backpack is None:
        return math.nan
    extended, criterion, n = backpack.extend(copy.deepcopy(model)), backpack.extend(nn.CrossEntropyLoss()), len(images)
    with backpack.backpack(Variance()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook")  # from BackPACK
        criterion(extended(images), labels).backward()
    # BackPACK's gradients are divided by n, and it divides their squares by n and not by n - 1.
    return float(sum(p.variance.sum() for p in extended.parameters())) * n**2 * n / (n - 1)


def square(model: nn.Module) -> float:
    """The mean squared length of the gradients of drawn batches of 16 images, by autograd."""
    total = 0.0
    for drawn in torch.randint(len(images), (options.draws, 16)):
        gradients = torch.autograd.grad(loss(model(images[drawn]), labels[drawn]), list(model.parameters()))
        total += sum(float(g.square().sum()) for g in gradients)
    return total / options.draws


columns = f"{'tr Σ, ours':>13}{'BackPACK':>13}{'apart':>10}{'noise scale':>13}{'the run said':>14}"
print(f"{'after steps':>12}{columns}{'batches / prediction':>23}")
for number, then in copies.items():
    with autograd_hacks.add_hooks(then, param_grad=False):
        autograd_hacks.backward(nn.functional.cross_entropy(then(images), labels, reduction="none"))
        noise, signal = map(float, autograd_hacks.per_sample_grads(then).noise_scale())
    theirs, said = noise_by_backpack(then), steps.history[number - 1]["grads/noise_scale"]
    apart, ratio = abs(noise / theirs - 1), square(then) / (signal + noise / 16)
    print(f"{number:12}{noise:13.5g}{theirs:13.5g}{apart:10.1e}{noise / signal:13.1f}{said:14.1f}{ratio:23.2f}")
    assert math.isnan(apart) or apart < 1e-4

# %%
# What the callback has seen
# --------------------------
# The noise scale of all parameters, and that of each layer's weight.

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
for name in (name for name, p in model.named_parameters() if p.ndim > 1):
    axes.semilogy([step[f"grads/noise_scale/{name}"] for step in steps.history], linewidth=1, label=f"layer {name[0]}")
axes.semilogy([step["grads/noise_scale"] for step in steps.history], color="black", linewidth=2, label="all")
axes.axhline(BATCH, color="gray", linestyle=":", label="this batch size")
axes.set(xlabel="steps", ylabel="noise scale, in images")
axes.legend()
plt.show()
