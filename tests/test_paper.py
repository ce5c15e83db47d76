"""The table of what large models cost is what the script makes, and its counts are those of products that run."""

import pytest
import torch
from paper import TABLE, Cost, Size, cost_of, language_model, of_size, table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import autograd_hacks
from autograd_hacks.forms import Form, Outer
from autograd_hacks.forms.positions import norms_of_pairs

SMALL = Size(blocks=3, width=32, hidden=48, keys=16, words=40)


def test_the_table_is_what_the_script_makes() -> None:
    assert TABLE.read_text() == table(), "run benchmarks/paper.py"


def counted(lora: bool, words: Tensor) -> Cost:
    """The same by torch's own count of what runs."""
    model, found = language_model(SMALL, lora), Cost()
    with FlopCounterMode(display=False) as plain:
        model(words).square().sum().backward()
    found.step = plain.get_total_flops()
    with autograd_hacks.add_hooks(model, probe=False):
        model(words).square().sum().backward()
        forms = [form for form in autograd_hacks.per_sample_grads(model).values() if form is not None]
    for form in [leaf for whole in forms for leaf in whole.leaves() if isinstance(leaf, Outer)]:
        counts = []
        for run in (
            lambda form=form: norms_of_pairs([form.pair], 2**30),
            lambda form=form: Form.norms(form),
            lambda form=form: form.norms(),
            lambda form=form: form.weighted_sum(torch.ones(1)),
        ):
            with FlopCounterMode(display=False) as flops:
                run()
            counts.append(flops.get_total_flops())
        found.products, found.chosen, found.sums = (
            found.products + counts[0], found.chosen + counts[2], found.sums + counts[3],
        )  # fmt: skip
        found.smaller += min(counts[:2])
    return found


@pytest.mark.parametrize("positions", [3, 200])
@pytest.mark.parametrize("lora", [False, True])
def test_its_counts_are_those_of_a_small_model_that_runs(lora: bool, positions: int) -> None:
    words = torch.zeros(1, positions, dtype=torch.long)
    told, found = cost_of(language_model(SMALL, lora), words), counted(lora, words)
    for name in ("products", "smaller", "chosen", "sums"):
        assert getattr(told, name) == getattr(found, name), name
    # With LoRA nothing before the first block asks for gradients.
    block = language_model(SMALL, lora)[1]
    first = [block.query, block.key, block.value] if lora else []
    unasked = [p for part in first for p in (part.base.weight, part.a.weight)]
    assert told.step - found.step == 2 * positions * sum(p.numel() for p in unasked)
    with torch.device("meta"):
        assert of_size(SMALL, lora, positions) == cost_of(language_model(SMALL, lora).bfloat16(), words.to("meta"))


def test_what_is_held_is_inputs_and_gradients() -> None:
    positions, s = 5, SMALL
    told = cost_of(language_model(s, lora=False), torch.zeros(1, positions, dtype=torch.long))
    inputs = 3 * s.width + s.hidden  # of queries, keys and values; out; gate and up; down
    gradients = 3 * s.width + 2 * s.keys + 2 * s.hidden
    assert told.factor_bytes == 4 * positions * (s.blocks * (inputs + gradients) + s.width + s.words)
