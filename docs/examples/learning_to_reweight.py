"""
Learn to reweight
=================

40 % of the labels are wrong, and 50 images have been looked at by someone.  Ren et al. 2018 (arXiv:1803.09050) give
each image of a batch the weight that makes the step best for the clean ones: how far its gradient points along theirs,
and nothing where it points away.  They differentiate through the update; the result is an inner product, ``dot``. ::

    python docs/examples/learning_to_reweight.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/learning_to_reweight.png'

from __future__ import annotations

import statistics
import time

from common import command_line, handwritten_digits, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

import autograd_hacks

NOISE = 0.4  # the share of labels that are drawn anew, all of them wrong
CLEAN, NOISY = 50, 1000  # images that are looked at, and that are not; the rest are for the test

parser = command_line(
    "Trains on labels of which 40 % are wrong, as they are and with learned weights.",
    batch_size=(100, "images in a batch"),
    epochs=(80, "rounds through the images"),
)
options = parser.parse_args()

# %%
# Labels, of which some are wrong
# -------------------------------

images, true = handwritten_digits()
draws = torch.Generator().manual_seed(options.seed)
order = torch.randperm(len(images), generator=draws)
clean, noisy, test = order.split([CLEAN, NOISY, len(order) - CLEAN - NOISY])
chosen = noisy[: round(NOISE * NOISY)]
given = true.clone()
given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
wrong = given != true

# %%
# The weights
# -----------


def small_net() -> nn.Sequential:
    torch.manual_seed(options.seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def clean_gradient(model: nn.Module) -> dict[str, Tensor]:
    with autograd_hacks.pause_hooks():
        loss = F.cross_entropy(model(images[clean]), given[clean])
        return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))


def ours(model: nn.Module, batch: Tensor) -> tuple[Tensor, autograd_hacks.PerSampleGrads]:
    """How much a little more weight of each image lowers the clean images' loss, N."""
    autograd_hacks.backward(F.cross_entropy(model(images[batch]), given[batch], reduction="none"), "sum")
    grads = autograd_hacks.per_sample_grads(model)
    return grads.dot(clean_gradient(model)), grads


def through_the_update(model: nn.Module, batch: Tensor) -> Tensor:
    """The same as Ren et al. have it: a step with weights of zero, and the clean loss's gradient by these."""
    with autograd_hacks.pause_hooks():
        weights = torch.zeros(len(batch), requires_grad=True)
        loss = weights @ F.cross_entropy(model(images[batch]), given[batch], reduction="none")
        steps = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        moved = {name: p - step for (name, p), step in zip(model.named_parameters(), steps)}
        after = F.cross_entropy(functional_call(model, moved, images[clean]), given[clean])
        return -torch.autograd.grad(after, weights)[0]


def normalised(helps: Tensor) -> Tensor:
    """Weights that add up to 1, none below 0."""
    return helps.clamp(min=0) / helps.clamp(min=0).sum().clamp(min=1e-12)


def our_step(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    helps, grads = ours(model, batch)
    w = normalised(helps)
    return w, grads.weighted_sum(w)


def their_step(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    w = normalised(through_the_update(model, batch))
    with autograd_hacks.pause_hooks():
        loss = w @ F.cross_entropy(model(images[batch]), given[batch], reduction="none")
        return w, dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))


# %%
# Train, and see
# --------------
# Plain training has the clean images among its own; otherwise both are the same.  Both shorten long steps: the weighted one
# diverges without.


def train(reweighted: bool) -> tuple[list[float], Tensor]:
    """The accuracy after each epoch; and each image's mean weight, 1 being a batch's mean."""
    model, accuracies, weights = small_net(), [], torch.zeros(len(images))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if reweighted:
        autograd_hacks.add_hooks(model, param_grad=False)
    for _ in tqdm(range(options.epochs), desc="reweighted" if reweighted else "plain", unit="epoch"):
        known = noisy if reweighted else torch.cat([noisy, clean])
        for batch in known[torch.randperm(len(known), generator=draws)].split(options.batch_size):
            if reweighted:
                w, updates = our_step(model, batch)
                weights[batch] += w * len(batch) / options.epochs
                for name, update in updates.items():
                    model.get_parameter(name).grad = update
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), given[batch]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad(), autograd_hacks.pause_hooks():
            accuracies.append(float((model(images[test]).argmax(1) == true[test]).float().mean()))
    return accuracies, weights


model, batch = small_net(), noisy[: options.batch_size]
seconds: dict[str, list[float]] = {"autograd through the update": [], "autograd_hacks' dot": []}
with autograd_hacks.add_hooks(model, param_grad=False):
    for _ in range(12):
        for name, way in zip(seconds, (their_step, our_step)):
            start = time.perf_counter()
            way(model, batch)
            seconds[name].append(time.perf_counter() - start)
    expected, found = through_the_update(model, batch), ours(model, batch)[0]
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
furthest = (found - expected).abs().max() / expected.abs().max()
print(f"{len(batch)} weights: the furthest from autograd's {furthest:.0e} of the largest")
for name, taken in seconds.items():
    print(f"{name:30}{1e3 * statistics.median(taken):8.1f} ms for weights and step")
plain, (learned, weights) = train(False)[0], train(True)
best = max(range(len(plain)), key=plain.__getitem__)
print(f"accuracy on {len(test)} images: reweighted {learned[-1]:.3f}; plain {plain[-1]:.3f} at the end")
print(f"  and {plain[best]:.3f} at its best epoch, {best + 1}, chosen on these images")
right, bad = (float(weights[noisy][those].mean()) for those in (~wrong[noisy], wrong[noisy]))
print(f"mean weight: {right:.2f} of right labels, {bad:.2f} of wrong ones")

# %%
# What became of it
# -----------------
# The weights keep the wrong labels from being learned.  Plain training gets as far at its best epoch, but only who has
# a test set to choose it by knows which that is.

figure, (left, beside) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
epochs = range(1, options.epochs + 1)
left.plot(epochs, plain, label="plain", color="tab:gray")
left.plot(epochs, learned, label=f"reweighted, by {CLEAN} clean images", color="tab:blue")
left.plot(best + 1, plain[best], "*", color="crimson", markersize=14, label="plain's best epoch, chosen on the test set")
left.set(xlabel="epoch", ylabel="test accuracy", title=f"{NOISE:.0%} of the labels are wrong")
left.legend(loc="lower right")
left.grid(alpha=0.3)
for name, those, color in (("right label", ~wrong[noisy], "tab:blue"), ("wrong label", wrong[noisy], "crimson")):
    beside.hist(weights[noisy][those].clamp(max=4).numpy(), bins=40, range=(0, 4), alpha=0.6, label=name, color=color)
beside.set(xlabel="mean weight of an image (4 stands for more)", ylabel="images", title="the weights")
beside.legend()
save(figure, options, "learning_to_reweight.png")
