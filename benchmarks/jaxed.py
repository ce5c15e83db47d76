"""JAX's ``jit(vmap(grad))`` on some of the workloads, in a process of its own, which needs no torch.

    python benchmarks/jaxed.py 'tutorial CNN, N 64' 20 1      workload, rounds, threads

prints JSON: seconds of each round, after two that compile and warm up, how many parameters there are, and JAX's version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

JAX = "JAX, jit(vmap(grad))"
Params = list[Any]
Case = tuple[Params, Callable[[Params, Any], Any], tuple[int, ...]]
"""Parameters, a sample's (x) logits, and the batch's shape."""


def measured(workload: str, rounds: int, threads: int, python: str, parameters: int) -> list[float]:
    """Seconds of each round.  python: the interpreter    parameters: as many as torch's model has

    Raises RuntimeError saying what went wrong.
    """
    # XLA's own pool of threads heeds the processors that it may run on.
    command = [python, __file__, workload, str(rounds), str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or ["no message"])[-1])
    found = json.loads(ran.stdout)
    if found["parameters"] != parameters:
        raise RuntimeError(f"{found['parameters']} parameters, where torch's model has {parameters}")
    return [round(seconds, 7) for seconds in found["seconds"]]


def linear(key: Any, into: int, out: int) -> Params:
    import jax

    return [jax.random.normal(key, (out, into)) / into**0.5, jax.numpy.zeros(out)]


def mlp() -> Case:
    import jax

    widths = (784, 512, 512, 10)
    keys = jax.random.split(jax.random.key(0), len(widths))
    params = [linear(key, *pair) for key, pair in zip(keys, pairwise(widths))]

    def logits(params: Params, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.relu(w @ x + b)
        return params[-1][0] @ x + params[-1][1]

    return params, logits, (256, 784)


def cnn() -> Case:
    import jax

    draw, keys = jax.random.normal, jax.random.split(jax.random.key(0), 4)
    convs = [
        [0.1 * draw(keys[0], (32, 1, 3, 3)), jax.numpy.zeros(32)],
        [0.1 * draw(keys[1], (64, 32, 3, 3)), jax.numpy.zeros(64)],
    ]
    params = [*convs, linear(keys[2], 9216, 128), linear(keys[3], 128, 10)]

    def logits(params: Params, x: Any) -> Any:
        x = x[None]
        for w, b in params[:2]:
            x = jax.nn.relu(jax.lax.conv(x, w, (1, 1), "VALID") + b[:, None, None])
        x = jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID").flatten()
        x = jax.nn.relu(params[2][0] @ x + params[2][1])
        return params[3][0] @ x + params[3][1]

    return params, logits, (64, 1, 28, 28)


def transformer() -> Case:
    """nn.TransformerEncoder's layers: norms come last, ReLU between."""
    import jax

    np, d, heads, layers = jax.numpy, 256, 4, 4
    keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 1))
    sizes = ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    norm = [np.ones(d), np.zeros(d)]
    params = [[*(linear(next(keys), *size) for size in sizes), norm, norm] for _ in range(layers)]
    params.append(linear(next(keys), d, 10))

    def normalised(x: Any, weight: Any, bias: Any) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * weight + bias

    def logits(params: Params, x: Any) -> Any:
        for into, out, up, down, first, second in params[:-1]:
            q, k, v = np.split(x @ into[0].T + into[1], 3, axis=-1)
            q, k, v = (part.reshape(len(x), heads, -1).swapaxes(0, 1) for part in (q, k, v))
            weights = jax.nn.softmax(q @ k.swapaxes(1, 2) / (d // heads) ** 0.5)
            mixed = (weights @ v).swapaxes(0, 1).reshape(len(x), d)
            x = normalised(x + mixed @ out[0].T + out[1], *first)
            x = normalised(x + jax.nn.relu(x @ up[0].T + up[1]) @ down[0].T + down[1], *second)
        return params[-1][0] @ x.mean(0) + params[-1][1]

    return params, logits, (16, 128, d)


WORKLOADS: dict[str, Callable[[], Case]] = {
    "tutorial CNN, N 64": cnn,
    "MLP 784-512-512-10, N 256": mlp,
    "Transformer d 256, 4 layers, T 128, N 16": transformer,
}
"""Of the names in `workloads.WORKLOADS`."""


def main(workload: str, rounds: int, threads: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    import jax

    params, logits, shape = WORKLOADS[workload]()

    def loss(params: Params, x: Any, y: Any) -> Any:
        return -jax.nn.log_softmax(logits(params, x))[y]

    rows = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    seconds = []
    for number in range(rounds + 2):
        key = jax.random.key(number)
        x, y = jax.random.normal(key, shape), jax.random.randint(key, shape[:1], 0, 10)
        jax.block_until_ready((x, y))
        begin = time.perf_counter()
        jax.block_until_ready(rows(params, x, y))
        seconds.append(time.perf_counter() - begin)
    count = sum(p.size for p in jax.tree.leaves(params))
    print(json.dumps({"seconds": seconds[2:], "parameters": count, "version": jax.__version__}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
