"""The public API as its users' programs call it."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch

from runtime import (
    LLM,
    AsyncLLM,
    InvalidRequestError,
    ModelLoadError,
    RequestOutputKind,
    SamplingParams,
)
from tests.runtime.stream_reading import collect, greedy, is_clean, run, until

END = 257


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint("llama"), max_model_len=512, kv_cache_bytes=1 << 22) as llm:
        yield llm


def say(llm, text, *last_ids):
    """Processors that let a request say this, then these ids, and then nothing but "z"."""
    ids = [*llm.tokenizer.encode_piece(text), *last_ids]
    (filler,) = llm.tokenizer.encode_piece("z")

    def process(output_ids, logits):
        place = len(output_ids)
        changed = torch.full_like(logits, -torch.inf)
        changed[ids[place] if place < len(ids) else filler] = 0.0
        return changed

    return [process]


# Programs written for vLLM

BATCH_PROGRAM = """
from vllm import LLM, SamplingParams

questions = ["The tallest mountain is", "My name is", "A prime number is"]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5)
llm = LLM(model=MODEL, max_model_len=128)
results = llm.generate(questions, params)
for question, result in zip(questions, results):
    assert result.prompt == question
    assert isinstance(result.outputs[0].text, str)
assert [len(result.outputs) for result in results] == [1, 1, 1]

first = results[0]
assert isinstance(first.request_id, str)
assert first.finished is True
assert first.prompt_logprobs is None
assert isinstance(first.prompt_token_ids, list) and isinstance(first.num_cached_tokens, int)
answer = first.outputs[0]
assert answer.index == 0
assert answer.finish_reason in ("stop", "length")
assert answer.stop_reason is None
assert (answer.logprobs, answer.cumulative_logprob) == (None, None)
assert 1 <= len(answer.token_ids) <= 5

by_ids = llm.generate({"prompt_token_ids": first.prompt_token_ids}, params, use_tqdm=False)
assert by_ids[0].prompt_token_ids == first.prompt_token_ids
with_logprobs = llm.generate(questions[0], SamplingParams(max_tokens=2, logprobs=2))[0].outputs[0]
for token_id, entry in zip(with_logprobs.token_ids, with_logprobs.logprobs):
    assert entry[token_id].logprob <= 0 and entry[token_id].rank >= 1
    assert isinstance(entry[token_id].decoded_token, str)
"""

CHAT_PROGRAM = """
from vllm import LLM
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

