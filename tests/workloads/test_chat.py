"""Turns as tokens: what a session holds is what the target's chat template makes of the whole
conversation."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpdraft.errors import SharpDraftError, SharpDraftNote
from sharpdraft.workloads.chat import Chat, ChatSettings, describe
from sharpdraft.workloads.tasks import Task
from support.templates import STYLES, WITH_SYSTEM, byte_tokenizer, tokenizer_of
from support.tiny import PROMPT, Tiny, continuation

# Templates may trim texts and cut thinking out of answers: that is not what is asked here.
TEXTS = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), exclude_characters="<>|"),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    return {style: tokenizer_of(style) for style in STYLES}


@pytest.fixture(autouse=True)
def no_notes() -> Any:
    """What is noted without being looked for fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharpDraftNote)
        yield


def chat_of(tokenizer: Any, **told: Any) -> Chat:
    if "enable_thinking" in tokenizer.chat_template:
        told.setdefault("arguments", {"enable_thinking": True})
    return Chat(tokenizer, ChatSettings(**told))


@pytest.mark.parametrize("style", STYLES)
def test_a_lead_is_what_stands_before_the_question(style: str, tokenizers: dict[str, Any]) -> None:
    chat, read = chat_of(tokenizers[style]), "A page, and its end.\n\n"
    leads = []
    for question in ("What?", "Who then?"):
        task = Task("t", (read + question, "and then?"), lead=len(read))
        prompt, lead = next(chat.prompts(task)), chat.lead(task)
        before, behind = (tokenizers[style].decode(part) for part in (prompt[:lead], prompt[lead:]))
        assert read.rstrip() in before and "W" not in before.partition(read.rstrip())[2]
        assert question in behind and "page" not in behind
        leads.append(prompt[:lead])
    assert leads[0] == leads[1]
    assert chat.lead(Task("t", ("What?",))) == 0


def test_prompt_text_is_that_of_the_targets(llama: Tiny) -> None:
    """The fixture's promise that the tests above rest on."""
    assert (
        continuation(llama.model, llama.text[: PROMPT + 9], 12)
        == llama.text[PROMPT + 9 : PROMPT + 21]
    )


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_session_is_the_templates_conversation(
    style: str, tokenizers: dict[str, Any], data: st.DataObject
) -> None:
    """Token for token, whether an answer ended by itself or was cut."""
    tokenizer = tokenizers[style]
    systems = st.none() | TEXTS if style in WITH_SYSTEM else st.none()
    system, own = data.draw(systems), data.draw(systems)
    turns = data.draw(st.lists(TEXTS, min_size=1, max_size=4))
    chat = chat_of(tokenizer, system=system)
    task = Task("t", tuple(turns), 9, own)
    said: list[int] = []
    messages = [{"role": "system", "content": own or system}] if own or system else []
    for turn, prompt in zip(turns, chat.prompts(task), strict=True):
        said += [chat.end_of_turn] * bool(said) + prompt
        messages.append({"role": "user", "content": turn})
        whole = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **chat.settings.arguments
        )
        assert said == whole
        answer = data.draw(TEXTS)
        said += tokenizer(answer, add_special_tokens=False)["input_ids"]
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("style", STYLES)
def test_the_end_of_a_turn_is_the_templates(style: str, tokenizers: dict[str, Any]) -> None:
    """Whatever a configuration names first, and whatever the tokenizer calls its end."""
    tokenizer, of_style = tokenizers[style], STYLES[style]
    chat = chat_of(tokenizer)
    end = tokenizer.convert_tokens_to_ids(of_style.end)
    assert chat.end_of_turn == end
    others = tuple(tokenizer.convert_tokens_to_ids(each) for each in of_style.specials[:2])
    known = (*others, *({end} - {*others}))
    assert chat.stops(known) == known
    lacking = tuple(each for each in others if each != end)
    with pytest.warns(
        SharpDraftNote, match=f"ends a turn with {of_style.end[:5]}".replace("|", r"\|")
    ):
        assert chat.stops(lacking) == (*lacking, end)


def test_white_space_before_the_end_of_a_turn_is_left_out() -> None:
    template = "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}"
    tokenizer = byte_tokenizer(template, ("</s>",), eos_token="</s>")
    chat = Chat(tokenizer)
    assert tokenizer.decode([chat.end_of_turn]) == "</s>"
    assert tokenizer.decode(chat.prompt("b", first=False)) == "b </s>"


def test_the_end_of_a_turn_is_the_longest_token_that_stands_there() -> None:
    template = "{% for m in messages %}{{ m.content }}<end><of>{% endfor %}"
    tokenizer = byte_tokenizer(template, ("<end>", "<end><of>"))
    assert tokenizer.decode([Chat(tokenizer).end_of_turn]) == "<end><of>"


