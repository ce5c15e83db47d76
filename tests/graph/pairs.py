"""Pairs of forwards whose graphs look alike: the same kinds of nodes, the same numbers that Python can read, the same sizes.
What differs is a tensor's values, or what C++ or a Function keeps to itself.  Each is ``make(k)`` for k = 0 and 1, and the
axis of the samples in what it returns."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

N = D = 4
PERMUTED, ORDER = torch.tensor([1, 0, 3, 2]), torch.arange(N)
ASIDE = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]]).bool()  # two masks of four rows


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, dtype=torch.float64)


def zeros(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.float64)


def eye(k: int, n: int = N) -> Tensor:
    """The identity, or a permutation."""
    return torch.eye(n, dtype=torch.float64)[torch.arange(n) ^ (k if n == N else 2 * k)]


def order(k: int) -> Tensor:
    return PERMUTED if k else ORDER


def columns(k: int) -> Tensor:
    return order(k)[:, None].expand(N, N)


def rising(k: int) -> Tensor:
    """Rows in one order, or in the other."""
    x = torch.arange(4.0, dtype=torch.float64)[:, None].expand(N, N)
    return (x.flip(0) if k else x).clone().requires_grad_().mul(1)


def h() -> Tensor:
    return leaf(N, N) * 1


def grid(k: int) -> Tensor:
    found = torch.zeros(1, N, N, 2, dtype=torch.float64)
    line = torch.linspace(-1, 1, N, dtype=torch.float64)
    found[..., 0], found[..., 1] = line, line[order(k)][:, None]
    return found


def written(k: int) -> Tensor:
    out = zeros(N, N).clone()
    out[order(k)] = h()
    return out


def turned(k: int) -> Tensor:
    """Written in an order, or in its inverse."""
    whole = zeros(16, N)
    whole[8:].view(2, 2, 2, N).permute(*((2, 0, 1, 3) if k else (1, 2, 0, 3))).copy_((leaf(8, N) * 1).view(2, 2, 2, N))
    return whole[8:]


def written_through_a_view(k: int) -> Tensor:
    whole = zeros(2 * N, N)
    whole[2 * k : 2 * k + N].copy_(h())
    whole[:0] = h()[:0]  # an input without entries
    return whole[2 : 2 + N]


class Permutes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> Tensor:
        ctx.k = k
        return x[order(k)]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[order(ctx.k)], None


@torch.library.custom_op("graphs::permuted", mutates_args=())
def permuted(x: Tensor, k: int) -> Tensor:
    return x[order(k)].clone()


permuted.register_autograd(
    lambda ctx, g: (g[order(ctx.k)], None), setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1])
)


def in_checkpoint(k: int) -> Tensor:
    found: Tensor = torch.utils.checkpoint.checkpoint(lambda x: x[order(k)], h(), use_reentrant=False)
    return found


def offloaded(k: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return h()[order(k)]


def packed_by_hooks(k: int) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x,), lambda x: x[0]):
        return eye(k) @ h()


def attention(k: int, axes: int) -> Tensor:
    lead = (1,) * (axes - 2)
    q, key, v = (x.view(*lead, N, N) for x in (1000 * eye(0), 1000 * eye(k), h()))
    return F.scaled_dot_product_attention(q, key, v)


def masked_attention(k: int) -> Tensor:
    q = zeros(1, 1, N, N)
    return F.scaled_dot_product_attention(q, q, h()[None, None], attn_mask=eye(k).bool()[None, None])


def bags(k: int) -> Tensor:
    return F.embedding_bag(torch.arange(4).repeat(2), h(), torch.tensor([0, 1, 3, 5] if k else [0, 2, 4, 6]), mode="mean")


lower = torch.eye(N, dtype=torch.float64) + torch.ones(N, N, dtype=torch.float64).tril(-1)

PAIRS: dict[str, tuple[Callable[[int], Tensor], int]] = {
    "as_strided of a transposed tensor": (lambda k: (h().t() if k else h()).as_strided((N, N), (N, 1)), 0),
    "as_strided with an offset": (lambda k: (leaf(6, 4) * 1)[2 * k :][:4].as_strided((4, 4), (4, 1)), 0),
    "cat with constants of other sizes": (lambda k: torch.cat([zeros(1 + k, 4), h()[:2], zeros(1 - k, 4)]), 0),
    "block_diag with constants of other sizes": (
        lambda k: torch.block_diag(zeros(1 + k, 1), h()[:2, :2], zeros(1 - k, 1)), 0),
    "_foreach_mul and _foreach_neg": (
        lambda k: torch._foreach_neg([h()])[0] if k else torch._foreach_mul([h()], [eye(0) + 1])[0], 0),
    "index": (lambda k: h()[order(k)], 0),
    "index of two later axes": (lambda k: (leaf(3, N, N) * 1)[:, order(k), ORDER], 1),
    "index of two axes apart": (lambda k: (leaf(N, 3, N) * 1)[order(k), :, ORDER], 0),
    "mask of rows": (lambda k: torch.cat([h(), h()])[ASIDE[k]], 0),
    "masked_select": (lambda k: h()[:, 0].repeat(2).masked_select(ASIDE[k]), 0),
    "masked_scatter": (
        lambda k: zeros(N).masked_scatter(torch.tensor([0, 1, 1, 1] if k else [1, 0, 1, 1]).bool(), h()[:, 0]), 0),
    "where, a whole flag": (lambda k: torch.where(torch.tensor(bool(k)), h(), h() * 2), 0),
    "index_put": (lambda k: zeros(N, N).index_put((order(k),), h()), 0),
    "index_put that adds": (lambda k: zeros(N, N).index_put((order(k),), h(), accumulate=True), 0),
    "index_put that adds all to one row": (
        lambda k: zeros(N, N).index_put((ORDER * (1 - k),), h(), accumulate=True), 0),
    "index_put by a mask": (lambda k: zeros(8, N).index_put((ASIDE[k],), h()), 0),
    "index_add": (lambda k: zeros(N, N).index_add(0, order(k), h()), 0),
    "index_copy": (lambda k: zeros(N, N).index_copy(0, order(k), h()), 0),
    "index_reduce": (lambda k: ones(N, N).index_reduce(0, order(k), h(), "amax", include_self=False), 0),
    "index_select": (lambda k: h().index_select(0, order(k)), 0),
    "scatter": (lambda k: zeros(N, N).scatter(0, columns(k), h()), 0),
    "scatter_add": (lambda k: zeros(N, N).scatter_add(0, columns(k), h()), 0),
    "scatter_reduce by maximum": (
        lambda k: zeros(N, N).scatter_reduce(0, columns(k), h(), "amax", include_self=False), 0),
    "scatter_reduce by mean": (lambda k: zeros(N, N).scatter_reduce(0, columns(k), h(), "mean", include_self=False), 0),
    "take": (lambda k: h().take(torch.arange(4) * (4 if k else 1)), 0),
    "put": (lambda k: zeros(N).put(order(k), h()[:, 0]), 0),
    "gather": (lambda k: h().gather(0, columns(k)), 0),
    "take_along_dim": (lambda k: h().take_along_dim(order(k)[:, None], 0), 0),
    "sort": (lambda k: rising(k).sort(0).values, 0),
    "stable sort": (lambda k: rising(k).sort(dim=0, stable=True).values, 0),
    "topk": (lambda k: rising(k).topk(4, 0).values, 0),
    "cummax": (lambda k: rising(k).cummax(0).values, 0),
    "cummin": (lambda k: rising(k).cummin(0).values, 0),
    "median": (lambda k: rising(k).t().median(0).values, 0),
    "embedding of activations": (lambda k: F.embedding(order(k), h()), 0),
    "embedding_bag, sum": (lambda k: F.embedding_bag(order(k)[:, None], h(), mode="sum"), 0),
    "embedding_bag, maximum": (lambda k: F.embedding_bag(order(k)[:, None], h(), mode="max"), 0),
    "embedding_bag, offsets": (bags, 0),
    "segment_reduce": (
        lambda k: torch.segment_reduce(h(), "sum", lengths=torch.tensor([2, 0, 1, 1] if k else [1, 1, 1, 1]), axis=0,
                                       unsafe=True), 0),
    "max_pool1d over samples": (lambda k: F.max_pool1d(rising(k).t()[None], 3, 1, 1), 2),
    "max_pool2d over samples": (lambda k: F.max_pool2d(rising(k).t()[None], (1, 3), 1, (0, 1)), 2),
    "adaptive_max_pool1d over samples": (
        lambda k: F.adaptive_max_pool1d(torch.cat([rising(k), rising(0)]).t()[None], 4), 2),
    "max_unpool1d": (lambda k: F.max_unpool1d(h()[None], order(k).expand(1, N, N), 1), 2),
    "a write in an order or its inverse": (turned, 0),
    "windows": (lambda k: h().unfold(0, 1, 1)[..., 0], 0),
    "mm": (lambda k: eye(k) @ h(), 0),
    "mm by a folded matrix": (lambda k: eye(k, 8) @ (leaf(8, N) * 1), 0),
    "mm by a wide matrix": (lambda k: torch.eye(8, dtype=torch.float64)[4 * k : 4 * k + 4] @ (leaf(8, N) * 1), 0),
    "mv": (lambda k: eye(k) @ h()[:, 0], 0),
    "bmm": (lambda k: eye(k).expand(N, N, N) @ (leaf(N, N, N) * 1), 1),
    "addmm": (lambda k: torch.addmm(zeros(N, N), eye(k), h()), 0),
    "einsum": (lambda k: torch.einsum("nm,mc->nc", eye(k), h()), 0),
    "kron": (lambda k: torch.kron(torch.tensor([[1.0 - k, k]], dtype=torch.float64), h()), 0),
    "kernel over the samples' axis": (
        lambda k: F.conv1d(h()[None], eye(0)[:, :, None] * torch.tensor([k, 1.0 - k, 0]).double(), padding=1), 2),
    "convolution whose channels are samples": (lambda k: F.conv1d(h()[None], eye(k)[:, :, None]), 1),
    "conv_transpose whose channels are samples": (lambda k: F.conv_transpose1d(h()[None], eye(k)[:, :, None]), 1),
    "bilinear": (lambda k: F.bilinear(h().t(), ones(N, 1), eye(k)[..., None]).t(), 0),
    "grid_sample, nearest": (lambda k: F.grid_sample(h()[None, None], grid(k), "nearest", align_corners=True), 2),
    "grid_sample, bilinear": (lambda k: F.grid_sample(h()[None, None], grid(k), align_corners=True), 2),
    "cdist": (lambda k: torch.cdist(h(), torch.randn(N, N, dtype=torch.float64)), 0),
    "solve_triangular": (lambda k: torch.linalg.solve_triangular(lower if k else eye(0), h(), upper=False), 0),
    "solve": (lambda k: torch.linalg.solve(eye(k), h()), 0),
    "lu_solve": (lambda k: torch.linalg.lu_solve(*torch.linalg.lu_factor(eye(k)), h()), 0),
    "cholesky_solve": (lambda k: torch.cholesky_solve(h(), lower if k else eye(0)), 0),
    "ormqr": (lambda k: torch.ormqr(zeros(N, N) + k * lower, zeros(N) + k, h()), 0),
    "sparse.mm": (lambda k: torch.sparse.mm(eye(k).to_sparse(), h()), 0),
    "product by compressed rows": (lambda k: eye(k).to_sparse_csr() @ h(), 0),
    "attention of three axes": (lambda k: attention(k, 3), 1),
    "attention of four axes": (lambda k: attention(k, 4), 2),
    "attention by a mask": (masked_attention, 2),
    "fft over samples, then not": (lambda k: torch.fft.fft(h(), dim=1 - k).real, 0),
    "cumprod with zeros": (lambda k: (rising(0) + k).cumprod(0), 0),
    "prod with zeros": (lambda k: (rising(0) + k).t().prod(0), 0),
    "product with zeros": (lambda k: h() * zeros(N, N).add(k), 0),
    "mm by zeros": (lambda k: h() @ (k * lower), 0),
    "low rank, zero at first": (lambda k: h()[:, :2] @ (k * lower[:2]), 0),
    "convolution by zeros": (lambda k: F.conv2d(leaf(4, 2, 5, 5) * 1, ones(3, 2, 3, 3) * k), 0),
    "dead units": (lambda k: (h().detach().abs() * (2 * k - 1)).requires_grad_().mul(1).relu(), 0),
    "maximum with ties": (lambda k: (h() * k).amax(1), 0),
    "ctc_loss": (
        lambda k: F.ctc_loss(
            leaf(6, 4, 5).log_softmax(2), torch.randint(1, 5, (4, 3)), torch.tensor([6, 6, 6, 6]),
            torch.tensor([3, 2, 1, 1] if k else [1, 1, 2, 3]), reduction="none"), 0),
    "nll_loss": (lambda k: F.nll_loss(h(), order(k), reduction="none"), 0),
    "multi_margin_loss": (lambda k: F.multi_margin_loss(h(), order(k), reduction="none"), 0),
    "renorm": (lambda k: (h() * (1 if k else 100)).renorm(2, 0, 1.0), 0),
    "largest entry": (lambda k: torch.linalg.vector_norm(rising(k), float("inf"), 1), 0),
    "matrix_exp": (lambda k: torch.matrix_exp(torch.diag_embed(h()) + k), 0),
    "interpolate": (lambda k: F.interpolate(h()[None], size=4, mode="nearest"), 2),
    "roll": (lambda k: h().roll(1 + k, 0), 0),
    "diagonal": (lambda k: (leaf(4, 4, 6) * 1).diagonal(k, 0, 2), 0),
    "select": (lambda k: (leaf(4, 4, 4) * 1).select(0, k), 0),
    "narrow": (lambda k: (leaf(8, 4) * 1).narrow(0, 4 * k, 4), 0),
    "chunk": (lambda k: (leaf(8, 4) * 1).chunk(2)[k], 0),
    "unbind": (lambda k: (leaf(2, 4, 4) * 1).unbind()[k], 0),
    "real part": (lambda k: torch.view_as_real(h().to(torch.complex128))[..., k], 0),
    "written by index": (written, 0),
    "written through a view": (written_through_a_view, 0),
    "a user's Function": (lambda k: Permutes.apply(h(), k), 0),
    "a custom operator": (lambda k: permuted(h(), k), 0),
    "index in a checkpoint": (in_checkpoint, 0),
    "index under save_on_cpu": (offloaded, 0),
    "mm under saved_tensors_hooks": (packed_by_hooks, 0),
    "LSTM": (lambda k: nn.LSTM(4, 3, batch_first=bool(k)).double()(leaf(N, N, N) * 1)[0], 0),
    "vmap": (lambda k: torch.func.vmap(lambda r: r * (2 + k))(h()), 0),
}  # fmt: skip


# Programs that are another thing with a flag, each with what it should be: owned, or mixed


class Net(nn.Module):
    """Two layers, and an operation between them."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(D, D), nn.Linear(D, D), between
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, flag: int = 0) -> Tensor:
        return self.b(self.between(self.a(x), flag) * self.scale)


