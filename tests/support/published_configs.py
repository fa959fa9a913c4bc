"""What real drafters' config.json have in them: every key that is published, with sizes of the tiny
targets."""

from __future__ import annotations

from typing import Any

from support.tiny import VOCAB

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
_MADE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 43,
    "eos_token_id": 45,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "transformers_version": "4.51.0",
    "use_cache": True,
}
_QWEN: dict[str, Any] = {
    "head_dim": 8,
    "max_window_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
}
_NO_HEAD_DIM = {k: v for k, v in _QWEN.items() if k != "head_dim"}
_LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}

_ZLAB: dict[str, Any] = _SIZES | _MADE | _QWEN
_ZLAB |= {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 2,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
}
_SLIDING = ["sliding_attention", "full_attention"]


def _speculators(family: str, outer: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    name = {"dflash": "DFlash", "eagle3": "Eagle3"}[family]
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": [f"{name}Speculator"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "base_model_ep_plan": None,
        "dtype": "bfloat16",
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "verifier_accept_k": 1}],
            "verifier": {
                "architectures": ["Qwen3ForCausalLM"],
                "name_or_path": "Qwen/Qwen3-8B",
            },
        },
        "speculators_model_type": family,
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "transformers_version": "4.57.3",
        **outer,
    }


DFLASH: dict[str, dict[str, Any]] = {
    "z-lab, Qwen3": _ZLAB,
    "z-lab, Qwen3.5": {
        **_ZLAB,
        "block_size": None,
        "dflash_config": {"block_size": 6, "mask_token_id": 3, "target_layer_ids": [0, 2]},
        "layer_types": _SLIDING,
        "pad_token_id": 44,
        "rope_parameters": {"rope_theta": 10_000_000, "rope_type": "default"},
        "rope_scaling": None,
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
    "AngelSlim, Qwen3": {
        **_ZLAB,
        "architectures": ["QwenDFlashDraftModel"],
        "attention_backend": "flex_attention",
        "loss_decay_gamma": 7.0,
        "num_anchors": 512,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "NVIDIA, Nemotron": {
        **_SIZES,
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_sink_bias": False,
        "block_size": 6,
        "dflash_config": {
            "attention_sink_bias": False,
            "causal": False,
            "mask_token_id": 3,
            "sample_from_anchor": False,
            "target_layer_ids": [0, 2],
            "use_swa": False,
        },
        "dflash_query_causal": False,
        "draft_vocab_size": None,
        "dspark_fixup_head_type": None,
        "dspark_markov_rank": None,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "has_embed_tokens": True,
        "has_lm_head": False,
        "head_dim": 8,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 2,
        "mask_token_id": 3,
        "model_type": "qwen3",
        "num_aux_layers": 2,
        "num_hidden_layers": 2,
        "pard_token": 3,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "factor": 128.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10_000,
            "rope_type": "yarn",
        },
        "rope_theta": 10_000,
        "sample_from_anchor": False,
        "sliding_window": None,
        "target_layer_ids": [0, 2],
        "train_embed_tokens": False,
        "transformers_version": "5.5.3",
        "use_cache": False,
    },
    "RedHatAI, Qwen3": _speculators(
        "dflash",
        {
            "aux_hidden_state_layer_ids": [0, 2],
            "block_size": 6,
            "draft_vocab_size": 40,
            "mask_token_id": 3,
            "max_anchors": 512,
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
        },
        _SIZES
        | {
            "_attn_implementation": "simple_flex_attention",
            "dtype": "bfloat16",
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
        },
    ),
}

_EAGLE: dict[str, Any] = {
    **(_SIZES | _MADE),
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 40,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
}
EAGLE3: dict[str, dict[str, Any]] = {
    "yuhuili, Llama 3.1": {
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 60,
        "draft_vocab_size": 40,
        "eos_token_id": 61,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
    },
    "lmsys, Qwen3 of SpecForge": {
        **(_EAGLE | _QWEN),
    },
    "lmsys, gpt-oss of SpecForge": {
        **_EAGLE,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "head_dim": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
    },
    "SpecForge, 3.1": {
        **(_EAGLE | _QWEN),
        "fc_norm": True,
        "norm_output": True,
    },
    "SpecForge, Phi": {
        **_EAGLE,
        "model_type": "phi3",
        "pad_token_id": 45,
        "rope_theta": 250_000.0,
    },
    "AngelSlim, Qwen2.5": {
        **(_EAGLE | _NO_HEAD_DIM),
        "architectures": ["Eagle3LlamaForCausalLM"],
        "sliding_window": 131_072,
        "target_model_type": "qwen2.5",
        "use_mrope": False,
    },
    "AngelSlim, Qwen3-VL": {
        **_EAGLE,
        "architectures": ["Eagle3LlamaForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": 8,
        "image_token_id": 55,
        "modal_type": "VLM",
        "rope_scaling": None,
        "rope_theta": 5_000_000,
        "target_model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "video_token_id": 56,
        "vision_end_token_id": 53,
        "vision_start_token_id": 52,
    },
    "NVIDIA, of ModelOpt": {
        **_EAGLE,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "next_layer_regular": True,
            "parallel_draft_heads_num_layers": 1,
            "parallel_draft_step": 1,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
        "head_dim": 8,
        "mlp_bias": False,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rope_scaling": _LLAMA3,
        "rope_theta": 500_000.0,
    },
    "nebius, gpt-oss": {
        **_EAGLE,
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 8,
        "mlp_bias": False,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "truncated_vocab_size": 40,
    },
    "RedHatAI, Llama 3.1": _speculators(
        "eagle3",
        {
            "draft_vocab_size": 40,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "embed_requires_grad": False,
            "fc_norm": False,
            "norm_before_fc": False,
            "norm_before_residual": True,
            "norm_output": False,
            "torch_dtype": "bfloat16",
        },
        (_SIZES | _MADE)
        | {
            "head_dim": 8,
            "mlp_bias": False,
            "model_type": "llama",
            "num_hidden_layers": 1,
            "pretraining_tp": 1,
            "rope_scaling": _LLAMA3,
            "rope_theta": 500_000.0,
        },
    ),
}

_PARD: dict[str, Any] = {"pard_token": 62, "spd_type": "pard", "num_hidden_layers": 2}
PARD: dict[str, dict[str, Any]] = {
    "AMD, Llama 3.2": {
        **(_SIZES | _MADE | _PARD),
        "_name_or_path": "meta-llama/Llama-3.2-1B",
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 8,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": _LLAMA3,
        "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16",
    },
    "AMD, Qwen2.5": {
        **({k: v for k, v in _MADE.items() if k != "attention_bias"} | _SIZES | _PARD),
        "architectures": ["Qwen2ForCausalLM"],
        "max_window_layers": 24,
        "model_type": "qwen2",
        "rope_scaling": None,
        "rope_theta": 1_000_000.0,
        "sliding_window": 32_768,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "AMD, Qwen3": {
        **(_SIZES | _MADE | _QWEN | _PARD),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
    },
}
