"""
How large a batch?
==================

A batch's mean gradient is the gradient that one is after, and noise, which falls as one over the batch size.  They are
equal at the *gradient noise scale*: batches much smaller are noise in the main, much larger ones hardly better
(McCandlish et al. 2018).  It grows as training goes on, and layers differ.  A callback measures it on the way. ::

    python docs/examples/batch_size.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/batch_size.png'

import copy
import math
import statistics

import theirs
import torch
import torch.nn as nn
from common import command_line, handwritten_digits, panels, peer, save, small_cnn, tqdm

import autograd_hacks
from autograd_hacks.integrations.steps import Steps

options = command_line(
    batch_size=(64, "images in a batch"),
    epochs=(12, "rounds through the images"),
    draws=(3200, "images for each point of the picture, and a 160th of that in batches"),
)

# %%
# Train, with the callback
# ------------------------
# ``Steps`` is what the callbacks for Hugging Face's Trainer, Lightning, accelerate and skorch are made of
# (:doc:`/integrations/index`).  Here a plain loop calls it: it shows when, and keeps the model to look at again.

images, labels = handwritten_digits()
model = small_cnn(options.seed)
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
steps = Steps(per_parameter=True, smoothing=0.95)
whole = len(images) // options.batch_size * options.batch_size  # a small last batch would blur the running means
batches = [batch for _ in range(options.epochs) for batch in torch.randperm(len(images))[:whole].split(options.batch_size)]
moments: dict[int, nn.Module] = {}  # what the model was after some steps, to look at again
steps.attach(model)
for number, batch in enumerate(tqdm(batches, desc="training", unit="batch"), start=1):
    optimizer.zero_grad()
    loss(model(images[batch]), labels[batch]).backward()
    steps.read()
    optimizer.step()
    if number in {round(len(batches) * share) for share in (0.1, 0.4, 1)}:
        moments[number] = copy.deepcopy(model)
steps.detach()

# %%
# Held to BackPACK, and to batches themselves
# -------------------------------------------
# BackPACK has the variance of each number's gradient, whose sum is the noise.  And the squared length of the gradients of
# drawn batches, by autograd, falls with their size as noise and signal say: on the right.  On the left is what the
# callback saw.


def square(model: nn.Module, size: int) -> float:
    """|g|², by autograd, of the mean gradients of drawn batches; its mean."""
    draws = [torch.randint(len(images), (size,)) for _ in range(options.draws // 160 + options.draws // size)]
    found = [torch.autograd.grad(loss(model(images[own]), labels[own]), list(model.parameters())) for own in draws]
    return statistics.mean(sum(float(g.square().sum()) for g in own) for own in found)


has_backpack = peer("backpack", "backpack-for-pytorch") is not None
figure, (left, right) = panels()
sizes = [2**k for k in range(2, 10)]
print(f"{'after steps':>12}{'tr Σ, ours':>13}{'BackPACK':>13}{'apart':>10}{'noise scale':>13}{'the run said':>14}")
for color, (number, then) in zip(("C0", "C1", "C2"), moments.items()):
    backpack = theirs.backpack_noise(then, images, labels) if has_backpack else math.nan
    right.loglog(sizes, [square(then, size) for size in sizes], "o", color=color, label=f"after {number} steps, by autograd")
    with autograd_hacks.add_hooks(then, param_grad=False):
        loss(then(images), labels).backward()
        noise, signal = map(float, autograd_hacks.per_sample_grads(then).noise_scale())
    right.loglog(sizes, [signal + noise / size for size in sizes], color=color, label="|G|² + tr Σ / B")
    right.axvline(noise / signal, color=color, linestyle=":")
    apart, said = abs(noise / backpack - 1), steps.history[number - 1]["grads/noise_scale"]
    print(f"{number:12}{noise:13.5g}{backpack:13.5g}{apart:10.1e}{noise / signal:13.1f}{said:14.1f}")
    assert math.isnan(apart) or apart < 1e-4

for name in (name for name, p in model.named_parameters() if p.ndim > 1):  # weights, each a layer's
    left.semilogy([step[f"grads/noise_scale/{name}"] for step in steps.history], linewidth=1, label=f"layer {name}")
left.semilogy([step["grads/noise_scale"] for step in steps.history], color="black", linewidth=2, label="all")
left.axhline(options.batch_size, color="gray", linestyle=":", label="this run's batch size")
left.set(xlabel="steps", ylabel="noise scale, in images")
left.legend(fontsize=8)
right.set(xlabel="batch size B, in images (dotted: the noise scale)", ylabel="squared length of a batch's gradient")
right.legend(fontsize=8, loc="upper right")
save(figure, options, "batch_size.png")
