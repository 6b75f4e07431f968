"""Engines that sleep: what they give back, what they refuse, and that they wake up as they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from attention import PagedKVCache
from runtime import (
    AsyncLLM,
    Engine,
    EngineConfig,
    EngineStateError,
    InvalidRequestError,
    ModelLoadError,
)
from runtime.kv_memory import give_back_free_memory
from runtime.models.linear import PackedWeight
from tests.runtime.other_weights import (
    HAS_COMPILER,
    PROMPTS,
    SIZES,
    change_config,
    generate,
    make,
    other_weights,
)
from tests.runtime.stream_reading import Gate, collect, final, greedy, is_clean, run

MIB = 1 << 20


def resident_bytes():
    """Memory of this process that isn't a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


# Memory


@pytest.mark.parametrize("graph_mode", ["none", "full_and_piecewise"])
def test_level_1_gives_back_the_kv_pool(checkpoint, graph_mode):
    with make(checkpoint("llama"), graph_mode=graph_mode, num_kv_blocks=8192) as llm:
        before = generate(llm)
        num_blocks = llm.stats()["num_kv_blocks"]
        assert num_blocks * PagedKVCache.bytes_per_block(llm.engine._runner._spec) > 64 * MIB
        give_back_free_memory(torch.device("cpu"))  # of earlier tests
        awake = resident_bytes()
        llm.sleep()
        assert awake - resident_bytes() > 60 * MIB
        llm.wake_up()
        assert resident_bytes() > awake - 4 * MIB, "the pool was in memory before"
        assert llm.stats()["num_kv_blocks"] == num_blocks
        assert generate(llm) == before


@pytest.fixture(scope="module")
def large(checkpoint, tmp_path_factory):
    """A model of some 14 million parameters; drawn, not read."""
    path = other_weights(checkpoint("llama"), tmp_path_factory.mktemp("large") / "model")
    return change_config(
        path, hidden_size=512, intermediate_size=1536, vocab_size=4096, head_dim=128
    )


@pytest.mark.parametrize(
    ("options", "bytes_per_weight"),
    [
        ({"dtype": "float32"}, 4),
        ({"dtype": "bfloat16"}, 2),
        ({"dtype": "bfloat16", "quantization": "int8"}, 1),
    ],
    ids=str,
)
def test_level_2_gives_back_the_weights(large, options, bytes_per_weight):
    if options["dtype"] == "bfloat16" and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    config = EngineConfig(model=str(large), load_format="dummy", **SIZES, **options)
    engine = Engine(config)
    decoder = engine._runner._model
    num_weights = 2 * (512 * 128 * 12 + 512 * 1536 * 3) + 4096 * 512 * 2

    def tokens():
        sequence = engine.add_request([1, 2, 3], greedy(8))
        while engine.has_unfinished:
            engine.step()
        return sequence.output_token_ids

    before = tokens()
    give_back_free_memory(torch.device("cpu"))  # of earlier tests
    awake = resident_bytes()
    engine.sleep(2)
    assert awake - resident_bytes() > 0.9 * bytes_per_weight * num_weights
    engine.wake_up()
    assert tokens() == before
    assert isinstance(decoder.layers[0].o_weight, PackedWeight) == (options["dtype"] == "bfloat16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")
