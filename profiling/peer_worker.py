"""One engine behind a pipe: the child process of bench_peers.py, run by the engine's own Python.

Reads one JSON line per workload from stdin and answers with one JSON line on stdout: for each
request the seconds, counted from the workload's start, at which its tokens arrived. It imports
nothing of stepgraph unless that is the engine, so it runs in a peer's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from peer_llama import LlamaCppEngine
from peer_memory import MemoryLimit
from peer_transformers import transformers_engine


class Engine(Protocol):
    """What the loop below needs of an engine that works in steps."""

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""

    def step(self) -> list[tuple[int, int, bool]]:
        """Run one step: index, number of new tokens and "finished" of each request it served."""


class StepgraphEngine:
    """Our own."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from runtime.config import EngineConfig
        from runtime.engine import Engine

        self._engine = Engine(EngineConfig(model=model, **options))

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        from runtime import SamplingParams

        self._engine.add_request(
            request["prompt"],
            SamplingParams(
                temperature=request["temperature"],
                max_tokens=request["max_tokens"],
                ignore_eos=request["ignore_eos"],
                seed=index,
            ),
            request_id=str(index),
        )

    def step(self) -> list[tuple[int, int, bool]]:
        """Run one step."""
        updates = self._engine.step()
        return [(int(s.request_id), 1, s.is_finished) for s in updates.sequences]


class VllmEngine:
    """vLLM's engine in this process."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options))

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(
            str(index),
            {"prompt_token_ids": request["prompt"]},
            SamplingParams(
                temperature=request["temperature"],
                max_tokens=request["max_tokens"],
                ignore_eos=request["ignore_eos"],
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    def step(self) -> list[tuple[int, int, bool]]:
        """Run one step."""
        outputs = self._engine.step()
        return [(int(o.request_id), len(o.outputs[0].token_ids), o.finished) for o in outputs]


class OpenVinoEngine:
    """OpenVINO GenAI's continuous batching, which reads a GGUF file of the same weights."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        if "gguf" not in options:
            raise SystemExit("openvino wants openvino:gguf=FILE, the model's weights as a GGUF")
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.cache_size = options["cache_gib"]
        scheduler.enable_prefix_caching = True
        precision = {"INFERENCE_PRECISION_HINT": options["precision"]}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["gguf"], scheduler, "CPU", precision
        )
        self._handles: dict[int, Any] = {}
        self._num_added = 0

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        config = GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = request["ignore_eos"]
        config.do_sample = request["temperature"] > 0
        if config.do_sample:
            config.temperature = request["temperature"]
            config.rng_seed = index
        prompt = Tensor(np.array([request["prompt"]], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(self._num_added, prompt, config)
        self._num_added += 1

    def step(self) -> list[tuple[int, int, bool]]:
        """Run one step."""
        from openvino_genai import GenerationFinishReason

        self._pipeline.step()
        served = []
        for index, handle in list(self._handles.items()):
            while handle.can_read():
                (output,) = handle.read().values()
                finished = output.finish_reason != GenerationFinishReason.NONE
                served.append((index, len(output.generated_ids), finished))
                if finished:
                    del self._handles[index]
        return served


ENGINES: dict[str, Callable[[str, dict[str, Any]], Engine]] = {
    "stepgraph": StepgraphEngine,
    "vllm": VllmEngine,
    "transformers": transformers_engine,
    "openvino": OpenVinoEngine,
    "llama": LlamaCppEngine,
    "memory": MemoryLimit,
}


def serve(engine: Engine, requests: list[dict[str, Any]]) -> list[list[float]]:
    """Run one workload; arrival times of every request's tokens, seconds from its start."""
    times: list[list[float]] = [[] for _ in requests]
    order = sorted(range(len(requests)), key=lambda i: requests[i]["arrival"])
    num_added, num_unfinished = 0, 0
    start = time.perf_counter()
    while num_added < len(order) or num_unfinished:
        now = time.perf_counter() - start
        while num_added < len(order) and requests[order[num_added]]["arrival"] <= now:
            engine.add(order[num_added], requests[order[num_added]])
            num_added += 1
            num_unfinished += 1
        if not num_unfinished:
            time.sleep(max(0.0, requests[order[num_added]]["arrival"] - now))
            continue
        served = engine.step()
        now = time.perf_counter() - start
        for index, num_tokens, finished in served:
            times[index] += [now] * num_tokens
            num_unfinished -= finished
    return times


def main() -> None:
    """Serve workloads until stdin ends; argv: engine, model, options as JSON."""
    name, model, options = sys.argv[1:4]
    # Engines print to stdout as they like: answers go to a copy of it, the rest to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start = time.perf_counter()
    engine = ENGINES[name](model, json.loads(options))
    print(json.dumps({"start_seconds": time.perf_counter() - start}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"times": serve(engine, json.loads(line))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
