"""
Reweighting: learn despite wrong labels
=======================================

40 % of the labels are wrong, and the labels of 50 images have been checked.  Ren et al. 2018 (arXiv:1803.09050) give each
image of a batch the weight that makes the step best for the checked images: how far its gradient points along theirs, and
zero if it points away.  They differentiate through the update.  The result is an inner product, ``dot``. ::

    pip install matplotlib scikit-learn tqdm
    python learning_to_reweight.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/learning_to_reweight.png'

import argparse
import copy

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

import autograd_hacks

torch.set_num_threads(1)  # a network this small is slower with more threads
WRONG, BATCH = 0.4, 100  # the share of wrong labels; images in a batch
CLEAN, NOISY = 50, 1000  # images with checked labels, and without; the rest are for the test
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=80, help="rounds through the images")
options = parser.parse_args()

digits, draws = load_digits(), torch.Generator().manual_seed(0)
images, true = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
torch.manual_seed(0)
order = torch.randperm(len(images))
clean, noisy, test = order.split([CLEAN, NOISY, len(order) - CLEAN - NOISY])
chosen = noisy[torch.randperm(NOISY, generator=draws)[: round(WRONG * NOISY)]]
given = true.clone()
given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
wrong = (given != true)[noisy]

torch.manual_seed(0)
convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
plain = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
hooked = copy.deepcopy(plain)
autograd_hacks.add_hooks(hooked, param_grad=False)


def losses(model: nn.Module, own: Tensor) -> Tensor:
    return F.cross_entropy(model(images[own]), given[own], reduction="none")


# %%
# The weights
# -----------
# How far a little more weight for each image would bring the clean images' loss down, N: by inner products of gradients,
# and as in the paper, where a step with weights of zero is followed by the clean loss's gradient with respect to the
# weights.


def ours(model: nn.Module, batch: Tensor) -> tuple[Tensor, autograd_hacks.PerSampleGrads]:
    autograd_hacks.backward(losses(model, batch), "sum")
    grads = autograd_hacks.per_sample_grads(model)
    with autograd_hacks.pause_hooks():
        wanted = torch.autograd.grad(losses(model, clean).mean(), list(model.parameters()))
    return grads.dot(dict(zip(dict(model.named_parameters()), wanted))), grads


def through_the_update(model: nn.Module, batch: Tensor) -> Tensor:
    weights = torch.zeros(len(batch), requires_grad=True)
    steps = torch.autograd.grad(weights @ losses(model, batch), list(model.parameters()), create_graph=True)
    moved = {name: p - step for (name, p), step in zip(model.named_parameters(), steps)}
    after = F.cross_entropy(functional_call(model, moved, images[clean]), given[clean])
    return -torch.autograd.grad(after, weights)[0]


def our_step(model: nn.Module, batch: Tensor) -> Tensor:
    """Sets ``.grad``, and returns the weights: none is below 0, and their sum is 1."""
    helps, grads = ours(model, batch)
    w = helps.clamp(min=0) / helps.clamp(min=0).sum().clamp(min=1e-12)
    for name, update in grads.weighted_sum(w).items():
        model.get_parameter(name).grad = update
    return w


found, expected = ours(hooked, noisy[:BATCH])[0], through_the_update(plain, noisy[:BATCH])
apart = (found - expected).abs().max() / expected.abs().max()
print(f"{BATCH} weights: the furthest from autograd's {apart:.0e} of the largest")
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

# %%
# Train
# -----
# Plain training also has the clean images.  Long steps are shortened in both trainings, because the weighted one would
# diverge.


def train(model: nn.Module, reweighted: bool) -> tuple[list[float], Tensor]:
    """The accuracy after each epoch; and each image's mean weight, as a multiple of the batch's mean."""
    known = noisy if reweighted else torch.cat([noisy, clean])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accuracies, weights = [], torch.zeros(len(images))
    for _ in tqdm(range(options.epochs), desc="reweighted" if reweighted else "plain", unit="epoch"):
        for batch in known[torch.randperm(len(known))].split(BATCH):
            if reweighted:
                weights[batch] += our_step(model, batch) * len(batch) / options.epochs
            else:
                optimizer.zero_grad()
                losses(model, batch).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad(), autograd_hacks.pause_hooks():
            accuracies.append(float((model(images[test]).argmax(1) == true[test]).float().mean()))
    return accuracies, weights[noisy]


(usual, _), (learned, weights) = train(plain, False), train(hooked, True)
best = usual.index(max(usual))
print(f"accuracy on {len(test)} images: reweighted {learned[-1]:.3f}; plain {usual[-1]:.3f} at the end")
print(f"  and {usual[best]:.3f} at its best epoch, {best + 1}, chosen on these images")
print(f"mean weight: {weights[~wrong].mean():.2f} of right labels, {weights[wrong].mean():.2f} of wrong ones")

# %%
# The accuracy
# ------------
# The weights keep the wrong labels from being learned.  Plain training is as good, or better, at its best epoch, but it
# takes a test set to know which epoch that is.

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
epochs = range(1, options.epochs + 1)
axes.plot(epochs, usual, label="plain", color="tab:gray")
axes.plot(best + 1, usual[best], "*", color="crimson", markersize=14, label="plain, best epoch on the test set")
axes.plot(epochs, learned, label=f"reweighted, by {CLEAN} clean images", color="tab:blue")
axes.set(xlabel="epoch", ylabel="test accuracy")
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
plt.show()