llm = LLM(model=MODEL, max_model_len=256)
params = llm.get_default_sampling_params()
params = SamplingParams(temperature=params.temperature, max_tokens=4)
turns = [
    {"role": "system", "content": "Talk like a sailor."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Ahoy!"},
    {"role": "user", "content": "Tell me about ropes."},
]
(single,) = llm.chat(turns, params, use_tqdm=False)
several = llm.chat([turns, turns[:2]], sampling_params=params, use_tqdm=False)
assert [len(result.outputs[0].token_ids) <= 4 for result in [single, *several]] == [True] * 3
assert several[0].prompt_token_ids == single.prompt_token_ids

template = "{% for turn in messages %}{{ turn['content'] }};{% endfor %}"
custom = llm.chat(turns, params, use_tqdm=False, chat_template=template)[0]
formatted = llm.get_tokenizer().apply_chat_template(
    turns, tokenize=False, chat_template=template, add_generation_prompt=True
)
assert llm.generate(formatted, params)[0].prompt_token_ids == custom.prompt_token_ids

form = StructuredOutputsParams(choice=["left", "right"])
side = llm.generate("Turn", SamplingParams(structured_outputs=form))[0].outputs[0].text
assert side in ("left", "right")
"""


@pytest.mark.parametrize("program", [BATCH_PROGRAM, CHAT_PROGRAM], ids=["batch", "chat"])
def test_a_program_of_vllms_runs_with_the_import_changed(checkpoint, program):
    code = program.replace("from vllm", "from runtime")
    exec(compile(code, "program", "exec"), {"MODEL": str(checkpoint("llama"))})


def test_the_models_own_sampling_parameters_are_found(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    file = path / "generation_config.json"
    values = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "eos_token_id": END}
    file.write_text(json.dumps(values))
    with LLM(path, max_model_len=64) as llm:
        params = llm.get_default_sampling_params()
        assert params == SamplingParams(temperature=0.6, top_k=20, max_tokens=7)
        file.write_text(json.dumps({"top_p": 3}))
        with pytest.raises(ModelLoadError, match=r"generation_config.json: top_p=3"):
            llm.get_default_sampling_params()
        file.write_text("[1]")
        with pytest.raises(ModelLoadError, match="not a JSON object"):
            llm.get_default_sampling_params()
        file.unlink()
        assert llm.get_default_sampling_params() == SamplingParams()


# Priorities


@pytest.mark.parametrize("call", ["generate", "chat"])
def test_lower_priorities_run_first(checkpoint, call):
    prompts = [
        text if call == "generate" else [{"role": "user", "content": text}] for text in "abcd"
    ]
    with LLM(checkpoint("llama"), max_model_len=64, max_num_seqs=1, policy="priority") as llm:
        for priorities in ([3, -1, 0, 2], np.array([3, -1, 0, 2]).tolist(), (3, -1, 0, 2)):
            outputs = getattr(llm, call)(prompts, greedy(2), use_tqdm=False, priority=priorities)
            finished = [output.metrics.finish_time for output in outputs]
            assert sorted(range(4), key=finished.__getitem__) == [1, 2, 3, 0]
        outputs = getattr(llm, call)(prompts, greedy(2), use_tqdm=False, priority=7)
        finished = [output.metrics.finish_time for output in outputs]
        assert sorted(finished) == finished


@pytest.mark.parametrize(
    ("priority", "error", "text"),
    [
        (1, InvalidRequestError, "priority=1 has no effect under policy='fcfs'"),
        ([0, 1], InvalidRequestError, "priority=1 has no effect"),
        ([0], InvalidRequestError, "priority has 1 entries for 2 prompts"),
        ([0, 1.5], TypeError, r"priority\[1\]=1.5 is of type float"),
        ([0, True], TypeError, r"priority\[1\]=True"),
        ("12", TypeError, "priority='12'"),
        (2**63, InvalidRequestError, "priority=9223372036854775808 is out of range"),
    ],
)
def test_a_bad_priority_is_refused_before_anything_is_queued(llm, priority, error, text):
    with pytest.raises(error, match=text):
        llm.generate(["a", "b"], greedy(), use_tqdm=False, priority=priority)
    conversation = [{"role": "user", "content": "hi"}]
    with pytest.raises(error, match=text):
        llm.chat([conversation] * 2, greedy(), use_tqdm=False, priority=priority)
    assert not llm.engine.has_unfinished
    assert len(llm.generate(["a", "b"], greedy(1), use_tqdm=False, priority=None)) == 2


# What callers hold to be self-evident


@pytest.mark.parametrize("max_tokens", [5, 10])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_end_token_on_the_last_step_or_before_it(llm, max_tokens, ignore_eos):
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        logits_processors=say(llm, "abcd", END),
    )
    (output,) = llm.generate(["x"], params, use_tqdm=False)
    completion = output.outputs[0]
    if ignore_eos:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", max_tokens)
    else:
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert (completion.text, len(completion.token_ids)) == ("abcd", 5)
    assert completion.token_ids[4] == END


@pytest.mark.parametrize("include", [False, True])
def test_no_part_of_a_stop_string_is_ever_streamed(llm, include):
    params = SamplingParams(
        max_tokens=40,
        stop=["END"],
        include_stop_str_in_output=include,
        logits_processors=say(llm, "abcENeENDxyz"),
        output_kind=RequestOutputKind.DELTA,
    )
    pieces = [output.outputs[0].text for output in llm.generate_iter(["x"], params)]
    assert "".join(pieces) == "abcENe" + "END" * include
    so_far = ""
    for piece in pieces[:-1]:
        so_far += piece
        assert so_far in ("", "a", "ab", "abc", "abcENe"), "what could become END is withheld"


def test_prompt_logprobs_are_whole_for_a_prompt_that_is_cached(llm):
    prompt = [(13 * i + 7) % 250 for i in range(3 * 16 + 2)]
    llm.generate([prompt], greedy(1), use_tqdm=False)
    assert llm.generate([prompt], greedy(1), use_tqdm=False)[0].num_cached_tokens == 48
    outputs = [
        llm.generate([prompt], greedy(1, prompt_logprobs=1), use_tqdm=False)[0] for _ in range(2)
    ]
    for output in outputs:
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        assert all(t in e for t, e in zip(prompt[1:], output.prompt_logprobs[1:], strict=True))
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs


def test_a_tokenizer_with_a_bos_gives_the_empty_text_one_token(checkpoint, tmp_path):
    """Without one the empty text is refused; with one it runs like any other."""
    from tokenizers import Tokenizer, processors

    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    file = str(path / "tokenizer.json")
    backend = Tokenizer.from_file(file)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    backend.save(file)
    with LLM(path, max_model_len=64) as llm:
        outputs = llm.generate(["ab", "", "   "], greedy(3), use_tqdm=False)
        assert [len(output.prompt_token_ids) for output in outputs] == [3, 1, 4]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3, 3]
        with pytest.raises(InvalidRequestError, match="prompt 1: the prompt has no tokens"):
            llm.generate(["ab", []], greedy(3), use_tqdm=False)


def test_clients_that_leave_free_their_blocks_within_two_steps(checkpoint):
    """Some are read, some not, one waits for a row, one is in its last step or past it.

    Steps are counted from the last goodbye on, whatever the engine did meanwhile.
    """
    llm = AsyncLLM(checkpoint("llama"), max_model_len=512, max_num_seqs=5, num_kv_blocks=200)
    engine = llm._llm.engine

    async def main():
        streams = [llm.generate([i + 1] * 9, greedy(400)) for i in range(4)]
        last = llm.generate([9] * 9, greedy(3))
        waiting = llm.generate([8] * 9, greedy(400))
        await anext(last)
        await anext(streams[0])
        for stream in (*streams, last, waiting):
            await stream.aclose()
        num_steps = engine.counters.num_steps
        await until(lambda: not llm._thread._open)
        assert await is_clean(llm)
        return engine.counters.num_steps - num_steps

    try:
        assert run(main()) <= 2 + 1, "the step that ran, and at most two more"
    finally:
        run(llm.shutdown(drain=False))


def test_a_bad_request_beside_a_good_one_harms_neither_it_nor_the_engine(checkpoint):
    llm = AsyncLLM(checkpoint("llama"), max_model_len=128)

    async def main():
        good = llm.generate("abc", greedy(60))
        first = await anext(good)
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await collect(llm.generate("", greedy()))
        for options, error, name in (
            ({"max_tokens": -5}, InvalidRequestError, "max_tokens=-5"),
            ({"temperature": "hot"}, TypeError, "temperature='hot'"),
        ):
            with pytest.raises(error, match=name):
                llm.generate("abc", SamplingParams(**options))
        await llm.check_health()
        last = (await collect(good))[-1]
        assert len(last.outputs[0].token_ids) == 60 > len(first.outputs[0].token_ids)
        await asyncio.gather(*(collect(llm.generate("d", greedy(2))) for _ in range(3)))
        return await is_clean(llm)

    try:
        assert run(main())
    finally:
        run(llm.shutdown(drain=False))
