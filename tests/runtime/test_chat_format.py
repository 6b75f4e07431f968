"""Conversations: what templates get, what is refused by place, alike for LLM and AsyncLLM."""

from __future__ import annotations

from typing import Any

import pytest

from runtime import LLM, AsyncLLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from runtime.chat_format import ChatFormat, check_messages
from tests.runtime.stream_reading import collect, final, greedy, is_clean, run

USER = {"role": "user", "content": "hi"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Yes?"},
    {"role": "tool", "content": "42"},
]
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = "{% for m in messages %}<{{ m.role }}|{{ m.content }}>{% endfor %}"


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture
def async_llm(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22)
    yield llm
    run(llm.shutdown(drain=False))


def prompt_of(llm, messages: Any, **chat_format: Any) -> str:
    """The prompt that the model saw."""
    (output,) = llm.chat(messages, greedy(1), use_tqdm=False, **chat_format)
    return llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


# What templates get


def test_all_roles_reach_the_models_template(llm):
    expected = "system: Be brief.\nuser: hi\nassistant: Yes?\ntool: 42\n"
    assert prompt_of(llm, CHAT) == expected + "assistant: "
    assert prompt_of(llm, CHAT, add_generation_prompt=False) == expected


def test_text_parts_are_joined_by_line_ends(llm):
    parts = [{"type": "text", "text": "one"}, {"text": "two"}, "three"]
    assert prompt_of(llm, [{"role": "user", "content": parts}]) == (
        "user: one\ntwo\nthree\nassistant: "
    )
    assert prompt_of(llm, [{"role": "user", "content": []}]) == "user: \nassistant: "


