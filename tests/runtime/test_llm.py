"""The Python API on a tiny model: what is accepted, what comes back, what stays clean."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch

from runtime import LLM, ConfigError, InvalidRequestError, ModelLoadError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


@pytest.fixture(autouse=True)
def is_left_clean(request):
    """After every call all blocks are free, nothing is queued, and a further call works."""
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        llm.engine.check_integrity()
        assert not llm.engine.has_unfinished
        assert llm.engine._blocks.num_free_blocks == llm.engine._blocks.num_usable_blocks
        assert len(llm.generate([1, 2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_come_as_text_ids_or_lists_of_either(llm):
    text, tokens = "Hello", llm.tokenizer.encode("Hello")
    one = llm.generate(text, GREEDY, use_tqdm=False)
    assert len(one) == 1, "a string is one prompt"
    assert one[0].prompt == "Hello"
    assert one[0].prompt_token_ids == tokens
    assert ids(llm.generate(tokens, GREEDY, use_tqdm=False)) == ids(one)
    assert ids(llm.generate(np.array(tokens), GREEDY, use_tqdm=False)) == ids(one)
    mixed = llm.generate([text, tokens, tuple(tokens)], [GREEDY] * 3, use_tqdm=False)
    assert ids(mixed) == ids(one) * 3
    assert [output.prompt for output in mixed] == ["Hello", None, None]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "params", "error", "text"),
    [
        (["a", "b", "c"], [GREEDY] * 2, ValueError, "2 sampling_params for 3 prompts"),
        (["a"], [None], TypeError, r"sampling_params\[0\] is None"),
        (["a"], 3, TypeError, "sampling_params is 3"),
        (5, GREEDY, TypeError, "prompts is a int"),
        ({"prompt": 3}, GREEDY, TypeError, "prompt 0: prompt is 3"),
        ({"prompt_token_ids": "a"}, GREEDY, TypeError, "prompt 0: prompt_token_ids is 'a'"),
        ([[1], {}], GREEDY, InvalidRequestError, r"prompt 1 has the entries \[\]"),
        ({"prompt": "a", "salt": "b"}, GREEDY, InvalidRequestError, "prompt 0 has .*salt"),
        ({"prompt": "a", "cache_salt": ""}, GREEDY, InvalidRequestError, "cache_salt is empty"),
        ({"prompt": "a", "cache_salt": 1}, GREEDY, TypeError, "prompt 0: cache_salt=1 is not"),
        (b"abc", GREEDY, TypeError, "prompts is a bytes"),
        (["a", 5.5], GREEDY, TypeError, "prompt 1 is 5.5"),
        (["a", [1, "b"]], GREEDY, TypeError, "prompt 1 is"),
        (["a", [True]], GREEDY, TypeError, "prompt 1 is"),
        (["a", ""], GREEDY, InvalidRequestError, "prompt 1: the prompt has no tokens"),
        ([[1], []], GREEDY, InvalidRequestError, "prompt 1: the prompt has no tokens"),
        ([[1], [5, 300]], GREEDY, InvalidRequestError, r"prompt 1: .* 300 at place 1 .* 0 to 299"),
        ([[1], [-1]], GREEDY, InvalidRequestError, "prompt 1: .* -1 at place 0"),
        ([[1], [2**40]], GREEDY, InvalidRequestError, r"prompt 1: .* 1099511627776 at place 0"),
        ([[1], [2**70]], GREEDY, InvalidRequestError, "prompt 1: .* 64 bits"),
        ([[1], [5] * 600], GREEDY, InvalidRequestError, "prompt 1: a prompt of 600 tokens"),
        ([[1], [5] * 512], GREEDY, InvalidRequestError, "prompt 1: a prompt of 512 tokens"),
        (
            [[1]],
            SamplingParams(stop_token_ids=[307]),
            InvalidRequestError,
            "prompt 0: stop_token_ids 307",
        ),
    ],
)
def test_bad_input_is_refused_by_place_before_anything_is_queued(llm, prompts, params, error, text):
    with pytest.raises(error, match=text):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("prompt", [[1.5], [[1, 2]], [True], ["a"], [2**70], [None], np.ones(2)])
def test_the_engine_refuses_what_is_not_a_flat_list_of_whole_numbers(llm, prompt):
    with pytest.raises(InvalidRequestError, match="flat list of whole numbers"):
        llm.engine.add_request(prompt, GREEDY)


def test_a_refused_call_leaves_nothing_for_the_next_one(llm):
    with pytest.raises(InvalidRequestError):
        llm.generate(["ok one", [5] * 600, "ok two"], GREEDY, use_tqdm=False)
    outputs = llm.generate(["ok three"], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["ok three"]


def test_ids_up_to_the_models_vocabulary_run_though_the_tokenizer_knows_fewer(llm):
    assert llm.tokenizer.vocab_size == 258
    outputs = llm.generate([[5, 299], "   "], GREEDY, use_tqdm=False)
    assert [len(tokens) for tokens in ids(outputs)] == [6, 6]


def test_greedy_is_exact_beside_random_neighbours(llm):
    alone = ids(llm.generate(["abc"], GREEDY, use_tqdm=False))[0]
    warm = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    for _ in range(10):
        together = llm.generate(["xyz", "abc", "q"], [warm, GREEDY, warm], use_tqdm=False)
        assert ids(together)[1] == alone


def test_a_seed_gives_the_same_tokens_whatever_surrounds_it(checkpoint):
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=12, ignore_eos=True)
    other = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    prompt = "a prompt that is long enough to be cut into chunks"
    seen = set()
    for options in ({}, {"max_num_batched_tokens": 8}, {"num_kv_blocks": 6}):
        with LLM(checkpoint("llama"), max_model_len=96, **options) as llm:
            for neighbours in ([], [free], [other], [free, other, free]):
                for place in {0, len(neighbours)}:
                    params = [*neighbours[:place], seeded, *neighbours[place:]]
                    prompts = ["q" * 40] * len(neighbours)
                    prompts.insert(place, prompt)
                    seen.add(tuple(ids(llm.generate(prompts, params, use_tqdm=False))[place]))
            if "num_kv_blocks" in options:
                assert llm.engine.scheduler.num_preemptions > 0
    assert len(seen) == 1


def test_equal_unseeded_prompts_differ_and_engines_repeat(checkpoint):
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for _ in range(2):
        with LLM(checkpoint("llama"), max_model_len=96, seed=3) as llm:
            runs.append(ids(llm.generate(["same"] * 8, free, use_tqdm=False)))
    assert len({tuple(tokens) for tokens in runs[0]}) > 1
    assert runs[0] == runs[1], "the engine's seed decides the seeds of requests without one"


def test_extreme_temperatures_give_ids_inside_the_vocabulary(llm):
    for temperature in (1e-7, 1e-3, 1e3):
        params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True)
        (tokens,) = ids(llm.generate(["abc"], params, use_tqdm=False))
        assert len(tokens) == 6
        assert all(0 <= token < 300 for token in tokens)
    cold = SamplingParams(temperature=1e-7, max_tokens=6, ignore_eos=True)
    assert ids(llm.generate(["abc"], cold)) == ids(llm.generate(["abc"], GREEDY))


def test_max_tokens_and_the_models_limit(llm):
    def run(max_tokens):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([[7] * 10], params, use_tqdm=False)
        return len(output.outputs[0].token_ids), output.outputs[0].finish_reason

    assert run(1) == (1, "length")
    assert run(10**9) == (502, "length")


def test_finish_reasons_counts_and_times(llm):
    free = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate([[3, 4, 5]], free, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    end = tokens.index(tokens[4])
    stop = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[tokens[4]], ignore_eos=True)
    (stopped,) = llm.generate([[3, 4, 5]], stop, use_tqdm=False)
    assert stopped.outputs[0].token_ids == tokens[: end + 1]
    assert stopped.outputs[0].finish_reason == "stop"
    assert (output.outputs[0].finish_reason, len(tokens)) == ("length", 10)
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time
    assert metrics.time_to_first_token >= 0
    assert output.finished


def test_end_tokens_of_the_model_stop_and_can_be_ignored(checkpoint, tmp_path):
    """generation_config.json may name several; all of them count."""
    import json
    import shutil

    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    with LLM(path, max_model_len=64) as llm:
        (tokens,) = ids(llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False))
    ends = [tokens[3], 299]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    obey = SamplingParams(temperature=0, max_tokens=6)
    with LLM(path, max_model_len=64) as llm:
        (output,) = llm.generate([[3, 4, 5]], obey, use_tqdm=False)
        assert output.outputs[0].token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert output.outputs[0].finish_reason == "stop"
        assert ids(llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)) == [tokens]
        late = SamplingParams(temperature=0, max_tokens=6, min_tokens=6)
        (tokens,) = ids(llm.generate([[3, 4, 5]], late, use_tqdm=False))
        assert len(tokens) == 6
        assert not set(tokens[:5]) & set(ends)


def test_text_is_the_decoded_output(llm):
    outputs = llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)
    for output in outputs:
        completion = output.outputs[0]
        assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_cached_equals_cold(checkpoint):
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, 256, 5 * 16 + 3)]
    results = []
    for caching in (True, False):
        with LLM(checkpoint("llama"), max_model_len=128, enable_prefix_caching=caching) as llm:
            outputs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for _ in range(3)]
        results += ids(outputs)
        assert [o.num_cached_tokens for o in outputs] == ([0, 80, 80] if caching else [0, 0, 0])
    assert all(tokens == results[0] for tokens in results)


def test_chat_applies_the_models_template(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "user: hi\nassistant: "
    both = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert ids(both) == ids([output]) * 2
    assert "".join(llm.stream_chat(conversation, GREEDY)) == output.outputs[0].text
    with pytest.raises(TypeError, match="messages is a str"):
        llm.chat("hi", GREEDY)
    with pytest.raises(InvalidRequestError, match="role"):
        llm.chat([{"content": "hi"}], GREEDY)


def test_leaving_a_stream_early_aborts_it(llm):
    stream = llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY)
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert not llm.engine.has_unfinished


def test_a_nan_row_ends_with_an_error_and_the_others_are_unaffected(llm, monkeypatch):
    prompts = ["one", "two", "three", "four"]
    expected = ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    model, calls = llm.engine._runner._model, []
    compute_logits = model.compute_logits

    def poisoned(hidden):
        logits = compute_logits(hidden)
        calls.append(len(logits))
        if len(calls) == 3:
            logits[2] = torch.nan
        return logits

    monkeypatch.setattr(model, "compute_logits", poisoned)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length", "error", "length"]
    assert "NaN" in outputs[2].outputs[0].error
    assert outputs[2].outputs[0].token_ids == expected[2][:2]
    assert [ids(outputs)[i] for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]


def test_a_step_that_raises_leaves_a_clean_engine(llm, monkeypatch):
    expected = ids(llm.generate(["one", "two"], GREEDY, use_tqdm=False))
    runner, steps = llm.engine._runner, []
    execute = runner.execute

    def failing(scheduled):
        steps.append(scheduled)
        if len(steps) == 3:
            raise RuntimeError("the device fell over")
        return execute(scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", failing)
        with pytest.raises(RuntimeError, match="fell over"):
            llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished
    assert ids(llm.generate(["one", "two"], GREEDY, use_tqdm=False)) == expected


def test_requests_of_a_failed_step_can_go_on(llm, monkeypatch):
    """Engine.step raises, and the next step takes up where the failed one was."""
    engine = llm.engine
    (expected,) = ids(llm.generate([[9, 8, 7]], GREEDY, use_tqdm=False))
    sequence = engine.add_request([9, 8, 7], GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "execute", lambda scheduled: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    assert sequence.output_token_ids == expected


def test_ctrl_c_is_raised_between_steps_and_leaves_a_clean_engine(llm, monkeypatch):
    runner, steps = llm.engine._runner, []
    execute = runner.execute

    def interrupted(scheduled):
        steps.append(scheduled)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(scheduled)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert len(steps) == 3
    assert not llm.engine.has_unfinished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_stream_comes_after_the_step(llm, monkeypatch):
    engine = llm.engine
    step = engine.step

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        return step()

    stream = llm.stream_chat([{"role": "user", "content": "hi"}], GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert not engine.has_unfinished


def test_request_ids_are_unique_among_unfinished_requests(llm):
    engine = llm.engine
    engine.add_request([1], GREEDY, request_id="mine")
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        engine.add_request([1], GREEDY, request_id="mine")
    assert engine.abort("mine").finish_reason == "abort"
    assert engine.abort("mine") is None


def test_two_engines_of_different_block_sizes_live_in_one_process(checkpoint):
    prompt = list(range(100))
    with (
        LLM(checkpoint("llama"), block_size=256, max_model_len=512) as first,
        LLM(checkpoint("llama"), block_size=4, max_model_len=512) as second,
    ):
        for _ in range(2):
            assert ids(first.generate([prompt], GREEDY, use_tqdm=False)) == ids(
                second.generate([prompt], GREEDY, use_tqdm=False)
            )


def test_close_twice_then_another_model(checkpoint):
    llm = LLM(checkpoint("llama"), max_model_len=64)
    engine = weakref.ref(llm.engine._runner)
    llm.generate("a", GREEDY, use_tqdm=False)
    llm.close()
    llm.close()
    gc.collect()
    assert engine() is None, "weights and KV pool are given back"
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", GREEDY, use_tqdm=False)
    with LLM(checkpoint("qwen3"), max_model_len=64) as other:
        other.generate("a", GREEDY, use_tqdm=False)


def test_a_process_ends_quietly_with_engines_open_closed_or_failed(checkpoint):
    code = f"""
        from runtime import LLM, SamplingParams
        path = {str(checkpoint("llama"))!r}
        first = LLM(path, max_model_len=64)
        first.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        first.close()
        second = LLM(path, max_model_len=64)
        try:
            LLM(path, max_model_len=10**9)
        except ValueError:
            pass
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_options_and_models_are_named(checkpoint, tmp_path):
    with pytest.raises(TypeError, match="max_num_seq"):
        LLM(checkpoint("llama"), max_num_seq=3)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=5000 exceeds the model's 2048"):
        LLM(checkpoint("llama"), max_model_len=5000)


def test_dummy_weights_need_no_checkpoint_files(checkpoint, tmp_path):
    import shutil

    path = shutil.copytree(
        checkpoint("llama"), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    with LLM(path, load_format="dummy", max_model_len=64) as llm:
        (tokens,) = ids(llm.generate(["abc"], GREEDY, use_tqdm=False))
    assert len(tokens) == 6


def test_the_progress_bar_shows_requests_and_both_rates(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "prompt" in shown
    assert "output" in shown
