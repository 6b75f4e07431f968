"""Sampling options through the whole engine, on a tiny model and against transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from runtime import LLM, InvalidRequestError, LogitsProcessorError, SamplingParams

PROMPT = [(37 * i + 5) % 256 for i in range(16 * 3 + 2)]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=256, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture(autouse=True)
def is_left_clean(request):
    """After every call all blocks are free, nothing is queued or watched."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.engine.check_integrity()
        assert not llm.engine.has_unfinished
        assert not llm.engine._watched_texts
        assert llm.engine._blocks.num_free_blocks == llm.engine._blocks.num_usable_blocks


@pytest.fixture(scope="module")
def reference(checkpoint):
    """Log-probabilities of the next token after each token, by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), dtype=torch.float32
    )

    @torch.inference_mode()
    def logprobs(ids):
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return logprobs


def greedy(max_tokens=6, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def run(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def one(llm, prompt, params):
    (output,) = run(llm, [prompt], params)
    return output, output.outputs[0]


def check_logprobs(found, expected, ids, num_top):
    """`found` are dicts; `expected[i]` predicts `ids[i]`."""
    assert len(found) == len(ids) == len(expected)
    for entry, row, id_ in zip(found, expected, ids, strict=True):
        assert next(iter(entry)) == id_, "the token itself comes first"
        top = row.topk(num_top).indices.tolist()
        assert set(entry) == {id_, *top}
        order = row.argsort(descending=True).tolist()
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=2e-4)
            assert logprob.rank == order.index(token_id) + 1


# -- log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_of_prompt_and_output_are_transformers(llm, reference, num_top):
    params = greedy(logprobs=num_top, prompt_logprobs=num_top, presence_penalty=1.0)
    output, completion = one(llm, PROMPT, params)
    ids = completion.token_ids
    expected = reference(PROMPT + ids)
    assert output.prompt_logprobs[0] is None
    n = len(PROMPT)
    check_logprobs(output.prompt_logprobs[1:], expected[: n - 1], PROMPT[1:], num_top)
    check_logprobs(completion.logprobs, expected[n - 1 : -1], ids, num_top)
    own = [entry[id_].logprob for entry, id_ in zip(completion.logprobs, ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(own))
    entry = completion.logprobs[0]
    texts = {id_: llm.tokenizer.decode([id_], skip_special_tokens=False) for id_ in entry}
    assert {id_: logprob.decoded_token for id_, logprob in entry.items()} == texts


def test_without_the_wish_there_are_no_logprobs(llm):
    output, completion = one(llm, PROMPT, greedy())
    assert output.prompt_logprobs is None
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def same_logprobs(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.keys() == b.keys()
            for id_ in a:
                assert a[id_].logprob == pytest.approx(b[id_].logprob, abs=1e-4)
                assert a[id_].rank == b[id_].rank


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"max_prefill_chunk": 16},
        {"num_kv_blocks": 7, "max_num_batched_tokens": 24},
        {"graph_mode": "piecewise", "capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        {"policy": "prefill_first"},
    ],
    ids=str,
)
def test_prompt_logprobs_are_whole_whatever_the_cache_the_chunks_and_the_pool(
    checkpoint, reference, options
):
    """Each prompt twice: where the second could be served from the cache it still has them all."""
    prompts = [PROMPT, PROMPT[:33], PROMPT[:1], PROMPT, PROMPT[::-1]]
    params = [greedy(20, prompt_logprobs=2, logprobs=2)] * 4 + [greedy(20)]
    with LLM(checkpoint("llama"), max_model_len=96, dtype="float32", **options) as llm:
        outputs = [*run(llm, prompts, params), *run(llm, prompts, params)]
        if "num_kv_blocks" in options:
            assert llm.engine.scheduler.num_preemptions > 0
        elif options.get("enable_prefix_caching", True):
            assert outputs[-1].num_cached_tokens > 0, "those without the wish still hit"
        llm.engine.check_integrity()
    for output, prompt in zip(outputs, prompts * 2, strict=True):
        if prompt == PROMPT[::-1]:
            continue
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.num_cached_tokens == 0
        ids = output.outputs[0].token_ids
        expected = reference(prompt + ids)
        n = len(prompt)
        check_logprobs(output.prompt_logprobs[1:], expected[: n - 1], prompt[1:], 2)
        check_logprobs(output.outputs[0].logprobs, expected[n - 1 : -1], ids, 2)


def test_a_prompt_with_logprobs_fills_the_cache_for_others(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=96) as llm:
        one(llm, PROMPT, greedy(1, prompt_logprobs=0))
        output, _ = one(llm, PROMPT, greedy(1))
    assert output.num_cached_tokens == 48


def test_too_many_logprobs_are_refused_by_the_engines_limit(llm, checkpoint):
    for name in ("logprobs", "prompt_logprobs"):
        for value in (21, -1, 10**6):
            with pytest.raises(InvalidRequestError, match=rf"{name}={value} .*max_logprobs=20"):
                one(llm, [1, 2], greedy(**{name: value}))
    with LLM(checkpoint("llama"), max_model_len=64, max_logprobs=-1) as wide:
        output, completion = one(wide, [1, 2], greedy(2, logprobs=-1, prompt_logprobs=-1))
        assert [len(entry) for entry in completion.logprobs] == [300, 300]
        assert len(output.prompt_logprobs[1]) == 300
        total = math.fsum(math.exp(found.logprob) for found in completion.logprobs[0].values())
        assert total == pytest.approx(1, abs=1e-4)
        with pytest.raises(InvalidRequestError, match=r"logprobs=301 .* allows 300"):
            one(wide, [1, 2], greedy(logprobs=301))
    with LLM(checkpoint("llama"), max_model_len=64, max_logprobs=0) as narrow:
        assert one(narrow, [1], greedy(1, logprobs=0))[1].logprobs[0]
        with pytest.raises(InvalidRequestError, match="allows 0"):
            one(narrow, [1], greedy(1, logprobs=1))


def test_score_gives_the_likelihood_of_each_prompt(llm, reference):
    scores = llm.score([PROMPT, "hello", [5, 6]], use_tqdm=False)
    texts = [PROMPT, llm.tokenizer.encode("hello"), [5, 6]]
    for score, ids in zip(scores, texts, strict=True):
        expected = reference(ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert score.prompt_token_ids == ids
        assert score.logprobs == pytest.approx(expected.tolist(), abs=2e-4)
        assert score.sum_logprob == pytest.approx(float(expected.sum()), abs=1e-3)
        assert score.mean_logprob == pytest.approx(float(expected.mean()), abs=1e-3)
        assert score.perplexity == pytest.approx(float(expected.mean().neg().exp()), rel=1e-3)
    assert llm.score([], use_tqdm=False) == []
    with pytest.raises(InvalidRequestError, match="prompt 1: nothing predicts the only token"):
        llm.score([[1, 2], [3]])


# -- what the engine draws -------------------------------------------------------------------------

OPTIONS = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {5: 4.0, 6: -4.0}},
    {"allowed_token_ids": [*range(40, 60)]},
    {"bad_words": ["a", "bc"], "min_tokens": 3, "stop_token_ids": [7]},
    {"logits_processors": [lambda ids, logits: logits * (1 + 0.01 * len(ids))]},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "logprobs": 3},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_give_the_same_alone_together_chunked_and_preempted(checkpoint, temperature):
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True, **options)
        for i, options in enumerate(OPTIONS)
    ]
    prompts = [[(11 * i + 7 * j) % 250 for j in range(20 + i)] for i in range(len(params))]

    def generate(together, **options):
        with LLM(checkpoint("llama"), max_model_len=64, dtype="float32", **options) as llm:
            if together:
                outputs = run(llm, prompts, params)
            else:
                pairs = zip(prompts, params, strict=True)
                outputs = [one(llm, prompt, own)[0] for prompt, own in pairs]
            preemptions = llm.engine.scheduler.num_preemptions
        return outputs, preemptions

    alone, _ = generate(False)
    tokens = [output.outputs[0].token_ids for output in alone]
    assert len({tuple(ids) for ids in tokens}) == len(tokens)
    for options in ({}, {"max_num_batched_tokens": 9}, {"num_kv_blocks": 6}):
        outputs, preemptions = generate(True, **options)
        assert [output.outputs[0].token_ids for output in outputs] == tokens
        assert (preemptions > 0) == ("num_kv_blocks" in options)
        same_logprobs(outputs[-1].outputs[0].logprobs, alone[-1].outputs[0].logprobs)


def test_greedy_output_under_penalties_is_that_of_a_loop_over_transformers(llm, reference):
    params = greedy(30, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2)
    _, completion = one(llm, PROMPT[:10], params)
    output = []
    for _ in range(30):
        row = reference(PROMPT[:10] + output)[-1]
        # The penalties see logits, and log-probabilities differ from them by a constant.
        logits = row + _log_normaliser(llm, PROMPT[:10] + output)
        for id_ in {*PROMPT[:10], *output}:
            logits[id_] = logits[id_] / 1.4 if logits[id_] > 0 else logits[id_] * 1.4
        for id_ in set(output):
            logits[id_] -= 0.2 * output.count(id_) + 0.5
        output.append(int(logits.argmax()))
    assert completion.token_ids == output


def _log_normaliser(llm, ids):
    """log(sum(exp(logits))) after `ids`, from the engine's own model."""
    seen = []

    def look(_, logits):
        seen.append(float(logits.double().logsumexp(-1)))
        return logits

    one(llm, ids, greedy(1, logits_processors=[look]))
    return seen[0]


