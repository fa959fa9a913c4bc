"""A target and a drafter on disk, with a tokenizer that chats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from sharpdraft.drafters.dflash import save
from support.drafters import drafter_config, drafter_tensors
from support.tiny import VOCAB, make_model

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Checkpoints:
    model: Any
    tokenizer: Any
    target: Path
    drafter: Path


def save_checkpoints(
    folder: Path,
    target: Mapping[str, Any] = MappingProxyType({}),
    drafter: Mapping[str, Any] = MappingProxyType({}),
) -> Checkpoints:
    """target, drafter: what their configs have otherwise."""
    model = make_model("llama", **target)
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.save_pretrained(folder / "target")
    words = ["<unk>", "<|im_start|>", "<|im_end|>", "<mask>", "user", "assistant"]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "target")
    config = drafter_config(**drafter)
    save(folder / "drafter", config, drafter_tensors(config))
    (folder / "drafter" / "sharpdraft.json").write_text(
        json.dumps({"policy": {"kind": "fixed_slope", "reference": 40}})
    )
    return Checkpoints(model, tokenizer, folder / "target", folder / "drafter")
