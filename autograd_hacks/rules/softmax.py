"""Layers that end in a loss: AdaptiveLogSoftmaxWithLoss and LinearCrossEntropyLoss.  The loss is recomputed from the logits,
which the reduction comes after: so the gradient at a sample's logits belongs to that sample alone."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Form
from autograd_hacks.rules.call import Call, needs_batch
from autograd_hacks.rules.recompute import LinearMaps, check_recomputed, recomputing


def count_rows(layer: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> int:
    return len(args[0] if args else next(iter(kwargs.values())))


def adaptive_log_softmax(layer: nn.AdaptiveLogSoftmaxWithLoss, call: Call) -> Mapping[str, Form]:
    """x: N I    target: N.  The head scores the frequent classes and each cluster of rare ones; a cluster's tail scores its
    classes, for the samples whose target is among them."""
    x, target = call.argument(0, "input_"), call.argument(1, "target_")
    needs_batch(x, at_least=2, layout="(N, in_features)")
    maps = LinearMaps(call)
    with recomputing(call):
        scores = F.log_softmax(maps(x, "head.weight", "head.bias" if layer.head_bias else None), dim=1)
        cluster = torch.bucketize(target, torch.tensor(layer.cutoffs[:-1], device=target.device), right=True)
        entry = torch.where(cluster == 0, target, layer.shortlist_size + cluster - 1)
        out = scores.gather(1, entry[:, None])[:, 0]
        for part, (first, _) in enumerate(pairwise(layer.cutoffs)):
            rows = (cluster == part + 1).nonzero()[:, 0]
            if len(rows):
                inner = maps(x[rows], f"tail.{part}.0.weight", None, rows=rows)
                local = F.log_softmax(maps(inner, f"tail.{part}.1.weight", None, rows=rows), dim=1)
                out = out.index_add(0, rows, local.gather(1, (target[rows] - first)[:, None])[:, 0])
        outputs = [out, -out.mean()]
        check_recomputed(call, outputs)
        return maps.forms(outputs)


def linear_cross_entropy(layer: Any, call: Call) -> Mapping[str, Form]:
    """x: N I    target: N *S, or N C *S.  The loss is the cross entropy of the target and the logits, N C *S,
    a linear map of x."""
    x, target = call.argument(0, "input"), call.argument(1, "target")
    needs_batch(x, at_least=2, layout="(N, in_features)")
    maps, weight = LinearMaps(call), None if layer.weight is None else call.read("weight")
    with recomputing(call):
        logits = maps(x, "linear.weight", None if layer.linear.bias is None else "linear.bias")
        logits = logits.view(len(x), layer.num_classes, *layer.out_features)
        ignored = {} if layer.ignore_index is None or target.is_floating_point() else {"ignore_index": layer.ignore_index}
        loss = F.cross_entropy(
            logits, target, weight, reduction=layer.reduction, label_smoothing=layer.label_smoothing, **ignored
        )
        check_recomputed(call, [loss])
        return maps.forms([loss])