def test_allowed_ids_and_bias_steer_the_output(llm):
    _, completion = one(llm, "abc", greedy(5, allowed_token_ids=[70]))
    assert completion.token_ids == [70] * 5
    _, completion = one(llm, "abc", greedy(5, logit_bias={71: 100.0}))
    assert completion.token_ids == [71] * 5


def test_bad_words_don_t_occur(llm):
    letters = llm.tokenizer.encode("abcdefgh")
    params = {"allowed_token_ids": letters, "repetition_penalty": 1.5}
    _, free = one(llm, "abc", greedy(20, **params))
    words = [free.text[4:6], free.text[9:12], free.text[15]]
    assert len({*words}) == 3
    _, held = one(llm, "abc", greedy(20, bad_words=words, **params))
    assert len(held.text) == 20
    assert not [word for word in words if word in held.text]
    assert words[0][0] in held.text, "its first letter alone is no bad word"


def test_min_tokens_holds_back_stop_tokens_and_stop_strings(llm):
    _, free = one(llm, "abc", greedy(12))
    stop_id = free.token_ids[1]
    _, held = one(llm, "abc", greedy(12, min_tokens=5, stop_token_ids=[stop_id]))
    assert stop_id not in held.token_ids[:5]
    everything = [*map(chr, range(32, 127)), "\N{REPLACEMENT CHARACTER}"]
    _, late = one(llm, "abc", greedy(12, min_tokens=4, stop=everything))
    assert 4 < len(late.token_ids) <= 12
    assert late.finish_reason == "stop"


