"""Small models of each kind of architecture, randomly initialised: rows against a backward pass from each sample's loss, the
random numbers the same; as compiled steps; and their labels."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from one_at_a_time import by_memo, check, judge
from oracle import one_loss_at_a_time, squares
from rarely import rarely
from steps import check_hooked
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import UnsupportedOperation
from autograd_hacks.graph.label import Entries
from autograd_hacks.graph.memo import Memo

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

WORDS = 37
TEXT = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 40,
}  # fmt: skip
IMAGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32}
EXPERTS = {"num_key_value_heads": 1, "experts_implementation": "eager"}
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}


def words(samples: int, steps: int = 6) -> Tensor:
    return torch.randint(3, WORDS, (samples, steps))


def text(samples: int) -> dict[str, Tensor]:
    return {"input_ids": words(samples)}


def square_text(samples: int) -> dict[str, Tensor]:
    return {"input_ids": words(samples, samples)}


def masked_text(samples: int) -> dict[str, Tensor]:
    return {"input_ids": words(samples), "attention_mask": (torch.arange(6) < 6 - torch.arange(samples)[:, None] % 3).long()}


def pairs(samples: int) -> dict[str, Tensor]:
    return {"input_ids": words(samples), "decoder_input_ids": words(samples, 5)}


def image(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(samples, 3, 32, 32)}


def speech(samples: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(samples, 200)}


def spectrogram(samples: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(samples, 8, 20), "decoder_input_ids": words(samples, 5)}


def text_and_image(samples: int) -> dict[str, Tensor]:
    return text(samples) | image(samples)


IN_FLOAT32 = ("Llama", "Mamba", "Mixtral", "Qwen", "T5")
"""Models that compute in part in single precision, whatever they are given."""

Inputs = Callable[[int], dict[str, Tensor]]
MODELS: list[tuple[str, str, dict[str, Any], Inputs, str]] = [
    # model, configuration, its arguments, inputs, output
    ("GPT2LMHeadModel", "GPT2Config", GPT2, text, "logits"),
    ("GPT2LMHeadModel", "GPT2Config", GPT2, square_text, "logits"),
    ("GPT2LMHeadModel", "GPT2Config", GPT2, masked_text, "logits"),
    ("BertModel", "BertConfig", TEXT, text, "last_hidden_state"),
    ("BertForSequenceClassification", "BertConfig", TEXT, masked_text, "logits"),
    ("RobertaModel", "RobertaConfig", TEXT, text, "last_hidden_state"),
    ("AlbertModel", "AlbertConfig", TEXT | {"embedding_size": 8}, square_text, "last_hidden_state"),
    ("DebertaV2Model", "DebertaV2Config", TEXT | {"relative_attention": True,
     "pos_att_type": ["c2p", "p2c"], "position_buckets": 4}, text, "last_hidden_state"),
    *[("DebertaV2Model", "DebertaV2Config", TEXT | {"relative_attention": True, "pos_att_type": kinds, "share_att_key": True,
       "position_buckets": 4, "norm_rel_ebd": "layer_norm", "position_biased_input": False}, text, "last_hidden_state")
      for kinds in ([], ["c2p"], ["p2c"])],
    ("LlamaForCausalLM", "LlamaConfig", TEXT | {"num_key_value_heads": 1}, text, "logits"),
    ("MixtralForCausalLM", "MixtralConfig", TEXT | EXPERTS | {"num_local_experts": 3}, text, "logits"),
    ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", TEXT | EXPERTS | {"num_experts": 3, "num_experts_per_tok": 2,
     "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}, text, "logits"),
    ("T5ForConditionalGeneration", "T5Config", {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
     "num_heads": 2}, pairs, "logits"),
    ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ | {"max_position_embeddings": 32}, pairs, "logits"),
    ("OPTForCausalLM", "OPTConfig", {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2,
     "num_attention_heads": 2, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16}, text, "logits"),
    ("MambaForCausalLM", "MambaConfig", {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2,
     "state_size": 4}, text, "logits"),
    ("XLNetModel", "XLNetConfig", {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}, text,
     "last_hidden_state"),
    ("ViTModel", "ViTConfig", IMAGE | {"patch_size": 8}, image, "last_hidden_state"),
    ("BeitModel", "BeitConfig", IMAGE | {"patch_size": 8, "use_relative_position_bias": True}, image, "last_hidden_state"),
    ("SwinModel", "SwinConfig", {"image_size": 32, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4},
     image, "last_hidden_state"),
    ("Swinv2Model", "Swinv2Config", {"image_size": 32, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2],
     "window_size": 4}, image, "last_hidden_state"),
    ("ConvNextV2Model", "ConvNextV2Config", STAGES | {"num_stages": 2}, image, "last_hidden_state"),
    ("ResNetModel", "ResNetConfig", STAGES | {"embedding_size": 8, "layer_type": "basic"}, image, "last_hidden_state"),
    ("PoolFormerModel", "PoolFormerConfig", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, image,
     "last_hidden_state"),
    ("CLIPTextModelWithProjection", "CLIPTextConfig", TEXT | {"projection_dim": 8, "eos_token_id": 2}, text, "text_embeds"),
    ("Wav2Vec2Model", "Wav2Vec2Config", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
     "intermediate_size": 24, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
     "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0},
     speech, "last_hidden_state"),
    ("WhisperModel", "WhisperConfig", SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12,
     "decoder_start_token_id": 1}, spectrogram, "last_hidden_state"),
    ("ViltModel", "ViltConfig", TEXT | {"image_size": 32, "patch_size": 16, "modality_type_vocab_size": 2}, text_and_image,
     "last_hidden_state"),
]  # fmt: skip


def built(model: str, config: str, arguments: dict[str, Any], training: bool) -> Any:
    transformers.logging.set_verbosity_error()
    net = getattr(transformers, model)(getattr(transformers, config)(**arguments)).double().train(training)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return net


def batch_of(inputs: Inputs, samples: int) -> dict[str, Tensor]:
    return {key: x.double() if x.is_floating_point() else x for key, x in inputs(samples).items()}


USUAL, RARELY = ("XLNet", "Swinv2"), ("Roberta", "Albert", "Bart", "PoolFormer", "Vilt", "DebertaV2")
"""Families that the benchmark lacks; labels and compiled steps, below, have all."""


def of(*families: str) -> list[Any]:
    return [case for case in MODELS if case[0].startswith(families)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "config", "arguments", "inputs", "output"), [*of(*USUAL), *rarely(*of(*RARELY))])
def test_architecture(model: str, config: str, arguments: dict[str, Any], inputs: Inputs, output: str) -> None:
    net, batches = built(model, config, arguments, training=True), [batch_of(inputs, samples) for samples in (4, 3)]
    check_hooked(net, *[partial(lambda batch: squares(net(**batch)[output]), batch) for batch in batches])


# Compiled steps: rows against a backward pass from each sample's loss, or a refusal by name


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
def test_compiled_architecture(name: str) -> None:
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


# Labels, with other words or pictures in each step: they and rows against one backward pass a sample


OLMOE = ("OlmoeForCausalLM", "OlmoeConfig", TEXT | {"num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2,
         "pad_token_id": 0, "eos_token_id": 1, "experts_implementation": "eager"}, text, "logits")  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, *rarely(False)])
@pytest.mark.parametrize(
    ("model", "config", "arguments", "inputs", "output"),
    [*MODELS, OLMOE], ids=[f"{case[0]}-{case[3].__name__}" for case in [*MODELS, OLMOE]],
)  # fmt: skip
def test_labels(model: str, config: str, arguments: dict[str, Any], inputs: Inputs, output: str, training: bool) -> None:
    net, memo = built(model, config, arguments, training), Memo()
    for _ in range(2):
        batch = batch_of(inputs, 4)
        out = net(**batch)[output]
        own = by_memo(memo, out, 4, net, list(batch.values()))
        assert not own["walk"].mixes
        assert not own["walk"].asked
        found = check([out], 4, net, **own)
        assert not found.early
        assert found.owned > len(own["trace"].nodes) // 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [next(c for c in MODELS if c[0].startswith("Mixtral")), OLMOE], ids=["Mixtral", "OLMoE"])
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_routing_is_followed_in_each_step(case: Any, way: str) -> None:
    """Which rows an expert gets is said anew for other words, though the graph looks the same."""
    model, config, arguments, inputs, output = case
    net = built(model, config, arguments | {"experts_implementation": way}, True)
    if way == "grouped_mm":
        net = net.float()
    memo, routed = Memo(), set()
    for _ in range(4):
        batch = batch_of(inputs, 4)
        out = net(**batch)[output]
        own = by_memo(memo, out, 4, net, list(batch.values()))
        found, walk = judge([out], 4, net, **own), own["walk"]
        assert not found.wrong
        assert not walk.mixes
        assert found.rows < (1e-9 if way == "eager" else 1e-4)
        entries = [own.samples for labels in walk.labels for own in labels if isinstance(own, Entries)]
        assert all(sum(size > 1 for size in own.shape) <= 1 for own in entries)  # tokens differ, not their parts
        uses = [walk.labels[use.node][0] for use in walk.uses if use.node >= 0]
        routed.add(str([label.samples.flatten().tolist() for label in uses if isinstance(label, Entries)]))
    assert len(routed) > 1
    assert torch.is_grad_enabled()
