"""
Three ways to find wrong labels
===============================

Who is responsible for what a network says of an image?  For one whose label is wrong, mostly that image alone: nothing
else says the same.  So images are ranked by their influence on their own loss, in three ways, from cheap to thorough:
the square of the gradient's length, TracIn's sum of that over training, and influence by EK-FAC, gᵀ (G + λ)⁻¹ g.  Captum
has TracIn, kronfluence EK-FAC; both run here on the same network. ::

    python docs/examples/find_wrong_labels.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/find_wrong_labels.png'

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

from common import command_line, handwritten_digits, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import autograd_hacks

PLANTED = 0.1  # the share of labels that are made wrong
RATE = 0.1

parser = command_line(
    "Ranks scikit-learn's handwritten digits by their influence on themselves, to find labels that were made wrong.",
    images=(1797, "of the digits"),
    epochs=(12, "rounds through them; TracIn looks at the weights after every third"),
)
options = parser.parse_args()
torch.manual_seed(options.seed)

# %%
# Plant wrong labels, train, and keep some checkpoints
# ----------------------------------------------------

images, true = (x[: options.images] for x in handwritten_digits())
draws = torch.Generator().manual_seed(options.seed)
chosen = torch.randperm(len(true), generator=draws)[: round(PLANTED * len(true))]
given = true.clone()
given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
wrong = given != true

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
checkpoints: list[tuple[dict[str, Tensor], float]] = []
for epoch in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for batch in torch.randperm(len(images)).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), given[batch]).backward()
        optimizer.step()
    if epoch % 3 == 2 or epoch == options.epochs - 1:
        checkpoints.append(({name: x.clone() for name, x in model.state_dict().items()}, RATE))
hooked = copy.deepcopy(model)
autograd_hacks.add_hooks(hooked, param_grad=False)
data = TensorDataset(images, given)
loader = DataLoader(data, batch_size=200)

# %%
# This library's three
# --------------------


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def squares(grads: autograd_hacks.PerSampleGrads) -> Tensor:
    return grads.norms().square()


def by_ekfac(grads: autograd_hacks.PerSampleGrads) -> Tensor:
    """gᵀ (EKFAC + λ)⁻¹ g of each sample."""
    rows, solved = grads.dense(), autograd_hacks.ekfac_solve(hooked, grads).dense()
    return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)


def self_influence() -> Tensor:
    return autograd_hacks.over(hooked, loader, losses, squares)


def tracin() -> Tensor:
    return autograd_hacks.over(hooked, loader, losses, squares, checkpoints=checkpoints)


def ekfac() -> Tensor:
    autograd_hacks.compute_hess_over(hooked, loader, kind="ekfac", kfac_bias="joint")
    return autograd_hacks.over(hooked, loader, losses, by_ekfac)


# %%
# Theirs
# ------


def captum_tracin() -> Tensor:
    """Captum's, with its own way to take the gradients of a whole batch at once."""
    from captum.influence import TracInCP

    def load(model: nn.Module, state: Any) -> float:
        model.load_state_dict(state[0])
        return float(state[1])

    total = nn.CrossEntropyLoss(reduction="sum")
    best: dict[str, Any] = {"loss_fn": total, "batch_size": 200, "sample_wise_grads_per_batch": True}
    theirs = TracInCP(copy.deepcopy(model), data, checkpoints, load, **best)
    return theirs.self_influence()


def kronfluence_ekfac() -> Tensor:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            output = model(batch[0])
            drawn = torch.multinomial(output.detach().softmax(1), 1).flatten()
            return F.cross_entropy(output, drawn if sample else batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task = Digits()
    with tempfile.TemporaryDirectory() as folder:
        own = prepare_model(copy.deepcopy(model), task)
        analyzer = Analyzer("digits", own, task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", data, 200)
        analyzer.compute_self_scores("scores", "factors", data, 200)
        return analyzer.load_self_scores("scores")["all_modules"]


# %%
# Which of them find the wrong labels?
# ------------------------------------
# TracIn is captum's to rounding.  Kronfluence draws labels from the network where ours takes all of them, so its scores
# are noisier ones of the same: their ranks agree.

ways: dict[str, Callable[[], Tensor]] = {
    "gradient's length²": self_influence, "TracIn": tracin, "captum's TracIn": captum_tracin,
    "EK-FAC": ekfac, "kronfluence's EK-FAC": kronfluence_ekfac,
}  # fmt: skip
scores: dict[str, Tensor] = {}
skipped: dict[str, str] = {}
seconds: dict[str, float] = {}  # the least of two rounds
for name, way in 2 * list(ways.items()):
    start = time.perf_counter()
    try:
        scores[name] = way().double()
    except ImportError as missing:
        skipped[name] = f"{name}: skipped, {missing.name} is not installed"
        continue
    seconds[name] = min(time.perf_counter() - start, seconds.get(name, float("inf")))
print(*skipped.values(), sep="\n")
print(f"{int(wrong.sum())} of {len(images)} labels were made wrong{'':9}area under ROC{'seconds':>12}")
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
for place, (name, own) in enumerate(scores.items()):
    area, theirs = roc_auc_score(wrong, own), name.startswith(("captum", "kronfluence"))
    print(f"{name:44}{area:14.4f}{seconds[name]:12.2f}")
    color = "tab:gray" if name.startswith("gradient") else "tab:blue" if "TracIn" in name else "tab:orange"
    fall, hit, _ = roc_curve(wrong, own)
    left.plot(fall, hit, ls=":" if theirs else "-", lw=3 if theirs else 1.5, color=color, label=f"{name}: {area:.3f}")
    right.barh(place, seconds[name], color=color, hatch="//" if theirs else None, alpha=0.6 if theirs else 1)
if "captum's TracIn" in scores:
    furthest = (scores["TracIn"] / scores["captum's TracIn"] - 1).abs().max()
    print(f"TracIn is captum's to {furthest:.0e} of each score")
    torch.testing.assert_close(scores["TracIn"], scores["captum's TracIn"], rtol=1e-3, atol=1e-6)
if "kronfluence's EK-FAC" in scores:
    ranks = torch.stack([scores[name].argsort().argsort().double() for name in ("EK-FAC", "kronfluence's EK-FAC")])
    print(f"EK-FAC: rank correlation with kronfluence's {torch.corrcoef(ranks)[0, 1]:.4f}")
left.set(xlabel="right labels looked at", ylabel="wrong labels found", xlim=(-0.005, 0.15), title=f"{PLANTED:.0%} are wrong")
left.legend(loc="lower right", title="area under the curve")
left.grid(alpha=0.3)
right.set(yticks=range(len(scores)), yticklabels=list(scores), xlabel="seconds", title="what it takes")
right.invert_yaxis()
save(figure, options, "find_wrong_labels.png")