def test_the_prompt_is_truncated_to_its_last_tokens(llm):
    whole, expected = one(llm, PROMPT[-20:], greedy())
    output, completion = one(llm, PROMPT, greedy(truncate_prompt_tokens=20))
    assert output.prompt_token_ids == PROMPT[-20:] == whole.prompt_token_ids
    assert completion.token_ids == expected.token_ids
    long = [7] * 600
    output, completion = one(llm, long, greedy(truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == 255
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")
    with pytest.raises(InvalidRequestError, match="a prompt of 300 tokens"):
        one(llm, long, greedy(truncate_prompt_tokens=300))


def test_detokenize_false_gives_ids_only(llm):
    _, expected = one(llm, "abc", greedy())
    _, completion = one(llm, "abc", greedy(detokenize=False, logprobs=1))
    assert (completion.text, completion.token_ids) == ("", expected.token_ids)
    assert {found.decoded_token for e in completion.logprobs for found in e.values()} == {None}


# -- how it stops ----------------------------------------------------------------------------------


def ascii_stop(llm, prompt, max_tokens=40):
    """Greedy output for a prompt, and a stop string of two characters found well inside it."""
    _, free = one(llm, prompt, greedy(max_tokens))
    for i in range(4, len(free.text) - 4):
        stop = free.text[i : i + 2]
        if stop.isascii() and free.text.index(stop) == i:
            return free, stop
    raise AssertionError("no such string")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_request_and_its_text(llm, include):
    free, stop = ascii_stop(llm, "abc")
    params = greedy(40, stop=[stop], include_stop_str_in_output=include)
    outputs = run(llm, ["abc", "abc"], [params, greedy(40)])
    completion = outputs[0].outputs[0]
    expected = free.text[: free.text.index(stop) + len(stop) * include]
    assert completion.text == expected
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 40
    assert llm.tokenizer.decode(completion.token_ids).endswith(stop)
    assert outputs[1].outputs[0].token_ids == free.token_ids
    conversation = [{"role": "user", "content": "hi"}]
    free, stop = ascii_stop(llm, llm.tokenizer.apply_chat_template(conversation))
    params = greedy(40, stop=stop, include_stop_str_in_output=include)
    pieces = list(llm.stream_chat(conversation, params))
    expected = free.text[: free.text.index(stop) + len(stop) * include]
    assert "".join(pieces) == expected
    assert llm.chat(conversation, params, use_tqdm=False)[0].outputs[0].text == expected


def test_a_stop_string_in_the_last_token_is_the_reason_though_max_tokens_is_too(llm):
    _, stop = ascii_stop(llm, "abc")
    num = len(one(llm, "abc", greedy(40, stop=stop))[1].token_ids)
    _, completion = one(llm, "abc", greedy(num, stop=stop))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    _, completion = one(llm, "abc", greedy(num - 1, stop=stop))
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_the_stop_reason_is_the_token_and_its_text_is_left_out(llm):
    _, free = one(llm, "abc", greedy(10))
    stop_id = next(id_ for id_ in free.token_ids[2:] if free.token_ids.index(id_) >= 2)
    num = free.token_ids.index(stop_id) + 1
    _, completion = one(llm, "abc", greedy(10, stop_token_ids=[stop_id]))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_id)
    assert completion.token_ids == free.token_ids[:num]
    assert completion.text == llm.tokenizer.decode(free.token_ids[: num - 1])
    params = greedy(10, stop_token_ids=[stop_id], include_stop_str_in_output=True)
    _, completion = one(llm, "abc", params)
    assert completion.text == llm.tokenizer.decode(free.token_ids[:num])
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={257: 100.0})
    _, completion = one(llm, "abc", params)
    assert (completion.token_ids, completion.stop_reason) == ([257], None)
    assert (completion.finish_reason, completion.text) == ("stop", "")


