"""What single steps cost on a device, timed one by one, for the table of ``autograd_hacks/forms/costs.json``.

python benchmarks/device_costs.py                  on the CPU, with one thread
python benchmarks/device_costs.py --device cuda    on a GPU
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import log2

import torch
from measuring import seconds as once
from torch import Tensor
from torch.nn.grad import conv2d_weight

from autograd_hacks.forms import Outer
from autograd_hacks.forms.cost import TABLE, Costs
from autograd_hacks.forms.positions import norms_of_pairs

Timed = Callable[[], object]
ROUNDS = 9


def seconds(run: Timed, device: torch.device) -> float:
    """The median of `ROUNDS` calls, after two that don't count."""
    return statistics.median([once(run, device) for _ in range(2 + ROUNDS)][2:])


def measured(device: torch.device, large: int) -> dict[str, float | None]:
    """The fields of `Costs`.  large: the size of the matrix product whose multiplications are the unit"""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def took(run: Timed, numbers: float) -> float:
        return seconds(run, device) / numbers

    a, b = new(large, large), new(large, large)
    unit = took(lambda: a @ b, large**3)
    n, t, o, i = 16, 64, large // 8, large // 8
    left, right, rows = new(n, t, o), new(n, t, i), new(n, o, i)
    short = took(lambda: left @ left.mT, n * t * t * o)
    c, size = 64, 16
    x, g = new(n, c, size, size), new(n, c, size, size)
    of_kernel = took(lambda: conv2d_weight(x, (c, c, 3, 3), g, padding=1), n * c * c * 9 * size**2)
    patches = x.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 1, 4, 5, 2, 3)
    narrow = patches[..., :2]  # runs of 2 numbers, and of 14
    long, short_runs = took(patches.contiguous, patches.numel()), took(narrow.contiguous, narrow.numel())
    run = max(0.0, short_runs - long) / (1 / 2 - 1 / (size - 2))
    write = took(lambda: torch.mul(left[:, 0, :, None], right[:, 0, None, :], out=rows), rows.numel())
    read = took(lambda: torch.linalg.vector_norm(rows.flatten(1), dim=1), rows.numel())
    fresh = took(lambda: torch.empty_like(rows).copy_(rows), rows.numel()) - took(lambda: rows.copy_(rows), rows.numel())
    products = new(2, n, 256, 256)
    pair = took(lambda: (products[0] * products[1]).sum((1, 2)), products[0].numel())
    shift = took(lambda: products[0, :, :-1, :-1] + products[1, :, 1:, 1:], products[0].numel())
    tiny, is_cuda = Outer(new(n, 2, 4), new(n, 2, 4)), device.type == "cuda"
    call = seconds(lambda: norms_of_pairs([tiny.pair], 2**20, is_cuda), device)
    call -= seconds(lambda: tiny.dense().flatten(1).norm(dim=1), device)
    begin = took(lambda: torch.bmm(left[:, :17], left[:, :17].mT), n) - 17**2 * o * unit
    place = torch.randint(512, (rows[0].numel(),), device=device)
    scatter = took(lambda: new_zeros(rows, 512).index_add_(1, place, rows.flatten(1)), rows.numel())
    put = took(lambda: new_zeros(rows, 512).index_add_(1, place[:o], left[:, 0]), n * o)
    signals, doubles = new(256, 4096), a[: large // 2, : large // 2].double()
    fft = took(lambda: torch.fft.rfft(signals), signals.numel() * log2(4096))
    double = took(lambda: doubles @ doubles, (large // 2) ** 3)
    found = Costs(
        short / unit, of_kernel / unit, max(0.0, long - run / (size - 2)) / unit, run / unit,
        write / unit, read / unit, max(0.0, fresh) / unit, pair / unit, shift / unit,
        max(0.0, call) / unit, max(0.0, begin) / unit, scatter / unit, put / unit, fft / unit, double / unit,
    )  # fmt: skip
    return {name: float(f"{value:.3g}") for name, value in asdict(found).items()}


def new_zeros(like: Tensor, size: int) -> Tensor:
    return like.new_zeros(len(like), size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", type=int, default=4096, help="of the matrix product whose multiplications are the unit")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    table, device = json.loads(TABLE.read_text()), torch.device(options.device)
    table[device.type] = measured(device, options.size)
    TABLE.write_text(json.dumps(table, indent=2) + "\n")
    print(f"{TABLE}: {table[device.type]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
