"""Prompts as the target's chat template has them."""

from __future__ import annotations

from support.tiny import PROMPT, Tiny, continuation


def test_prompt_text_is_that_of_the_targets(llama: Tiny) -> None:
    """The fixture's promise that the tests above rest on."""
    assert (
        continuation(llama.model, llama.text[: PROMPT + 9], 12)
        == llama.text[PROMPT + 9 : PROMPT + 21]
    )