def test_stop_strings_survive_preemption_and_failed_steps(checkpoint, monkeypatch):
    with LLM(checkpoint("llama"), max_model_len=96) as roomy:
        _, stop = ascii_stop(roomy, PROMPT[:20], 60)
        expected = one(roomy, PROMPT[:20], greedy(60, stop=stop))[1]
    with LLM(checkpoint("llama"), max_model_len=96, num_kv_blocks=7) as llm:
        params = [greedy(60)] * 2 + [greedy(60, stop=stop)]
        outputs = run(llm, [PROMPT[5:25], PROMPT[9:29], PROMPT[:20]], params)
        assert outputs[2].outputs[0] == expected
        sequence = llm.engine.add_request(PROMPT[:20], greedy(60, stop=stop))
        execute, calls = llm.engine._runner.execute, []

        def failing(scheduled):
            calls.append(scheduled)
            if len(calls) % 3 == 0:
                raise RuntimeError("the device fell over")
            return execute(scheduled)

        monkeypatch.setattr(llm.engine._runner, "execute", failing)
        while llm.engine.has_unfinished:
            try:
                llm.engine.step()
            except RuntimeError:
                continue
        assert sequence.output_token_ids == expected.token_ids
        assert sequence.stop_reason == stop
        assert not llm.engine._watched_texts
        assert not llm.engine._runner._rows.output_ids
        llm.engine.check_integrity()


