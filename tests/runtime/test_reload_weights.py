"""Weights read again in place: the tokens of a fresh engine, at the addresses of the old one."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from runtime import AsyncLLM, EngineStateError, ModelLoadError, SamplingParams
from runtime.models import weights as weights_module
from runtime.models.linear import PackedWeight
from tests.runtime.other_weights import (
    HAS_COMPILER,
    PROMPTS,
    SIZES,
    change_config,
    generate,
    make,
    other_weights,
    save_weights,
)
from tests.runtime.stream_reading import final, greedy, is_clean, run


def num_cached(llm):
    (output,) = llm.generate([PROMPTS[-1]], greedy(1), use_tqdm=False)
    return output.num_cached_tokens


def addresses(llm):
    """Of all weights, by name."""
    decoder, found = llm.engine._runner._model, {}
    for name in [*llm.engine._runner._loaded.weights._shapes, "lm_head"]:
        weight = decoder.get(name)
        parts = (weight.panels, weight.scales) if isinstance(weight, PackedWeight) else (weight,)
        found[name] = [part.data_ptr() for part in parts if part is not None]  # None: a tied head
    return found


@pytest.fixture
def packable(request):
    if "bfloat16" in request.node.callspec.id and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")


KINDS = [
    ("llama", {}),
    ("qwen2", {"overlap_scheduling": True}),
    ("qwen3", {"overlap_scheduling": True}),  # its head is tied
    ("llama", {"dtype": "bfloat16"}),
    ("qwen2", {"dtype": "bfloat16"}),
    ("qwen3", {"dtype": "bfloat16", "overlap_scheduling": True}),
    ("llama", {"dtype": "bfloat16", "quantization": "int8"}),
    ("qwen3", {"dtype": "bfloat16", "quantization": "int8"}),
    ("llama", {"graph_mode": "full", "overlap_scheduling": True}),
    ("llama", {"graph_mode": "piecewise"}),
    ("qwen3", {"graph_mode": "full_and_piecewise"}),
    ("qwen3", {"dtype": "bfloat16", "graph_mode": "full_and_piecewise"}),
]


@pytest.mark.usefixtures("packable")
@pytest.mark.parametrize("slept", [False, True], ids=["awake", "slept"])
@pytest.mark.parametrize(("family", "options"), KINDS, ids=str)
def test_a_reload_gives_what_a_fresh_engine_gives(checkpoint, tmp_path, family, options, slept):
    new = other_weights(checkpoint(family), tmp_path / "new")
    if options.get("graph_mode"):
        options = {**options, "capture_sizes": "1,2,4,8,16,32"}
    with make(new, **options) as llm:
        expected = generate(llm)
    with make(checkpoint(family), **options) as llm:
        before = generate(llm)
        assert num_cached(llm) > 0
        places, captures = addresses(llm), len(llm.stats()["captures"])
        if slept:
            llm.sleep(2)
            llm.wake_up()
            assert generate(llm) == before
            assert len(llm.stats()["captures"]) == 2 * captures
        llm.reload_weights(new)
        assert num_cached(llm) == 0
        assert generate(llm) == expected != before
        assert num_cached(llm) > 0
        stats = llm.stats()
        assert (stats["dropped"], stats["falls"]) == ({}, {})
        assert bool(stats["captures"]) == ("graph_mode" in options)
        if not slept:
            assert addresses(llm) == places
            assert len(stats["captures"]) == captures
        llm.reload_weights(checkpoint(family))
        assert generate(llm) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")
@pytest.mark.parametrize("slept", [False, True], ids=["awake", "slept"])
def test_a_reload_gives_what_a_fresh_engine_gives_on_cuda(checkpoint, tmp_path, slept):
    new = other_weights(checkpoint("llama"), tmp_path / "new")
    options = {"device": "cuda", "dtype": "bfloat16"}
    with make(new, **options) as llm:
        expected = generate(llm)
    with make(checkpoint("llama"), **options) as llm:
        before, places = generate(llm), addresses(llm)
        if slept:
            llm.sleep(2)
            llm.wake_up()
            assert generate(llm) == before
        llm.reload_weights(new)
        assert generate(llm) == expected != before
        assert slept or addresses(llm) == places


@pytest.mark.slow
@pytest.mark.usefixtures("packable", "compiled_once")
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
def test_compiled_layers_go_on_without_compiling_again(checkpoint, tmp_path, options):
    new = other_weights(checkpoint("llama"), tmp_path / "new")
    # Sizes that other tests compile too.
    options = {**options, "compile": True, "max_model_len": 256, "max_num_batched_tokens": 32}
    with make(new, **options) as llm:
        expected = generate(llm)
    with make(checkpoint("llama"), **options) as llm:
        before, compilation = generate(llm), llm.stats()["compile"]
        assert compilation["enabled"]
        llm.reload_weights(new)
        assert generate(llm) == expected != before
        llm.sleep(2)
        llm.wake_up()
        assert generate(llm) == expected, "the weights come from where they were read last"
        assert llm.stats()["compile"] == compilation


def test_weights_are_converted_to_the_dtype_that_runs(checkpoint, tmp_path):
    new = other_weights(checkpoint("llama"), tmp_path / "new", dtype=torch.bfloat16)
    with make(new) as llm:
        expected = generate(llm)
    with make(checkpoint("llama")) as llm:
        llm.reload_weights(str(new))
        assert llm.engine._runner._model.norm.dtype == torch.float32
        assert generate(llm) == expected


def test_the_callers_inference_mode_makes_no_difference(checkpoint, tmp_path):
    new = other_weights(checkpoint("llama"), tmp_path / "new")
    with make(new) as llm:
        expected = generate(llm)
    with torch.inference_mode(), make(checkpoint("llama")) as llm:
        llm.sleep(2)
        llm.wake_up()
        llm.reload_weights(new)
        assert generate(llm) == expected
        assert not any(weight.is_inference() for weight in llm.engine._runner._model.parameters())
        with torch.inference_mode(mode=False):
            llm.reload_weights(checkpoint("llama"))
            llm.reload_weights(new)
        assert generate(llm) == expected


def test_random_weights_are_drawn_again_until_some_are_read(checkpoint, tmp_path):
    with make(checkpoint("llama")) as llm:
        expected = generate(llm)
    with make(checkpoint("llama"), load_format="dummy") as llm:
        drawn = generate(llm)
        llm.reload_weights()
        assert generate(llm) == drawn
        llm.reload_weights(checkpoint("llama"))
        assert generate(llm) == expected != drawn
        llm.reload_weights()
        assert generate(llm) == expected


# What is refused


def _missing(path):
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_weights(path, weights)


def _misshapen(path):
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(63)
    save_weights(path, weights)


def _cut_short(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


WRONG = {
    "missing": (_missing, r"1 missing: model\.norm\.weight"),
    "misshapen": (_misshapen, r"model\.norm\.weight \(expected \[64\], found \[63\]\)"),
    "cut short": (_cut_short, "cut short or damaged"),
    "no config": (lambda path: (path / "config.json").unlink(), r"has no config\.json"),
    "gone": (shutil.rmtree, "is neither a directory"),
    "other epsilon": (
        lambda path: change_config(path, rms_norm_eps=0.5),
        r"are of another model than the one that runs: rms_norm_eps=0\.5, not 1e-06",
    ),
    "shorter": (
        lambda path: change_config(path, max_position_embeddings=64),
        "max_position_embeddings=64, not 128",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_directory_changes_nothing(checkpoint, tmp_path, fault):
    spoil, text = WRONG[fault]
    path = other_weights(checkpoint("llama"), tmp_path / "new")
    spoil(path)
    with make(checkpoint("llama")) as llm:
        before = generate(llm)
        with pytest.raises(ModelLoadError, match=text):
            llm.reload_weights(path)
        assert num_cached(llm) > 0
        assert generate(llm) == before
        llm.engine.reset_prefix_cache()
        assert generate(llm) == before


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
@pytest.mark.usefixtures("packable")
def test_a_tied_head_stays_tied_and_an_own_one_stays_its_own(checkpoint, tmp_path, options):
    def head(source, name, *, is_own):
        path = other_weights(checkpoint(source), tmp_path / name)
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
        if not is_own:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        save_weights(path, weights)
        return path

    same, own = head("qwen3", "same", is_own=False), head("qwen3", "own", is_own=True)
    with make(own, **options) as llm:
        expected = generate(llm)
    with make(checkpoint("qwen3"), **options) as llm:
        before = generate(llm)
        with pytest.raises(ModelLoadError, match="tie_word_embeddings=False, not True"):
            llm.reload_weights(own)
        assert generate(llm) == before
        llm.reload_weights(same)
        assert generate(llm) != before
    # The config ties the head, but the weights, which differ, don't.
    with make(own, **options) as llm:
        with pytest.raises(ModelLoadError, match="tie_word_embeddings=True, not False"):
            llm.reload_weights(checkpoint("qwen3"))
        llm.reload_weights(own)
        assert generate(llm) == expected


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.usefixtures("packable")
def test_after_half_a_reload_nothing_is_served_until_a_whole_one(
    checkpoint, tmp_path, monkeypatch, options
):
    new = other_weights(checkpoint("llama"), tmp_path / "new")
    read_into, num_read = weights_module.read_into, []

    def failing(stored, target):
        num_read.append(stored)
        if len(num_read) == 5:
            raise OSError("the disk is on fire")
        read_into(stored, target)

    with make(checkpoint("llama"), **options) as llm:
        before = generate(llm)
        monkeypatch.setattr(weights_module, "read_into", failing)
        with pytest.raises(
            ModelLoadError, match=r"half-way: the disk .*refused until .*reload_weights"
        ):
            llm.reload_weights(new)
        monkeypatch.undo()
        with pytest.raises(EngineStateError, match=r"only in part; call reload_weights\(\)"):
            generate(llm)
        with pytest.raises(ModelLoadError, match="is neither a directory"):
            llm.reload_weights(tmp_path / "nothing")
        llm.sleep()
        llm.wake_up()
        with pytest.raises(EngineStateError, match="only in part"):
            generate(llm)
        llm.reload_weights()
        assert generate(llm) == before, "the last whole ones were the first"


def test_a_reload_waits_for_nobody(checkpoint):
    with make(checkpoint("llama")) as llm:
        stream = llm.generate_iter([PROMPTS[0]], greedy(5))
        next(stream)
        with pytest.raises(EngineStateError, match=r"1 requests are unfinished.*reload_weights\("):
            llm.reload_weights()
        stream.close()
        llm.reload_weights()
        llm.sleep()
        with pytest.raises(EngineStateError, match=r"call wake_up\(\) first"):
            llm.reload_weights()


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapped"])
def test_async_requests_get_the_old_weights_or_the_new_ones(checkpoint, tmp_path, overlap):
    new = other_weights(checkpoint("llama"), tmp_path / "new")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts = []
    for path in (checkpoint("llama"), new):
        with make(path) as llm:
            texts.append(llm.generate(["abc"], params, use_tqdm=False)[0].outputs[0].text)
    old_text, new_text = texts
    assert old_text != new_text

    async def main():
        options = {"dtype": "float32", "overlap_scheduling": overlap, **SIZES}
        async with AsyncLLM(checkpoint("llama"), **options) as llm:
            streams = [llm.generate("abc", params) for _ in range(8)]
            with pytest.raises(EngineStateError, match=r"requests are unfinished"):
                await llm.reload_weights(new)
            assert [(await final(stream)).text for stream in streams] == [old_text] * 8
            with pytest.raises(ModelLoadError, match="is neither a directory"):
                await llm.reload_weights(tmp_path / "nothing")
            await llm.reload_weights(new)
            streams = [llm.generate("abc", params) for _ in range(8)]
            assert [(await final(stream)).text for stream in streams] == [new_text] * 8
            assert await is_clean(llm)

    run(main())
