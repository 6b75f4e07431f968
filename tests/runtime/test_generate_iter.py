"""Streaming without asyncio: what comes, in which order, and what is left when it is left."""

from __future__ import annotations

import pytest

from runtime import LLM, InvalidRequestError, NonFiniteLogitsError, RequestOutputKind
from runtime import SamplingParams as Params

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPTS = ["abc", [7] * 30, {"prompt": "a longer prompt"}]


def greedy(max_tokens=10, **params):
    return Params(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture(autouse=True)
def is_left_clean(llm):
    yield
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished
    assert not llm._streamed
    assert llm.engine._blocks.num_free_blocks == llm.engine._blocks.num_usable_blocks


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_outputs_of_all_prompts_grow_to_what_generate_gives(llm, kind):
    whole = llm.generate(PROMPTS, greedy(), use_tqdm=False)
    outputs = list(llm.generate_iter(PROMPTS, greedy(output_kind=kind)))
    for index, expected in enumerate(whole):
        mine = [output for output in outputs if output.prompt_index == index]
        completions = [output.outputs[0] for output in mine]
        if kind is DELTA:
            assert "".join(c.text for c in completions) == expected.outputs[0].text
            ids = [token_id for c in completions for token_id in c.token_ids]
            assert ids == expected.outputs[0].token_ids
        else:
            assert completions[-1] == expected.outputs[0]
        assert [o.finished for o in mine] == [False] * (len(mine) - 1) + [True]
        assert len(mine) == (1 if kind is FINAL_ONLY else 10)
        assert {o.prompt for o in mine} == {expected.prompt}
        assert expected.prompt_index == index
    assert {output.prompt_index for output in outputs[:3]} == {0, 1, 2}, "they grow side by side"


def test_output_kind_does_not_change_what_generate_gives(llm):
    results = [
        [o.outputs for o in llm.generate(PROMPTS, greedy(output_kind=kind), use_tqdm=False)]
        for kind in RequestOutputKind
    ]
    assert results[0] == results[1] == results[2]


def test_all_is_checked_at_the_call_and_nothing_runs_before_the_first_output(llm):
    with pytest.raises(InvalidRequestError, match="prompt 1: a prompt of 600 tokens"):
        llm.generate_iter(["a", [5] * 600], greedy())
    with pytest.raises(TypeError, match="sampling_params is 3"):
        llm.generate_iter("a", 3)
    with pytest.raises(TypeError, match="sampling_params is 3"):
        llm.stream_chat([{"role": "user", "content": "hi"}], 3)
    before = llm.engine.counters.num_steps
    outputs = llm.generate_iter("a", greedy())
    assert llm.engine.counters.num_steps == before
    next(outputs)
    assert llm.engine.counters.num_steps == before + 1
    outputs.close()
    assert list(llm.generate_iter([], greedy())) == []


@pytest.mark.parametrize("num_read", [0, 1, 5, 25])
def test_leaving_early_aborts_what_is_left(llm, num_read):
    outputs = llm.generate_iter(PROMPTS, greedy())
    for _ in range(num_read):
        next(outputs)
    outputs.close()


def test_calls_in_between_serve_each_other(llm):
    """The steps of any call bring tokens to the streams of all."""
    whole = llm.generate(PROMPTS, greedy(30), use_tqdm=False)
    answer = "".join(llm.stream_chat([{"role": "user", "content": "hi"}], greedy()))
    first = llm.generate_iter(PROMPTS, greedy(30))
    second = llm.generate_iter(PROMPTS, greedy(30))
    last = {}
    for count, output in enumerate(first):
        last[output.prompt_index] = output.outputs[0]
        if count == 3:
            next(second)
            assert llm.generate("q", greedy(), use_tqdm=False)[0].finished
            pieces = llm.stream_chat([{"role": "user", "content": "hi"}], greedy())
            assert "".join(pieces) == answer
    assert [last[index] for index in range(3)] == [output.outputs[0] for output in whole]
    rest = {output.prompt_index: output.outputs[0] for output in second}
    assert [rest[index] for index in range(3)] == [output.outputs[0] for output in whole]


def test_a_request_that_is_aborted_ends_its_stream(llm):
    outputs = llm.generate_iter("abc", greedy())
    request_id = next(outputs).request_id
    llm.engine.abort(request_id)
    (last,) = outputs
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")


def test_a_nan_row_is_told_in_its_output_and_raised_by_stream_chat(llm, monkeypatch):
    model, calls = llm.engine._runner._model, []
    compute_logits = model.compute_logits

    def poisoned(hidden):
        calls.append(0)
        return compute_logits(hidden) * (float("nan") if len(calls) > 2 else 1)

    monkeypatch.setattr(model, "compute_logits", poisoned)
    outputs = [output.outputs[0] for output in llm.generate_iter("abc", greedy())]
    assert [completion.finish_reason for completion in outputs] == [None, None, "error"]
    assert "NaN" in outputs[-1].error
    calls.clear()
    pieces = []
    with pytest.raises(NonFiniteLogitsError):
        for piece in llm.stream_chat([{"role": "user", "content": "hi"}], greedy()):
            pieces.append(piece)
    assert pieces


def test_a_step_that_raises_reaches_the_caller_and_ends_his_requests(llm, monkeypatch):
    outputs = llm.generate_iter(PROMPTS, greedy())
    next(outputs)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "execute", lambda scheduled: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(outputs)


def test_a_cache_salt_shares_with_its_like_only_and_the_cache_can_be_reset(llm):
    prompt = list(range(100))
    conversation = [{"role": "user", "content": "x" * 50}]

    def num_cached(**entries):
        params = greedy(1)
        mapping = {"prompt_token_ids": prompt, **entries}
        return llm.generate([mapping], params, use_tqdm=False)[0].num_cached_tokens

    def num_cached_in_chat(salt):
        output = llm.chat(conversation, greedy(1), use_tqdm=False, cache_salt=salt)[0]
        return output.num_cached_tokens

    llm.reset_prefix_cache()
    assert [num_cached(), num_cached()] == [0, 96]
    assert [num_cached(cache_salt="a"), num_cached(cache_salt="a")] == [0, 96]
    assert num_cached(cache_salt="b") == 0
    assert [num_cached_in_chat(salt) for salt in (None, "a", "a", None)] == [0, 0, 64, 64]
    llm.reset_prefix_cache()
    assert num_cached() == 0
    for salt, error in ((3, TypeError), ("", InvalidRequestError)):
        with pytest.raises(error, match="cache_salt"):
            llm.chat(conversation, greedy(1), cache_salt=salt)
        with pytest.raises(error, match="cache_salt"):
            llm.stream_chat(conversation, greedy(1), cache_salt=salt)


def test_resetting_the_cache_leaves_what_runs_alone(llm):
    prompt = [3] * 40
    (expected,) = llm.generate([prompt], greedy(40), use_tqdm=False)
    outputs = llm.generate_iter([prompt], greedy(40))
    for _ in range(10):
        next(outputs)
    llm.reset_prefix_cache()
    llm.engine.check_integrity()
    for output in outputs:
        llm.engine.check_integrity()
        last = output
    assert last.outputs[0] == expected.outputs[0]
    (again,) = llm.generate([prompt], greedy(40), use_tqdm=False)
    assert (again.outputs, again.num_cached_tokens) == (expected.outputs, 0)