def test_thinking_is_what_the_template_is_told(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen3"]
    with pytest.warns(SharpDraftNote, match="enable_thinking, and nothing sets it"):
        unset = Chat(tokenizer).prompt("a")
    told = chat_of(tokenizer, arguments={"enable_thinking": False}).prompt("a")
    behind = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
    assert told == unset + behind


def test_a_variable_that_a_template_does_not_know_is_noted(tokenizers: dict[str, Any]) -> None:
    with pytest.warns(SharpDraftNote, match="does not mention thinking: it has no effect"):
        Chat(tokenizers["phi3"], ChatSettings(arguments={"thinking": True}))
    for name in ("messages", "add_generation_prompt", "tokenize", "chat_template"):
        with pytest.raises(SharpDraftError, match=f"{name}: that is no variable"):
            Chat(tokenizers["phi3"], ChatSettings(arguments={name: True}))


def test_a_template_that_rewrites_earlier_turns_is_noted(tokenizers: dict[str, Any]) -> None:
    several, single = Task("t", ("a", "b")), Task("t", ("a",))
    chat = chat_of(tokenizers["qwen3"], arguments={"enable_thinking": False})
    chat.check([single])
    with pytest.warns(SharpDraftNote, match="renders earlier turns otherwise"):
        chat.check([single, several])
    for style in STYLES:
        chat_of(tokenizers[style]).check([single, several])


def test_a_system_message_that_is_left_out_is_noted() -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{{ eos_token }}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template, ("</s>",), eos_token="</s>")
    for chat, own in (
        (Chat(tokenizer), "be kind"),
        (Chat(tokenizer, ChatSettings("be kind")), None),
    ):
        with pytest.warns(SharpDraftNote, match="leaves the system message out"):
            chat.check([Task("t", ("a",), 9, own)])


@pytest.mark.parametrize(
    ("style", "task", "message"),
    [
        ("gemma", Task("t", ("a",), 9, "be kind"), "of system, user: System role not supported"),
        ("mistral", Task("t", ("a",), 9, "be kind"), "Only user and assistant roles"),
        ("broken", Task("t", ("a",)), "refuses a conversation of user: "),
        ("first", Task("t", ("a", "b")), "refuses a conversation of user, assistant, user: one"),
        ("silent", Task("t", ("a", "b")), "does not show earlier answers: give single prompts"),
        ("endless", Task("t", ("a", "b")), "ends an answer with no token of its own"),
        ("none", Task("t", ("a",)), "has no chat template: use its chat or instruct version"),
    ],
)
def test_what_a_template_refuses_is_one_line(
    style: str, task: Task, message: str, tokenizers: dict[str, Any]
) -> None:
    templates = {
        "broken": "{% for m in messages %}",
        "first": "{% if messages | length > 1 %}{{ raise_exception('one\nturn') }}{% endif %}"
        "{{ messages[-1].content }}",
        "silent": "{{ messages[-1].content }}</s>",
        "endless": "{% for m in messages %}[INST] {{ m.content }} {% endfor %}",
        "none": None,
    }
    tokenizer = tokenizers.get(style) or byte_tokenizer(templates[style], ("</s>",))
    with pytest.raises(SharpDraftError) as caught:
        Chat(tokenizer).check([Task("s", ("a",))] * (style in ("first", "silent")) + [task])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_single_prompts_need_no_end_of_turn() -> None:
    tokenizer = byte_tokenizer("{{ messages[-1].content }}", ())
    chat = Chat(tokenizer)
    chat.check([Task("t", ("a",))])
    assert chat.stops((7, 9)) == (7, 9)


def test_several_named_templates() -> None:
    named = {"default": "d{{ messages[-1].content }}", "tool_use": "t{{ messages[-1].content }}"}
    tokenizer = byte_tokenizer(named, ())
    assert tokenizer.decode(Chat(tokenizer).prompt("a")) == "da"
    tokenizer.chat_template = {"tool_use": named["tool_use"]}
    with pytest.raises(SharpDraftError, match="multiple chat templates with no default"):
        Chat(tokenizer)


def test_raw_texts(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["gemma"]
    chat = Chat(tokenizer, ChatSettings(raw=True))
    assert chat.prompt("a b") == tokenizer("a b")["input_ids"]
    assert chat.stops((3,)) == (3,)
    chat.check([Task("t", ("a",))])
    for task in (Task("t", ("a", "b")), Task("t", ("a",), 9, "be kind")):
        with pytest.raises(SharpDraftError, match="--raw is for single prompts"):
            chat.check([task])


def test_settings_as_they_are_written() -> None:
    told = ["enable_thinking=false", "n = 3".replace(" ", ""), "date=26 Jul", "tools=[{}]", "e="]
    found = ChatSettings.parse("be kind", told)
    arguments = {"enable_thinking": False, "n": 3, "date": "26 Jul", "tools": [{}], "e": ""}
    assert found == ChatSettings("be kind", arguments)
    assert found.to_dict() == {"system": "be kind", "arguments": arguments}
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    assert describe(found.to_dict()) == (
        'system "be kind", enable_thinking=false, n=3, date="26 Jul", tools=[{}], e=""'
    )
    assert ChatSettings.parse().to_dict() == {}
    assert ChatSettings.parse("").to_dict() == {"system": ""}
    assert ChatSettings.parse(raw=True).to_dict() == {"raw": True}
    for wrong in ("thinking", "=1", "a b=1", "a-b=1"):
        with pytest.raises(SharpDraftError, match="write NAME=VALUE"):
            ChatSettings.parse(None, [wrong])
    with pytest.raises(SharpDraftError, match="a is given twice"):
        ChatSettings.parse(None, ["a=1", "a=2"])
    for system, arguments in (("be kind", ()), (None, ("a=1",))):
        with pytest.raises(SharpDraftError, match="--raw leaves the chat template out"):
            ChatSettings.parse(system, arguments, True)
