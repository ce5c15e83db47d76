"""One model of each family on each device: every verb in double precision, rows in those people train in; random bits."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import packed
import pytest
import torch
import torch.nn as nn
from by_device import FAMILIES, TF32, Causal, double_rows, errors, grad1_of, losses, products, recurrent, rows_of, step
from flexible import Flexible, quiet
from quantities import assert_quantities
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import UnseenGradient, VerificationFailed
from autograd_hacks.forms import SparseMap
from autograd_hacks.formulas import RULES
from autograd_hacks.support.contexts import CONV, MATMUL, RNN, unit_of_products
from autograd_hacks.support.philox import key_of, noise, packed_signs

SUMS_BY_INDEX = ("causal language model", "embedding bag", "routed experts")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_verb_of_a_family(device: torch.device, name: str) -> None:
    """In the second step, of the samples in another order and one replaced.  Outputs and gradients keep their bits, unless
    torch's own sums by index come in any order, as on a GPU."""
    model, x = FAMILIES[name].on(device)
    first, x = x, x[[3, 0, 5, 1, 4, 3]]
    expected = rows_of(model, x)
    losses(plain := model(x)).mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    exact = {} if device.type == "cuda" and name in SUMS_BY_INDEX else {"rtol": 0, "atol": 0}
    with autograd_hacks.add_hooks(model):
        step(model, first)
        model.zero_grad()
        assert_close(step(model, x), plain, **exact)
        assert_close([p.grad for p in model.parameters()], grads, **exact)
        assert_close(grad1_of(model), expected)
        assert {p.grad1.device.type for p in model.parameters()} == {device.type}
        assert_quantities(model, expected)


def autocast(dtype: torch.dtype) -> Callable[[torch.device], AbstractContextManager[object]]:
    return lambda device: torch.autocast(device.type, dtype)


PRECISIONS: dict[str, Callable[[torch.device], AbstractContextManager[object]]] = {
    "single": lambda device: products("ieee"),
    "as torch has it": lambda device: nullcontext(),
    "TF32": lambda device: products("tf32"),
    "bfloat16": autocast(torch.bfloat16),
    "float16": autocast(torch.float16),
}
UNITS = {"single": 2.0**-23, "as torch has it": 2.0**-10, "TF32": 2.0**-10, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_proofs_and_rows_in_a_precision(device: torch.device, name: str, precision: str) -> None:
    """Three steps, two of which are proven.  Rows may be as far off as plain passes of one sample are, and a few units."""
    if precision in ("TF32", "as torch has it") and device.type == "cpu":
        pytest.skip("a CPU has no TF32, and torch no other default; steps with rounded factors, below, are as on a GPU")
    if name in ("lstm", "gru") and device.type == "cpu":
        model, x = FAMILIES[name].on(device, torch.float32)
        try:
            with PRECISIONS[precision](device):
                model(x)
        except RuntimeError as error:  # in half precision, on CPUs whose kernels have no recurrent layers in it
            pytest.skip(f"torch itself can't run it: {error}")
    for param_grad in (True, False):
        model, x = FAMILIES[name].on(device, torch.float32)
        with autograd_hacks.add_hooks(model, param_grad=param_grad):
            for _ in range(3):
                with PRECISIONS[precision](device):
                    step(model, x)
                model.zero_grad()
            found = grad1_of(model)
        exact = double_rows(model, x)
        with PRECISIONS[precision](device):
            plain = errors(rows_of(model, x), exact)
        for parameter, error in errors(found, exact).items():
            allowed = 3 * plain[parameter] + 16 * UNITS[precision]
            assert error <= allowed, f"{parameter} is off by {error:.1e}, where a plain pass is by {plain[parameter]:.1e}"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_a_backend(device: torch.device, kind: type[nn.RNNBase]) -> None:
    """Of cuDNN's own kernels on a GPU, with the weights in one piece of memory; without them the same rows."""
    if device.type == "cpu":
        pytest.skip("a CPU has one kind of kernels; tests/rules has these layers")
    torch.manual_seed(0)
    model = recurrent(kind, 32).to(device)
    x = torch.randn(6, 7, 3, device=device)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    exact = double_rows(model, x)
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled), autograd_hacks.add_hooks(model):
            step(model, x)
            assert max(errors(grad1_of(model), exact).values()) < 2e-2


def test_random_bits_are_those_of_the_cpu(device: torch.device) -> None:
    """Written down, so that no version and no device has others.  Normal numbers are those of each kind of device."""
    key, cpu = key_of("bits", 1), torch.device("cpu")
    signs = packed_signs(key, slice(0, 300), slice(0, 1000), device)
    assert signs.device.type == device.type
    assert torch.equal(signs.cpu(), packed_signs(key, slice(0, 300), slice(0, 1000), cpu))
    assert signs[0, :4].tolist() == [167, 233, 0, 67]
    assert torch.equal(noise((70, 999), key, device), noise((70, 999), key, device))
    found, right = (SparseMap("p", torch.Size((70, 999)), 64, 1).hashes(where) for where in (device, cpu))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, right))


