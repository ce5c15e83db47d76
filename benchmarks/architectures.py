"""What people train: small models of timm, transformers and peft, randomly initialised, a denoiser, and `fields`'."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn
from families import Make, Size, grouped, hugging, outputs, plain_vit, seeded, sequences, sizes, text, timm, with_dropout
from fields import FIELDS, speaking
from torch import Tensor
from workloads import Batch, UNet, Workload, hugging_face, next_token, pictures


def with_tokens(name: str, own: Callable[[Size], Tensor]) -> Callable[[Size], Callable[[int], Batch]]:
    """Batches of an encoder's input, and tokens for a decoder with as many positions as there are samples."""
    return lambda size: lambda step: {
        name: own(size), "decoder_input_ids": torch.randint(3, size.words, (size.samples, size.samples))
    }  # fmt: skip


t5 = hugging(
    "T5ForConditionalGeneration",
    "T5Config",
    lambda size: {
        "vocab_size": size.words, "d_model": size.width, "d_kv": size.width // size.heads, "d_ff": 2 * size.width,
        "num_layers": 2, "num_heads": size.heads,
    },
    with_tokens("input_ids", lambda size: torch.randint(3, size.words, (size.samples, size.length))),
    next_token,
)  # fmt: skip
whisper = hugging(
    "WhisperModel",
    "WhisperConfig",
    lambda size: sequences(size, num_mel_bins=16, max_source_positions=2 * size.length, max_target_positions=size.length),
    with_tokens("input_features", lambda size: torch.randn(size.samples, 16, 4 * size.length)),
    outputs("last_hidden_state"),
)
wav2vec2 = hugging(
    "Wav2Vec2Model",
    "Wav2Vec2Config",
    lambda size: speaking(size, mask_time_prob=0.0, layerdrop=0.0),
    lambda size: lambda step: {"input_values": torch.randn(size.samples, size.frames)},
    outputs("last_hidden_state"),
)
clip = hugging(
    "CLIPVisionModelWithProjection",
    "CLIPVisionConfig",
    lambda size: {
        "hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "intermediate_size": 3 * size.width, "image_size": size.image, "patch_size": size.patch,
        "projection_dim": size.width // 2,
    },
    lambda size: pictures(size.samples, size.image),
    outputs("image_embeds"),
)  # fmt: skip


def mixtral(size: Size) -> Workload:
    """By grouped products, which torch has for single precision."""
    build = hugging_face("MixtralForCausalLM", "MixtralConfig", **grouped(size, num_local_experts=4))
    return replace(one_by_one(size), model=build, dtype=torch.float32)


def adapted(base: Workload, rank: int) -> Workload:
    """With low-rank adapters, random ones, of a frozen model's queries and values."""

    def build() -> nn.Module:
        peft = importlib.import_module("peft")
        config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = base.model()
        found: nn.Module = peft.get_peft_model(model, config)
        return found.train(model.training)

    return replace(base, model=build)


def unet(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        return {"x": torch.randn(size.samples, 3, size.image // 2, size.image // 2)}

    return Workload(lambda: UNet(size.dims[0]), batch, seeded(lambda model, batch: model(**batch)), drawn=True)


def denoiser(size: Size) -> Workload:
    def batch(step: int) -> Batch:
        x, noise = torch.randn(2, size.samples, 3, size.image // 2, size.image // 2)
        return {"x": x, "time": torch.rand(size.samples), "noise": noise}

    return Workload(lambda: UNet(size.dims[0]), batch, lambda model, batch: model(**batch))


vit = timm("vit_tiny_patch16_224", lambda size: plain_vit(size) | {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1})
convnext = timm(
    "convnext_atto",
    lambda size: {"dims": size.dims, "depths": (1, 1, 2, 1), "patch_size": 2, "ls_init_value": 0.1, "drop_path_rate": 0.1},
)
one_by_one = text(
    "MixtralForCausalLM",
    "MixtralConfig",
    lambda size: grouped(size, num_local_experts=4, experts_implementation="eager"),
)
bert = text("BertForMaskedLM", "BertConfig", sizes)
llama = text("LlamaForCausalLM", "LlamaConfig", grouped)
gpt2 = text(
    "GPT2LMHeadModel",
    "GPT2Config",
    lambda size: {
        "vocab_size": size.words, "n_positions": 64, "n_embd": size.width, "n_layer": size.layers, "n_head": size.heads,
    },
)  # fmt: skip

ARCHITECTURES: dict[str, Make] = {
    "vit": vit,
    "vit, dropout": with_dropout(vit),
    "deit, layer scale": timm("deit3_small_patch16_224", lambda size: plain_vit(size) | {"init_values": 0.1}),
    "beit, position tables": timm("beit_base_patch16_224", lambda size: plain_vit(size) | {"init_values": 0.1}),
    "cait": timm("cait_xxs24_224", plain_vit),
    "mixer": timm(
        "MlpMixer",
        lambda size: {
            "img_size": size.image, "patch_size": size.patch, "embed_dim": size.width, "num_blocks": size.layers,
        },
    ),
    "swin": timm(
        "swin_tiny_patch4_window7_224",
        lambda size: {
            "img_size": size.image, "patch_size": size.patch // 2, "window_size": 4, "embed_dim": size.dims[0],
            "depths": (2, 2), "num_heads": (2, 4),
        },
    ),
    "convnext": convnext,
    "convnext, drop path": with_dropout(convnext),
    "resnet18, BatchNorm in eval": timm("resnet18", lambda size: {"channels": [2 * width for width in size.dims]}),
    "mobilenet, BatchNorm in eval": timm("mobilenetv3_small_050", lambda size: {}),
    "bert": bert,
    "bert, dropout": with_dropout(bert),
    "deberta-v2": text(
        "DebertaV2Model",
        "DebertaV2Config",
        lambda size: sizes(size, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
        outputs("last_hidden_state"),
    ),
    "gpt2": gpt2,
    "gpt2, dropout": with_dropout(gpt2),
    "llama": llama,
    "llama, LoRA": lambda size: adapted(llama(size), 8),
    "gemma2": text("Gemma2ForCausalLM", "Gemma2Config", grouped),
    "qwen3": text("Qwen3ForCausalLM", "Qwen3Config", grouped),
    "phi": text("PhiForCausalLM", "PhiConfig", sizes),
    "opt": text(
        "OPTForCausalLM",
        "OPTConfig",
        lambda size: sizes(size, ffn_dim=3 * size.width, word_embed_proj_dim=size.width),
    ),
    "mixtral": mixtral,
    "mixtral, one expert after the other": one_by_one,
    "t5": t5,
    "t5, dropout": with_dropout(t5),
    "mamba": text(
        "MambaForCausalLM", "MambaConfig", lambda size: sizes(size, state_size=8, num_hidden_layers=2), longest=16
    ),
    "wav2vec2": wav2vec2,
    "wav2vec2, dropout": with_dropout(wav2vec2),
    "whisper": whisper,
    "clip": clip,
    "UNet, noise drawn inside": unet,
    "denoiser": denoiser,
    **FIELDS,
}  # fmt: skip
"""{name: makes it in a size}"""
