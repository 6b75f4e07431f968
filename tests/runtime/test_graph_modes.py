"""Steps under captured graphs, through the whole engine.

On the CPU they run under its emulation of graphs; the tests of equality are repeated on a CUDA
device, with the attention backend that it gets by itself.
"""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from attention.native_build import usable_levels
from graphs.captured_graphs import CapturedGraphs
from runtime import LLM, ConfigError, SamplingParams
from runtime.model_runner import ModelRunner

PROMPTS = [[(11 * i + j) % 250 for j in range(n)] for i, n in enumerate((1, 7, 16, 33, 60, 90))]
SIZES = "1,2,4,8,16,32"
PREEMPTING = {"num_kv_blocks": 10}
MODES = ("full", "piecewise", "full_and_piecewise")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present"),
        ),
    ),
]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def run(path, **options):
    """Tokens and statistics of twelve requests, half of them cached from the first six."""
    params = [
        greedy(12),
        SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True),
    ] * 3
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 128} | options
    with LLM(path, max_num_batched_tokens=32, **options) as llm:
        outputs = [*llm.generate(PROMPTS, params, use_tqdm=False)]
        outputs += llm.generate(PROMPTS, params, use_tqdm=False)
        llm.engine.check_integrity()
        return [output.outputs[0].token_ids for output in outputs], llm.stats()


@pytest.fixture(scope="module")
def eager_tokens(checkpoint):
    """Tokens of `run` without graphs, each kind of run once."""
    known: dict[str, list] = {}

    def tokens(family: str = "llama", **options):
        key = f"{family} {sorted(options.items())}"
        if key not in known:
            known[key], _ = run(checkpoint(family), graph_mode="none", **options)
        return known[key]

    return tokens


def kinds(stats) -> set[str]:
    return {bucket["mode"] for bucket in stats["buckets"]}


# Equality


