"""Bad values at every public call: the error names what is wrong, and nothing is disturbed."""

from __future__ import annotations

import dataclasses
import decimal
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from runtime import LLM, InvalidRequestError, SamplingParams, StructuredOutputsParams
from runtime.chat_format import ChatFormat

FORM_FIELDS = tuple(field.name for field in dataclasses.fields(StructuredOutputsParams))
FORMAT_FIELDS = tuple(field.name for field in dataclasses.fields(ChatFormat))
FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
VOCAB = 300

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, -1, 2, 20, 21, 255, 299, 300, 10**400]),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=3),
    st.sampled_from(
        [math.nan, np.float32(0.5), np.int64(3), np.True_, decimal.Decimal(1), 1j, "\ud800"]
    ),
    st.sampled_from([object(), max, SamplingParams, ...]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.integers(-2, 400), st.text(max_size=2)), inner, max_size=2),
        st.builds(np.array, st.lists(st.integers(-5, 400), max_size=3)),
    ),
    max_leaves=5,
)


ids = st.lists(st.integers(0, 310), max_size=4)
words = st.lists(st.text("ab \N{SNOWMAN}", max_size=3), max_size=3)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(0, 2),
    "temperature": st.sampled_from([0, 1e-9, 0.7, 1e30]),
    "top_k": st.integers(-1, 400),
    "top_p": st.sampled_from([1e-9, 0.5, 1]),
    "min_p": st.sampled_from([0, 0.1, 1]),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 310), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": ids,
    "bad_words": words,
    "logits_processors": st.sampled_from([[max], [lambda ids, logits: logits], [print]]),
    "seed": st.integers(-5, 5),
    "max_tokens": st.integers(1, 5),
    "min_tokens": st.integers(0, 5),
    "stop": words,
    "stop_token_ids": ids,
    "logprobs": st.integers(-1, 21),
    "prompt_logprobs": st.integers(-1, 21),
    "truncate_prompt_tokens": st.integers(-1, 3),
    "structured_outputs": st.sampled_from(
        [
            StructuredOutputsParams(regex="[ab]{1,3}"),
            StructuredOutputsParams(choice=["a", "bc"]),
            StructuredOutputsParams(json_object=True),
            StructuredOutputsParams(regex="(a"),
            StructuredOutputsParams(json={"type": "strin"}),
        ]
    ),
}
options_of = st.dictionaries(st.sampled_from(FIELDS), st.none(), min_size=1, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries(
        {name: st.one_of(*[plausible.get(name, st.booleans())] * 4, values) for name in names}
    )
)


def build(options: dict[str, Any]) -> SamplingParams | None:
    """The params, or None if they were refused by a field's name."""
    try:
        return SamplingParams(**options)
    except (TypeError, InvalidRequestError) as error:
        assert any(name in str(error) for name in options), f"{options}: {error}"
        assert len(str(error)) < 2000
        return None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FIELDS), values)
def test_sampling_params_take_a_value_or_refuse_it_by_the_fields_name(
    name: str, value: Any
) -> None:
    params = build({name: value})
    if params is not None:
        assert dataclasses.replace(params) == params
        hash(params)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FORM_FIELDS), values, min_size=1, max_size=2))
def test_a_form_takes_a_value_or_refuses_it_by_the_fields_name(options: dict[str, Any]) -> None:
    try:
        form = StructuredOutputsParams(**options)
    except (TypeError, InvalidRequestError) as error:
        names = ("structured_outputs", *options)
        assert any(name in str(error) for name in names), f"{options}: {error}"
        assert len(str(error)) < 2000
    else:
        assert dataclasses.replace(form) == form
        hash(form)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FORMAT_FIELDS), values)
def test_a_chat_format_takes_a_value_or_refuses_it_by_the_fields_name(
    name: str, value: Any
) -> None:
    try:
        ChatFormat(**{name: value})
    except (TypeError, InvalidRequestError) as error:
        assert name in str(error)
        assert len(str(error)) < 2000


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=64, kv_cache_bytes=1 << 20) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    """What a good request gives, to be compared after each bad one."""
    return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs


def undisturbed(llm, expected) -> None:
    engine = llm.engine
    assert not engine.has_unfinished
    assert not engine._watched_texts
    engine.check_integrity()
    assert engine._blocks.num_free_blocks == engine._blocks.num_usable_blocks
    assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs == expected


QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(QUICK, max_examples=200)
@given(options=options_of)
def test_any_params_run_or_are_refused_before_anything_is_queued(llm, expected, options):
    params = build({"max_tokens": 3, **options})
    if params is None:
        return
    if params.max_tokens > 64:
        params = dataclasses.replace(params, max_tokens=64, min_tokens=min(params.min_tokens, 64))
    try:
        outputs = llm.generate([[1, 2], [3, 4]], [params, GREEDY], use_tqdm=False)
    except InvalidRequestError as error:
        assert str(error).startswith("prompt 0: ")
        assert any(name in str(error) for name in options)
    else:
        assert outputs[1].outputs[0].finish_reason == "length"
        assert outputs[0].outputs[0].finish_reason in ("length", "stop", "error")
    undisturbed(llm, expected)


@QUICK
@given(prompts=values)
def test_any_prompts_run_or_are_refused_before_anything_is_queued(llm, expected, prompts):
    for call in (llm.generate, llm.score):
        try:
            outputs = call(
                prompts,
                use_tqdm=False,
                **({"sampling_params": GREEDY} if call == llm.generate else {}),
            )
        except (TypeError, InvalidRequestError) as error:
            assert "prompt" in str(error) or "text" in str(error)
        else:
            assert isinstance(outputs, list)
    undisturbed(llm, expected)


@QUICK
@given(messages=values, params=values)
def test_any_messages_and_params_run_or_are_refused(llm, expected, messages, params):
    conversation = [{"role": "user", "content": "hi"}]
    for call in (llm.chat, lambda *given: list(llm.stream_chat(*given))):
        for given_messages, given_params in ((messages, GREEDY), (conversation, params)):
            try:
                call(given_messages, given_params)
            except (TypeError, InvalidRequestError) as error:
                assert (
                    "message" in str(error)
                    or "sampling_params" in str(error)
                    or "chat" in str(error)
                )
    undisturbed(llm, expected)


@QUICK
@given(
    ids=st.lists(st.one_of(st.integers(-3, 310), st.integers(-(2**70), 2**70)), max_size=6),
    good=st.booleans(),
)
def test_ids_outside_the_vocabulary_are_refused_beside_good_prompts(llm, expected, ids, good):
    prompts = [[5, 6]] * good + [ids]
    is_good = bool(ids) and all(0 <= id_ < VOCAB for id_ in ids)
    if is_good:
        assert len(llm.generate(prompts, GREEDY, use_tqdm=False)) == len(prompts)
    else:
        with pytest.raises(InvalidRequestError, match=f"prompt {int(good)}: "):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    undisturbed(llm, expected)


@QUICK
@given(name=st.sampled_from(("use_tqdm", "priority", "cache_salt", *FORMAT_FIELDS)), value=values)
def test_any_option_of_a_chat_works_or_is_refused(llm, expected, name, value):
    conversation = [{"role": "user", "content": "hi"}]
    try:
        llm.chat(conversation, **{"sampling_params": GREEDY, "use_tqdm": False, name: value})
    except (TypeError, InvalidRequestError) as error:
        named = name in str(error) or (name, value) == ("chat_template", "")
        assert named or "chat template" in str(error) or "prompt 0: " in str(error), error
    undisturbed(llm, expected)


@settings(QUICK, max_examples=200)
@given(
    name=st.sampled_from(("params", "request_id", "priority", "arrival_time", "cache_salt")),
    value=values,
)
def test_any_option_of_an_engines_request_works_or_is_refused(llm, expected, name, value):
    engine = llm.engine
    try:
        sequence = engine.add_request([1, 2], **{"params": GREEDY, name: value})
    except (TypeError, InvalidRequestError) as error:
        assert name in str(error)
    else:
        engine.abort(sequence.request_id)
    undisturbed(llm, expected)