def test_the_last_message_can_be_continued(llm):
    messages = [USER, {"role": "assistant", "content": "It is"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(llm, messages, **options) == "user: hi\nassistant: It is"


def test_a_template_variables_and_tools_can_be_given(llm):
    template = (
        "{{ style }}{% for t in tools %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x + 1 }}{% endfor %}{% endfor %}"
    )
    messages = [USER, {"role": "assistant", "tool_calls": [CALL], "content": ""}]
    options = {
        "chat_template": template,
        "tools": [TOOL],
        "chat_template_kwargs": {"style": "loud "},
    }
    assert prompt_of(llm, messages, **options) == "loud [f]hi2"
    assert CALL["function"]["arguments"] == '{"x": 1}', "the caller's own is left alone"


def test_tool_calls_may_stand_in_for_content():
    (message,) = check_messages([{"role": "assistant", "tool_calls": [CALL]}])
    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": (CALL,)}])
    assert message["tool_calls"][0]["function"]["name"] == "f"


def test_a_batch_of_conversations_is_answered_in_order(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    outputs = llm.chat(conversations, greedy(4), use_tqdm=False, chat_template=TEMPLATE)
    alone = [
        llm.chat(conversation, greedy(4), use_tqdm=False, chat_template=TEMPLATE)[0]
        for conversation in conversations
    ]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    texts = [llm.tokenizer.decode(output.prompt_token_ids) for output in outputs]
    assert texts == ["<user|one>", "<user|two>", "<user|three>"]


def test_stream_chat_and_async_chat_take_the_same_format(llm, async_llm):
    options = {"chat_template": TEMPLATE, "add_generation_prompt": False}
    (expected,) = llm.chat(CHAT, greedy(5), use_tqdm=False, **options)
    assert "".join(llm.stream_chat(CHAT, greedy(5), **options)) == expected.outputs[0].text

    async def main():
        outputs = await collect(async_llm.chat(CHAT, greedy(5), **options))
        assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids

    run(main())


# What is refused

BAD_MESSAGES = [
    ([], "at least one message"),
    ([3], "message 0 is a int, but must be a mapping"),
    ([USER, {"content": "x"}], "message 1 has no 'role'"),
    ([{"role": "user"}], "message 0 has no 'content'"),
    ([{"role": ["user"], "content": "x"}], r"message 0 has role \['user'\]; give a text"),
    ([{"role": "", "content": "x"}], "message 0 has role ''"),
    ([{"role": "user", "content": 5}], "message 0 has content of type int"),
    ([{"role": "user", "content": None}], "message 0 has content of type NoneType"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "message 0, part 0 is of type 'image_url', and the models here take text only",
    ),
    ([{"role": "user", "content": ["a", 5]}], "message 0, part 1 is a int"),
    ([{"role": "user", "content": [{"type": "text"}]}], "message 0, part 0 has no 'text'"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "part 0 has no 'text'"),
    ([{"role": "assistant", "tool_calls": "f"}], "message 0 has tool_calls 'f'"),
    ([{"role": "assistant", "tool_calls": [1]}], r"message 0 has tool_calls \[1\]"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{x"}}]}],
        "message 0, tool call 0: arguments '{x' are not JSON",
    ),
    ([{"role": "user", "content": "\ud800"}], "can't format these messages"),
]


@pytest.mark.parametrize(("messages", "text"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_place(llm, messages, text):
    with pytest.raises(InvalidRequestError, match=text):
        llm.tokenizer.apply_chat_template(messages)
    with pytest.raises(InvalidRequestError, match=f"conversation 1: .*{text}"):
        llm.chat([[USER], messages], greedy(), use_tqdm=False)
    assert not llm.engine.has_unfinished


def test_bad_messages_fail_their_streams_alone(async_llm):
    async def main():
        good = async_llm.chat([USER], greedy())
        for messages, text in BAD_MESSAGES:
            with pytest.raises(InvalidRequestError, match=text):
                await collect(async_llm.chat(messages, greedy()))
        assert (await final(good)).finish_reason == "length"
        return await is_clean(async_llm)

    assert run(main())


BAD_FORMATS = [
    ({"chat_template": 5}, TypeError, "chat_template=5 is of type int"),
    ({"add_generation_prompt": "yes"}, TypeError, "add_generation_prompt='yes'"),
    ({"continue_final_message": None}, TypeError, "continue_final_message=None"),
    (
        {"continue_final_message": True},
        InvalidRequestError,
        "continue_final_message=True needs add_generation_prompt=False",
    ),
    ({"tools": "f"}, TypeError, "tools='f' is of type str: give a list of mappings"),
    ({"tools": [max]}, TypeError, r"tools\[0\]=<built-in function max>"),
    ({"chat_template_kwargs": 3}, TypeError, "chat_template_kwargs=3"),
    ({"chat_template_kwargs": {3: 4}}, TypeError, "chat_template_kwargs={3: 4}"),
    ({"template": "x"}, TypeError, "template"),
]
BAD_TEMPLATES = [
    ({"chat_template": "{% for %}"}, "given as chat_template, can't format"),
    ({"chat_template": "{{ raise_exception('not today') }}"}, "not today"),
    ({"chat_template": "{{ 1 / 0 }}"}, "can't format these messages: division by zero"),
    ({"chat_template": "{{ messages[9].content.x }}"}, "can't format these messages"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs has 'tokenize'"),
    (
        {"chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs has 'tools', which is not a variable of its own",
    ),
    ({"chat_template": ""}, "no tokens"),
    (
        {
            "chat_template": "{{ messages[0].role }}",
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "can't format these messages: continue_final_message",
    ),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD_FORMATS)
def test_a_bad_format_is_refused_by_name_at_the_call(llm, async_llm, options, error, text):
    with pytest.raises(error, match=text):
        llm.chat([USER], greedy(), use_tqdm=False, **options)
    with pytest.raises(error, match=text):
        llm.stream_chat([USER], greedy(), **options)

    async def main():
        with pytest.raises(error, match=text):
            async_llm.chat([USER], greedy(), **options)
        return await is_clean(async_llm)

    assert run(main())


@pytest.mark.parametrize(("options", "text"), BAD_TEMPLATES)
def test_a_template_that_fails_is_a_refusal(llm, async_llm, options, text):
    with pytest.raises(InvalidRequestError, match=text):
        llm.chat([USER], greedy(), use_tqdm=False, **options)

    async def main():
        with pytest.raises(InvalidRequestError, match=text):
            await collect(async_llm.chat([USER], greedy(), **options))
        return await is_clean(async_llm)

    assert run(main())


def test_a_format_is_as_it_was_when_made():
    tools, variables = [dict(TOOL)], {"a": 1}
    made = ChatFormat(tools=tools, chat_template_kwargs=variables)
    tools.append({})
    variables["b"] = 2
    assert made.tools == (TOOL,)
    assert made.chat_template_kwargs == {"a": 1}
    assert ChatFormat(tools=[]).tools is None
    assert ChatFormat(chat_template_kwargs=None).chat_template_kwargs == {}


def test_answers_can_have_a_form_too(llm):
    form = StructuredOutputsParams(choice=["yes", "no"])
    (output,) = llm.chat([USER], SamplingParams(structured_outputs=form), use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")