@pytest.mark.parametrize(
    ("family", "mode", "options"),
    [
        ("llama", "full", {}),
        ("llama", "piecewise", PREEMPTING),
        ("llama", "full_and_piecewise", PREEMPTING),
        ("mistral", "full", PREEMPTING),
        ("mistral", "full_and_piecewise", {}),
        ("qwen3", "piecewise", {}),
        ("qwen3", "full_and_piecewise", PREEMPTING),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_graphs_give_the_tokens_of_eager_steps(
    checkpoint, eager_tokens, device, family, mode, options
):
    graphs, stats = run(
        checkpoint(family), device=device, graph_mode=mode, capture_sizes=SIZES, **options
    )
    assert graphs == eager_tokens(family, device=device, **options)
    assert stats["dropped"] == {}
    assert stats["falls"] == {}, "the ladder's top is the budget, so no step leaves it"
    wanted = set(mode.split("_and_"))
    if device != "cpu" and "full" not in kinds(stats):
        wanted.discard("full")  # the backend that this device gets has no full graphs
    assert kinds(stats) == wanted | ({"eager"} if mode == "full" else set())
    assert sum(bucket["steps"] for bucket in stats["buckets"]) == stats["num_steps"]
    assert (stats["num_preemptions"] > 0) == bool(options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_the_graph_is_chosen_by_the_kind_of_step(checkpoint, device, mode):
    """A prompt of 12 tokens; then a decode beside a chunk of 20; then a prompt of one token."""

    def serve(graph_mode):
        with LLM(
            checkpoint("llama"),
            device=device,
            dtype="float32",
            max_model_len=128,
            max_num_batched_tokens=21,
            graph_mode=graph_mode,
            capture_sizes="1,2,4,8,12,21",
        ) as llm:
            engine = llm.engine
            first = engine.add_request(range(12), greedy(3))
            engine.step()
            second = engine.add_request(range(100, 120), greedy(1))
            engine.step()
            while engine.has_unfinished:
                engine.step()
            third = engine.add_request([7], greedy(1))
            engine.step()
            ids = [s.output_token_ids for s in (first, second, third)]
            return ids, llm.stats()["buckets"], llm.engine._runner.ladders

    eager, _, _ = serve("none")
    graphs, buckets, ladders = serve(mode)
    assert graphs == eager
    one_token = "full" if ladders.decode else "piecewise"
    steps = {(bucket["mode"], bucket["size"]): bucket["steps"] for bucket in buckets}
    mixed = "piecewise" if ladders.mixed else "eager"
    if mixed == "eager":
        assert steps.pop(("eager", 0)) == 2, "the prompt, and the decode beside a chunk"
    else:
        assert steps.pop((mixed, 12)) == steps.pop((mixed, 21)) == 1
    if ladders.decode or ladders.mixed:
        assert steps == {(one_token, 1): 2}, "a decode, and the prompt of one token"


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
@pytest.mark.parametrize("device", DEVICES)
def test_decode_batches_of_every_size_up_down_and_at_random(checkpoint, device, mode):
    """The first step of each is a prompt step of an odd number of tokens."""
    numbers = [*range(1, 8), *range(7, 0, -1), 5, 2, 7, 1, 3]

    def serve(graph_mode):
        with LLM(
            checkpoint("qwen3"),
            device=device,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=7,
            max_num_batched_tokens=32,
            graph_mode=graph_mode,
        ) as llm:
            ids = []
            for number in numbers:
                prompts = [[number, 3 * i, 5] for i in range(number)]
                outputs = llm.generate(prompts, greedy(3), use_tqdm=False)
                ids += [output.outputs[0].token_ids for output in outputs]
            return ids, llm.stats()

    eager, _ = serve("none")
    graphs, stats = serve(mode)
    assert graphs == eager
    assert stats["falls"] == stats["dropped"] == {}
    assert {size for size, _ in stats["step_sizes"]["decode"]} == set(range(1, 8))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_smollm2_under_graphs_of_three_sizes_gives_the_tokens_of_eager_steps(smollm2, mode):
    def serve(graph_mode):
        with LLM(
            smollm2,
            device="cpu",
            dtype="float32",
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            graph_mode=graph_mode,
            capture_sizes="2,4,16",
        ) as llm:
            outputs = llm.generate(["The sky is", "One, two,", "A"], greedy(6), use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs], llm.stats()

    eager, _ = serve("none")
    graphs, stats = serve(mode)
    assert graphs == eager
    assert set(mode.split("_and_")) <= kinds(stats)


# One choice of size


@pytest.mark.parametrize(
    ("sizes", "overlap"), [(SIZES, False), ("3,8,20", False), (None, False), ("3,8,20", True)]
)
@pytest.mark.parametrize("mode", ["none", *MODES])
def test_the_schedulers_bucket_is_the_size_that_is_launched(
    checkpoint, mode, sizes, overlap, monkeypatch
):
    """Also where decode sizes are cut at the most sequences, and steps fall off the ladder."""
    steps = []
    run_forward = ModelRunner._run_forward

    def spy(self, batch, scheduled, graphs):
        forward = run_forward(self, batch, scheduled, graphs)
        steps.append((scheduled.bucket, forward.launch))
        return forward

    monkeypatch.setattr(ModelRunner, "_run_forward", spy)
    options = {"graph_mode": mode, "capture_sizes": sizes, "overlap_scheduling": overlap}
    _, stats = run(checkpoint("llama"), **options, max_num_seqs=5, num_kv_blocks=40)
    assert [bucket for bucket, _ in steps] == [
        0 if launch.mode == "eager" else launch.size for _, launch in steps
    ]
    assert len(steps) == stats["num_steps"]
    assert (stats["num_steps_ahead"] > 0) == overlap
    assert sum(stats["falls"].values()) == sum(launch.fall != "" for _, launch in steps)


def test_steps_off_the_ladder_run_eagerly_and_are_counted(checkpoint, eager_tokens):
    graphs, stats = run(checkpoint("llama"), graph_mode="piecewise", capture_sizes=[1, 2, 8])
    assert graphs == eager_tokens(device="cpu")
    assert stats["falls"]["above the largest size"] > 0
    assert stats["falls"]["padding above 2x"] > 0
    assert sum(bucket["steps"] for bucket in stats["buckets"]) == stats["num_steps"]


@pytest.mark.parametrize("mode", MODES)
def test_no_step_leaves_the_default_ladders(checkpoint, mode):
    _, stats = run(checkpoint("llama"), graph_mode=mode)
    assert stats["falls"] == {}
    assert (stats["ladders"]["decode"] == []) == (mode == "piecewise")
    assert (stats["ladders"]["mixed"] == []) == (mode == "full")


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_steps_under_graphs_use_packed_weights_too(checkpoint, caplog, mode):
    caplog.set_level("INFO", logger="stepgraph.runtime")
    eager, _ = run(checkpoint("llama"), dtype="bfloat16")
    graphs, stats = run(checkpoint("llama"), dtype="bfloat16", graph_mode=mode, capture_sizes=SIZES)
    assert (stats["dropped"], stats["falls"]) == ({}, {})
    assert len({line for line in caplog.messages if line.startswith("weights packed")}) == 1
    if "weights packed: yes, in bfloat16" in caplog.messages and usable_levels()[0] != "amx":
        # Neither padding nor what shares a step changes a row's products.
        assert graphs == eager


def test_full_graphs_are_left_out_where_the_backend_has_none(checkpoint, caplog):
    eager, _ = run(checkpoint("llama"), attention_backend="torch")
    with caplog.at_level("WARNING", logger="stepgraph.graphs"):
        graphs, stats = run(
            checkpoint("llama"),
            graph_mode="full_and_piecewise",
            attention_backend="torch",
            capture_sizes=SIZES,
        )
    assert graphs == eager
    assert caplog.text.count("goes without full graphs") == 1
    assert kinds(stats) == {"piecewise"}


# Captures: late, failing, and their memory


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_late_captures_change_no_token_and_no_choice(checkpoint, eager_tokens, device, mode):
    options = {"device": device, "graph_mode": mode, "capture_sizes": SIZES}
    early, early_stats = run(checkpoint("llama"), **options)
    late, late_stats = run(checkpoint("llama"), lazy_capture=True, **options)
    assert early == late == eager_tokens(device=device)
    assert early_stats["ladders"] == late_stats["ladders"]
    assert late_stats["falls"] == early_stats["falls"] == {}
    assert not any(capture["at_first_use"] for capture in early_stats["captures"])
    captures = [(c["mode"], c["size"]) for c in late_stats["captures"]]
    assert len(captures) == len(set(captures))
    used = {(b["mode"], b["size"]) for b in late_stats["buckets"] if b["mode"] != "eager"}
    assert used <= set(captures)


def test_a_late_captures_time_is_not_taken_for_the_steps(checkpoint, monkeypatch):
    options = {"graph_mode": "piecewise", "capture_sizes": SIZES, "itl_target_ms": 10_000}
    with LLM(
        checkpoint("llama"), device="cpu", lazy_capture=True, max_num_batched_tokens=32, **options
    ) as llm:
        engine, seen = llm.engine, []
        monkeypatch.setattr(engine._step_cost, "observe", lambda *args: seen.append(args))
        llm.generate(PROMPTS, greedy(8), use_tqdm=False)
        stats = llm.stats()
    num_late = sum(capture["at_first_use"] for capture in stats["captures"])
    assert num_late > 0
    assert len(seen) <= stats["num_steps"] - num_late
    assert len(seen) > 0


def test_a_size_that_cannot_be_captured_is_named_and_the_scheduler_knows(
    checkpoint, eager_tokens, caplog, monkeypatch
):
    capture = CapturedGraphs.capture

    def failing(self, bucket):
        if bucket == ("piecewise", 8):
            raise torch.OutOfMemoryError("CUDA out of memory")
        capture(self, bucket)

    monkeypatch.setattr(CapturedGraphs, "capture", failing)
    eager = eager_tokens(device="cpu")
    for lazy in (False, True):
        graphs, stats = run(
            checkpoint("llama"), graph_mode="piecewise", capture_sizes=SIZES, lazy_capture=lazy
        )
        assert graphs == eager
        assert stats["dropped"] == {"piecewise 8": "CUDA out of memory"}
        assert stats["ladders"]["mixed"] == [1, 2, 4, 16, 32]
        assert caplog.text.count("no piecewise graph for size 8") == 1
        assert stats["falls"].get("capture failed", 0) == lazy
        caplog.clear()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", DEVICES)
def test_graph_memory_is_estimated_beforehand_and_kept_free_of_blocks(
    checkpoint, device, mode, caplog, monkeypatch
):
    """The estimate is made for a pool of two blocks, and all that it took is given back."""
    if device == "cpu":
        monkeypatch.setattr("runtime.model_runner.cpu_kv_bytes", lambda: 64 << 20)
    options = {"device": device, "graph_mode": mode, "capture_sizes": SIZES}
    with (
        caplog.at_level("INFO", logger="stepgraph.runtime"),
        LLM(checkpoint("llama"), max_model_len=128, max_num_batched_tokens=32, **options) as llm,
    ):
        stats, runner = llm.stats(), llm.engine._runner
        estimate, taken = stats["estimated_graph_bytes"], stats["graph_bytes"]
        if device == "cpu":
            assert 0 < taken <= estimate, "a tape shares nothing, so each size costs its share"
            assert estimate < 8 * taken
            num_bytes = (64 << 20) - estimate
            block = runner._graphs._graphs._cache.bytes_per_block(runner._spec)
            assert runner.num_kv_blocks <= num_bytes // block
        else:
            assert taken <= estimate + (64 << 20)
    assert (
        f"graph memory: {taken / 2**20:.1f} MiB for {len(stats['captures'])} graphs" in caplog.text
    )
    assert f"{estimate / 2**20:.1f} MiB were estimated for all" in caplog.text


def test_the_pool_shrinks_by_what_the_graphs_will_take(checkpoint, monkeypatch):
    monkeypatch.setattr("runtime.model_runner.cpu_kv_bytes", lambda: 12 << 20)

    def num_blocks(**options):
        with LLM(
            checkpoint("llama"), device="cpu", dtype="float32", max_num_batched_tokens=32, **options
        ) as llm:
            return llm.engine._runner.num_kv_blocks, llm.stats()["estimated_graph_bytes"]

    block = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, elements, bytes
    plain, estimate = num_blocks(graph_mode="none")
    assert (plain, estimate) == ((12 << 20) // block, 0)
    fewer, estimate = num_blocks(graph_mode="full_and_piecewise", capture_sizes="8,32")
    assert fewer == ((12 << 20) - estimate) // block
    late = num_blocks(graph_mode="full_and_piecewise", capture_sizes="8,32", lazy_capture=True)
    assert late == (fewer, estimate), "memory is set aside for graphs that come later"
    _, estimate = num_blocks(graph_mode="piecewise", capture_sizes="8", num_kv_blocks=20)
    assert estimate is None, "nothing is tried where the pool's size is given"


def test_the_trials_memory_is_gone_before_the_pool_is_sized(checkpoint, monkeypatch):
    trials = []
    measure = CapturedGraphs.measure

    def spy(self, buckets):
        trials.append(weakref.ref(self))
        return measure(self, buckets)

    monkeypatch.setattr(CapturedGraphs, "measure", spy)
    sized = []

    def cpu_kv_bytes():
        sized.append(trials[0]() is None)
        return 32 << 20

    monkeypatch.setattr("runtime.model_runner.cpu_kv_bytes", cpu_kv_bytes)
    gc.disable()
    try:
        run(checkpoint("llama"), graph_mode="piecewise", capture_sizes=SIZES)
    finally:
        gc.enable()
    assert sized == [True]


# Statistics and configuration


def test_statistics_add_up_and_are_json(checkpoint):
    _, stats = run(checkpoint("llama"))
    assert json.loads(json.dumps(stats)) == stats
    assert stats["schema_version"] == 1
    (bucket,) = stats["buckets"]
    assert (bucket["mode"], bucket["steps"]) == ("eager", stats["num_steps"])
    assert bucket["num_padded_tokens"] == 0
    assert bucket["num_tokens"] >= stats["num_prompt_tokens"]
    assert bucket["seconds"] > 0
    sizes = stats["step_sizes"]
    assert sum(steps for kind in sizes.values() for _, steps in kind) == stats["num_steps"]
    tokens = sum(size * steps for kind in sizes.values() for size, steps in kind)
    assert tokens == bucket["num_tokens"]


def test_the_table_is_logged_on_close(checkpoint, caplog):
    with caplog.at_level("INFO", logger="stepgraph.runtime"):
        run(checkpoint("llama"), graph_mode="full_and_piecewise", capture_sizes=SIZES)
    (table,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("steps:\n")]
    assert "mode         size    steps     tokens  padding   ms/step" in table
    assert "\nfull            4" in table
    assert "captures took" in table


def test_the_mode_comes_from_argument_environment_or_device(checkpoint, monkeypatch):
    def mode(**options):
        options = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2} | options
        with LLM(checkpoint("llama"), **options) as llm:
            return llm.engine.config.graph_mode

    assert mode() == "none"
    monkeypatch.setenv("STEPGRAPH_GRAPH_MODE", "piecewise")
    monkeypatch.setenv("STEPGRAPH_CAPTURE_SIZES", "1,2")
    assert mode() == "piecewise"
    assert mode(graph_mode="none") == "none"
    with pytest.raises(ConfigError, match="graph_mode='all' is not one of none, full"):
        mode(graph_mode="all")
