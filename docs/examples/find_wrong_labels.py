"""
Self-influence: three ways to find wrong labels
===============================================

Which training image is responsible for what a network says about an image?  If the image's label is wrong, mostly that
image itself, because no other image says the same.  So images are ranked by their influence on their own loss, in three
ways: the squared length of the gradient, TracIn, which sums that over checkpoints, and influence by EK-FAC,
gᵀ (G + λ)⁻¹ g.  TracIn is compared with captum's, and EK-FAC with kronfluence's. ::

    pip install matplotlib scikit-learn tqdm
    python find_wrong_labels.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/find_wrong_labels.png'

import argparse
import copy
import tempfile
import warnings
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from autograd_hacks import PerSampleGrads, add_hooks, over
from autograd_hacks.attribution import Metric
from autograd_hacks.curvature import compute_hess_over

torch.set_num_threads(1)  # a network this small is slower with more threads
warnings.simplefilter("ignore")  # from captum and kronfluence
PLANTED, RATE = 0.1, 0.1  # the share of labels that are made wrong; the learning rate
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--images", type=int, default=1797, help="of the digits")
parser.add_argument("--epochs", type=int, default=12, help="rounds through the images, with a checkpoint at each third one")
options = parser.parse_args()

# %%
# Plant wrong labels, train, and keep checkpoints
# -----------------------------------------------

digits, draws = load_digits(), torch.Generator().manual_seed(0)
images, true = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
images, true = images[: options.images], true[: options.images]
chosen = torch.randperm(len(true), generator=draws)[: round(PLANTED * len(true))]
given = true.clone()
given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
wrong = given != true

torch.manual_seed(0)
first, second = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)], [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()]
model = nn.Sequential(*first, *second, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
visited: list[tuple[dict[str, Tensor], float]] = []
for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for batch in torch.randperm(len(images)).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), given[batch]).backward()
        optimizer.step()
    visited.append((copy.deepcopy(model.state_dict()), RATE))
checkpoints = visited[::-3]

# %%
# Three scores
# ------------
# ``over`` reads them batch by batch, so at most one batch of gradients is in memory.

data = TensorDataset(images, given)
loader = DataLoader(data, batch_size=200)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def lengths(grads: PerSampleGrads) -> Tensor:
    return grads.norms() ** 2


def by_ekfac(grads: PerSampleGrads) -> Tensor:
    """gᵀ (G + λ)⁻¹ g for each sample."""
    rows, solved = grads.dense(), grads.preconditioned(Metric.from_ekfac(hooked)).dense()
    return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)


hooked, scores = copy.deepcopy(model), dict[str, Tensor]()
with add_hooks(hooked, param_grad=False):
    scores["gradient's length²"] = over(hooked, loader, losses, lengths)
    scores["TracIn"] = torch.zeros(len(data))
    for state, rate in checkpoints:
        hooked.load_state_dict(state)
        scores["TracIn"] += rate * over(hooked, loader, losses, lengths)
    hooked.load_state_dict(model.state_dict())
    compute_hess_over(hooked, loader, kind="ekfac")
    scores["EK-FAC"] = over(hooked, loader, losses, by_ekfac)

# %%
# Compared with captum
# --------------------
# TracIn is the same up to rounding.

try:
    from captum.influence import TracInCP
except ImportError:
    print("not compared with captum: pip install --no-deps captum")
else:

    def load(model: nn.Module, checkpoint: Any) -> float:
        model.load_state_dict(checkpoint[0])
        return float(checkpoint[1])

    how: Any = {"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "batch_size": 200, "sample_wise_grads_per_batch": True}
    theirs = TracInCP(copy.deepcopy(model), data, checkpoints, load, **how).self_influence()
    print(f"TracIn is captum's to {(scores['TracIn'] / theirs - 1).abs().max():.0e} of each score")
    torch.testing.assert_close(scores["TracIn"], theirs, rtol=1e-3, atol=1e-6)

# %%
# Compared with kronfluence
# -------------------------
# Kronfluence draws labels from the network's predictions, and ours sums over all labels.  So kronfluence's scores are noisy
# versions of ours, and their ranks agree.

try:
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.task import Task
except ImportError:
    print("not compared with kronfluence: pip install --no-deps kronfluence accelerate")
else:

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            output = model(batch[0])
            drawn = torch.multinomial(output.detach().softmax(1), 1).flatten()
            return F.cross_entropy(output, drawn if sample else batch[1], reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare_model(copy.deepcopy(model), Digits())
        analyzer = Analyzer("digits", prepared, Digits(), cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("factors", data, 200)
        analyzer.compute_self_scores("scores", "factors", data, 200)
        theirs = analyzer.load_self_scores("scores")["all_modules"]
    ranks = spearmanr(scores["EK-FAC"], theirs).statistic
    print(f"EK-FAC: rank correlation with kronfluence's {ranks:.4f}")

# %%
# Which of them find the wrong labels?
# ------------------------------------

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
print(f"{int(wrong.sum())} of {len(images)} labels were made wrong. Area under the curve:")
for name, own in scores.items():
    area = roc_auc_score(wrong, own)
    print(f"{name:20}{area:.4f}")
    axes.plot(*roc_curve(wrong, own)[:2], linewidth=2, label=f"{name}: {area:.3f}")
axes.set(xlabel="share of right labels looked at", ylabel="share of wrong labels found", xlim=(-0.005, 0.15))
axes.legend(title="area under the curve", loc="lower right")
axes.grid(alpha=0.3)
plt.show()
