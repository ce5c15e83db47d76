"""Whether norms and clipping take the cheaper way.  Some minutes, on one thread.

    python benchmarks/choices.py                          on the CPU
    python benchmarks/choices.py --device cuda            on a GPU
    python benchmarks/choices.py --device cuda --write    measures the device's costs first, and writes them to costs.json

For each shape the ways that `autograd_hacks.forms.cost` chooses from are timed: norms by products and by writing rows out;
then norms and a weighted sum each by itself, and both from rows in held memory, and in new; then a sparse projection to 512
coordinates from transforms of the factors, and from rows.  Times are in milliseconds; `<` marks what is chosen, and `!`
where that takes more than 1.2 times as long as the best way.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import torch
from device_costs import measured, seconds
from torch import Tensor
from torch.nn.functional import conv2d

from autograd_hacks.forms import Convolution, Form, Outer, SparseMap, projection
from autograd_hacks.forms.cost import TABLE, by_products, by_writing, sketches_factors
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.forms.positions import norms_of_pairs

N = 16
LINEAR = {  # T, O, I
    "ViT-S": [(197, 1152, 384), (197, 384, 384), (197, 1536, 384), (197, 384, 1536)],
    "ViT, small": [(65, 192, 192), (65, 768, 192)],
    "GPT-2": [(128, 768, 768), (64, 768, 3072), (256, 768, 768), (64, 128, 512), (128, 512, 128)],
    "LLM": [(64, 2048, 2048), (128, 1024, 1024), (512, 1024, 1024), (1024, 256, 1024), (256, 4096, 1024), (64, 1024, 256)],
    "ConvNeXt": [(196, 384, 96), (49, 768, 192), (784, 160, 40)],
    "MLP with few positions": [(2, 512, 512), (8, 256, 256), (16, 64, 64), (4, 1024, 4096)],
}
CONVOLUTION = {  # O, C, image, kernel, stride
    "ResNet": [
        *[(64, 64, 16, 3, 1), (128, 64, 16, 3, 2), (128, 128, 8, 3, 1), (256, 256, 4, 3, 1), (512, 512, 2, 3, 1)],
        *[(64, 3, 64, 7, 2), (128, 64, 16, 1, 2), (512, 256, 4, 1, 2), (256, 64, 16, 1, 1), (64, 256, 16, 1, 1)],
    ],
    "ResNet, 32 wide": [(32, 32, 32, 3, 1), (64, 64, 16, 3, 1), (128, 128, 8, 3, 1), (256, 256, 4, 3, 1)],
    "ResNet, 112": [(64, 64, 28, 3, 1), (128, 128, 14, 3, 1), (256, 256, 7, 3, 1), (512, 256, 7, 3, 2), (512, 512, 4, 3, 1)],
    "UNet, patches": [(64, 32, 16, 3, 1), (384, 3, 64, 16, 16), (192, 96, 14, 2, 2)],
}


def forms() -> Iterator[tuple[str, Form]]:
    for model, shapes in LINEAR.items():
        for t, o, i in shapes:
            yield f"{model}: T {t}, {o} × {i}", Outer(torch.randn(N, t, o), torch.randn(N, t, i))
    for model, layers in CONVOLUTION.items():
        for o, c, size, kernel, stride in layers:
            pad = 0 if kernel == stride else kernel // 2
            x, weight = torch.randn(N, c, size, size), torch.randn(o, c, kernel, kernel)
            g = torch.randn_like(conv2d(x, weight, None, stride, pad))
            form = Convolution(x, g, weight.shape, (stride,) * 2, (pad,) * 2, (1, 1), 1)
            yield f"{model}: {c} → {o}, {size}×{size}, {kernel}×{kernel} by {stride}", form


def line(times: dict[str, float], chosen: str, among: list[str]) -> tuple[str, float]:
    """The times of some ways, and how much longer the chosen one takes than the best."""
    excess = times[chosen] / min(times[way] for way in among)
    shown = "".join(f"{times[way]:8.2f}{'<' if way == chosen else ' '}" for way in among)
    return shown + ("!" if excess > 1.2 else " "), excess


def sketched(form: Form, transforms: bool) -> None:
    with patch.object(projection, "sketches_factors", lambda *_: transforms):
        form.project(SparseMap("", form.shape, 512, 0))


def measure(form: Form) -> tuple[str, float, float, float]:
    assert form.pair is not None
    pair, w, held = form.pair, torch.rand(N), torch.empty(N, *form.shape)

    def read(rows: Tensor) -> None:
        row_norms(rows.flatten(1)), w @ rows.flatten(1)

    ways: dict[str, Callable[[], object]] = {
        "products": lambda: norms_of_pairs([pair], 2**30),
        "writing": lambda: Form.norms(form),
        "sum": lambda: form.weighted_sum(w),
        "held": lambda: read(form.dense(held)),
        "new": lambda: read(form.dense(torch.empty(N, *form.shape))),
        "transforms": lambda: sketched(form, True),
        "rows": lambda: sketched(form, False),
    }
    times = {way: 1e3 * seconds(run, torch.get_default_device()) for way, run in ways.items()}
    times["apart"] = times["sum"] + min(times["products"], times["writing"])
    by = "products" if by_products([pair], pair[0].device.type == "cuda") <= by_writing([pair]) else "writing"
    norms, first = line(times, by, ["products", "writing"])
    clip, second = line(times, "held" if form.saving() > 0 else "apart", ["apart", "held"])
    new, third = line(times, "new" if form.saving(fresh=True) > 0 else "apart", ["apart", "new"])
    sizes = form.shape[0], form.shape[1:].numel(), 512, 1
    by = "transforms" if sketches_factors(pair[0].device, pair[0].shape[1], *sizes) else "rows"
    sketch, fourth = line(times, by, ["transforms", "rows"])
    return f"{norms} |{clip} |{new} |{sketch}", first, max(second, third), fourth


def write(device: torch.device, size: int) -> None:
    """Measures what a device's steps cost, and writes them to the table."""
    table = json.loads(TABLE.read_text())
    table[device.type] = measured(device, size)
    TABLE.write_text(json.dumps(table, indent=2) + "\n")
    print(f"{TABLE}: {device.type}: {table[device.type]}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--write", action="store_true", help="measure the device's costs first, and write them to the table")
    parser.add_argument("--size", type=int, default=4096, help="of the matrix product whose multiplications are the unit")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu"):
        if options.write:
            write(torch.get_default_device(), options.size)
        compare()


def compare() -> None:
    """Times the ways of all shapes on the default device."""
    print(f"{'':44} products  writing  |  apart     held   |  apart      new     | transforms rows")
    found = []
    for label, form in forms():
        text, *excesses = measure(form)
        found += excesses
        print(f"{label:44}{text}", flush=True)
    if found:
        print(f"chosen over best, geometric mean {statistics.geometric_mean(found):.3f}, worst {max(found):.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
