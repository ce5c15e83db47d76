"""
Learn to reweight
=================

40 % of the labels are wrong, and 50 images have been looked at by someone.  Ren et al. 2018 (arXiv:1803.09050) give
each image of a batch the weight that makes the step best for the clean ones: how far its gradient points along theirs,
and nothing where it points away.  They differentiate through the update; the result is an inner product, ``dot``. ::

    python docs/examples/learning_to_reweight.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/learning_to_reweight.png'

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import command_line, furthest, handwritten_digits, panels, save, seconds_of, small_cnn, tqdm, with_wrong_labels
from torch import Tensor
from torch.func import functional_call

import autograd_hacks

NOISE = 0.4  # the share of labels that are drawn anew, all of them wrong
CLEAN, NOISY = 50, 1000  # images that are looked at, and that are not; the rest are for the test

options = command_line(
    batch_size=(100, "images in a batch"),
    epochs=(80, "rounds through the images"),
)
images, true = handwritten_digits()
torch.manual_seed(options.seed)
order = torch.randperm(len(images))
clean, noisy, test = order.split([CLEAN, NOISY, len(order) - CLEAN - NOISY])
given = true.clone()
given[noisy] = with_wrong_labels(true[noisy], NOISE, options.seed)
wrong = (given != true)[noisy]


def losses(model: nn.Module, own: Tensor) -> Tensor:
    return F.cross_entropy(model(images[own]), given[own], reduction="none")


# %%
# The weights
# -----------
# How much a little more weight of each image lowers the clean images' loss, N: by inner products of gradients, and as Ren
# et al. have it, by a step with weights of zero, and the clean loss's gradient by these.


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
    """Sets ``.grad``, and returns the weights: they add up to 1, none is below 0."""
    helps, grads = ours(model, batch)
    w = helps.clamp(min=0) / helps.clamp(min=0).sum().clamp(min=1e-12)
    for name, update in grads.weighted_sum(w).items():
        model.get_parameter(name).grad = update
    return w


hooked, plain, batch = small_cnn(options.seed), small_cnn(options.seed), noisy[: options.batch_size]
autograd_hacks.add_hooks(hooked, param_grad=False)
expected, found = through_the_update(plain, batch), ours(hooked, batch)[0]
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
apart = furthest([found], [expected]) / float(expected.abs().max())
print(f"{len(batch)} weights: the furthest from autograd's {apart:.0e} of the largest")
ways = {
    "autograd through the update": lambda: (through_the_update(plain, batch).clamp(min=0) @ losses(plain, batch)).backward(),
    "autograd_hacks' dot": lambda: our_step(hooked, batch),
}
for name, seconds in seconds_of(ways).items():
    print(f"{name:30}{1e3 * seconds:8.1f} ms for weights and gradient")

# %%
# Train, and see
# --------------
# Plain training has the clean images among its own; otherwise both are the same.  Both shorten long steps: the weighted one
# diverges without.


def train(model: nn.Module, reweighted: bool) -> tuple[list[float], Tensor]:
    """The accuracy after each epoch; and each image's mean weight, 1 being a batch's mean."""
    known = noisy if reweighted else torch.cat([noisy, clean])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accuracies, weights = [], torch.zeros(len(images))
    for _ in tqdm(range(options.epochs), desc="reweighted" if reweighted else "plain", unit="epoch"):
        for batch in known[torch.randperm(len(known))].split(options.batch_size):
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
# What became of it
# -----------------
# The weights keep the wrong labels from being learned.  Plain training gets as far, or further, at its best epoch, but only
# who has a test set to choose it by knows which that is.

figure, (left, beside) = panels(figsize=(11, 4))
epochs = range(1, options.epochs + 1)
left.plot(epochs, usual, label="plain", color="tab:gray")
left.plot(epochs, learned, label=f"reweighted, by {CLEAN} clean images", color="tab:blue")
left.plot(best + 1, usual[best], "*", color="crimson", markersize=14, label="plain's best epoch, chosen on the test set")
left.set(xlabel="epoch", ylabel="test accuracy", title=f"{NOISE:.0%} of the labels are wrong")
left.legend(loc="lower right")
for label, those, color in (("right label", ~wrong, "tab:blue"), ("wrong label", wrong, "crimson")):
    beside.hist(weights[those].clamp(max=4).numpy(), bins=40, range=(0, 4), alpha=0.6, label=label, color=color)
beside.set(xlabel="mean weight of an image (4 stands for more)", ylabel="images", title="the weights")
beside.legend()
save(figure, options, "learning_to_reweight.png")
