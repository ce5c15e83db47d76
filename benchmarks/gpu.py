"""Times a GPU, part by part: this library's verbs beside plain steps, ``vmap(grad)``, Opacus and loops.

    python benchmarks/gpu.py smoke                      does everything run: two minutes
    python benchmarks/gpu.py gpt2 --rounds 10           one part: under nine minutes
    python benchmarks/gpu.py gpt2 --tiny --device cpu   all of its code, in sizes that tell nothing

A part is a few cases, each a model with random weights, and ways to run it; sizes are those of one card of 140 GB.  Figures
are put into ``gpu.json``, ``gpu.txt`` and ``gpu.rst``, a page for the docs, after each case.  A case that has figures is not
run again without ``--again``, so a part that ran out of time goes on where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import report
import torch
import torch.nn as nn
from families import FULL, Size, sizes
from measuring import Case, error_of, guarded, measured
from run import about, save
from systems import Data, Found
from torch import Tensor
from tqdm import tqdm
from workloads import MODELS, Batch, Model, Workload, hugging_face, next_token, of_shape, sentences, stack, tokens

ROWS, NORMS, CLIP = (f"{what}: ours, param_grad=False" for what in ("rows", "norms", "clip"))
HOOKED, VMAP, GHOST = "hooks alone", "clip: vmap(grad)", "clip: Opacus, ghost"
ENOUGH = 0.6
"""A case is begun while no more than this share of a part's time is gone."""


def of(samples: int, width: int, layers: int, heads: int, words: int, length: int) -> Size:
    return replace(FULL, samples=samples, width=width, layers=layers, heads=heads, words=words, length=length)


def under_autocast(work: Workload) -> Workload:
    """In bfloat16, with weights in single precision."""

    def run(model: Model, batch: Batch) -> Tensor:
        with torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16):
            found = work.losses(model, batch)
        return found.float()

    return replace(work, losses=run)


def language(kind: str, size: Size, **more: Any) -> Workload:
    """A model of texts: GPT2LMHead, GPTNeoXForCausalLM, ..."""
    config = kind.removesuffix("LMHeadModel").removesuffix("ForCausalLM") + "Config"
    # With a padding token, models look for it in the batch, which vmap can't do.
    arguments = sizes(size, **{"intermediate_size": 4 * size.width, "pad_token_id": None} | more)
    return Workload(
        hugging_face(kind, config, training=True, use_cache=False, **arguments),
        tokens(size.samples, size.length, size.words),
        next_token,
    )


def smoke(tiny: bool) -> dict[str, Case]:
    ways = ("plain", HOOKED, ROWS, NORMS, CLIP, "rows: loop", "rows: vmap(grad)")
    models = {} if tiny else {name: MODELS[name] for name in ("MLP 784-512-512-10, N 256", "tutorial CNN, N 64")}
    texts = language("GPT2LMHeadModel", of(8, 64, 2, 2, 100, 32))
    models |= {"2 layers of 10, N 4": stack(2, 10, 4), "GPT-2, 2 layers of 64, N 8, T 32": texts}
    models["GPT-2, 2 layers of 64, N 8, T 32, bfloat16"] = under_autocast(texts)
    return {name: Case(work, ways, tokens=8 * 32 if "GPT" in name else 0) for name, work in models.items()}


def gpt2(tiny: bool) -> dict[str, Case]:
    size = of(4, 16, 2, 2, 50, 8) if tiny else of(16, 768, 12, 12, 50_257, 1024)
    # Compiled steps; of the uncompiled graph on a CPU, where compiling takes longest.
    compiled = [f"{what}: {'graph' if tiny else 'compiled'}" for what in ("norms", "clip")]
    ways = ("plain", HOOKED, NORMS, CLIP, *compiled, ROWS, VMAP, GHOST)
    work = under_autocast(language("GPT2LMHeadModel", size, max_position_embeddings=size.length))
    return {f"GPT-2 small, N {size.samples}, T {size.length}, bfloat16": Case(work, ways, size.samples * size.length)}


