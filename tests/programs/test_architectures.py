"""Small models of each kind of architecture, randomly initialised: rows against a backward pass from each sample's loss, the
random numbers the same."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import rarely
from steps import check_hooked
from torch import Tensor

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


OFTEN, RARELY = ("XLNet", "Swinv2"), ("Roberta", "Albert", "Bart", "PoolFormer", "Vilt", "DebertaV2")
"""Families that the benchmark lacks; tests/graph has the labels of all."""


def of(*families: str) -> list[Any]:
    return [case for case in MODELS if case[0].startswith(families)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "config", "arguments", "inputs", "output"), [*of(*OFTEN), *rarely(*of(*RARELY))])
def test_architecture(model: str, config: str, arguments: dict[str, Any], inputs: Inputs, output: str) -> None:
    net, batches = built(model, config, arguments, training=True), [batch_of(inputs, samples) for samples in (4, 3)]
    check_hooked(net, *[partial(lambda batch: squares(net(**batch)[output]), batch) for batch in batches])
