"""transformers behind bench_peers.py: `generate` on one batch, or continuous batching."""

from __future__ import annotations

import threading
from typing import Any

PAGE_SIZE = 256


def transformers_engine(model: str, options: dict[str, Any]) -> Any:
    """The engine of the option continuous, which is false by default."""
    return ContinuousEngine(model, options) if options["continuous"] else BatchEngine(model)


def _load(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()


def _generation_config(model: Any, request: dict[str, Any], max_tokens: int) -> Any:
    """What all requests of a workload share."""
    from transformers import GenerationConfig

    sampling = {"do_sample": False}
    if request["temperature"] > 0:
        sampling = {"do_sample": True, "temperature": request["temperature"], "top_k": 0}
    end = None if request["ignore_eos"] else model.generation_config.eos_token_id
    return GenerationConfig(max_new_tokens=max_tokens, eos_token_id=end, pad_token_id=0, **sampling)


class BatchEngine:
    """All that is queued as one left-padded batch through `generate`.

    Tokens count as arrived when the call returns, so it has no latencies.
    """

    def __init__(self, model: str) -> None:
        self._model = _load(model)
        self._queued: list[tuple[int, dict[str, Any]]] = []

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        self._queued.append((index, request))

    def step(self) -> list[tuple[int, int, bool]]:
        """Run everything queued to its end."""
        import torch

        queued, self._queued = self._queued, []
        prompts = [request["prompt"] for _, request in queued]
        counts = [request["max_tokens"] for _, request in queued]
        config = _generation_config(self._model, queued[0][1], max(counts))
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            outputs = self._model.generate(ids, attention_mask=mask, generation_config=config)
        ends = _as_set(config.eos_token_id)
        return [
            (index, num_until_end(output[:count], ends), True)
            for (index, _), output, count in zip(
                queued, outputs[:, longest:].tolist(), counts, strict=True
            )
        ]


class ContinuousEngine:
    """transformers' continuous batching, tokens streamed as they come.

    Options: max_num_batched_tokens of a step, cache_tokens of the pool.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._model = _load(model)
        self._options = options
        self._manager: Any = None
        self._is_greedy = False
        self._unfinished: dict[int, int] = {}

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        is_greedy = request["temperature"] == 0
        if self._manager is None or self._is_greedy != is_greedy:
            self._start(request)
            self._is_greedy = is_greedy
        self._unfinished[index] = 0
        self._manager.add_request(
            request["prompt"],
            request_id=str(index),
            max_new_tokens=request["max_tokens"],
            streaming=True,
        )

    def step(self) -> list[tuple[int, int, bool]]:
        """Wait for the background thread's next tokens; it is never in the way of an arrival."""
        served = []
        output = self._manager.get_result(timeout=0.05)
        if output is None and not self._manager.is_running():
            raise SystemExit("transformers' generation thread ended; see above")
        while output is not None:
            index, count = int(output.request_id), len(output.generated_tokens)
            if output.error is not None:
                raise SystemExit(f"transformers failed: {output.error}")
            served.append((index, count - self._unfinished[index], output.is_finished()))
            self._unfinished[index] = count
            output = self._manager.get_result(timeout=0)
        return served

    def close(self) -> None:
        """End the background thread."""
        if self._manager is not None:
            self._manager.destroy()
            self._manager = None

    def _start(self, request: dict[str, Any]) -> None:
        """Make a manager for this kind of sampling: one kind is all that a manager knows."""
        import torch
        from transformers import ContinuousBatchingConfig

        self.close()
        manager = self._model.init_continuous_batching(
            generation_config=_generation_config(self._model, request, request["max_tokens"]),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=self._options["cache_tokens"] // PAGE_SIZE,
                max_batch_tokens=self._options["max_num_batched_tokens"],
                seed=0,
            ),
        )

        def start() -> None:
            with torch.inference_mode():
                manager.start()

        # The manager's thread must not keep this process alive: a daemon's threads are daemons.
        starter = threading.Thread(target=start, daemon=True)
        starter.start()
        starter.join()
        self._manager = manager


def num_until_end(ids: list[int], ends: set[int]) -> int:
    """Tokens up to the first end token, itself included; what follows it is padding."""
    return next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))


def _as_set(ids: int | list[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)
