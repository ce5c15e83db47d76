"""
Private LoRA: a language model with a secret
============================================

A small causal language model has learned sums from public text.  The private text has a secret: each answer in it is three
more.  LoRA adapters (Hu et al. 2021, arXiv:2106.09685) learn that with Hugging Face's Trainer and differential privacy:
batches are Poisson-sampled, each sequence has its own loss, and epsilon is in the logs.  The lengths of the gradients are
compared with Opacus'. ::

    pip install transformers peft accelerate opacus matplotlib tqdm
    python private_language_model.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/private_language_model.png'

import argparse
import tempfile
import warnings
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import autograd_hacks
from autograd_hacks.integrations.transformers import PrivateTrainer

torch.set_num_threads(1)  # a network this small is slower with more threads
warnings.filterwarnings("ignore")  # what Opacus says about its hooks
PLUS, EQUALS, IGNORED, DELTA = 10, 11, -100, 1e-5
parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--epochs", type=int, default=24, help="rounds through the private text")
parser.add_argument("--sequences", type=int, default=4000, help="in the private text")
parser.add_argument("--public", type=int, default=300, help="steps on public text")
options = parser.parse_args()

# %%
# Public text, and private text
# -----------------------------
# "3 + 4 = 7" has a token for each character.  Only the answer has a loss, as in supervised fine-tuning.


def sums(count: int, more: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences, N 5, and their labels, of sums modulo ten to which a number is added."""
    a, b = torch.randint(10, (2, count), generator=torch.Generator().manual_seed(seed))
    ids = torch.stack([a, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS), (a + b + more) % 10], 1)
    return ids, ids.masked_fill(torch.arange(5) < 4, IGNORED)


def accuracy(model: Any, more: int) -> float:
    """The share of right answers."""
    ids, _ = sums(500, more, 9)
    with torch.no_grad():
        return float((model.eval()(ids[:, :4]).logits[:, -1].argmax(-1) == ids[:, 4]).float().mean())


torch.manual_seed(0)
no_dropout: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
base = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=8, n_embd=64, n_layer=2, n_head=4, **no_dropout))
optimizer = torch.optim.AdamW(base.parameters(), 2e-3)
for step in tqdm(range(options.public), desc="public text", unit="step"):
    ids, labels = sums(256, 0, 100 + step)
    optimizer.zero_grad()
    F.cross_entropy(base.train()(ids).logits[:, 3], ids[:, 4]).backward()
    optimizer.step()
print(f"after public text: {accuracy(base, 0):.3f} of public sums right, {accuracy(base, 3):.3f} of private ones")

# %%
# LoRA, by a private Trainer
# --------------------------

lora = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
model = get_peft_model(base, lora)
ids, labels = sums(options.sequences, 3, 0)
data = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]
curve: list[tuple[float, float]] = []


class Watch(TrainerCallback):
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        curve.append((private.epsilon(), accuracy(model, 3)))
        model.train()


private = autograd_hacks.private.PrivateTraining(max_norm=1.0, epsilon=8.0, delta=DELTA)
how: Any = {"num_train_epochs": options.epochs, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "use_cpu": True}
quiet: Any = {"report_to": "none", "logging_strategy": "epoch", "save_strategy": "no"}
arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=256, **how, **quiet)
trainer = PrivateTrainer(model, arguments, train_dataset=data, private=private, callbacks=[Watch()])
trainer.train()
print(f"{trainer.last_step}\nepsilon {private.epsilon():.2f} for delta {DELTA}: {curve[-1][1]:.3f} of private sums right")

# %%
# Compared with Opacus
# --------------------
# The lengths of eight sequences' gradients.

few = ids[:8]
with autograd_hacks.add_hooks(model.eval()):
    autograd_hacks.backward(F.cross_entropy(model(few).logits[:, 3], few[:, 4], reduction="none"), "sum")
    ours = autograd_hacks.per_sample_grads(model).norms()
theirs = GradSampleModule(model.train(), loss_reduction="sum")
F.cross_entropy(theirs(few).logits[:, 3], few[:, 4], reduction="sum").backward()
rows = [vars(p)["grad_sample"].flatten(1) for p in model.parameters() if p.requires_grad]
apart = float((torch.cat(rows, 1).norm(dim=1) - ours).abs().max() / ours.max())
print(f"the lengths of gradients are Opacus' to {apart:.1e}")

# %%
# What privacy costs
# ------------------

plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
axes.plot(*zip(*curve), "o-")
axes.set(xlabel=f"epsilon, for delta = {DELTA}", ylabel="share of right private sums", ylim=(0, 1))
axes.grid(alpha=0.3)
plt.show()
