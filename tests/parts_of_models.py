"""Small parts of language models, which say what they read and make: tables, turned matrices, experts, groups."""

from collections.abc import Callable, Collection

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.attribution import Metric

Use = tuple[int, Tensor, Tensor, Callable[[Tensor], Tensor]]
"""One sample's use of a block: its number; inputs, T I; the output, and what makes its gradient T O."""


class Turned(nn.Module):
    """As transformers' Conv1D: the weight is (I, O)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(fan_in, fan_out)), nn.Parameter(torch.randn(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


def experts(m: nn.Module, x: Tensor, words: Tensor, seen: list[Use] | None = None) -> Tensor:
    """As Mixtral's, one expert for each word: words are sent to experts unevenly, and to the last one none."""
    out = torch.zeros_like(x)
    for expert in range(3):
        where = torch.where((words % 5 != 0).long() == expert)
        if not len(where[0]):
            continue
        own = x[where]
        y = F.linear(own, m.stack[expert])
        z = torch.tanh(y) @ m.turned[expert]
        out = out.index_put(where, z)
        if seen is not None:
            seen += [(expert, own, y, lambda g: g), (3 + expert, torch.tanh(y), z, lambda g: g)]
    return out


def of_words(m: nn.Module, words: Tensor, seen: dict[str, list[Use]] | None = None) -> Tensor:
    """Words to words by a table, a turned matrix, experts and a norm."""
    x = m.table(words)
    mixed = torch.tanh(x.cumsum(1))  # as many inputs as there are positions
    y = m.turned(mixed)
    own: list[Use] | None = None if seen is None else []
    z = m.norm(y + m.experts(torch.tanh(y), words, own))
    if seen is not None and own is not None:
        one_hot = F.one_hot(words[0][words[0] != 2], 6).double()
        seen["table.weight"] = [(0, one_hot, x, lambda g: g[0][words[0] != 2])]
        seen["turned.weight"] = [(0, mixed[0], y, lambda g: g[0])]
        seen["experts.stack"] = [use for use in own if use[0] < 3]
        seen["experts.turned"] = [(k - 3, *use) for k, *use in own if k >= 3]
    return z


def convolve(m: nn.Module, x: Tensor, seen: dict[str, list[Use]] | None = None) -> Tensor:
    """With groups, and by depth."""
    y = m.grouped(x)
    z = torch.tanh(y).flatten(2)
    w = m.deep(z)
    if seen is not None:
        seen["grouped.weight"] = [
            (
                k,
                F.unfold(x[:, 2 * k : 2 * k + 2], 2, padding=1)[0].mT,
                y,
                lambda g, k=k: g[0, 3 * k : 3 * k + 3].flatten(1).mT,
            )
            for k in range(2)
        ]
        seen["deep.weight"] = [(k, z[0, k].unfold(0, 3, 2), w, lambda g, k=k: g[0, k][:, None]) for k in range(6)]
        last = w.mT[0]
        out = m.last(w.mT)
        seen["last.weight"] = [(0, last, out, lambda g: g[0])]
        return out
    return m.last(w.mT)


def words_net() -> nn.Module:
    stacks = Bare(experts, stack=torch.randn(3, 4, 5), turned=torch.randn(3, 4, 5))
    table = nn.Embedding(6, 3, padding_idx=2)
    return Bare(of_words, table=table, turned=Turned(3, 5), experts=stacks, norm=nn.LayerNorm(5))


def convolutions() -> nn.Module:
    grouped, deep = nn.Conv2d(4, 6, 2, groups=2, padding=1), nn.Conv1d(6, 6, 3, groups=6, stride=2)
    return Bare(convolve, grouped=grouped, deep=deep, last=nn.Linear(6, 2))


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "words": lambda: (words_net(), torch.tensor([[1, 3, 2], [0, 5, 5], [3, 3, 1], *torch.randint(6, (9, 3)).tolist()])),
    "convolutions": lambda: (convolutions(), torch.randn(12, 4, 2, 2)),
}
IS_TURNED = {"table.weight", "turned.weight", "experts.turned"}


def hooked(case: str) -> tuple[nn.Module, Tensor]:
    model, x = CASES[case]()
    autograd_hacks.add_hooks(model)
    return model, x


def rows_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """A backward pass for each sample and output: {name: (N · K, *shape)}."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for own in x:
        out = model(own[None])
        for s in torch.eye(out.numel()):
            grads = torch.autograd.grad(out, list(model.parameters()), s.view(out.shape), retain_graph=True)
            for name, grad in zip(rows, grads):
                rows[name].append(grad)
    return {name: torch.stack(own) for name, own in rows.items()}


def expected_block(rows: Tensor, kfac: tuple[Tensor, Tensor], is_turned: bool, samples: int) -> Tensor:
    """(Q ⊗ Q) diag(S) (Q ⊗ Q)ᵀ of a parameter, block by block of its first axis, P P."""
    a, b = kfac
    count = len(b) if b.ndim == 3 else 1
    found = []
    for k, own in enumerate(rows.flatten(1).chunk(count, 1)):
        mine, theirs = (a[k], b[k]) if b.ndim == 3 else (a, b)
        q_a, q_b = (
            torch.eye(len(x)) if x.ndim == 1 else torch.linalg.eigh(x).eigenvectors.contiguous() for x in (mine, theirs)
        )
        q = torch.kron(q_a, q_b) if is_turned else torch.kron(q_b, q_a)
        found.append(q @ ((own @ q).square().sum(0) / samples).diag() @ q.T)
    return torch.block_diag(*found)


def assert_solves(model: nn.Module, x: Tensor, rows: dict[str, Tensor], turned: Collection[str]) -> None:
    """EK-FAC's damped inverse, of directions and of rows, is that of each parameter's block.  turned: which lie (I, O)"""
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    solved = Metric.from_ekfac(model, 0.3)(v)
    model(x).square().flatten(1).sum(1).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    lazily = grads.preconditioned(Metric.from_ekfac(model, 0.3))
    for name, p in model.named_parameters():
        block, own = expected_block(rows[name], p.kfac, name in turned, len(x)), grads[name].dense().flatten(1)
        inverse = torch.linalg.inv(block + 0.3 * torch.eye(p.numel()))
        assert_close(p.ekfac.matvec(torch.eye(p.numel()).view(-1, *p.shape)).flatten(1), block)
        assert_close(solved[name].flatten(), inverse @ v[name].flatten())
        assert_close(lazily[name].dense().flatten(1), own @ inverse)
        assert_close(lazily[name].dot(v[name]), own @ inverse @ v[name].flatten())