# Products whose factors are rounded to TF32: proofs don't take that for wrong rows, and still see what is wrong


@pytest.fixture
def high() -> Iterator[None]:
    """Whatever may use TF32 may."""
    cpu = torch.backends.mkldnn
    with products("tf32", cpu.matmul, cpu.conv, cpu.rnn, torch.backends.cuda.matmul):
        yield


@pytest.mark.usefixtures("high")
@pytest.mark.parametrize(("name", "convolutions_alone"), [*((name, False) for name in FAMILIES), ("cnn", True)])
def test_steps_in_tf32_are_proven(device: torch.device, name: str, convolutions_alone: bool) -> None:
    """convolutions_alone: as cuDNN has it by default"""
    model, x = FAMILIES[name].on(device, torch.float32)
    exact, mode = double_rows(model, x), TF32(TF32.CONVOLUTIONS if convolutions_alone else TF32.PRODUCTS)
    if convolutions_alone:
        torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
    for param_grad in (True, False):
        with autograd_hacks.add_hooks(model, param_grad=param_grad), mode if device.type == "cpu" else nullcontext():
            for _ in range(3):
                step(model, x)
                autograd_hacks.per_sample_grads(model).norms()
                model.zero_grad()
            found = grad1_of(model)
        assert max(errors(found, exact).values()) < 1e-2
    assert mode.rounded or device.type != "cpu"
    assert max(errors(found, exact).values()) > 1e-6  # it has rounded


def test_rounding_unasked_for_is_no_rounding() -> None:
    """Where torch isn't told that factors may be rounded, what differs so much is wrong."""
    model, x = FAMILIES["mlp"].on("cpu", torch.float32)
    with autograd_hacks.add_hooks(model), TF32(), pytest.raises(UnseenGradient, match="don't add up"):
        step(model, x)


@pytest.mark.usefixtures("high")
def test_a_rule_that_is_wrong_is_still_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = FAMILIES["mlp"].on(device, torch.float32)
    sound = RULES[nn.Linear]

    def off(layer: nn.Linear, call: object) -> object:
        return {name: autograd_hacks.forms.scale(form, 1.02) for name, form in sound.formula(layer, call).items()}

    monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(sound, formula=off))
    with autograd_hacks.add_hooks(model), pytest.raises(VerificationFailed):
        step(model, x)


def test_what_torch_is_told_is_known(high: None) -> None:
    x = torch.ones(1)
    assert unit_of_products(x, [MATMUL]) == 2.0**-10
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert unit_of_products(x, [MATMUL]) == 2.0**-7
    assert unit_of_products(x, [CONV, RNN]) == 2.0**-10
    torch.set_float32_matmul_precision("highest")
    assert unit_of_products(x, [MATMUL]) == 0
    assert unit_of_products(x.double(), [MATMUL, CONV, RNN]) == 0
    assert unit_of_products(x.to("meta"), [MATMUL, CONV, RNN]) == 0


# What a device brings: layouts of memory, kernels of attention, streams, graphs, memory elsewhere, several devices


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are none without a GPU")


@pytest.mark.parametrize(
    "backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
)
def test_kernels_of_attention(device: torch.device, backend: SDPBackend) -> None:
    """Heads of 64 in bfloat16 on a GPU, as its kernels want them; in single precision on a CPU."""
    if device.type == "cpu" and backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        pytest.skip("a CPU has no such kernel")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model, x = Causal(128 if device.type == "cuda" else 16).to(device), torch.randint(11, (4, 8), device=device)
    exact = double_rows(model, x)
    ran = []
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            with sdpa_kernel(backend), torch.autocast(device.type, dtype, enabled=device.type == "cuda"):
                try:
                    out = model(x)
                except RuntimeError as error:
                    if "No available kernel" not in str(error):
                        raise
                    pytest.skip(f"this device has no {backend}: {error}".splitlines()[0])
            ran.append(str(backend))
            losses(out).mean().backward()
            autograd_hacks.compute_grad1(model)
            model.zero_grad()
        assert max(errors(grad1_of(model), exact).values()) < (0.1 if dtype == torch.bfloat16 else 1e-5)
    assert len(ran) == 3


@pytest.mark.parametrize("name", ["cnn", "encoder", "lstm", "embedding bag", "causal language model"])
def test_memory_elsewhere(device: torch.device, name: str) -> None:
    """What the graph keeps is moved to the CPU, into pinned memory where there is a GPU, and comes back as a copy.

    With pinned memory torch 2.11's own gradients of an LSTM by cuDNN are wrong, which a first reading refuses.  Of a copy of
    positions nobody knows whether it was the batch's: rows are those of the position table's use."""
    model, x = FAMILIES[name].on(device)
    expected, is_pinned = rows_of(model, x), device.type == "cuda" and name not in ("lstm", "causal language model")
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            with torch.autograd.graph.save_on_cpu(pin_memory=is_pinned):
                loss = losses(model(x)).mean()
            loss.backward()
            autograd_hacks.compute_grad1(model)
        assert_close(grad1_of(model), expected)


