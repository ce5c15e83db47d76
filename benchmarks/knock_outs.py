"""Silent errors in other tools: small models, their numbers, and the findings of `autograd_hacks.check.check_rows`.

    python benchmarks/knock_outs.py          writes docs/benchmark/knock_outs/*.txt, which docs/knock_outs.rst shows

All of the tools must be installed for that, in the versions that the page will name.
"""

from __future__ import annotations

import copy
import datetime
import importlib.metadata
import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from peers import torch_func
from torch import Tensor
from workloads import Workload

import autograd_hacks
from autograd_hacks.check import check_rows
from autograd_hacks.errors import VerificationFailed

FOLDER = Path(__file__).parents[1] / "docs" / "benchmark" / "knock_outs"
TOOLS = {"opacus": "Opacus", "bergson": "bergson", "kronfluence": "kronfluence"}
"""That are shown, by the names that pip knows."""
BESIDE = ["torch", "transformers", "peft"]
"""On which the models depend."""

Rows = dict[str, Tensor]
Engine = Callable[[nn.Module, Tensor], Any]
"""Of a copy of the model and the batch: what check_rows takes."""


def losses(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Each sequence's loss: the sum over its tokens.  N"""
    returned = model(ids)
    logits = getattr(returned, "logits", returned)
    return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


def sequences() -> Tensor:
    """Four texts of twelve tokens, out of fifty."""
    return torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(0))


@cache
def mixtral() -> nn.Module:
    """Two blocks, of four experts each."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return MixtralForCausalLM(config).train()


@cache
def gpt2() -> nn.Module:
    """Two blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


@cache
def adapted() -> nn.Module:
    """The same with LoRA adapters in its attention and its embedding."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["c_attn", "wte"], fan_in_fan_out=True, init_lora_weights=False)
    return get_peft_model(copy.deepcopy(gpt2()), config).train()


class Twice(nn.Module):
    """Reads its table as an embedding, and again, by a function, as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.table(ids)).tanh(), self.table.weight)


@cache
def twice() -> nn.Module:
    torch.manual_seed(0)
    return Twice()


def opacus(model: nn.Module, ids: Tensor) -> dict[str, Tensor | None]:
    """Its rows, of the sum of the losses."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum", strict=True)
    losses(wrapped, ids).sum().backward()
    return {name: vars(p).get("grad_sample") for name, p in model.named_parameters() if p.requires_grad}


def opacus_norms(model: nn.Module, ids: Tensor) -> Tensor:
    """The norms over all parameters, as they are usually written: the squares of all rows, added up."""
    rows = opacus(model, ids)
    return torch.stack([x.flatten(1).square().sum(1).expand(len(ids)) for x in rows.values() if x is not None]).sum(0).sqrt()


def bergson(model: nn.Module, ids: Tensor) -> Rows:
    """The rows of its collector for callbacks."""
    from bergson.collector.gradient_collectors import StreamingGradientCollector

    collector = StreamingGradientCollector(model=model, dtype=torch.float32)
    with collector:
        losses(model, ids).sum().backward()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {f"{name}.weight": x.reshape(-1, *shapes[f"{name}.weight"]) for name, x in dict(collector.mod_grads).items()}


def kronfluence(model: nn.Module, ids: Tensor) -> Tensor:
    """Norms, from its scores without preconditioning, which are inner products of gradients."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    class Language(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            return losses(model, batch[0]).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return losses(model, batch[0]).sum()

    task, data, n = Language(), torch.utils.data.TensorDataset(ids), len(ids)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("texts", prepare_model(model, task), task, cpu=True, output_dir=folder, disable_tqdm=True)
        analyzer.fit_all_factors("none", data, n, factor_args=FactorArguments(strategy="identity"))
        analyzer.compute_pairwise_scores("pairs", "none", data, data, n, n)
        scores: Tensor = analyzer.load_pairwise_scores("pairs")["all_modules"]
    return scores.diagonal().sqrt()


def by_vmap(model: nn.Module, ids: Tensor) -> Rows:
    """torch.func's rows."""
    work = Workload(lambda: model, lambda step: {"ids": ids}, lambda model, batch: losses(model, batch["ids"]))
    return torch_func(work, model)(work.batch(0))


def ours(model: nn.Module, ids: Tensor) -> Rows:
    """This library's rows."""
    with autograd_hacks.add_hooks(model):
        autograd_hacks.backward(losses(model, ids), "sum")
        return autograd_hacks.per_sample_grads(model).dense()


OURS = "autograd_hacks"
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[str, Engine]]]] = {
    "experts": (
        mixtral,
        {
            "opacus": ("GradSampleModule", opacus),
            "bergson": ("StreamingGradientCollector", bergson),
            "kronfluence": ("norms, from scores", kronfluence),
            "torch": ("vmap(grad)", by_vmap),
            OURS: ("add_hooks", ours),
        },
    ),
    "positions": (
        gpt2,
        {
            "opacus": ("GradSampleModule", opacus),
            "opacus ": ("norms over all parameters", opacus_norms),
            "torch": ("vmap(grad)", by_vmap),
            OURS: ("add_hooks", ours),
        },
    ),
    "adapters": (adapted, {"opacus": ("GradSampleModule", opacus), OURS: ("add_hooks", ours)}),
    "twice": (twice, {"opacus": ("GradSampleModule", opacus), OURS: ("add_hooks", ours)}),
}
"""By file: the model; and the tools, each with what is used of it."""


def versions() -> str:
    """What the models depend on."""
    return ", ".join(f"{name} {importlib.metadata.version(name).partition('+')[0]}" for name in BESIDE)


def said(case: str) -> dict[str, str]:
    """Of each tool that is installed: what it said, and what check_rows says of its numbers."""
    model, engines = CASES[case]
    found = {}
    for tool, (what, engine) in engines.items():
        name = tool.strip()
        if importlib.util.find_spec(name) is not None:
            title = TOOLS.get(name, name) + ("" if name == OURS else f" {_version(name)}")
            found[f"{title}, {what}"] = _said(model(), engine)
    return found


def _version(name: str) -> str:
    return importlib.metadata.version(name).partition("+")[0]


def _said(model: nn.Module, engine: Engine) -> str:
    batch = sequences()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            numbers = engine(copy.deepcopy(model), batch)
        except Exception as error:  # whatever a tool raises is what is to be shown
            return f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
    told = sorted({str(warning.message).split(". ")[0][:100] for warning in caught})
    lines = ["no error", *(f"warns: {text}" for text in told)] if told else ["no error, no warning"]
    try:
        checked = check_rows(model, (batch,), losses, numbers)
    except (VerificationFailed, ValueError) as error:
        text = str(error).partition("\nMore: ")[0]
        return "\n".join([*lines, "", f"{type(error).__name__}: {text}"])
    if all(line.error is not None for line in checked.parameters):
        return "\n".join([*lines, f"right: {str(checked).splitlines()[0]}"])
    return "\n".join([*lines, "", str(checked)])


def page(case: str) -> str:
    """What docs show of a case."""
    parts = [f"{title}: {text}" for title, text in said(case).items()]
    return "\n\n".join([f"{datetime.date.today()}, {versions()}", *parts]) + "\n"


if __name__ == "__main__":
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"install what the page shows: {', '.join(missing)}; versions are in tox.ini")
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(page(case))
        print(f"{case}\n\n{page(case)}")
