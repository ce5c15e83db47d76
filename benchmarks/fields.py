"""Models of speech, detection, diffusion, recommendation, graphs, states and reinforcement learning, randomly initialised.

Those of transformers have losses as their fields have them; the others are written out, small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from families import Make, Size, hugging, outputs, sizes, text
from torch import Tensor
from workloads import Batch, Model, Workload, classification, multilayer

CLASSES, BOXES, FOUND = 5, 3, 7
"""Of detectors: kinds of things, things in an image, and how many a transformer proposes."""
DENSE, TABLES, BAG = 13, 5, 6
"""Of a recommender: numbers, features that are words, and how many words each has at most."""
OBSERVED, ACTIONS = 11, 3


def speaking(size: Size, **more: object) -> dict[str, object]:
    """Of encoders of recordings."""
    return {
        "vocab_size": 29, "hidden_size": size.width, "num_hidden_layers": 2, "num_attention_heads": size.heads,
        "intermediate_size": 2 * size.width, "conv_dim": size.dims[1:3], "conv_stride": (5, 4), "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": size.heads,
    } | more  # fmt: skip


def recordings(size: Size) -> Callable[[int], Batch]:
    return lambda step: {
        "input_values": torch.randn(size.samples, size.frames),
        "letters": torch.randint(1, 29, (size.samples, 4)),
    }


def ctc(model: Model, batch: Batch) -> Tensor:
    """All alignments of letters to frames."""
    logits, letters = model(batch["input_values"]).logits, batch["letters"]
    frames, wanted = (torch.full((len(logits),), x.shape[1]) for x in (logits, letters))
    return F.ctc_loss(logits.log_softmax(2).transpose(0, 1), letters, frames, wanted, reduction="none")


def things(size: Size) -> Callable[[int], Batch]:
    return lambda step: {
        "pixel_values": torch.randn(size.samples, 3, size.image, size.image),
        "boxes": 0.2 + 0.6 * torch.rand(size.samples, BOXES, 4),
        "kinds": torch.randint(CLASSES, (size.samples, BOXES)),
    }


def matched(model: Model, batch: Batch) -> Tensor:
    """DETR's loss, without its third term: each thing belongs to the proposal that suits it best; the rest is nothing."""
    from scipy.optimize import linear_sum_assignment

    found = model(batch["pixel_values"])
    log_p, boxes = found.logits.log_softmax(2), found.pred_boxes
    far = (boxes[:, :, None] - batch["boxes"][:, None]).abs().sum(3)
    cost = far - log_p.gather(2, batch["kinds"][:, None].expand(-1, boxes.shape[1], -1)).exp()
    losses = []
    for n, own in enumerate(cost.detach().cpu()):
        chosen, whose = (torch.as_tensor(x) for x in linear_sum_assignment(own.numpy()))
        kinds = torch.full(log_p.shape[1:2], CLASSES, device=log_p.device)
        kinds[chosen] = batch["kinds"][n, whose]
        losses.append(F.nll_loss(log_p[n], kinds) + far[n, chosen, whose].mean())
    return torch.stack(losses)