# -- processors that fail, rows without a token ----------------------------------------------------


def test_a_processor_that_fails_ends_its_own_request_by_name(llm):
    def fails_later(ids, logits):
        if len(ids) == 3:
            raise ValueError("three is enough")
        return logits

    failing = greedy(logits_processors=[fails_later], logprobs=1)
    params = [greedy(), failing, greedy()]
    outputs = run(llm, ["one", "two", "three"], params)
    expected = run(llm, ["one", "two", "three"], greedy())
    good = [o.outputs[0] for o in (outputs[0], outputs[2])]
    assert good == [o.outputs[0] for o in (expected[0], expected[2])]
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error"
    assert "output token 3: logits_processors[0] raised ValueError: three is enough" in failed.error
    assert failed.token_ids == expected[1].outputs[0].token_ids[:3]
    assert len(failed.logprobs) == 3
    failing = greedy(logits_processors=[fails_later])
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], failing)
    with pytest.raises(LogitsProcessorError, match="three is enough"):
        list(stream)


def test_the_runner_keeps_no_ids_of_rows_that_were_taken_over(llm):
    run(llm, ["a", "b", "c"], greedy(bad_words=["ab"], logits_processors=[lambda _, x: x]))
    table = llm.engine._runner._rows
    assert (len(table.output_ids), table.num_with_rules) == (3, 3), "told with the next step"
    run(llm, ["a"], greedy(3))
    assert (table.output_ids, table.num_with_rules) == ({}, 0)


def test_ctrl_c_in_a_processor_leaves_a_clean_engine(llm):
    def interrupted(ids, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llm, ["one", "two"], [greedy(), greedy(logits_processors=[interrupted])])
    assert len(one(llm, "one", greedy())[1].token_ids) == 6


def test_rules_that_come_to_forbid_every_token_end_the_request_and_say_so(llm):
    letters = llm.tokenizer.encode("ab")
    forbid = greedy(allowed_token_ids=letters, bad_words=["aa", "ab", "ba", "bb"])
    outputs = run(llm, ["one", "two"], [forbid, greedy()])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "bad_words" in outputs[0].outputs[0].error
    assert len(outputs[0].outputs[0].token_ids) == 1
    assert outputs[1].outputs[0].finish_reason == "length"


def test_a_stream_of_text_refuses_what_it_can_not_show(llm):
    for options in ({"logprobs": 1}, {"prompt_logprobs": 1}, {"detokenize": False}):
        (name,) = options
        with pytest.raises(InvalidRequestError, match=f"{name}=.* stream"):
            next(llm.stream_chat([{"role": "user", "content": "hi"}], greedy(**options)))


def test_an_engine_without_a_tokenizer_refuses_texts(checkpoint):
    from runtime import Engine, EngineConfig

    engine = Engine(EngineConfig(model=str(checkpoint("llama")), max_model_len=64))
    for options in ({"stop": "END"}, {"bad_words": ["a"]}):
        with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
            engine.add_request([1, 2], greedy(**options))
    assert not engine.has_unfinished
    sequence = engine.add_request(np.array([1, 2]), greedy(logprobs=1))
    while engine.has_unfinished:
        engine.step()
    assert len(sequence.logprobs) == 6
