"""Chat templates in the manner of well-known models, rebuilt small, with a tokenizer of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_ASKED = "{% if add_generation_prompt %}"


@dataclass(frozen=True)
class Style:
    """A template, its special tokens, and which of them it puts behind an answer. eos: what the
    tokenizer calls its end of sequence. stripping: tokens that swallow the white space behind
    them."""

    template: str
    specials: tuple[str, ...]
    end: str
    eos: str
    stripping: tuple[str, ...] = ()


STYLES = {
    "llama3": Style(
        "{{ bos_token }}{% for m in messages %}"
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endfor %}" + _ASKED + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|end_of_text|>",
    ),
    "qwen3": Style(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + _ASKED
        + "<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        "<|im_end|>",
        "<|im_end|>",
    ),
    "gemma": Style(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        + _ASKED
        + "<start_of_turn>model\n{% endif %}",
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "<eos>",
    ),
    "phi3": Style(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        + _ASKED
        + "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        "<|endoftext|>",
        stripping=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "mistral": Style(
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}",
        ("</s>",),
        "</s>",
        "</s>",
    ),
    # Starts every turn with a token, and the next of a user's is what ends an answer.
    "glm": Style(
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        + _ASKED
        + "<|assistant|>\n{% endif %}",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|user|>",
        "<|endoftext|>",
    ),
}
WITH_SYSTEM = ("llama3", "qwen3", "phi3", "glm")


def byte_tokenizer(template: Any, specials: tuple[str, ...], **options: Any) -> Any:
    """A token a byte, special tokens behind them, "<s>" among them as the beginning."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    stripping = options.pop("stripping", ())
    plain.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=token in stripping)
            for token in ("<s>", *specials)
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", **options)
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(style: str) -> Any:
    each = STYLES[style]
    return byte_tokenizer(
        each.template, each.specials, eos_token=each.eos, stripping=each.stripping
    )
