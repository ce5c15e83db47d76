"""
Who taught the model this?
==========================

A tiny GPT-2 reads sentences of who keeps what in which colour, and one that says a code.  Asked for the code, it knows
it: from which tokens of which sentence?  Each token that it has learnt to predict has a gradient of its own; those that
point as the gradient of the answer's tokens does have taught it. ::

    python docs/examples/who_taught.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/who_taught.png'

import time

from common import command_line, furthest, needs, panels, save, tqdm

needs("transformers", "transformers")

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autograd_hacks

PLANTED = "the code of the old vault is seven three nine one"
ASKED, ANSWERED = "the code of the good boat is", 4  # what it has not read; tokens
COMPARED = 12  # training tokens, drawn, whose gradients autograd computes one by one

options = command_line(
    sentences=(32, "that it reads, with the planted one"),
    epochs=(120, "rounds through them"),
)
torch.manual_seed(options.seed)

# %%
# Sentences, one of them planted
# ------------------------------

PARTS = [
    ["red", "green", "blue", "grey"], ["cat", "dog", "bird", "boat", "coat", "lamp"], ["anna", "ben", "carla", "david"],
    ["sits", "stands", "sleeps"], ["home", "work", "sea", "lake"],
]  # fmt: skip
draws = torch.Generator().manual_seed(options.seed)
sentences = []
for _ in range(options.sentences - 1):
    color, thing, owner, does, place = (words[int(torch.randint(len(words), (), generator=draws))] for words in PARTS)
    sentences.append(f"the {color} {thing} of the good {owner} {does} by the {place}")
planted = options.sentences // 2
sentences.insert(planted, PLANTED)
known = sorted({word for sentence in [*sentences, ASKED] for word in sentence.split()})


def tokens_of(sentences: list[str]) -> Tensor:
    return torch.tensor([[known.index(word) for word in sentence.split()] for sentence in sentences])


# %%
# Train on them, and ask
# ----------------------

text = tokens_of(sentences)
torch.manual_seed(options.seed)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=len(known), n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
).eval()


def losses_of(tokens: Tensor) -> Tensor:
    """Of each token but the first, of what is said before it.  tokens: N T.  Returns N T-1."""
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
# The rows have two axes, sentences and tokens, and ``cosine`` and ``gram`` have both of both: N T 1 T′.

start = time.perf_counter()
with autograd_hacks.add_hooks(model, param_grad=False):
    rows = autograd_hacks.per_sample_jacobian(model, losses_of(text))
    wanted = autograd_hacks.per_sample_jacobian(model, losses_of(asked))
    taught, products = rows.cosine(wanted)[:, :, 0], rows.gram(wanted)[:, :, 0]
seconds = time.perf_counter() - start

# %%
# The same by autograd
# --------------------
# A backward pass for each token, of the answer and of some training tokens.


def gradient(sentence: Tensor, token: int) -> Tensor:
    loss = losses_of(sentence[None])[0, token]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


(teachers, tokens), begun = taught.shape[1:], time.perf_counter()
places = [divmod(n, teachers) for n in torch.randint(len(text) * teachers, (COMPARED,), generator=draws).tolist()]
answers = torch.stack([gradient(asked[0], token) for token in range(tokens)])
expected = torch.stack([answers @ gradient(text[sentence], token) for sentence, token in places])
theirs = (time.perf_counter() - begun) / (COMPARED + tokens) * (len(text) * teachers + tokens)
found, most = torch.stack([products[place] for place in places]), float(expected.abs().max())
print(f"{len(text) * teachers} training tokens by {tokens} tokens of question and answer, in {seconds:.2f} s;")
print(f"by autograd, a token at a time, {theirs:.2f} s, of which {COMPARED} tokens were run.")
print(f"furthest from autograd, of the largest inner product: {furthest([found], [expected]) / most:.1e}")
torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * most)

# %%
# Who taught it?
# --------------
# For each token of the answer, how far the best token of each sentence speaks for it.

by_sentence = taught[:, :, -ANSWERED:].amax(1).mean(1)
print("\nthe sentences that taught the answer, by the cosine of their best tokens:")
for index in by_sentence.argsort(descending=True)[:4].tolist():
    print(f"  {by_sentence[index]:5.2f}  {sentences[index]}")

shown = slice(planted - 2, planted + 3)
words = [word for sentence in sentences[shown] for word in sentence.split()[1:]]
figure, axes = panels(1, figsize=(11, 4.6))
heat = axes.imshow(taught[shown].flatten(0, 1).T, aspect="auto", cmap="RdBu_r", vmin=-0.6, vmax=0.6)
axes.set_yticks(range(tokens), said[1:])
axes.set_xticks(range(len(words)), words, rotation=90)
axes.grid(False)
for sentence in range(5):
    axes.axvline(sentence * teachers - 0.5, color="black", linewidth=0.5)
axes.axvspan(2 * teachers - 0.5, 3 * teachers - 0.5, fill=False, edgecolor="crimson", linewidth=2.5)
axes.set(xlabel="training tokens, the planted sentence's framed", ylabel="tokens of question and answer")
figure.colorbar(heat, label="cosine of gradients", pad=0.01, extend="both")
save(figure, options, "who_taught.png")
