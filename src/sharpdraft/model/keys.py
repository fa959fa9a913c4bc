"""What is done with each key of a config.json, as data: nothing that changes what a model computes
is passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SharpDraftError, note


@dataclass(frozen=True)
class Keys:
    """How the keys of a configuration are taken.

    used: a reader goes by them. neutral: the values of a key at which it does nothing; null always
    does, and any other value is refused. idle: they change nothing that is computed.

    `one | other` has both; `other` says what holds for a key that both have.
    """

    used: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    idle: frozenset[str] = frozenset()

    @classmethod
    def of(cls, used: str = "", idle: str = "", **neutral: tuple[Any, ...]) -> Keys:
        """From names with blanks between them."""
        return cls(frozenset(used.split()), neutral, frozenset(idle.split()))

    @property
    def known(self) -> frozenset[str]:
        return self.used | self.idle | frozenset(self.neutral)

    def __or__(self, other: Keys) -> Keys:
        own = {key: values for key, values in self.neutral.items() if key not in other.known}
        return Keys(
            self.used - other.known | other.used,
            own | dict(other.neutral),
            self.idle - other.known | other.idle,
        )

    def refuse(self, values: Mapping[str, Any], where: str) -> None:
        """Raise SharpDraftError for a key whose value does something that is not supported.

        where: what the values are of, as the message begins.
        """
        for key, allowed in self.neutral.items():
            value = values.get(key)
            if value is not None and not any(_same(value, each) for each in allowed):
                only = f"; supported: {', '.join(map(repr, allowed))}" if allowed else ""
                raise SharpDraftError(
                    f"{where}: {key} is {_short(value)}, which is not supported{only}"
                )

    def unknown(self, values: Mapping[str, Any]) -> list[str]:
        """The keys with a value that are in no list, in alphabetical order; without those that
        begin with "_", in which transformers keeps where a model came from and how it attends."""
        given = (key for key, value in values.items() if value is not None and key[0:1] != "_")
        return sorted(set(given) - self.known)

    def check(self, values: Mapping[str, Any], where: str) -> None:
        """As `refuse`; then note, once, the keys that are in no list."""
        self.refuse(values, where)
        if strange := self.unknown(values):
            note(
                f"{where}: not known here and left out: {', '.join(strange)}; should one of them "
                "change what the model computes, what comes out is not what it was made for"
            )


def _same(value: Any, allowed: Any) -> bool:
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SAID_OF_TEXT = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores prefix remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
_SAID_OF_TOKENS = """
    audio_token_id bos_token bos_token_id cls_token_id decoder_start_token_id eos_token
    image_token_id mask_token pad_token pad_token_id sep_token_id tokenizer_class unk_token_id
    video_token_id vision_end_token_id vision_start_token_id vision_token_id
"""
_SAID_OF_MAKING = """
    architectures attention_dropout attn_implementation attn_pdrop auto_map chunk_size_feed_forward
    classifier_dropout embd_pdrop embedding_dropout finetuning_task gradient_checkpointing
    hidden_dropout hidden_dropout_prob id2label initializer_range is_decoder is_llama_config
    kv_channels label2id layerdrop logits_to_keep max_sequence_length mlp_dropout model_max_length
    num_labels output_router_logits pretraining_tp problem_type resid_dropout resid_pdrop
    router_aux_loss_coef save_safetensors seq_length task_specific_params tf_legacy_loss
    tie_last_hidden_states torchscript transformers.js_config transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_cache_kernel use_cache_quantization use_flash_attn
    v_head_dim
