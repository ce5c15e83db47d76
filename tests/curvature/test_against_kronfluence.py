"""EK-FAC of a GPT-2, whose weights lie as (I, O), against kronfluence's of the same network of Linear layers."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.attribution import Metric

transformers = pytest.importorskip("transformers")

LAYERS = ["*.c_attn.*", "*.c_proj.*", "*.c_fc.*"]


def of_words() -> nn.Module:
    """A GPT-2 that returns logits alone."""
    sizes = {"vocab_size": 11, "n_positions": 6, "n_embd": 12, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **drops, eos_token_id=0)
    inner = transformers.GPT2LMHeadModel(config)
    for name, p in inner.named_parameters():  # kronfluence has them in one block with their weights
        p.requires_grad_(not (name.endswith("bias") and ".c_" in name))
    return Bare(lambda m, words: m.inner(words).logits, inner=inner)


def of_linear_layers(model: nn.Module) -> nn.Module:
    """The same with Linear in the place of Conv1D."""
    twin = copy.deepcopy(model)
    for path, layer in model.named_modules():
        if type(layer).__name__ == "Conv1D":
            plain = nn.Linear(*layer.weight.shape, bias=False).to(layer.weight)
            plain.load_state_dict({"weight": layer.weight.mT})
            twin.set_submodule(path, plain)
    return twin


def losses(model: nn.Module, words: Tensor) -> Tensor:
    """Of each sequence, summed over its positions."""
    return F.cross_entropy(model(words)[:, :-1].mT, words[:, 1:], reduction="none").sum(1)


def sequences() -> tuple[Tensor, Tensor]:
    """Counted up by a step of each sequence's own, with mistakes: 40, and 6 others."""
    start, step = torch.randint(11, (46, 1)), torch.randint(1, 4, (46, 1))
    words = (start + step * torch.arange(6)) % 11
    words = torch.where(torch.rand(words.shape) < 0.15, torch.randint(11, words.shape), words)
    return words[:40], words[40:]


def trained(model: nn.Module, words: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        losses(model, words).mean().backward()
        optimizer.step()
    return model.eval()


def influences(model: nn.Module, train: Tensor, test: Tensor, kfac: dict[str, Any]) -> Tensor:
    """Of training sequences on others, 40 × 6, with one label drawn for each position.  kfac: filled with factors"""
    generator = torch.Generator().manual_seed(1)
    with autograd_hacks.add_hooks(model):
        autograd_hacks.backprop_hess(model(train), draws=1, generator=generator)
        autograd_hacks.compute_hess(model, "ekfac", parameters=LAYERS)

        def rows(words: Tensor) -> autograd_hacks.PerSampleGrads:
            losses(model, words).sum().backward()
            return autograd_hacks.per_sample_grads(model, "sum", only=LAYERS)

        others = rows(test).preconditioned(Metric.from_ekfac(model))
        found = rows(train).gram(others)
        kfac.update((name, p.kfac) for name, p in model.named_parameters() if getattr(p, "kfac", None) is not None)
    return found


def drawn(model: nn.Module, words: Tensor) -> Tensor:
    """The labels that `influences` draws."""
    p = model(words).softmax(-1)
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(words.shape)


def test_conv1d_has_what_linear_has() -> None:
    train, test = sequences()
    model = trained(of_words().double(), train)
    twin = of_linear_layers(model).double()
    own, others = dict[str, Any](), dict[str, Any]()
    assert_close(influences(model, train, test, own), influences(twin, train, test, others))
    assert own.keys() == others.keys()
    assert len(own) == 8
    for name, kfac in own.items():
        assert kfac.is_turned
        assert not others[name].is_turned
        assert_close(tuple(kfac), tuple(others[name]))


def test_influences_are_kronfluences(tmp_path: Path) -> None:
    pytest.importorskip("kronfluence")
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import ScoreArguments
    from kronfluence.task import Task

    train, test = sequences()
    model = trained(of_words(), train)
    labels = drawn(model, train).detach()

    class Sequences(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            words, own = batch
            if sample:
                return F.cross_entropy(model(words).mT, own, reduction="sum")
            return losses(model, words).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

        def get_influence_tracked_modules(self) -> list[str]:
            return [path for path, layer in twin.named_modules() if isinstance(layer, nn.Linear) and ".h." in path]

    twin = of_linear_layers(model)
    task = Sequences()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        prepared = prepare_model(copy.deepcopy(twin), task)
        analyzer = Analyzer("words", prepared, task, cpu=True, output_dir=str(tmp_path), disable_tqdm=True)
        data = torch.utils.data.TensorDataset(train, labels)
        others = torch.utils.data.TensorDataset(test, torch.zeros_like(test))
        analyzer.fit_all_factors("factors", data, per_device_batch_size=40)
        tenth = ScoreArguments(damping_factor=None)  # of the mean eigenvalue
        analyzer.compute_pairwise_scores("scores", "factors", others, data, 6, 40, score_args=tenth)
        theirs = analyzer.load_pairwise_scores("scores")["all_modules"].mT
    found = influences(model, train, test, {})
    r = torch.corrcoef(torch.stack([found.flatten(), theirs.flatten()]).double())[0, 1]
    assert float(r) > 0.9999
    assert_close(6 * theirs, found, rtol=1e-2, atol=1e-2 * float(found.abs().max()))  # its loss is the sum over 6 positions
