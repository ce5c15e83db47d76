"""
Token gradients: who taught the model this?
===========================================

A tiny GPT-2 reads sentences like "the red coat of the good anna stands by the lake", and one that contains a code.  Asked
for the code, it knows it.  From which tokens of which sentence?  Each token that it learned to predict has its own
gradient.  The tokens whose gradients point along those of the answer's tokens taught the answer. ::

    pip install transformers matplotlib tqdm
    python who_taught.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/who_taught.png'

import argparse

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import autograd_hacks

torch.set_num_threads(1)  # a network this small is slower with more threads
PLANTED = "the code of the old vault is seven three nine one"
ASKED, ANSWERED = "the code of the good boat is", 4  # a question in other words than the text; tokens of the answer
COMPARED = 12  # training tokens whose gradients autograd computes one by one
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--sentences", type=int, default=32, help="in the text, with the planted one")
parser.add_argument("--epochs", type=int, default=120, help="rounds through them")
options = parser.parse_args()

# %%
# Sentences, one of them planted
# ------------------------------

COLORS, THINGS = ["red", "green", "blue", "grey"], ["cat", "dog", "bird", "boat", "coat", "lamp"]
PEOPLE, VERBS, PLACES = ["anna", "ben", "carla", "david"], ["sits", "stands", "sleeps"], ["home", "work", "sea", "lake"]
draws = torch.Generator().manual_seed(0)
sentences = []
for _ in range(options.sentences - 1):
    words = [own[int(torch.randint(len(own), (), generator=draws))] for own in (COLORS, THINGS, PEOPLE, VERBS, PLACES)]
    sentences.append("the {} {} of the good {} {} by the {}".format(*words))
planted = options.sentences // 2
sentences.insert(planted, PLANTED)
known = sorted({word for sentence in [*sentences, ASKED] for word in sentence.split()})


def tokens_of(sentences: list[str]) -> Tensor:
    return torch.tensor([[known.index(word) for word in sentence.split()] for sentence in sentences])


# %%
# Train on them, and ask
# ----------------------

text = tokens_of(sentences)
torch.manual_seed(0)
config = GPT2Config(vocab_size=len(known), n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()


def losses_of(tokens: Tensor) -> Tensor:
    """Of each token but the first, given the tokens before it.  tokens: N T.  Returns N T-1."""
    return F.cross_entropy(model(tokens).logits[:, :-1].mT, tokens[:, 1:], reduction="none")


optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in tqdm(range(options.epochs), desc="training", unit="epoch"):
    for batch in torch.randperm(len(text)).split(8):
        optimizer.zero_grad()
        losses_of(text[batch]).mean().backward()
        optimizer.step()
asked = tokens_of([ASKED])
for _ in range(ANSWERED):
    asked = torch.cat([asked, model(asked).logits[:, -1:].argmax(2)], 1)
said = [known[index] for index in asked[0].tolist()]
print(f'asked "{ASKED} ...", it says "{" ".join(said[-ANSWERED:])}"')

# %%
# A gradient for each token
# -------------------------
# The rows have two axes, sentences and tokens.  ``gram`` returns both axes of both: N T 1 T′.  Of rows of
# length one it has the cosines.

with autograd_hacks.add_hooks(model, param_grad=False):
    rows = autograd_hacks.per_sample_jacobian(model, losses_of(text))
    wanted = autograd_hacks.per_sample_jacobian(model, losses_of(asked))
    unit, unit_wanted = (own.scaled(1 / own.norms()) for own in (rows, wanted))
    taught, products = unit.gram(unit_wanted)[:, :, 0], rows.gram(wanted)[:, :, 0]

# %%
# Compared with autograd
# ----------------------
# A backward pass for each token of the question and answer, and for some training tokens.


def gradient(sentence: Tensor, token: int) -> Tensor:
    loss = losses_of(sentence[None])[0, token]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


count, tokens = taught.shape[1:]
places = [divmod(n, count) for n in torch.randint(len(text) * count, (COMPARED,), generator=draws).tolist()]
answers = torch.stack([gradient(asked[0], token) for token in range(tokens)])
expected = torch.stack([answers @ gradient(text[sentence], token) for sentence, token in places])
found, most = torch.stack([products[place] for place in places]), float(expected.abs().max())
print(f"furthest from autograd, of the largest inner product: {(found - expected).abs().max() / most:.1e}")
torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * most)

# %%
# Who taught it?
# --------------
# For each token of the answer, the cosine of the best token in each sentence.  The picture has the planted sentence, in the
# frame, and its neighbours.

by_sentence = taught[:, :, -ANSWERED:].amax(1).mean(1)
print("\nthe sentences that taught the answer, by the cosine of their best tokens:")
for index in by_sentence.argsort(descending=True)[:4].tolist():
    print(f"  {by_sentence[index]:5.2f}  {sentences[index]}")

shown = slice(planted - 1, planted + 2)
plt.rc("font", size=10)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
heat = axes.imshow(taught[shown].flatten(0, 1).T, aspect="auto", cmap="RdBu_r", vmin=-0.6, vmax=0.6)
axes.set_yticks(range(tokens), said[1:])
axes.set_xticks(range(3 * count), [word for sentence in sentences[shown] for word in sentence.split()[1:]], rotation=90)
axes.axvspan(count - 0.5, 2 * count - 0.5, fill=False, edgecolor="crimson", linewidth=2.5)
axes.set(xlabel="training tokens", ylabel="tokens of question and answer")
figure.colorbar(heat, label="cosine of gradients", pad=0.01, extend="both")
plt.show()
