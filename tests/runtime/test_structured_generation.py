"""Structured outputs through the whole engine, on random weights: no form is met by chance."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from runtime import (
    LLM,
    AsyncLLM,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputError,
    StructuredOutputsParams,
)
from tests.runtime.stream_reading import collect, final, is_clean, run

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
EXPRESSION = 'start: term | start "+" term\nterm: /[0-9]{1,2}/ | "(" start ")"'
TOO_COMPLEX = "\n".join(
    [
        "start: " + " | ".join(f"r{number}" for number in range(40)),
        *(f'r{number}: "a" start "b{number}"' for number in range(40)),
    ]
)
"""A text of it would begin with ever more of "a", all of which would have to be remembered."""
DATE = r"\d{4}-\d{2}-\d{2}"


def form(**options):
    return StructuredOutputsParams(**options)


FORMS = {
    "json": form(json=PERSON, disable_any_whitespace=True),
    "regex": form(regex=DATE),
    "choice": form(choice=["yes", "no", "no way", "☃"]),
    "grammar": form(grammar=EXPRESSION),
}


def is_right(name: str, text: str) -> bool:
    if name == "json":
        person = json.loads(text)
        return (
            list(person) == ["name", "age", "tags"]
            and len(person["name"]) <= 4
            and 0 <= person["age"] <= 120
            and len(person["tags"]) <= 2
            and set(person["tags"]) <= {"x", "y"}
        )
    if name == "regex":
        return re.fullmatch(DATE, text) is not None
    if name == "choice":
        return text in FORMS["choice"].choice
    assert re.fullmatch(r"[0-9+()]+", text)
    while "(" in text:
        text, num_replaced = re.subn(r"\((\d{1,2})(\+\d{1,2})*\)", "1", text)
        if not num_replaced:
            return False
    return re.fullmatch(r"\d{1,2}(\+\d{1,2})*", text) is not None


def structured(name: str, seed: int | None = 0, **options):
    options.setdefault("max_tokens", 200)
    return SamplingParams(structured_outputs=FORMS[name], seed=seed, **options)


def generate(llm, prompts, params):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def undisturbed(engine) -> None:
    engine.check_integrity()
    assert not engine.has_unfinished
    assert engine._blocks.num_free_blocks == engine._blocks.num_usable_blocks
    assert len(engine._runner._rows.matchers) <= engine.config.max_num_seqs


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlapped"])
def llm(checkpoint, request):
    options = {"overlap_scheduling": request.param, "kv_cache_bytes": 1 << 22}
    with LLM(checkpoint("llama"), max_model_len=256, **options) as llm:
        yield llm
        undisturbed(llm.engine)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("temperature", [0, 1.0, 3.0])
def test_every_output_has_the_form(llm, name, temperature):
    prompts = [[number, 7] for number in range(12)]
    params = [structured(name, seed, temperature=temperature) for seed in range(12)]
    completions = generate(llm, prompts, params)
    finished = [c for c in completions if c.finish_reason == "stop"]
    assert len(finished) == 12 or (name == "grammar" and temperature == 0), (
        "greedy sums may go on for ever"
    )
    for completion in finished:
        assert is_right(name, completion.text), completion.text
        assert completion.token_ids[-1] == 257, "the end token is drawn as any other"
    assert len({c.text for c in completions}) > 1 or temperature == 0


def test_neighbours_and_order_change_no_token(llm):
    """Structured rows among plain, biased, penalised and processed ones, as each alone."""
    rows = [
        ("a", structured("json", 1)),
        ("b", SamplingParams(seed=2, max_tokens=30, ignore_eos=True)),
        ("c", structured("regex", 3, temperature=0)),
        ("d", SamplingParams(seed=4, max_tokens=20, repetition_penalty=1.3)),
        ("e", structured("choice", 5, frequency_penalty=1.0)),
        ("f", SamplingParams(max_tokens=20, temperature=0, bad_words=["ab"], seed=0)),
        ("g", structured("grammar", 6, max_tokens=15)),
        ("h", SamplingParams(seed=7, max_tokens=9, logits_processors=[lambda ids, row: row * 2])),
        ("i", structured("json", 8, logits_processors=[lambda ids, row: row.flip(0)])),
    ]
    alone = [generate(llm, [prompt], params)[0] for prompt, params in rows]
    for order in (rows, rows[::-1]):
        together = generate(llm, [prompt for prompt, _ in order], [params for _, params in order])
        found = together if order is rows else together[::-1]
        assert [c.token_ids for c in found] == [c.token_ids for c in alone]
        assert [c.finish_reason for c in found] == [c.finish_reason for c in alone]
    assert is_right("json", alone[0].text)
    assert is_right("json", alone[8].text)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_kv_blocks": 13, "block_size": 4, "max_num_seqs": 8},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
    ],
    ids=["chunked", "preempted", "queued", "uncached"],
)
def test_chunks_preemption_and_queueing_change_no_token(checkpoint, llm, limits):
    prompts = [[5, 6, 7, 8, 9, 10, 11, number] for number in range(6)]
    params = [structured("json", seed, min_tokens=10) for seed in range(6)]
    expected = [c.token_ids for c in generate(llm, prompts, params)]
    with LLM(checkpoint("llama"), max_model_len=96, kv_cache_bytes=1 << 22, **limits) as other:
        outputs = other.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        if "num_kv_blocks" in limits:
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
        undisturbed(other.engine)


@pytest.mark.parametrize("stage", ["before_the_mask", "after_the_draw"])
def test_a_failed_step_leaves_the_matcher_where_it_was(llm, monkeypatch, stage):
    """The tokens are as if no step had failed."""
    engine, params = llm.engine, [structured("json", seed) for seed in range(3)]
    expected = [c.token_ids for c in generate(llm, [[1], [2], [3]], params)]
    runner = engine._runner
    if stage == "before_the_mask":
        owner, name = runner._model, "compute_logits"
    else:
        owner, name = runner._sampler, "draw"
    real, calls = getattr(owner, name), []

    def failing(*arguments):
        calls.append(1)
        is_failing = len(calls) % 4 == 0
        result = real(*arguments) if stage == "after_the_draw" or not is_failing else None
        if is_failing:
            raise RuntimeError("the device fell over")
        return result

    sequences = [engine.add_request([i + 1], p) for i, p in enumerate(params)]
    num_failed = 0
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        while engine.has_unfinished:
            try:
                engine.step()
            except RuntimeError:
                num_failed += 1
    assert num_failed > 3
    assert [sequence.output_token_ids for sequence in sequences] == expected


def test_log_probabilities_are_the_models_own(llm):
    (completion,) = generate(llm, ["x"], structured("regex", 1, logprobs=0))
    prompt = llm.tokenizer.encode("x")
    (score,) = llm.score([prompt + completion.token_ids], use_tqdm=False)
    own = [entry[i].logprob for entry, i in zip(completion.logprobs, completion.token_ids)]  # noqa: B905
    assert own == pytest.approx(score.logprobs[-len(own) :], abs=1e-4)
    assert completion.cumulative_logprob < -10, "random weights find no date likely"


def test_the_end_comes_where_the_text_is_complete_and_not_before_min_tokens(llm):
    params = SamplingParams(structured_outputs=form(regex="a{2,9}"), max_tokens=20, seed=1)
    biased = dataclasses.replace(params, logit_bias={257: 100.0})
    (completion,) = generate(llm, ["x"], biased)
    assert (completion.text, completion.finish_reason) == ("aa", "stop")
    (completion,) = generate(llm, ["x"], dataclasses.replace(biased, min_tokens=5))
    assert (completion.text, completion.finish_reason) == ("aaaaa", "stop")
    (completion,) = generate(llm, ["x"], dataclasses.replace(biased, min_tokens=15))
    assert completion.finish_reason == "error", "ten characters can't be had"
    assert "min_tokens and structured_outputs leave no token" in completion.error


def test_max_tokens_and_stop_strings_cut_the_text_off(llm):
    (completion,) = generate(llm, ["x"], structured("regex", 1, max_tokens=6))
    assert completion.finish_reason == "length"
    assert re.fullmatch(r"\d{4}-\d", completion.text)
    (completion,) = generate(llm, ["x"], structured("regex", 1, stop=["-"]))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "-")
    assert re.fullmatch(r"\d{4}", completion.text)


def test_allowed_ids_and_bad_words_forbid_what_the_form_would_allow(llm):
    digits = llm.tokenizer.encode_piece("01-")
    (completion,) = generate(llm, ["x"], structured("regex", 1, allowed_token_ids=[*digits, 257]))
    assert re.fullmatch(r"[01]{4}-[01]{2}-[01]{2}", completion.text)
    params = SamplingParams(structured_outputs=form(choice=["yes", "no"]), bad_words=["n"])
    (completion,) = generate(llm, ["x"], params)
    assert completion.text == "yes"


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(llm):
    bad = SamplingParams(structured_outputs=form(grammar=TOO_COMPLEX))
    good = [structured("regex", 1), SamplingParams(max_tokens=5, seed=2, ignore_eos=True)]
    expected = [c.token_ids for c in generate(llm, ["x", "z"], good)]
    outputs = generate(llm, ["x", "y", "z"], [good[0], bad, good[1]])
    assert [outputs[0].token_ids, outputs[2].token_ids] == expected
    assert outputs[1].finish_reason == "error"
    assert "structured_outputs can't be followed any further" in outputs[1].error
    with pytest.raises(StructuredOutputError, match=r"output token 1: structured_outputs can"):
        list(llm.stream_chat([{"role": "user", "content": "hi"}], bad))


def test_a_bad_form_is_refused_by_place_before_anything_is_queued(llm):
    good, bad = structured("regex"), SamplingParams(structured_outputs=form(regex="(a"))
    with pytest.raises(InvalidRequestError, match=r"prompt 1: structured_outputs: regex='\(a'"):
        llm.generate(["x", "y"], [good, bad], use_tqdm=False)
    undisturbed(llm.engine)


def test_rows_without_a_form_cost_nothing(llm, monkeypatch):
    def fail(*arguments):
        raise AssertionError("a mask was prepared")

    monkeypatch.setattr("runtime.token_sampler.prepare_mask", fail)
    generate(llm, ["a", "b"], SamplingParams(max_tokens=4, seed=1, bad_words=["a b"]))


def test_async_streams_have_the_form_and_a_bad_one_disturbs_nobody(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=256, kv_cache_bytes=1 << 22)

    async def main():
        names = [*FORMS] * 2
        streams = [llm.generate([5, i], structured(n, i)) for i, n in enumerate(names)]
        bad = [
            llm.generate("a", SamplingParams(structured_outputs=form(**options)))
            for options in ({"regex": "("}, {"json": {"type": "x"}}, {"grammar": "start: b"})
        ]
        for stream in bad:
            with pytest.raises(InvalidRequestError, match="structured_outputs: "):
                await collect(stream)
        for name, stream in zip(names, streams, strict=True):
            completion = await final(stream)
            assert completion.finish_reason == "stop" or name == "grammar"
            assert completion.finish_reason != "stop" or is_right(name, completion.text)
        return await is_clean(llm)

    try:
        assert run(main())
    finally:
        run(llm.shutdown(drain=False))


def test_a_form_is_compiled_off_the_engine_thread(checkpoint, monkeypatch):
    """While a slow form compiles, a stream goes on."""
    import threading

    llm = AsyncLLM(checkpoint("llama"), max_model_len=256, kv_cache_bytes=1 << 22)
    grammars = llm._llm.engine.grammars
    real, release, names = grammars._compile, threading.Event(), []

    def slow(wanted):
        names.append(threading.current_thread().name)
        assert release.wait(30)
        return real(wanted)

    monkeypatch.setattr(grammars, "_compile", slow)

    async def main():
        streaming = llm.generate([5], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        waiting = llm.generate([6], structured("regex"))
        assert (await final(streaming)).finish_reason == "length"
        release.set()
        assert (await final(waiting)).finish_reason == "stop"

    try:
        run(main())
    finally:
        release.set()
        run(llm.shutdown(drain=False))
    assert len(names) == 1, "the engine finds it compiled"
    assert names[0].startswith("stepgraph-tokenize")
