"""
Gradient norms: find wrong labels
=================================

A network learns what most labels say.  An image with a wrong label keeps pulling at the weights, so its own gradient is
long.  Here 5 % of the labels of 1,797 handwritten digits are made wrong, a small network is trained on them, and the images
are ranked by the length of their gradients.  With the default seed 74 of the 90 wrong labels are among the 90 longest
gradients; by chance there would be 4.5. ::

    pip install matplotlib scikit-learn tqdm
    python wrong_labels.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/wrong_labels.png'

import argparse
import os

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tqdm import tqdm

import autograd_hacks

torch.set_num_threads(1)  # a network this small is slower with more threads
PLANTED = 0.05  # the share of labels that are made wrong
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--batch-size", type=int, default=64, help="images in a batch")
parser.add_argument("--epochs", type=int, default=5, help="rounds through the images")
parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
options = parser.parse_args()
if min(options.batch_size, options.epochs) < 1:
    parser.error("--batch-size and --epochs must be at least 1")

# %%
# Plant wrong labels, and train
# -----------------------------

digits, draws = load_digits(), torch.Generator().manual_seed(options.seed)
images, true = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
chosen = torch.randperm(len(true), generator=draws)[: round(PLANTED * len(true))]
given = true.clone()
given[chosen] = (true[chosen] + torch.randint(1, 10, (len(chosen),), generator=draws)) % 10
wrong = given != true

torch.manual_seed(options.seed)
convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for batch in torch.randperm(len(images)).split(options.batch_size):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), given[batch]).backward()
        optimizer.step()

# %%
# Rank by the length of the gradients
# -----------------------------------
# ``norms`` writes no gradient out, so a pass with hooks takes little longer than one without.

parts = []
with autograd_hacks.add_hooks(model, param_grad=False):
    for x, y in zip(images.split(options.batch_size), given.split(options.batch_size)):
        autograd_hacks.backward(F.cross_entropy(model(x), y, reduction="none"))
        parts.append(autograd_hacks.per_sample_grads(model).norms())
norms = torch.cat(parts)
ranking = norms.argsort(descending=True)

print(f"{int(wrong.sum())} of {len(images)} labels were made wrong. Ranked by the length of their gradients:")
for share in (0.05, 0.10):
    top = ranking[: round(share * len(ranking))]
    chance = share * wrong.sum()
    print(f"  top {share:4.0%} ({len(top):3} images): {wrong[top].sum():3} wrong labels, by chance {chance:.1f}")

# %%
# Compared with autograd
# ----------------------
# One backward pass for each of the first images.

expected = []
for image, label in zip(images[:64].split(1), given[:64].split(1)):
    gradients = torch.autograd.grad(F.cross_entropy(model(image), label), list(model.parameters()))
    expected.append(torch.cat([g.flatten() for g in gradients]).norm())
off = (norms[:64] - torch.stack(expected)).abs().max() / torch.stack(expected).max()
print(f"lengths of {len(expected)} gradients: off from autograd's by at most {off:.0e} of the longest")
torch.testing.assert_close(norms[:64], torch.stack(expected), rtol=1e-4, atol=1e-5)

# %%
# The images with the longest gradients
# -------------------------------------
# A red title marks an image whose label was made wrong.

plt.rc("font", size=12)
figure, places = plt.subplots(3, 6, figsize=(6, 4.4), layout="constrained")
for place, index in zip(places.flat, ranking.tolist()):
    place.imshow(images[index, 0], cmap="gray_r")
    title = f"label {given[index]}\ntruth {true[index]}"
    place.set_title(title, color="crimson" if wrong[index] else "black", fontsize=11)
    place.set(xticks=[], yticks=[])
if plt.get_backend() == "agg" and "MPLBACKEND" not in os.environ:
    figure.savefig("wrong_labels.png")
    print(f"no display: the picture is in {os.path.abspath('wrong_labels.png')}")
plt.show()
