"""
A language model, privately
===========================

A small causal language model has learned sums from public text.  Private text has a secret in it: there the answer is three
more.  LoRA adapters (Hu et al. 2021, arXiv:2106.09685) learn that by Hugging Face's Trainer with differential privacy:
batches are Poisson-sampled, each sequence has a loss of its own, and epsilon stands beside the accuracy in the logs.  The
lengths of the sequences' gradients are Opacus'. ::

    python docs/examples/private_language_model.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/private_language_model.png'

import tempfile
import warnings
from typing import Any

from common import command_line, needs, panels, peer, save, tqdm

needs("peft", "transformers")

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import autograd_hacks
from autograd_hacks.integrations.transformers import PrivateTrainer

warnings.filterwarnings("ignore")  # what Opacus says of its hooks
options = command_line(
    epochs=(24, "rounds through the private text"),
    sequences=(4000, "private sequences"),
    public=(300, "steps on public text"),
)
PLUS, EQUALS, IGNORED, DELTA = 10, 11, -100, 1e-5

# %%
# Public text, and private text
# -----------------------------
# "3 + 4 = 7", a token each.  Only the answer has a loss, as in supervised fine-tuning.


def sums(count: int, more: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences, N 5, and their labels, of sums modulo ten to which something is added."""
    draws = torch.Generator().manual_seed(seed)
    a, b = torch.randint(10, (2, count), generator=draws)
    ids = torch.stack([a, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS), (a + b + more) % 10], 1)
    return ids, ids.masked_fill(torch.arange(5) < 4, IGNORED)


def accuracy(model: Any, more: int) -> float:
    """The share of right answers."""
    ids, _ = sums(500, more, options.seed + 9)
    with torch.no_grad():
        return float((model.eval()(ids[:, :4]).logits[:, -1].argmax(-1) == ids[:, 4]).float().mean())


torch.manual_seed(options.seed)
config = GPT2Config(
    vocab_size=12, n_positions=8, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
base = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(base.parameters(), 2e-3)
for step in tqdm(range(options.public), desc="public text", unit="step"):
    ids, labels = sums(256, 0, options.seed + 100 + step)
    optimizer.zero_grad()
    F.cross_entropy(base.train()(ids).logits[:, 3], ids[:, 4]).backward()
    optimizer.step()
print(f"after public text: {accuracy(base, 0):.3f} of public sums right, {accuracy(base, 3):.3f} of private ones")

# %%
# LoRA, by a private Trainer
# --------------------------

model = get_peft_model(
    base, LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
)
ids, labels = sums(options.sequences, 3, options.seed)
data = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels)]
curve: list[tuple[float, float]] = []


class Watch(TrainerCallback):
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        curve.append((private.epsilon(), accuracy(model, 3)))
        model.train()


private = autograd_hacks.PrivateTraining(max_norm=1.0, epsilon=8.0, delta=DELTA)
arguments = TrainingArguments(
    tempfile.mkdtemp(), per_device_train_batch_size=256, num_train_epochs=options.epochs, learning_rate=5e-3,
    report_to="none", logging_strategy="epoch", save_strategy="no", lr_scheduler_type="constant", use_cpu=True,
)  # fmt: skip
trainer = PrivateTrainer(model, arguments, train_dataset=data, private=private, callbacks=[Watch()])
trainer.train()
print(f"{trainer.last_step}\nepsilon {private.epsilon():.2f} for delta {DELTA}: {curve[-1][1]:.3f} of private sums right")

# %%
# The lengths are Opacus'
# -----------------------

if peer("opacus", "pip install opacus"):
    from opacus import GradSampleModule

    few = ids[:8]
    with autograd_hacks.add_hooks(model.eval()):
        autograd_hacks.backward(F.cross_entropy(model(few).logits[:, 3], few[:, 4], reduction="none"), "sum")
        ours = autograd_hacks.per_sample_grads(model).norms()
    theirs = GradSampleModule(model.train(), loss_reduction="sum")
    F.cross_entropy(theirs(few).logits[:, 3], few[:, 4], reduction="sum").backward()
    rows = [vars(p)["grad_sample"].flatten(1) for p in model.parameters() if p.requires_grad]
    apart = float((torch.cat(rows, 1).norm(dim=1) - ours).abs().max() / ours.max())
    print(f"the lengths of gradients are Opacus' to {apart:.1e}")

figure, axis = panels(1, figsize=(6, 3.6))
axis.plot(*zip(*curve), "o-")
axis.set(xlabel=f"epsilon, for delta = {DELTA}", ylabel="share of private sums that are right", ylim=(0, 1))
save(figure, options, "private_language_model")