def _grouped(h: Tensor, flag: int) -> Tensor:
    groups = N // 2 if flag else N
    return F.group_norm(h.view(1, 2 * N, D // 2, 1), groups).view(N, D)


def _folded(h: Tensor, flag: int) -> Tensor:
    """Two positions a sample, adjacent or apart."""
    rows = h.view(N, 2, D // 2)
    rows = rows.transpose(0, 1) if flag else rows
    folded = rows.reshape(2 * N, D // 2).tanh()
    return (folded.view(2, N, D // 2).transpose(0, 1) if flag else folded.view(N, 2, D // 2)).reshape(N, D)


def _selected(h: Tensor, flag: int) -> Tensor:
    index = ORDER.repeat(3) if flag else ORDER.repeat_interleave(3)
    rows = h[index].tanh()
    return rows.view(3, N, D).sum(0) if flag else rows.view(N, 3, D).sum(1)


CHANGING: dict[str, tuple[Callable[[Tensor, int], Tensor], str, str]] = {
    # name: (between(h, flag), what it is without the flag, with it)
    "mean over features, then over samples": (lambda h, k: h - h.mean(0 if k else 1, keepdim=True), "owned", "mixed"),
    "softmax over features, then over samples": (lambda h, k: h.softmax(0 if k else 1), "owned", "mixed"),
    "layer norm over features, then all": (lambda h, k: F.layer_norm(h, h.shape if k else h.shape[1:]), "owned", "mixed"),
    "group norm of samples' groups, then of two samples": (_grouped, "owned", "mixed"),
    "flip": (lambda h, k: h.flip(0 if k else 1), "owned", "owned"),
    "transposed twice, then once": (lambda h, k: h.t().tanh() if k else h.t().tanh().t(), "owned", "owned"),
    "index of several copies": (_selected, "owned", "owned"),
    "one row for all": (lambda h, k: h[torch.zeros(N, dtype=torch.long)] + h if k else h + h, "owned", "mixed"),
    "padding that moves rows": (lambda h, k: F.pad(h, (0, 0, -k, k)), "owned", "owned"),
    "folds": (_folded, "owned", "owned"),
    "product with a diagonal, then with a full matrix": (lambda h, k: (torch.eye(N) + k) @ h, "owned", "mixed"),
    "BatchNorm in eval mode, then in training": (
        lambda h, k: F.batch_norm(h, torch.zeros(D), torch.ones(D), training=bool(k)), "owned", "mixed",
    ),
    "in-batch similarity": (lambda h, k: h @ h.t() if k else h * h, "owned", "mixed"),
    "statistic without a gradient": (lambda h, k: h - h.mean(0).detach() if k else h, "owned", "owned"),
    "repeats": (
        lambda h, k: h.repeat(2, 1).view(2, N, D).sum(0) if k else h.repeat_interleave(2, 0).view(N, 2, D).sum(1),
        "owned", "owned",
    ),
    "convolution over features, then over samples": (
        lambda h, k: F.conv1d(h.t()[None], torch.ones(N, N, 3), padding=1)[0].t() if k
        else F.conv1d(h[:, None], torch.ones(1, 1, 3), padding=1)[:, 0], "owned", "mixed",
    ),
    "attention over heads, then over samples": (
        lambda h, k: F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])[0, 0] if k
        else F.scaled_dot_product_attention(h[:, None, None], h[:, None, None], h[:, None, None])[:, 0, 0], "owned", "mixed",
    ),
    "in place, on the other half": (
        lambda h, k: h.clone().index_copy_(0, ORDER[:2], h[2:] if k else h[:2]), "owned", "mixed",
    ),
}  # fmt: skip


def between(name: str) -> Any:
    return CHANGING[name][0]
