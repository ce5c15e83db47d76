"""
What was each image worth?
==========================

In-run data Shapley (Wang et al. 2024, arXiv:2406.11011): each step of a training brings the loss of held-out images down,
and the Shapley value says how much of that is owed to each image of the batch.  To first and second order it follows from
inner products of gradients that one backward pass has anyway.  Some labels are wrong: their images are worth the least. ::

    python docs/examples/in_run_shapley.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/in_run_shapley.png'

from collections.abc import Callable
from itertools import combinations
from math import comb

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import command_line, furthest, handwritten_digits, panels, save, small_cnn, tqdm, with_wrong_labels
from torch import Tensor

import autograd_hacks

BATCH, RATE = 64, 0.2  # images of a step; the learning rate
options = command_line(
    epochs=(20, "rounds through the images"), wrong=(0.15, "share of wrong labels"), held=(16, "held-out images in a step")
)

# %%
# A step that says what its samples were worth
# --------------------------------------------
# A step θ - r Σ gₙ over samples S changes the held-out loss by U(S) = -r ⟨Σ gₙ, h⟩ + r²/2 (Σ gₙ)ᵀ H (Σ gₙ) + ..., with its
# gradient h and Hessian H.  Of the first term, a sum over samples, each sample's Shapley value is its own part; of the
# second, a sum over pairs, half of each of its pairs: r²/2 gₙᵀ H Σ gₘ.  Here values are how far the loss goes *down*, -U.
# Training samples and held-out ones go through the model together.


Loss = Callable[[Tensor, Tensor], Tensor]  # of each sample, from outputs and targets


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def step(
    model: nn.Module, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor, rate: float, held: Loss = loss_of
) -> Tensor:
    """A step by rate · Σ gₙ.  Returns what each sample was worth, to first order and to second, 2 N.  held: losses"""
    n, parameters, out = len(x), dict(model.named_parameters()), model(torch.cat([x, held_x]))
    autograd_hacks.backward(torch.cat([loss_of(out[:n], y), held(out[n:], held_y)]), "sum")
    rows = autograd_hacks.per_sample_grads(model)
    batch, others = rows.select(slice(n)), rows.select(slice(n, None))
    total, h = batch.weighted_sum(out.new_ones(n)), others.weighted_sum(out.new_ones(len(held_x)) / len(held_x))
    with autograd_hacks.pause_hooks():  # H Σ gₘ, the derivative of h along Σ gₘ
        slopes = torch.func.grad(lambda own: held(torch.func.functional_call(model, own, (held_x,)), held_y).mean())
        bent = torch.func.jvp(slopes, ({name: p.detach() for name, p in parameters.items()},), (total,))[1]
    first = rate * batch.dot(h)
    with torch.no_grad():
        for name, p in parameters.items():
            p.sub_(rate * total[name])
    return torch.stack([first, first - rate**2 / 2 * batch.dot(bent)])


# %%
# Held to the definition
# ----------------------
# The mean of what a sample adds to each subset of the others, each subset a step of its own: exact to first order if the
# held-out loss is linear in the weights, to second if it is quadratic, and near to both for cross entropy.

torch.manual_seed(options.seed)
x, y, held_x, c = torch.randn(5, 4).double(), torch.randint(3, (5,)), torch.randn(3, 4).double(), torch.randn(3, 3).double()
flat, deep = nn.Linear(4, 3).double(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
subsets = [chosen for size in range(6) for chosen in combinations(range(5), size)]
print("furthest from all subsets of a step, of the largest value     first order   second order")
for kind, model, held, to in [
    ("a linear loss, a linear model", flat, lambda out, c: (out * c).sum(1), c),
    ("a quadratic loss, a linear model", flat, lambda out, c: (out - c).square().sum(1), c),
    ("cross entropy, a network", deep, loss_of, y[:3]),
]:
    g = [torch.autograd.grad(loss_of(model(x[k : k + 1]), y[k : k + 1])[0], list(model.parameters())) for k in range(5)]
    after = {}
    for chosen in subsets:
        moved = {m: p - RATE * sum(g[k][i] for k in chosen) for i, (m, p) in enumerate(model.named_parameters())}
        after[chosen] = held(torch.func.functional_call(model, moved, (held_x,)), to).mean().item()
    expected = torch.zeros(5).double()
    for k, chosen in [(k, chosen) for k in range(5) for chosen in subsets if k not in chosen]:
        expected[k] += (after[chosen] - after[tuple(sorted((*chosen, k)))]) / (5 * comb(4, len(chosen)))
    with autograd_hacks.add_hooks(model, param_grad=False):
        errors = (step(model, x, y, held_x, to, RATE, held) - expected).abs().amax(1) / expected.abs().max()
    print(f"{kind:56}{errors[0]:16.1e}{errors[1]:15.1e}")

# %%
# A training that adds values up
# ------------------------------
# Where first order is enough, the backward pass has it by itself, and frees each layer on the way: ``during_backward``.

images, true = handwritten_digits()
draws = torch.Generator().manual_seed(options.seed)
held_out, learnt = torch.randperm(len(images), generator=draws).split([100, len(images) - 100])
labels = with_wrong_labels(true[learnt], options.wrong, options.seed)
is_wrong, worth, model = labels != true[learnt], torch.zeros(2, len(learnt)), small_cnn(options.seed)
with autograd_hacks.add_hooks(model, param_grad=False):
    for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
        for own in torch.randperm(len(learnt), generator=draws).split(BATCH):
            seen = held_out[torch.randperm(len(held_out), generator=draws)[: options.held]]
            given = images[learnt[own]], labels[own], images[seen], true[seen], RATE / len(own)
            worth[:, own] += step(model, *given)

    is_held = torch.arange(len(own) + len(seen)) >= len(own)
    with autograd_hacks.during_backward(model, dot=is_held / len(seen), weights=(~is_held).float()) as found:
        autograd_hacks.backward(loss_of(model(torch.cat([given[0], given[2]])), torch.cat([given[1], given[3]])), "sum")
    ours = found.dot[: len(own)] * given[4]  # and .grad is that of the batch, without the held-out images
    apart = furthest([ours], [step(model, *given)[0]]) / float(ours.abs().max())
print(f"\nfirst order by during_backward is the same to {apart:.1e}")

# %%
# Wrong labels are worth the least
# --------------------------------

figure, (left, right) = panels()
shown, share = worth[1].clamp(*worth[1].quantile(torch.tensor([0.005, 0.995])).tolist()), torch.linspace(0, 1, len(learnt))
for group, color, label in ((~is_wrong, "C0", "right labels"), (is_wrong, "crimson", "wrong labels")):
    left.hist(shown[group], torch.linspace(float(shown.min()), float(shown.max()), 60), color=color, alpha=0.7, label=label)
left.set(xlabel="how far the image has brought the held-out loss down", ylabel="images", yscale="symlog")
print(f"{is_wrong.sum()} of {len(learnt)} labels are wrong; of as many images that are worth least")
for name, values in {"first order": worth[0], "second order": worth[1]}.items():
    hits, sums = is_wrong[values.argsort()].float().cumsum(0), (values[is_wrong].sum(), values[~is_wrong].sum())
    right.plot(share, hits / is_wrong.sum(), label=name)
    print(
        f"{name:13}{hits[is_wrong.sum() - 1]:4.0f} have one; the wrong add up to {sums[0]:+.2f}, the right to {sums[1]:+.2f}"
    )
right.plot(share, share, ":", color="gray", label="by chance")
right.set(xlabel="share of the images, from those worth least", ylabel="share of the wrong labels among them")
_ = left.legend(), right.legend()
save(figure, options, "in_run_shapley.png")