@pytest.mark.parametrize("level", [1, 2])
def test_memory_of_a_cuda_device_goes_back(checkpoint, level):
    options = {"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 65536}  # 256 MiB
    with make(checkpoint("llama"), **options) as llm:
        before = generate(llm)
        reserved = torch.cuda.memory_reserved()
        free, _ = torch.cuda.mem_get_info()
        llm.sleep(level)
        assert torch.cuda.memory_reserved() < reserved - 200 * MIB
        assert torch.cuda.mem_get_info()[0] > free + 200 * MIB
        llm.wake_up()
        assert generate(llm) == before
        assert not llm.stats()["dropped"]


# Waking up


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
@pytest.mark.parametrize("mode", ["none", "full", "piecewise", "full_and_piecewise"])
def test_an_engine_wakes_up_as_it_was(checkpoint, mode, overlap, level):
    options = {"graph_mode": mode, "capture_sizes": None if mode == "none" else "1,2,4,8,16,32"}
    with make(checkpoint("qwen3"), overlap_scheduling=overlap, **options) as llm:
        before, stats = generate(llm), llm.stats()
        assert not llm.is_sleeping
        for _ in range(2):
            llm.sleep(level)
            assert llm.is_sleeping
            assert llm.metrics().num_steps == llm.stats()["num_steps"] == stats["num_steps"]
            assert llm.engine._runner._graphs._graphs._cache.num_blocks == 2
        for _ in range(2):
            llm.wake_up()
            assert not llm.is_sleeping
        (first,) = llm.generate([PROMPTS[-1]], greedy(1), use_tqdm=False)
        assert first.num_cached_tokens == 0
        assert generate(llm) == before
        awake = llm.stats()
        assert awake["ladders"] == stats["ladders"]
        assert (awake["dropped"], awake["falls"]) == ({}, {})
        assert len(awake["captures"]) == 2 * len(stats["captures"])
        assert awake["num_steps"] > stats["num_steps"]


def test_sleep_can_become_deeper_but_not_lighter(checkpoint):
    with make(checkpoint("llama")) as llm:
        before, runner = generate(llm), llm.engine._runner
        llm.sleep(1)
        assert runner.has_weights
        llm.sleep(2)
        assert not runner.has_weights
        llm.sleep(1)
        assert not runner.has_weights
        llm.wake_up()
        assert generate(llm) == before
        for level in (0, 3):
            with pytest.raises(InvalidRequestError, match=f"level={level} is out of range"):
                llm.sleep(level)
        with pytest.raises(TypeError, match="level"):
            llm.sleep("1")
        assert not llm.is_sleeping


@pytest.mark.parametrize("level", [1, 2])
def test_waking_up_can_fail_and_be_tried_again(checkpoint, monkeypatch, level):
    allocate = PagedKVCache.allocate

    def failing(spec, num_blocks, **layout):
        if num_blocks > 2:
            raise MemoryError("no room")
        return allocate(spec, num_blocks, **layout)

    with make(checkpoint("llama"), graph_mode="full_and_piecewise") as llm:
        before, runner = generate(llm), llm.engine._runner
        llm.sleep(level)
        monkeypatch.setattr(PagedKVCache, "allocate", failing)
        for _ in range(2):
            with pytest.raises(MemoryError, match="no room"):
                llm.wake_up()
            assert llm.is_sleeping
            assert runner.has_weights == (level == 1)
            assert (runner._model.embed_tokens.numel() == 0) == (level == 2)
            with pytest.raises(EngineStateError, match=r"wake_up\(\)"):
                generate(llm)
        monkeypatch.undo()
        llm.wake_up()
        assert generate(llm) == before
        assert llm.stats()["dropped"] == {}


def test_weights_that_are_gone_keep_the_engine_asleep(checkpoint, tmp_path):
    path = other_weights(checkpoint("llama"), tmp_path / "model")
    file, elsewhere = path / "model.safetensors", tmp_path / "elsewhere"
    with make(path) as llm:
        before = generate(llm)
        llm.sleep(2)
        file.rename(elsewhere)
        with pytest.raises(ModelLoadError, match="holds neither"):
            llm.wake_up()
        file.write_bytes(elsewhere.read_bytes()[:-7])
        with pytest.raises(ModelLoadError, match="cut short"):
            llm.wake_up()
        assert llm.is_sleeping
        elsewhere.rename(file)
        llm.wake_up()
        assert generate(llm) == before


# What is refused


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate(["a"], use_tqdm=False),
        lambda llm: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
        lambda llm: llm.score(["ab"], use_tqdm=False),
        lambda llm: llm.generate_iter(["a"]),
        lambda llm: llm.stream_chat([{"role": "user", "content": "a"}]),
        lambda llm: llm.engine.add_request([1], greedy(1)),
    ],
    ids=["generate", "chat", "score", "generate_iter", "stream_chat", "add_request"],
)
def test_requests_are_refused_during_sleep(checkpoint, call):
    with make(checkpoint("llama")) as llm:
        llm.sleep()
        with pytest.raises(EngineStateError, match=r"the engine sleeps; call wake_up\(\) first"):
            call(llm)
        assert not llm.engine.has_unfinished
        llm.reset_prefix_cache()
        llm.wake_up()
        call(llm)


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
def test_sleep_is_refused_while_requests_are_unfinished(checkpoint, overlap):
    with make(checkpoint("llama"), overlap_scheduling=overlap) as llm:
        before = generate(llm)
        stream = llm.generate_iter(PROMPTS, greedy(5))
        outputs = [next(stream)]
        with pytest.raises(EngineStateError, match=r"4 requests are unfinished.*before sleep\(\)"):
            llm.sleep()
        outputs += stream
        assert [output.outputs[0].token_ids for output in outputs if output.finished]
        stream = llm.generate_iter(PROMPTS, greedy(100))
        next(stream)
        stream.close()  # under overlap a step may be in flight still
        llm.sleep(2)
        assert len(llm.engine._pipeline) == 0
        llm.wake_up()
        assert generate(llm) == before


def test_a_closed_llm_neither_sleeps_nor_wakes(checkpoint):
    llm = make(checkpoint("llama"))
    llm.sleep(2)
    llm.close()
    for call in (llm.sleep, llm.wake_up, llm.reload_weights, lambda: llm.is_sleeping):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


# asyncio


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
def test_async_sleep_is_refused_under_load_and_requests_are_during_it(checkpoint, overlap):
    async def main():
        options = {"dtype": "float32", "overlap_scheduling": overlap, **SIZES}
        async with AsyncLLM(checkpoint("llama"), **options) as llm:
            gate = Gate(llm)
            streams = [llm.generate("abc", greedy(9)) for _ in range(6)]
            refused = asyncio.create_task(llm.sleep())
            gate.open()
            with pytest.raises(EngineStateError, match=r"requests are unfinished.*sleep\(\)"):
                await refused
            (expected,) = {(await final(stream)).text for stream in streams}
            assert not await llm.is_sleeping()
            await llm.sleep(2)
            await llm.sleep(1)
            assert await llm.is_sleeping()
            assert await llm.check_health() is None
            with pytest.raises(EngineStateError, match=r"the engine sleeps; call wake_up\(\)"):
                await collect(llm.generate("abc", greedy(9)))
            waking = asyncio.create_task(llm.wake_up())
            await asyncio.sleep(0)
            assert (await final(llm.generate("abc", greedy(9)))).text == expected
            await waking
            await llm.wake_up()
            assert await is_clean(llm)
            await llm.sleep()

    run(main())


def test_a_request_is_counted_from_when_it_is_made(checkpoint, monkeypatch):
    """Also while its prompt waits for the tokenizer."""

    async def main():
        async with AsyncLLM(checkpoint("llama"), **SIZES) as llm:
            ready = asyncio.Event()
            llm._encoder.submit(asyncio.run_coroutine_threadsafe(ready.wait(), loop()).result)
            stream = llm.generate("abc", greedy(3))
            with pytest.raises(EngineStateError, match="1 requests are unfinished"):
                await llm.sleep()
            ready.set()
            assert (await final(stream)).finish_reason == "length"
            await llm.sleep()

    loop = asyncio.get_running_loop
    run(main())
