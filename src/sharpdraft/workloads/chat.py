"""A conversation's turns as tokens, by the target's chat template."""

from __future__ import annotations

from typing import Any

from ..errors import SharpDraftError

_ANSWER = "<answer>"


def chat_tokens(tokenizer: Any, turn: str, *, first: bool) -> list[int]:
    """Tokens of one user turn up to where the answer starts; `first` includes what a conversation
    begins with.

    A later turn starts behind the end-of-turn token, which the target itself writes. Raises
    SharpDraftError for a tokenizer without a chat template, or with one that does not end an answer
    with its end-of-sequence token.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SharpDraftError(
            "the target has no chat template, which sessions need: use its chat or instruct version"
        )
    messages = [{"role": "user", "content": turn}]
    if not first:
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _ANSWER},
            *messages,
        ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not first:
        text = text[text.index(_ANSWER) + len(_ANSWER) :]
        if not tokenizer.eos_token or not text.startswith(tokenizer.eos_token):
            raise SharpDraftError(
                f"the target's chat template does not end an answer with {tokenizer.eos_token}: "
                "give single prompts"
            )
        text = text.removeprefix(tokenizer.eos_token)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