@needs_cuda
@pytest.mark.parametrize("name", ["mlp", "cnn", "encoder"])
def test_a_step_in_a_stream_of_its_own(name: str) -> None:
    """Forward and backward in one stream, which autograd follows; rows are read in it, and used in another."""
    model, x = FAMILIES[name].on("cuda", torch.float32)
    expected = double_rows(model, x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)  # so that what doesn't wait reads what isn't there yet
                step(model, x)
                model.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        assert max(errors(grad1_of(model), expected).values()) < 1e-2


@needs_cuda
@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_a_step_in_a_cuda_graph(name: str) -> None:
    """Captured after steps in which everything was found that asks for numbers, and replayed on other numbers."""
    model, x = FAMILIES[name].on("cuda", torch.float32)
    others = torch.randn_like(x)
    expected = double_rows(model, others)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with autograd_hacks.add_hooks(model):
        with torch.cuda.stream(side):
            for _ in range(4):
                model.zero_grad()
                step(model, x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        model.zero_grad()
        with torch.cuda.graph(graph):
            step(model, x)
        x.copy_(others)
        graph.replay()
        torch.cuda.synchronize()
        assert max(errors(grad1_of(model), expected).values()) < 1e-2


def split_net(first: torch.device, second: torch.device) -> nn.Module:
    """One layer on each of two devices."""
    return Bare(
        lambda m, x: m.last(m.first(x.to(m.first.weight.device)).tanh().to(m.last.weight.device)),
        first=nn.Linear(5, 8).to(first),
        last=nn.Linear(8, 3).to(second),
    )


@needs_cuda
@pytest.mark.parametrize("places", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda:0", "cuda:1")])
def test_two_devices(places: tuple[str, str]) -> None:
    if torch.cuda.device_count() < 2 and places[1] == "cuda:1":
        pytest.skip("there are fewer than two GPUs")
    torch.manual_seed(0)
    model, x = split_net(*map(torch.device, places)).double(), torch.randn(6, 5, dtype=torch.float64)
    expected = rows_of(model, x)
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            step(model, x)
        assert_close(grad1_of(model), expected)
        matrix = torch.cat([own.flatten(1).cpu() for own in expected.values()], 1)
        grads, v = autograd_hacks.per_sample_grads(model), {name: torch.ones_like(p) for name, p in model.named_parameters()}
        found = grads.norms(), grads.gram(), grads.dot(v)
        assert_close([own.cpu() for own in found], [matrix.norm(dim=1), matrix @ matrix.mT, matrix.sum(1)])
        autograd_hacks.clip_grad1_norm_(model, 0.1)
        assert [p.grad.device for p in model.parameters()] == [p.device for p in model.parameters()]


def test_a_model_that_moves(device: torch.device) -> None:
    """Hooked on the CPU, then moved: the next forward is proven anew, and hooks stay."""
    model, x = FAMILIES["mlp"].on("cpu")
    with autograd_hacks.add_hooks(model):
        step(model, x)
        model.to(device)
        x = x.to(device)
        model.zero_grad()
        with autograd_hacks.pause_hooks():
            expected = rows_of(model, x)
        step(model, x)
        assert_close(grad1_of(model), expected)


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize(
    "how", ["mlp", "encoder", "in a graph", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]
)
def test_a_compiled_step(how: str) -> None:
    """By inductor's kernels; in a CUDA graph, as torch.compile has it with mode="reduce-overhead"; and in half precision
    by kernels of attention, which return lengths and seeds, too, that are no tensors or have no samples."""
    torch.manual_seed(0)
    model, x = FAMILIES[how if how in FAMILIES else "encoder"].on("cuda", torch.float32)
    context, captured = nullcontext(), {"triton.cudagraphs": how == "in a graph"}
    if is_half := how in SDPBackend.__members__:
        model, x = Causal(128).to("cuda"), torch.randint(11, (4, 8), device="cuda")
        context = sdpa_kernel(SDPBackend.__members__[how])
    matrix = torch.cat([own.flatten(1) for own in double_rows(model, x).values()], 1)
    compiled = autograd_hacks.compile(model, "norms", loss_type="sum")
    with context, torch._inductor.config.patch(captured):
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
                losses(compiled(x)).sum().backward()
            assert_close(compiled.norms.double().cpu(), matrix.norm(dim=1), rtol=0.1 if is_half else 1e-2, atol=0)
            model.zero_grad()


@needs_cuda
@quiet
def test_documents_by_a_block_mask_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against each document alone, on the CPU, where torch computes gradients but refuses to be asked for them.  Documents
    that are packed on a CPU are among tests/programs."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    torch.manual_seed(0)
    model, lengths = Flexible(), (5, 3, 6)
    given = packed.batch(2, lengths)
    rows = {name: own.double() for name, own in packed.rows_of(model, lengths, packed.losses, *given).items()}
    model.to("cuda")
    with autograd_hacks.add_hooks(model, segments="position_ids"):
        packed.losses(model, *(x.to("cuda") for x in given)).sum().backward()
        grads = autograd_hacks.per_sample_grads(model, "sum")
        assert max(errors(grads.dense(), rows).values()) < 2e-3