def cnn(tiny: bool) -> dict[str, Case]:
    ways = ("plain", HOOKED, ROWS, CLIP, "rows: loop", "rows: vmap(grad)", "rows: Opacus")
    name, samples = "tutorial CNN, N 64", 4 if tiny else 64
    return {f"the tutorial's CNN, N {samples}": Case(replace(MODELS[name], batch=of_shape(samples, 1, 28, 28)), ways)}


def last_layers(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.Module]:
    """The encoder's last layers train, and what is behind them."""

    def build() -> nn.Module:
        model: Any = make()
        model.requires_grad_(False)
        for module in (*model.bert.encoder.layer[-count:], model.bert.pooler, model.classifier):
            module.requires_grad_()
        return model

    return build


def labels_of(model: Model, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["x"]).logits
    return nn.functional.cross_entropy(logits, batch["y"] % logits.shape[1], reduction="none")


def bert(tiny: bool) -> dict[str, Case]:
    found = {}
    for samples in (4,) if tiny else (32, 128, 512, 2048):
        size = of(samples, 16, 2, 2, 50, 8) if tiny else of(samples, 768, 12, 12, 30_522, 128)
        more = {"intermediate_size": 4 * size.width, "max_position_embeddings": 512}
        model = hugging_face("BertForSequenceClassification", "BertConfig", training=True, **sizes(size, **more))
        work = Workload(last_layers(model, 1 if tiny else 3), sentences(samples, size.length, size.words), labels_of)
        case = Case(work, ("plain", CLIP, VMAP, GHOST), samples * size.length, apart=samples > 512)
        found[f"BERT-base, the last three layers, N {samples}, T {size.length}"] = case
    return found


PARTS: dict[str, tuple[str, Callable[[bool], dict[str, Case]]]] = {
    "smoke": ("Everything runs", smoke),
    "gpt2": ("GPT-2 small", gpt2),
    "cnn": ("The tutorial's CNN", cnn),
    "bert": ("BERT-base, the last three layers", bert),
}
"""{part: its title, and its cases, by whether they are tiny}"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    (title, cases), file = PARTS[options.part], options.output / "gpu.json"
    data: Data = {"about": about(options) | {"tiny": options.tiny}, "results": {}}
    old = json.loads(file.read_text()) if file.exists() else data
    if all(old["about"].get(key) == data["about"][key] for key in ("machine", "tiny")):
        data["results"] = old["results"]
    found = data["results"].setdefault(title, {})
    if options.again:
        found.clear()
    begun = perf_counter()
    until = begun + 60 * options.minutes
    left = {name: case for name, case in cases(options.tiny).items() if name not in found}
    for name, case in tqdm(left.items(), desc=title):
        if perf_counter() - begun > ENOUGH * 60 * options.minutes:
            print("not all cases were begun: run the part again")
            break
        found[name] = measured(name, case, options.rounds, torch.device(options.device), check=compared, until=until)
        save(data, file)
        file.with_suffix(".txt").write_text(report.text(data))
        file.with_suffix(".rst").write_text(report.page(data))
    print(report.text(data))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which tell only whether the code runs")
    parser.add_argument("--again", action="store_true", help="also cases that have their figures")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=8.5, help="that the part may take")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder for JSON, text and page")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU; --device cpu goes with --tiny")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: expected --tiny with it, since these sizes are those of a GPU")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    options.threads, options.packages = torch.get_num_threads(), ("transformers", "opacus")
    return options


def compared(case: Case, device: torch.device, failures: dict[str, str]) -> dict[str, float]:
    """How far our norms of two samples are off, from a backward pass of each alone in the same precision."""

    def apart(found: Found, right: Found) -> float:
        return float((found["norms"].double() / right["norms"].double() - 1).abs().max())

    run = partial(error_of, case.workload, NORMS, 2, device, case.dtype, by=apart)
    error = guarded(run, NORMS, failures)
    return {} if error is None else {NORMS: error}


if __name__ == "__main__":
    main()
