"""llama.cpp behind bench_peers.py, through llama-cpp-python's low-level batch interface.

The package's own class serves one sequence at a time, which is no fair rival for many. This is a
small serving loop over `llama_decode`: decodes mixed with pieces of prompts, and prefixes reused.
Each sequence has a memory of its own. With one for all (kv_unified) every token passes all cells:
W2 took 2.4 times the processor time, while W3 gained a tenth.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Slot:
    """One of llama.cpp's sequences: serves a request, or keeps a served one for its prefix."""

    number: int
    ids: list[int] = field(default_factory=list)
    """Prompt and output."""
    num_cached: int = 0
    """How many of `ids` have keys and values in llama.cpp's memory."""
    last_step: int = 0
    index: int | None = None
    """Of the request; None: free."""
    request: dict[str, Any] = field(default_factory=dict)
    sampler: Any = None

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.ids) - self.num_cached


class LlamaCppEngine:
    """llama.cpp in this process, from a GGUF file of the same weights.

    Options: gguf, the file; sequences, served at once; context, tokens of each;
    max_num_batched_tokens of a step.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        if "gguf" not in options:
            raise SystemExit("llama wants llama:gguf=FILE, the model's weights as a GGUF")
        import llama_cpp

        # Kept: C calls it. The package's own has other numbers for levels and swallows errors.
        self._log = llama_cpp.llama_log_callback(_print_warning)
        llama_cpp.llama_log_set(self._log, None)
        self._lib = llama_cpp
        self._budget: int = options["max_num_batched_tokens"]
        self._slots = [_Slot(number) for number in range(options["sequences"])]
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self._num_steps = 0
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            os.fsencode(options["gguf"]), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp can't load {options['gguf']}; see above")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options["context"] * len(self._slots)
        params.n_seq_max = len(self._slots)
        params.n_batch = params.n_ubatch = self._budget
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp can't make a context; see above")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._batch = llama_cpp.llama_batch_init(self._budget, 0, 1)

    def add(self, index: int, request: dict[str, Any]) -> None:
        """Queue a request."""
        self._waiting.append((index, request))

    def step(self) -> list[tuple[int, int, bool]]:
        """Run one step: a token of each decoding sequence, and prompts up to the budget."""
        self._num_steps += 1
        self._batch.n_tokens = 0
        if not self._waiting:
            self._close_gaps()
        active = [slot for slot in self._slots if slot.index is not None]
        active.sort(key=lambda slot: slot.num_missing > 1)
        packed = [(slot, self._pack(slot)) for slot in active]
        while self._waiting and self._batch.n_tokens < self._budget:
            slot = self._admit()
            if slot is None:
                break
            packed.append((slot, self._pack(slot)))
        status = self._lib.llama_decode(self._context, self._batch)
        if status != 0:
            raise SystemExit(f"llama_decode gave {status}; see above")
        served, row = [], 0
        for slot, num_tokens in packed:
            slot.num_cached += num_tokens
            row += num_tokens
            if slot.num_missing == 0:
                served.append(self._sample(slot, row - 1))
        return served

    def _admit(self) -> _Slot | None:
        """The first waiting request in a free slot, with the longest prefix there is."""
        free = [slot for slot in self._slots if slot.index is None]
        if not free:
            return None
        index, request = self._waiting.popleft()
        prompt = request["prompt"]
        lengths = [
            min(_common(s.ids[: s.num_cached], prompt), len(prompt) - 1) for s in self._slots
        ]
        donor = max(self._slots, key=lambda s: lengths[s.number])
        slot, num_shared = min(free, key=lambda s: s.last_step), lengths[donor.number]
        if num_shared and donor.index is None:
            slot = donor
        elif num_shared:
            self._copy(donor, slot)
        self._lib.llama_memory_seq_rm(self._memory, slot.number, num_shared, -1)
        slot.index, slot.request = index, request
        slot.ids, slot.num_cached = list(prompt), num_shared
        slot.sampler = self._make_sampler(request["temperature"], seed=index)
        return slot

    def _close_gaps(self) -> None:
        """Move sequences together: llama.cpp computes at once only those whose numbers follow."""
        while True:
            free = next((s for s in self._slots if s.index is None), None)
            last = next((s for s in reversed(self._slots) if s.index is not None), None)
            if free is None or last is None or last.number < free.number:
                return
            self._copy(last, free)
            free.ids, free.num_cached, free.sampler = list(last.ids), last.num_cached, last.sampler
            free.index, free.request = last.index, last.request
            last.index = None

    def _copy(self, source: _Slot, target: _Slot) -> None:
        """Copy keys and values, all of them: llama.cpp can't copy a part."""
        self._lib.llama_memory_seq_rm(self._memory, target.number, -1, -1)
        self._lib.llama_memory_seq_cp(self._memory, source.number, target.number, -1, -1)

    def _pack(self, slot: _Slot) -> int:
        """Add a slot's next tokens to the batch, as many as fit; their number."""
        batch, first = self._batch, self._batch.n_tokens
        num_tokens = min(slot.num_missing, self._budget - first)
        slot.last_step = self._num_steps
        for place in range(num_tokens):
            row, position = first + place, slot.num_cached + place
            batch.token[row] = slot.ids[position]
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = slot.number
            batch.logits[row] = position == len(slot.ids) - 1
        batch.n_tokens += num_tokens
        return num_tokens

    def _sample(self, slot: _Slot, row: int) -> tuple[int, int, bool]:
        """Sample a slot's next token from a row of the batch, and free the slot at the end."""
        token = self._lib.llama_sampler_sample(slot.sampler, self._context, row)
        slot.ids.append(token)
        request, index = slot.request, slot.index
        assert index is not None
        num_outputs = len(slot.ids) - len(request["prompt"])
        finished = num_outputs == request["max_tokens"] or (
            not request["ignore_eos"] and self._lib.llama_vocab_is_eog(self._vocab, token)
        )
        if finished:
            self._lib.llama_sampler_free(slot.sampler)
            slot.index = None
        return index, 1, finished

    def _make_sampler(self, temperature: float, *, seed: int) -> Any:
        lib = self._lib
        if temperature == 0:
            return lib.llama_sampler_init_greedy()
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_temp(temperature))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        return chain


def _print_warning(level: int, text: bytes, _: Any) -> None:
    if level in (3, 4):  # GGML_LOG_LEVEL_WARN and _ERROR
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def _common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