"""

CAUSAL_LM = Keys.of(
    used="""
        attention_bias compression_config dtype eos_token_id head_dim hidden_act hidden_size
        intermediate_size interleaved is_neox_style layer_types max_position_embeddings
        max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers
        num_key_value_heads original_max_position_embeddings partial_rotary_factor quantization
        quantization_config rms_norm_eps rope_interleave rope_interleaved rope_parameters
        rope_scaling rope_theta sliding_window tie_word_embeddings torch_dtype use_sliding_window
        vocab_size
    """,
    idle=_SAID_OF_TEXT + _SAID_OF_TOKENS + _SAID_OF_MAKING,
    # Positions.
    alibi=(False,),
    no_rope_layer_interval=(),
    no_rope_layers=([],),
    position_embedding_type=("rope", "rotary", "rotary_embedding"),
    rope_base=(),
    rope_local_base_freq=(),
    rope_ratio=(1,),
    rope_scaling_factor=(1,),
    rotary_base=(),
    rotary_dim=(),
    rotary_emb_base=(),
    rotary_emb_fraction=(1,),
    rotary_pct=(1,),
    use_alibi=(False,),
    use_dynamic_ntk=(False,),
    use_mrope=(False,),
    use_rope=(True,),
    # Attention.
    add_cross_attention=(False,),
    attention_logit_cap=(),
    attention_multiplier=(),
    attention_out_bias=(False,),
    attention_value_scale=(1,),
    attn_logit_softcapping=(),
    attn_logits_soft_cap=(),
    attn_temperature_tuning=(False, 0),
    bias=(False,),
    clip_qkv=(),
    cross_attention_hidden_size=(),
    is_causal=(True,),
    is_encoder_decoder=(False,),
    kv_lora_rank=(),
    logit_soft_cap=(),
    pruned_heads=({},),
    q_lora_rank=(),
    qk_layernorm=(False,),
    qk_norm=(False,),
    qkv_bias=(False,),
    query_pre_attn_scalar=(),
    use_bidirectional_attention=(False,),
    use_logn_attn=(False,),
    use_qk_norm=(False,),
    # Scales.
    dim_model_base=(),
    embedding_multiplier=(1,),
    embedding_scale=(1,),
    final_logit_softcapping=(),
    input_embedding_scale=(1,),
    logit_scale=(1,),
    logits_scaling=(1,),
    lm_head_multiplier=(1,),
    mup_base_hidden_size=(),
    residual_multiplier=(1,),
    residual_scale=(1,),
    scale_depth=(),
    scale_emb=(1,),
    use_mup=(False,),
    width_scale=(1,),
    # Layers of another kind, or more than are run.
    hidden_activation=("silu",),
    hidden_size_per_layer_input=(0,),
    lm_head_bias=(False,),
    mtp_num_hidden_layers=(0,),
    mtp_num_layers=(0,),
    n_routed_experts=(0,),
    norm_add_unit_offset=(False,),
    num_experts=(0,),
    num_kv_shared_layers=(0,),
    num_local_experts=(0,),
    num_nextn_predict_layers=(0,),
    parallel_attn=(False,),
    per_layer_config=({},),
    text_config=(),
    tie_encoder_decoder=(False,),
    use_parallel_residual=(False,),
)
"""Of Llama, Qwen2 and Qwen3, and of drafters with layers like theirs."""

_TURNED = "interleaved is_neox_style partial_rotary_factor rope_interleave rope_interleaved"
_ANY_ROPE = Keys.of(
    used=f"rope_theta rope_type type {_TURNED}",
    idle="finetuned",
    long_mscale=(),
    mrope_interleaved=(),
    mrope_section=(),
    short_mscale=(),
)

ROPE: Mapping[str, Keys] = {
    "default": _ANY_ROPE,
    "linear": _ANY_ROPE | Keys.of("factor", idle="original_max_position_embeddings"),
    "llama3": _ANY_ROPE
    | Keys.of("factor high_freq_factor low_freq_factor original_max_position_embeddings"),
    "yarn": _ANY_ROPE
    | Keys.of(
        "attention_factor beta_fast beta_slow factor mscale mscale_all_dim "
        "original_max_position_embeddings truncate"
    ),
    "longrope": _ANY_ROPE
    | Keys.of("attention_factor factor long_factor original_max_position_embeddings short_factor"),
}
"""Of rope_parameters, or rope_scaling, by their rope_type. `rotary_of` goes by them."""
