"""What is run by which command: models, ways to step, and who else is timed with ``--peers``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cards
from architectures import ARCHITECTURES
from derived import DERIVED
from families import FULL
from measuring import Case
from ways import is_installed
from workloads import CONVOLUTIONS, MODELS, STACKS, Workload

COMPILED = (
    "vit", "swin", "convnext", "resnet18, BatchNorm in eval", "bert", "gpt2", "llama", "llama, LoRA", "qwen3", "t5", "mamba",
    "whisper",
)  # fmt: skip
SMALL = ("MLP 784-512-512-10, N 256", "50 linear layers of width 16, N 8")
WHAT, BY = ("rows", "norms", "clip"), ("ours, param_grad=False", "graph", "compiled")
ROWS, CLIPS = ((f"{what}: ours", f"{what}: ours, param_grad=False") for what in ("rows", "clip"))


@dataclass(frozen=True)
class Table:
    """models: by name    ways: to run them, the first of which others are measured by    peers: other ways
    option: the command's, that chooses the table; some have none
    """

    models: Callable[[], dict[str, Workload]]
    ways: tuple[str, ...]
    peers: tuple[str, ...] = ()
    option: str | None = None

    def cases(self, peers: bool) -> dict[str, Case]:
        """Without what isn't installed."""
        ways = self.ways + (tuple(filter(is_installed, self.peers)) if peers else ())
        return {name: Case(workload, ways) for name, workload in self.models().items()}


def architectures() -> dict[str, Workload]:
    return {name: make(FULL) for name, make in ARCHITECTURES.items()}


def for_compilers() -> dict[str, Workload]:
    """Twelve architectures, and three models in which the arithmetic is little."""
    return {name: ARCHITECTURES[name](FULL) for name in COMPILED} | {name: MODELS[name] for name in SMALL} | CONVOLUTIONS


TABLES = {
    "Per-sample gradients written out (grad1)": Table(
        lambda: MODELS,
        ("plain", "write once", "hooks alone", *ROWS),
        ("rows: loop", "rows: vmap(grad)", "rows: expand trick", "rows: ExpandedWeights", "rows: Opacus", "rows: BackPACK"),
    ),
    "The mean of clipped gradients": Table(
        lambda: MODELS,
        ("plain", *CLIPS, "clip: ours, two passes"),
        ("clip: loop", "clip: vmap(grad)", "clip: ExpandedWeights", "clip: Opacus, ghost", "clip: BackPACK"),
    ),
    "Losses with derivatives: rows, and a clipped step": Table(
        lambda: DERIVED,
        ("plain", *ROWS, "clip: ours, param_grad=False"),
        ("rows: loop", "rows: vmap(grad)"),
    ),
    "Architectures: rows, and a clipped step": Table(
        architectures,
        ("plain", "write once", "hooks alone", *ROWS, "clip: ours, param_grad=False"),
        ("rows: loop", "rows: vmap(grad)"),
        "architectures",
    ),
    "Stacks of linear layers": Table(
        lambda: STACKS, ("plain", "hooks alone", "rows: ours", "norms: ours", "clip: ours"), option="layers"
    ),
    "Steps in the compiler": Table(
        for_compilers,
        ("plain, compiled", "plain", "write once", *(f"{what}: {by}" for what in WHAT for by in BY)),
        option="compiled",
    ),
    "GPT-2 small, bfloat16": Table(
        cards.gpt2,
        ("plain", "hooks alone", *(f"{what}: {BY[0]}" for what in WHAT), "norms: compiled", "clip: compiled"),
        ("rows: vmap(grad)", "clip: vmap(grad)", "clip: Opacus, ghost"),
        "gpu",
    ),
    "BERT-base, the last three layers": Table(
        cards.bert, ("plain", "clip: ours, param_grad=False"), ("clip: vmap(grad)", "clip: Opacus, ghost"), "gpu"
    ),
}  # fmt: skip
"""{title: what is in it}"""
