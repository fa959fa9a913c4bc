"""A prompt holds the user's text, whatever the template wants it as, or it is said."""

from __future__ import annotations

import pytest

from sharpdraft.errors import SharpDraftError
from sharpdraft.workloads.chat import Chat, ChatSettings
from sharpdraft.workloads.tasks import Task
from support.templates import byte_tokenizer

PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"
    "</s>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
STRICT = "{% if messages[0].content is string %}{{ raise_exception('a list') }}{% endif %}" + PARTS
SILENT = ("hello", "{# nothing #}", "{% for m in messages %}{{ m.role }}</s>{% endfor %}")


@pytest.mark.parametrize("template", [PARTS, STRICT])
def test_templates_of_parts_show_every_text(template: str) -> None:
    tokenizer = byte_tokenizer(template, ("</s>",))
    chat = Chat(tokenizer, ChatSettings("be kind"))
    task = Task("t", ("one", "two"))
    chat.check([task])
    first, second = (tokenizer.decode(ids) for ids in chat.prompts(task))
    assert first == "system:be kind</s>user:one</s>assistant:"
    assert second == "user:two</s>assistant:"
    # Who renders them elsewhere finds out for himself.
    assert chat.messages(task)[-1] == {"role": "user", "content": "one"}


@pytest.mark.parametrize("template", SILENT)
@pytest.mark.parametrize("turns", [("a",), ("a", "b")])
def test_a_template_without_the_users_text_is_refused(template: str, turns: tuple[str]) -> None:
    chat = Chat(byte_tokenizer(template, ("</s>",)))
    for met in (lambda: chat.check([Task("t", turns)]), lambda: chat.prompt("a")):
        with pytest.raises(SharpDraftError, match="does not show the user's text"):
            met()


@pytest.mark.parametrize("raw", [False, True])
def test_texts_that_are_no_unicode(raw: bool) -> None:
    chat = Chat(byte_tokenizer("{{ messages[-1].content }}", ()), ChatSettings(raw=raw))
    with pytest.raises(SharpDraftError, match="the prompt is no UTF-8"):
        chat.prompt("a\udcff")
    with pytest.raises(SharpDraftError, match="--system is no UTF-8"):
        ChatSettings.parse("a\udcff")
    for value in ("a=\udcff", 'a=["\\ud800"]'):
        with pytest.raises(SharpDraftError, match="--template-arg is no UTF-8"):
            ChatSettings.parse(None, [value])
