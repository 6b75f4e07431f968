"""The environment table: what is refused, in which words, and what an option takes from it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphs.capture_sizes import parse_capture_sizes
from runtime.config import EngineConfig, ResolvedConfig
from runtime.environment import VARIABLES, describe_environment, read_environment
from runtime.errors import ConfigError
from runtime.models import load_decoder_config

ALLOWED = {variable.name: variable.allowed for variable in VARIABLES}

MALFORMED = [
    ("STEPGRAPH_CAPTURE_SIZES", ""),
    ("STEPGRAPH_CAPTURE_SIZES", "1,,2"),
    ("STEPGRAPH_CAPTURE_SIZES", "1,2,"),
    ("STEPGRAPH_CAPTURE_SIZES", "1 2 4"),
    ("STEPGRAPH_CAPTURE_SIZES", "0"),
    ("STEPGRAPH_CAPTURE_SIZES", "-8"),
    ("STEPGRAPH_CAPTURE_SIZES", "8.0"),
    ("STEPGRAPH_CAPTURE_SIZES", "8-64"),
    ("STEPGRAPH_CAPTURE_SIZES", "64-8:8"),
    ("STEPGRAPH_CAPTURE_SIZES", "8-64:0"),
    ("STEPGRAPH_CAPTURE_SIZES", "1,2\n,x"),
    ("STEPGRAPH_CAPTURE_SIZES", "auto"),
    ("STEPGRAPH_CAPTURE_SIZES", "1-1000000:1"),
    ("STEPGRAPH_CAPTURE_SIZES", "9999999999"),
    ("STEPGRAPH_GRAPH_MODE", ""),
    ("STEPGRAPH_GRAPH_MODE", "Full"),
    ("STEPGRAPH_GRAPH_MODE", "full,piecewise"),
    ("STEPGRAPH_LAZY_CAPTURE", "on"),
    ("STEPGRAPH_LAZY_CAPTURE", "-1"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", ""),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "0"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "-1"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "2k"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "1e3"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "2_048"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "2048.0"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "\u0665"),
    ("STEPGRAPH_MAX_NUM_BATCHED_TOKENS", "9" * 5000),
    ("STEPGRAPH_COMPILE", ""),
    ("STEPGRAPH_COMPILE", "yes"),
    ("STEPGRAPH_NVTX", ""),
    ("STEPGRAPH_NVTX", "true"),
    ("STEPGRAPH_NVTX", "2"),
    ("STEPGRAPH_NVTX", "01"),
    ("STEPGRAPH_ATTENTION", "Torch"),
    ("STEPGRAPH_ATTENTION", "auto,torch"),
    ("STEPGRAPH_ATTENTION", "sdpa"),
    ("STEPGRAPH_LOG_LEVEL", "verbose"),
    ("STEPGRAPH_LOG_LEVEL", "DEBUG"),
    ("STEPGRAPH_LOG_LEVEL", "10"),
    ("STEPGRAPH_CACHE_DIR", ""),
    ("STEPGRAPH_CACHE_DIR", "models"),
    ("STEPGRAPH_CACHE_DIR", "./models"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_value_is_refused_in_one_line_with_name_value_and_allowed_form(name, text):
    with pytest.raises(ConfigError) as caught:
        read_environment({name: text})
    message = str(caught.value)
    assert message.startswith(f"environment variable {name}={text!r} is not allowed")
    assert message.endswith(f"allowed: {ALLOWED[name]}")
    assert "\n" not in message


SPELLINGS = ("abc", "", " 8 ", "on", "-1", "1e3", "12Q")
ACCEPTED = {
    "STEPGRAPH_CAPTURE_SIZES": {" 8 ": (8,)},
    "STEPGRAPH_MAX_NUM_BATCHED_TOKENS": {" 8 ": 8},
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("text", SPELLINGS)
def test_a_spelling_is_read_as_documented_or_refused_but_never_ignored(name, text):
    if text in ACCEPTED.get(name, {}):
        assert read_environment({name: text}) == {name: ACCEPTED[name][text]}
        return
    with pytest.raises(ConfigError) as caught:
        read_environment({name: text})
    assert str(caught.value).startswith(f"environment variable {name}={text!r} is not allowed")


def test_the_malformed_values_cover_every_variable():
    assert {name for name, _ in MALFORMED} == set(ALLOWED)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("STEPGRAPH_CAPTURE_SIZE", "STEPGRAPH_CAPTURE_SIZES"),
        ("STEPGRAPH_CAPTUER_SIZES", "STEPGRAPH_CAPTURE_SIZES"),
        ("STEPGRAPH_LOGLEVEL", "STEPGRAPH_LOG_LEVEL"),
        ("STEPGRAPH_ATTENTION_BACKEND", "STEPGRAPH_ATTENTION"),
        ("STEPGRAPH_MAX_BATCHED_TOKENS", "STEPGRAPH_MAX_NUM_BATCHED_TOKENS"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest_one(name, meant):
    with pytest.raises(ConfigError, match=f"{name}='1'; did you mean {meant}\\?"):
        read_environment({name: "1"})


def test_values_are_parsed_and_other_programs_variables_left_alone():
    values = read_environment(
        {
            "PATH": "/bin",
            "STEPGRAPHICS": "x",
            "STEPGRAPH_CAPTURE_SIZES": " 8-24:8, 1 ",
            "STEPGRAPH_NVTX": "1",
            "STEPGRAPH_MAX_NUM_BATCHED_TOKENS": "64",
        }
    )
    assert values == {
        "STEPGRAPH_CAPTURE_SIZES": (1, 8, 16, 24),
        "STEPGRAPH_NVTX": True,
        "STEPGRAPH_MAX_NUM_BATCHED_TOKENS": 64,
    }


def test_the_table_names_each_variable_with_value_source_and_meaning():
    table = describe_environment({"STEPGRAPH_CAPTURE_SIZES": " 1,2 "})
    assert "STEPGRAPH_CAPTURE_SIZES = 1,2  (environment)" in table
    for variable in VARIABLES:
        assert variable.help in table
        assert variable.allowed in table


def test_printing_the_table_needs_no_torch():
    code = (
        "import sys, runtime.environment as e; print(e.describe_environment({}));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# Options that take a value from the environment


@pytest.fixture
def resolve(checkpoint):
    """Resolves options for a tiny model under an environment."""
    path: Path = checkpoint("llama")
    decoder = load_decoder_config(path)

    def resolve(environ: dict[str, str] | None = None, **options: object) -> ResolvedConfig:
        config = EngineConfig(
            model=str(path), device="cpu", max_num_seqs=20, max_num_batched_tokens=64, **options
        )
        return config.resolve(decoder, path, torch.float32, environ or {})

    return resolve


def test_capture_sizes_come_from_the_argument_then_the_environment_then_the_limits(resolve):
    environ = {"STEPGRAPH_CAPTURE_SIZES": "1,4,96"}
    mode = {"graph_mode": "full_and_piecewise"}
    ladders = resolve(environ, capture_sizes="2-6:2", **mode).ladders
    assert (ladders.decode.sizes, ladders.mixed.sizes) == ((2, 4, 6), (2, 4, 6))
    assert resolve(environ, capture_sizes=[8, 2], **mode).ladders.decode.sizes == (2, 8)
    config = resolve(environ, **mode)
    assert config.ladders.decode.sizes == (1, 4, 20), "cut at the most sequences"
    assert config.ladders.mixed.sizes == (1, 4, 64), "cut at the token budget"
    assert config.reasons["ladders"] == "STEPGRAPH_CAPTURE_SIZES"
    assert resolve(**mode).ladders.decode.largest == 20


def test_the_graph_mode_says_which_ladders_there_are(resolve):
    sizes = {"capture_sizes": "1,4,96"}
    ladders = resolve(graph_mode="piecewise", **sizes).ladders
    assert (ladders.decode, ladders.mixed.sizes) == (None, (1, 4, 20, 64))
    ladders = resolve(graph_mode="full", **sizes).ladders
    assert (ladders.decode.sizes, ladders.mixed) == ((1, 4, 20), None)
    assert resolve(graph_mode="none", **sizes).ladders is None
    assert resolve(**sizes).ladders is None, "the default on a CPU is no graphs"


def test_switches_come_from_the_argument_then_the_environment_then_are_off(resolve):
    for name in ("lazy_capture", "nvtx"):
        environ = {f"STEPGRAPH_{name.upper()}": "1"}
        assert getattr(resolve(), name) is False
        assert getattr(resolve(environ), name) is True
        assert resolve(environ).reasons[name] == f"STEPGRAPH_{name.upper()}"
        assert getattr(resolve(environ, **{name: False}), name) is False
        with pytest.raises(ConfigError, match=f"{name}='yes' is not True or False"):
            resolve(**{name: "yes"})


@pytest.mark.parametrize(
    "value", ["", "x", "8-64", [], [0], [1, 2.5], [True], 8, [1, "2"], "1,2,3-1:1"]
)
def test_wrong_capture_sizes_are_refused_by_name_and_value(value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", capture_sizes=value)
    assert str(caught.value).startswith(f"capture_sizes={value!r}: ")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "5"])
def test_a_wrong_latency_target_is_refused(value):
    with pytest.raises(ConfigError, match=r"itl_target_ms=.* is not a number of milliseconds"):
        EngineConfig(model="m", itl_target_ms=value)


def test_options_about_step_size_that_do_not_go_together_are_refused(resolve):
    for mode in ("none", "full"):
        with pytest.raises(
            ConfigError, match=f"bucket_fitting=True, but under graph_mode='{mode}'"
        ):
            resolve(bucket_fitting=True, capture_sizes="8,64", graph_mode=mode)
    with pytest.raises(ConfigError, match="prefill_first"):
        EngineConfig(model="m", itl_target_ms=20, policy="prefill_first")
    assert resolve(bucket_fitting=True, graph_mode="piecewise").bucket_fitting


def test_the_environments_allowed_form_is_the_parsers_own():
    with pytest.raises(ValueError) as caught:
        parse_capture_sizes("x")
    assert str(caught.value).endswith(ALLOWED["STEPGRAPH_CAPTURE_SIZES"])
