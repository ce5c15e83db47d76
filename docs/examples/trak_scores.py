"""
TRAK: which images taught the network this?
===========================================

TRAK (Park et al. 2023, arXiv:2303.14186) scores training samples by the gradients of log p / (1 - p), randomly projected,
through the inverse of their second moments.  Scores are means over several networks.  Here it finds the training images
that support or oppose a held-out image's label, and is compared with the authors' own package, traker. ::

    pip install matplotlib scikit-learn tqdm
    python trak_scores.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/trak_scores.png'

import copy
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from tqdm import tqdm

from autograd_hacks import PerSampleGrads, add_hooks, over, pause_hooks
from autograd_hacks.attribution import trak_scores

torch.set_num_threads(1)  # a network this small is slower with more threads

# %%
# The recipe
# ----------
# Compute the margin log p / (1 - p) from the logits, as z_y minus the logsumexp of the others.  Computed from p, it would be
# infinite if p rounds to 1.  And 1 - p is the sigmoid of the negative margin.


def margins(model: Callable[..., Tensor], batch: Any) -> Tensor:
    logits, label = model(batch[0]), batch[1][:, None]
    return logits.gather(1, label)[:, 0] - logits.scatter(1, label, -torch.inf).logsumexp(1)


def trak(
    model: nn.Module,
    train: Sequence[Any],
    queries: Sequence[Any],
    states: Sequence[Mapping[str, Any]],
    margins: Callable[..., Tensor],
    project: Callable[..., Tensor],
) -> Tensor:
    """(1 - p) φ (ΦᵀΦ)⁻¹ φ′ᵀ, D E, of projected gradients φ of the margins; both factors are means over models.

    states: of trained models    project: ``project(grads, seed=)``, to far fewer coordinates than there are samples
    """
    before, phi, about, odds = copy.deepcopy(model.state_dict()), list[Tensor](), list[Tensor](), list[Tensor]()
    for seed, state in enumerate(states):
        model.load_state_dict(state)
        for rows, data in ((phi, train), (about, queries)):
            rows.append(over(model, data, margins, partial(project, seed=seed)))
        with torch.no_grad(), pause_hooks():
            odds.append(torch.cat([margins(model, batch) for batch in train]))
    model.load_state_dict(before)
    return trak_scores(phi, about, odds)


# %%
# Three networks, and the scores
# ------------------------------

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
x, y, asked, answers = images[:1500], labels[:1500], images[1500:], labels[1500:]
states = []
for seed in tqdm(range(3), desc="training", unit="network"):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in [batch for _ in range(30) for batch in torch.randperm(len(x)).split(100)]:
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    states.append(copy.deepcopy(model.state_dict()))

hooked = copy.deepcopy(model)
add_hooks(hooked, param_grad=False)
train, queries = list(zip(x.split(500), y.split(500))), [(asked, answers)]
scores = trak(hooked, train, queries, states, margins, partial(PerSampleGrads.project, dim=128))

# %%
# Which images support the label, and which oppose it?
# ----------------------------------------------------
# On the left are the held-out images that the networks are least sure about.  Beside them are the two training images with
# the highest scores, and the two with the lowest.  Most of the latter look alike, and have another label.

with torch.no_grad():
    hardest = margins(model, queries[0]).argsort()[:3]
plt.rc("font", size=12)
figure, places = plt.subplots(3, 5, figsize=(6, 4.4), layout="constrained")
for row, query in zip(places, hardest.tolist()):
    best = scores[:, query].argsort(descending=True)
    shown = [(asked[query], answers[query], "black"), *((x[n], y[n], "C0") for n in best[:2])]
    shown += [(x[n], y[n], "C3") for n in best[[-1, -2]]]
    for place, (image, label, color) in zip(row, shown):
        place.imshow(image.view(8, 8), cmap="gray_r")
        place.set_title(f"{label}", color=color)
        place.set(xticks=[], yticks=[])
for place, title in zip(places[0], ("asked: 3", "for: ", "for: ", "against: ", "against: ")):
    place.set_title(f"{title.split(':')[0]}: {place.get_title()}", color=place.title.get_color())
plt.show()

# %%
# Compared with traker
# --------------------
# With traker's own random projector instead of ours, the scores are the same.  Traker multiplies each network's scores by a
# different factor, so this compares one network.

try:
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType
except ImportError:
    print("not compared with traker: pip install --no-deps traker")
else:
    count = sum(p.numel() for p in model.parameters())
    projector = BasicProjector(count, 128, 0, ProjectionType.rademacher, torch.device("cpu"), block_size=64)

    def as_theirs(grads: PerSampleGrads, seed: int) -> Tensor:
        rows = torch.cat([g.flatten(1) for g in grads.dense().values()], 1)
        return torch.as_tensor(projector.project(rows, model_id=seed))

    ours = trak(hooked, train, queries, states[:1], margins, as_theirs)
    with tempfile.TemporaryDirectory() as folder:
        how: Any = {"device": "cpu", "use_half_precision": False, "logging_level": logging.ERROR}
        traker = TRAKer(model, "image_classification", len(x), folder, projector=projector, **how)
        traker.load_checkpoint(states[0], 0)
        for batch in train:
            traker.featurize(batch, num_samples=len(batch[1]))
        traker.finalize_features()
        traker.start_scoring_checkpoint("digits", states[0], 0, len(asked))
        traker.score(queries[0], num_samples=len(asked))
        theirs = torch.as_tensor(traker.finalize_scores("digits"))
    scale = (theirs * ours).sum() / ours.square().sum()
    print(f"the furthest from traker's: {(scale * ours - theirs).abs().max() / theirs.abs().max():.0e} of the largest score")
