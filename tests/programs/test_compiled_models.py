"""Architectures as compiled steps: rows against a backward pass from each sample's loss, or a refusal by name."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import one_loss_at_a_time, squares
from rarely import rarely
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import UnsupportedOperation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    from test_architectures import GPT2, IN_FLOAT32, MODELS, TEXT, batch_of, built, image, text


def unet(m: Any, x: Tensor, time: Tensor) -> Tensor:
    """Of diffusion: down and up again, with a table of angles for the time."""
    angles = time[:, None] * torch.arange(8).double()
    first = m.norm(m.first(x)).sigmoid()
    low = m.second(F.max_pool2d(first, 2)) + m.time(torch.cat([angles.sin(), angles.cos()], 1))[..., None, None]
    up = m.up(F.interpolate(F.avg_pool2d(low, 2), scale_factor=2.0))
    return m.last(torch.cat([first, up], 1))


def lora(**sizes: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )
    return model.double().eval()  # type: ignore[no-any-return]


def unet_net() -> nn.Module:
    convs = {"first": nn.Conv2d(3, 8, 3, padding=1), "second": nn.Conv2d(8, 16, 3, padding=1), "last": nn.Conv2d(16, 3, 1)}
    return Bare(unet, norm=nn.GroupNorm(2, 8), time=nn.Linear(16, 16), up=nn.ConvTranspose2d(16, 8, 2, 2), **convs).double()


SEGFORMER = ("SegformerForSemanticSegmentation", "SegformerConfig", {"depths": [1, 1], "hidden_sizes": [8, 16],
             "num_encoder_blocks": 2, "decoder_hidden_size": 16}, image, "logits")  # fmt: skip
SORTED = ("MixtralForCausalLM", "MixtralConfig", TEXT | {"num_key_value_heads": 1, "num_local_experts": 3}, text, "logits")
OTHERS = {
    "UNet": (unet_net, lambda samples: {"x": torch.randn(samples, 3, 8, 8), "time": torch.rand(samples)}),
    "LoRA": (lambda: lora(**GPT2 | {"n_layer": 1}), text),
}
"""{name: what makes a model, and its arguments}"""
REFUSED = {
    "MixtralForCausalLM-eager": r"data-dependent.*modeling_mixtral\.py", "Qwen2MoeForCausalLM-eager": "data-dependent.*_moe",
    "MixtralForCausalLM-": r"are sorted, as for experts.*sort\.default, at .*moe\.py", "ViltModel-": "data-dependent.*vilt",
}  # fmt: skip
OFTEN = "LoRA", "UNet", "MixtralForCausalLM-text-sorted"
CASES = {f"{case[0]}-{case[3].__name__}": case for case in [*MODELS, SEGFORMER]} | {"MixtralForCausalLM-text-sorted": SORTED}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OFTEN, *rarely(*(name for name in [*CASES, *OTHERS] if name not in OFTEN))])
def test_architecture(name: str) -> None:
    torch._dynamo.reset()
    if name in OTHERS:
        made, inputs = OTHERS[name]
        net, way, output = made(), "", "logits" if name == "LoRA" else slice(None)
    else:
        model, config, arguments, inputs, output = CASES[name]
        net, way = built(model, config, arguments, False), arguments.get("experts_implementation", "")
    net, batch = net.float() if CASES.get(name) is SORTED else net, batch_of(inputs, 4)
    with torch.no_grad():
        net(**batch)  # some prepare themselves
    step = autograd_hacks.compile(net, "rows", loss_type="sum", backend=None)
    if (why := REFUSED.get(f"{name.partition('-')[0]}-{way}")) is not None:
        with pytest.raises(UnsupportedOperation, match=why):
            step(**batch)
        return
    squares(step(**batch)[output]).sum().backward()
    rows = one_loss_at_a_time(net, lambda: squares(net(**batch)[output]))
    for key, own in rows.items():  # a compiled step has zeros where no loss arrives
        found = net.get_parameter(key).grad1
        own, found = (torch.zeros(4, *net.get_parameter(key).shape).double() if x is None else x for x in (own, found))
        inside = torch.float32 if name.startswith(IN_FLOAT32) else torch.float64
        torch.testing.assert_close(found.to(inside), own.to(inside), msg=lambda m, key=key: f"{key}: {m}")
