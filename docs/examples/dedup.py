"""
Near-duplicates: find them by gradients
=======================================

A copy of a sample with a little noise has nearly the same gradient.  Gradients are projected to 512 numbers and written to
disk batch by batch.  `Store` searches them for pairs, with one block at a time in memory.  For images this small, comparing
pixels would be enough.  Gradients work for anything that a model reads, and differ if equal inputs have different labels. ::

    pip install matplotlib scikit-learn tqdm
    python dedup.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/dedup.png'

import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm

from autograd_hacks import add_hooks, over
from autograd_hacks.attribution import Store

torch.set_num_threads(1)  # a network this small is slower with more threads
COPIES, NOISE = 40, 0.05  # how many, and the noise in their pixels, which are in [0, 1]

# %%
# Digits, some of them twice
# --------------------------

digits, draws = load_digits(), torch.Generator().manual_seed(0)
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
count, chosen = len(images), torch.randperm(len(images), generator=draws)[:COPIES]
copies = (images[chosen] + NOISE * torch.randn(COPIES, 64, generator=draws)).clamp(0, 1)
x, y = torch.cat([images, copies]), torch.cat([labels, labels[chosen]])
planted = {(original, count + n) for n, original in enumerate(chosen.tolist())}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in tqdm(range(10), desc="training", unit="epoch"):
    for batch in torch.randperm(len(x)).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()

# %%
# Gradients to disk, and pairs
# ----------------------------


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


with tempfile.TemporaryDirectory() as folder, add_hooks(model, param_grad=False):
    path = Path(folder) / "rows.npy"
    over(model, list(zip(x.split(300), y.split(300))), losses, lambda grads: grads.project(512), out=path)
    cosines, pairs = Store(path).duplicates(threshold=0.97)
found = [tuple(pair) for pair in pairs.tolist()]
hits = torch.tensor([pair in planted for pair in found])
print(f"of {COPIES} planted pairs {int(hits[:COPIES].sum())} are among the {COPIES} most alike, and")
print(f"{int(hits.sum())} among the {len(found)} with a cosine above 0.97, of {len(x) * (len(x) - 1) // 2:,} pairs")

# %%
# Compared with the definition
# ----------------------------
# The cosines of whole gradients, by ``torch.func`` in double precision.


def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, weights, x[None]), y[None])


weights = {name: p.detach().double() for name, p in model.named_parameters()}
rows = torch.cat([g.flatten(1) for g in vmap(grad(loss), (None, 0, 0))(weights, x.double(), y).values()], 1)
exact = (F.normalize(rows)[pairs[:, 0]] * F.normalize(rows)[pairs[:, 1]]).sum(1)
apart = (cosines - exact).abs().mean()
print(f"cosines of projections are off by {apart:.3f} on average: {len(rows[0])} numbers became 512")

# %%
# The pairs that are most alike
# -----------------------------
# The planted pairs have blue titles.  The others are digits that a person wrote twice, nearly the same.

plt.rc("font", size=12)
figure, places = plt.subplots(2, 5, figsize=(6, 4.4), layout="constrained")
shown = [*hits.nonzero()[:5, 0].tolist(), *(~hits).nonzero()[:5, 0].tolist()]
for place, number in zip(places.flat, shown):
    place.imshow(torch.cat([x[n].view(8, 8) for n in found[number]]), cmap="gray_r")
    place.axhline(7.5, color="gray")
    place.set_title(f"{cosines[number]:.3f}", color="C0" if hits[number] else "black")
    place.set(xticks=[], yticks=[])
plt.show()