class Pyramid(nn.Module):
    """One head on two levels of a pyramid, as RetinaNet has it: for each place a score of each kind, and a box."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(into, out, 3, 2, 1), nn.GroupNorm(4, out), nn.SiLU())
            for into, out in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.sides = nn.ModuleList(nn.Conv2d(into * width, width, 1) for into in (2, 4))
        self.kinds, self.boxes = (
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))
            for out in (CLASSES, 4)
        )
        self.scales = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.stages[1](self.stages[0](x))
        deep = self.sides[1](self.stages[2](fine))
        fine = self.sides[0](fine) + F.interpolate(deep, scale_factor=2.0)
        levels = (fine, deep)
        kinds = [self.kinds(own).flatten(2) for own in levels]
        boxes = [(self.boxes(own) * scale).flatten(2).exp() for own, scale in zip(levels, self.scales)]
        return torch.cat(kinds, 2), torch.cat(boxes, 2)


def places(size: Size) -> Callable[[int], Batch]:
    number = (size.image // 4) ** 2 + (size.image // 8) ** 2
    return lambda step: {
        "x": torch.randn(size.samples, 3, size.image, size.image),
        "kinds": (torch.rand(size.samples, CLASSES, number) < 0.1).float(),
        "boxes": torch.rand(size.samples, 4, number),
    }


def focal(model: Model, batch: Batch) -> Tensor:
    """The focal loss of kinds, and the distance of boxes where there is something."""
    logits, boxes = model(batch["x"])
    apart = F.binary_cross_entropy_with_logits(logits, batch["kinds"], reduction="none")
    there = batch["kinds"].amax(1)
    far = F.smooth_l1_loss(boxes, batch["boxes"], reduction="none").sum(1)
    number = there.sum(1).clamp(min=1)
    return (((1 - (-apart).exp()) ** 2 * apart).sum((1, 2)) + (far * there).sum(1)) / number


class Modulated(nn.Module):
    """A Transformer's block whose norms' shifts and scales come of the time and the class."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, 2)
        parts = self.into(self.norm(x) * (1 + scale) + shift).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion Transformer: the noise in images, of a time and a class."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patch, self.side = size.patch, size.image // size.patch
        self.into = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, self.side**2, size.width))
        self.time = nn.Sequential(nn.Linear(16, size.width), nn.SiLU(), nn.Linear(size.width, size.width))
        self.kinds = nn.Embedding(10, size.width)
        self.blocks = nn.ModuleList(Modulated(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, elementwise_affine=False)
        self.modulation, self.out = nn.Linear(size.width, 2 * size.width), nn.Linear(size.width, 3 * size.patch**2)

    def forward(self, x: Tensor, time: Tensor, kind: Tensor) -> Tensor:
        angles = time[:, None] * torch.arange(1, 9, device=x.device, dtype=x.dtype)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.kinds(kind)
        h = self.into(x).flatten(2).mT + self.places
        for block in self.blocks:
            h = block(h, condition)
        shift, scale = self.modulation(F.silu(condition))[:, None].chunk(2, 2)
        h = self.out(self.norm(h) * (1 + scale) + shift)
        return F.fold(h.mT, x.shape[2:], self.patch, stride=self.patch)


def dit(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        x, noise = torch.randn(2, size.samples, 3, size.image, size.image)
        return {"x": x, "noise": noise, "time": torch.rand(size.samples), "kind": torch.randint(10, (size.samples,))}

    def losses(model: Model, batch: Batch) -> Tensor:
        time, noise = batch["time"], batch["noise"]
        t = time[:, None, None, None]
        found = model((1 - t).sqrt() * batch["x"] + t.sqrt() * noise, time, batch["kind"])
        return (found - noise).square().flatten(1).mean(1)

    return Workload(lambda: DiT(size), batch, losses)


class DLRM(nn.Module):
    """Numbers and bags of words, their inner products, and the chance of a click."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(words, width, mode="sum") for _ in range(TABLES))
        self.item = nn.Embedding(words, width)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU())
        pairs = (TABLES + 2) * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, dense: Tensor, words: Tensor, item: Tensor) -> Tensor:
        x = self.bottom(dense)
        z = torch.stack([x, self.item(item), *(table(own) for table, own in zip(self.tables, words.unbind(1)))], 1)
        one, other = torch.triu_indices(z.shape[1], z.shape[1], 1, device=z.device)
        return self.top(torch.cat([x, (z @ z.mT)[:, one, other]], 1)).squeeze(1)


def dlrm(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        return {
            "dense": torch.randn(size.samples, DENSE), "words": torch.randint(size.words, (size.samples, TABLES, BAG)),
            "item": torch.randint(size.words, (size.samples,)), "clicked": torch.randint(2, (size.samples,)).float(),
        }  # fmt: skip

    def losses(model: Model, batch: Batch) -> Tensor:
        logits = model(batch["dense"], batch["words"], batch["item"])
        return F.binary_cross_entropy_with_logits(logits, batch["clicked"], reduction="none")

    return Workload(lambda: DLRM(size.words, size.width), batch, losses)


class GCN(nn.Module):
    """Sums over neighbours, each divided by the roots of both nodes' numbers of them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8 if n == 0 else width, width) for n in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges / (edges.sum(1, keepdim=True) * edges.sum(2, keepdim=True)).sqrt()
        for layer in self.layers:
            x = F.relu(edges @ layer(x))
        return self.head(x.mean(1))


class GAT(nn.Module):
    """Attention to neighbours: of each head the leaky sum of a number of the node and one of its neighbour."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(nn.Linear(8 if n == 0 else width, width, bias=False) for n in range(layers))
        self.here, self.there = (
            nn.ParameterList(torch.randn(heads, width // heads) / math.sqrt(width) for _ in range(layers)) for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer, here, there in zip(self.layers, self.here, self.there):
            h = layer(x).unflatten(2, (self.heads, -1))
            scores = (h * here).sum(3).mT[:, :, :, None] + (h * there).sum(3).mT[:, :, None]
            weights = F.leaky_relu(scores, 0.2).masked_fill(edges[:, None] == 0, -math.inf).softmax(3)
            x = F.elu((weights @ h.transpose(1, 2)).transpose(1, 2).flatten(2))
        return self.head(x.mean(1))


def graphs(size: Size, model: Callable[[], nn.Module]) -> Workload:
    """Each sample is a graph of its own, of some edges both ways and a loop at each node."""

    def batch(step: int) -> Batch:
        nodes = size.length // 2 + 3
        edges = (torch.rand(size.samples, nodes, nodes) < 0.2).float()
        return {
            "x": torch.randn(size.samples, nodes, 8), "edges": (edges + edges.mT + torch.eye(nodes)).clamp(max=1),
            "y": torch.randint(10, (size.samples,)),
        }  # fmt: skip

    def losses(model: Model, batch: Batch) -> Tensor:
        return classification(lambda x: model(x, batch["edges"]), batch)

    return Workload(model, batch, losses)


class ActorCritic(nn.Module):
    """A policy's mean and the logarithm of its spread, which is one for all observations, and a value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = multilayer(OBSERVED, width, width, ACTIONS, between=nn.Tanh)()
        self.critic = multilayer(OBSERVED, width, width, 1, between=nn.Tanh)()
        self.log_std = nn.Parameter(torch.full((ACTIONS,), -0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.actor(x)
        return mean, self.log_std.expand_as(mean), self.critic(x).squeeze(1)


def ppo(model: Model, batch: Batch) -> Tensor:
    """The clipped gain, the value's error and the entropy."""
    mean, log_std, value = model(batch["x"])
    policy = torch.distributions.Normal(mean, log_std.exp())
    ratio = (policy.log_prob(batch["action"]).sum(1) - batch["log_p"]).exp()
    gain = torch.minimum(ratio * batch["gain"], ratio.clamp(0.8, 1.2) * batch["gain"])
    return -gain + 0.5 * (value - batch["return"]).square() - 0.01 * policy.entropy().sum(1)


def actor_critic(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        gain, later = torch.randn(2, size.samples)
        return {
            "x": torch.randn(size.samples, OBSERVED), "action": torch.randn(size.samples, ACTIONS),
            "log_p": -3 + 0.3 * torch.randn(size.samples), "gain": gain, "return": later,
        }  # fmt: skip

    return Workload(lambda: ActorCritic(size.width), batch, ppo)


def episodes(size: Size) -> Callable[[int], Batch]:
    length = size.length // 2
    return lambda step: {
        "states": torch.randn(size.samples, length, OBSERVED), "actions": torch.randn(size.samples, length, ACTIONS),
        "returns_to_go": torch.randn(size.samples, length, 1),
        "timesteps": torch.randint(size.length, (size.samples, 1)) + torch.arange(length),
        "attention_mask": torch.ones(size.samples, length, dtype=torch.int64),
    }  # fmt: skip


def rwkv(size: Size) -> Workload:
    """In train mode, without dropout: in eval mode transformers overwrites what a backward pass needs."""
    own = text("RwkvForCausalLM", "RwkvConfig", lambda size: sizes(size, num_hidden_layers=2), longest=16)(size)
    return replace(own, model=lambda: own.model().train())


FIELDS: dict[str, Make] = {
    "hubert, CTC": hugging("HubertForCTC", "HubertConfig", speaking, recordings, ctc),
    "conformer, CTC, BatchNorm in eval": hugging(
        "Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", lambda size: speaking(size, conv_depthwise_kernel_size=5),
        recordings, ctc,
    ),
    "yolos, matched boxes": hugging(
        "YolosForObjectDetection",
        "YolosConfig",
        lambda size: {
            "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
            "intermediate_size": 3 * size.width, "image_size": [size.image, size.image], "patch_size": size.patch,
            "num_detection_tokens": FOUND, "num_labels": CLASSES, "use_mid_position_embeddings": False,
        },
        things,
        matched,
    ),
    "retina, one head on two levels": lambda size: Workload(
        lambda: Pyramid(size.dims[0]), places(size), focal
    ),
    "diffusion transformer": dit,
    "dlrm": dlrm,
    "gcn": lambda size: graphs(size, lambda: GCN(size.width, size.layers)),
    "gat": lambda size: graphs(size, lambda: GAT(size.width, size.heads, size.layers)),
    "mamba2": text(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        lambda size: sizes(
            size, state_size=8, num_hidden_layers=2, expand=2, head_dim=size.width // size.heads, num_heads=2 * size.heads,
            n_groups=1, chunk_size=8,
        ),
        longest=16,
    ),
    "rwkv": rwkv,
    "actor and critic, PPO": actor_critic,
    "decision transformer": hugging(
        "DecisionTransformerModel",
        "DecisionTransformerConfig",
        lambda size: {
            "state_dim": OBSERVED, "act_dim": ACTIONS, "hidden_size": size.width, "n_layer": 2, "n_head": size.heads,
            "max_ep_len": 2 * size.length, "n_positions": 4 * size.length,
        },
        episodes,
        outputs("action_preds"),
    ),
}  # fmt: skip
"""{name: makes it in a size}, added to `architectures.ARCHITECTURES`"""
