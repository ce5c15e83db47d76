"""
TrackStar: which sentence stated the fact?
==========================================

TrackStar (Chang et al. 2024, arXiv:2410.17413) finds the training text behind what a language model says.  Gradients are
taken in the optimizer's metric, projected, whitened by their second moments, and scaled to unit length.  A tiny GPT-2 reads
facts, and is asked for each.  The sentence that stated the fact should come first. ::

    pip install transformers matplotlib tqdm
    python trackstar.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/trackstar.png'

import copy
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from autograd_hacks import PerSampleGrads, add_hooks, over
from autograd_hacks.attribution import Metric

torch.set_num_threads(1)  # a network this small is slower with more threads

# %%
# The recipe
# ----------
# If Adam has seen no gradient for a number, such as the embedding of a token that is not in the training text, its factor is
# 1 / eps, and a question's gradient there dominates all its scores.  So ``only=`` leaves out the embeddings.  A larger eps
# would also help.


def whitening(own: Tensor, others: Tensor, mix: float, damping: float) -> Tensor:
    """R^-½, K K, for R = (1 - mix) × the second moment of ours + mix × that of others, both damped.  own: N K"""
    moments = [rows.mT @ rows / len(rows) for rows in (own, others)]
    eye = torch.eye(own.shape[1]).to(own)
    first, second = (moment + damping * moment.diagonal().mean() * eye for moment in moments)
    values, vectors = torch.linalg.eigh((1 - mix) * first + mix * second)
    return (vectors / values.sqrt()) @ vectors.mT


def trackstar(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    adam: Metric,
    losses: Callable[[nn.Module, Any], Tensor],
    rank: int = 8,
    mix: float = 0.5,
    damping: float = 0.1,
    only: Sequence[str] | None = None,
) -> Tensor:
    """cos(R^-½ G, R^-½ G′), D E, for G = Pᵀ A g Q of each parameter, with Adam's A = 1 / (√v̂ + eps)."""
    low = Metric.low_rank(model, rank)

    def projected(grads: PerSampleGrads) -> dict[str, Tensor]:
        rows = grads.preconditioned(adam).preconditioned(low).dense()
        return {name: own.flatten(1) for name, own in rows.items()}

    own, others = (over(model, data, losses, projected, only=only) for data in (train, queries))
    roots = {name: whitening(own[name], others[name], mix, damping) for name in own}
    units = [F.normalize(torch.cat([rows[name] @ roots[name] for name in roots], 1)) for rows in (own, others)]
    return units[0] @ units[1].mT


# %%
# Facts, and a model that has read them
# -------------------------------------
# The model reads a fact as "a boat anna has kept is red", and is asked for it as "the boat of anna has is red".  It has read
# other facts in this second form.

PEOPLE = ["anna", "ben", "carla", "david", "emma", "felix", "gina", "hugo", "ida", "jan"]
THINGS, COLORS = ["boat", "lamp", "coat", "door", "bird", "cup"], ["red", "green", "blue", "grey", "white", "black", "pink"]
draws = torch.Generator().manual_seed(0)
facts = [(who, thing) for who in PEOPLE for thing in THINGS]
facts = [facts[n] for n in torch.randperm(len(facts), generator=draws).tolist()]
colors = [COLORS[n] for n in torch.randint(len(COLORS), (len(facts),), generator=draws).tolist()]
known = sorted({*PEOPLE, *THINGS, *COLORS, "the", "of", "is", "has", "a", "kept"})


def tokens(sentences: list[str]) -> Tensor:
    return torch.tensor([[known.index(word) for word in sentence.split()] for sentence in sentences])


stated = tokens([f"a {thing} {who} has kept is {color}" for (who, thing), color in zip(facts, colors)])
asked = tokens([f"the {thing} of {who} has is {color}" for (who, thing), color in zip(facts, colors)])
read = torch.cat([stated, asked[30:]])  # the first 30 facts only as they were stated

torch.manual_seed(0)
config = GPT2Config(vocab_size=len(known), n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()


def losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Of each sentence's last word."""
    return F.cross_entropy(model(batch[:, :-1]).logits[:, -1], batch[:, -1], reduction="none")


optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in tqdm(range(40), desc="training", unit="epoch"):
    for own in torch.randperm(len(read), generator=draws).split(10):
        optimizer.zero_grad()
        losses(model, read[own]).mean().backward()
        optimizer.step()

# %%
# Scores, in three ways
# ---------------------

weights = ["*.c_attn.weight", "*.c_proj.weight", "*.c_fc.weight"]


def cosines(grads: PerSampleGrads, others: PerSampleGrads) -> Tensor:
    return grads.gram(others) / grads.norms()[:, None] / others.norms()


train, queries, metric = [stated], [asked[:30]], Metric.from_optimizer(optimizer)
with add_hooks(model, param_grad=False):
    ways = {
        "dot": over(model, train, losses, PerSampleGrads.gram, against=queries, only=weights),
        "cosine": over(model, train, losses, cosines, against=queries, only=weights),
        "TrackStar": trackstar(model, train, queries, metric, losses, only=weights),
    }
    whole = trackstar(model, train, queries, metric, losses, rank=64, only=weights)

# %%
# Compared with the definition
# ----------------------------
# A rank of 64 keeps everything here.  The definition takes a backward pass for each sentence, in double precision.

precise = copy.deepcopy(model).double()
names = [name for name, _ in precise.named_parameters() if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))]
rows: dict[str, list[Tensor]] = {name: [] for name in names}
for sentence in torch.cat([*train, *queries]):
    loss = losses(precise, sentence[None])[0]
    for name, g in zip(names, torch.autograd.grad(loss, [precise.get_parameter(name) for name in names])):
        state = optimizer.state[model.get_parameter(name)]
        unbiased = state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))
        rows[name].append((g / (unbiased.sqrt() + 1e-8)).flatten())
parts = []
for own in (torch.stack(rows[name]) for name in names):
    parts.append(own @ whitening(own[: len(stated)], own[len(stated) :], 0.5, 0.1))
units = F.normalize(torch.cat(parts, 1))
exact = units[: len(stated)] @ units[len(stated) :].mT
print(f"rank 64: the furthest from the definition {(whole - exact).abs().max():.0e}, of cosines")
print(f"rank 8: correlation with it {torch.stack([ways['TrackStar'].flatten(), exact.flatten()]).corrcoef()[0, 1]:.2f}")

# %%
# Where is the sentence that stated it?
# -------------------------------------

top = (1, 3, 10)
found = {}
for name, scores in ways.items():
    places = (scores > scores.diagonal()).sum(0)  # sentence n states what question n asks for
    found[name] = [float((places < k).float().mean()) for k in top]
    print(f"{name:10} {', '.join(f'among the first {k}: {share:4.0%}' for k, share in zip(top, found[name]))}")

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
for place, (name, shares) in enumerate(found.items()):
    axes.bar([n + 0.27 * (place - 1) for n in range(len(top))], shares, 0.25, label=name)
axes.set_xticks(range(len(top)), [f"first {k}" if k > 1 else "first" for k in top])
axes.set_ylabel("share of facts found")
axes.legend()
axes.grid(alpha=0.3)
plt.show()
