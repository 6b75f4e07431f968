"""A tiny model, and real batches for it: the scheduler's, packed as the model runner does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from attention import AttentionSpec, BoundAttention, PagedKVCache
from attention.torch_backend import TorchBackend
from graphs import GraphRunner, PreparedStep
from runtime.block_manager import BlockManager
from runtime.input_batch import InputBatch, pack
from runtime.models import Decoder, DecoderConfig, load_decoder
from runtime.models.rotary import RopeConfig
from runtime.row_table import RowTable
from runtime.sampling_params import SamplingParams
from runtime.scheduler import Scheduler
from runtime.scheduler_config import SchedulerConfig
from runtime.sequence import Sequence
from runtime.staging import StagingBuffer
from runtime.step import ScheduledBatch, StepOutput

VOCAB = 61
BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
MAX_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE
MAX_SEQS = 6
BUDGET = 16
NUM_BLOCKS = 30


def tiny_config(max_model_len: int = MAX_MODEL_LEN, *, head_dim: int = 8) -> DecoderConfig:
    return DecoderConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        windows=(None, 7, None),
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=False,
        rope=RopeConfig(original_max_position=max_model_len),
        max_position_embeddings=max_model_len,
        declared_dtype=None,
    )


def tiny_model(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = MAX_MODEL_LEN,
    *,
    head_dim: int = 8,
) -> Decoder:
    config = tiny_config(max_model_len, head_dim=head_dim)
    model = load_decoder(config, Path(), dtype=dtype, device=device, load_format="dummy", seed=1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data *= 10  # so that the logits differ by more than rounding
    return model


def tiny_spec(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    block_size: int = BLOCK_SIZE,
    *,
    head_dim: int = 8,
) -> AttentionSpec:
    config = tiny_config(head_dim=head_dim)
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        block_size=block_size,
        windows=config.windows,
        scale=config.head_dim**-0.5,
    )


def poisoned_cache(spec: AttentionSpec, num_blocks: int = NUM_BLOCKS) -> PagedKVCache:
    """NaN wherever nothing was written; the null block is finite, as after allocation."""
    cache = PagedKVCache.allocate(spec, num_blocks)
    for tensor in (*cache.keys, *cache.values):
        tensor[1:] = float("nan")
    return cache


def copy_cache(source: PagedKVCache, target: PagedKVCache) -> None:
    tensors = zip((*source.keys, *source.values), (*target.keys, *target.values), strict=True)
    for a, b in tensors:
        b.copy_(a)


def caches_equal(one: PagedKVCache, other: PagedKVCache) -> bool:
    tensors = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9)) for a, b in tensors)


def assert_same_blocks(one: PagedKVCache, other: PagedKVCache, tolerance: float) -> None:
    """All but the null block: the same slots were written, with the same values."""
    tensors = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    for a, b in tensors:
        torch.testing.assert_close(a[1:], b[1:], rtol=0, atol=tolerance, equal_nan=True)


class Traffic:
    """Random requests through the real scheduler, with few enough blocks to preempt."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_blocks: int = NUM_BLOCKS,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = MAX_MODEL_LEN,
        budget: int = BUDGET,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        config = SchedulerConfig(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=budget, max_model_len=max_model_len
        )
        self.scheduler = Scheduler(config, self.blocks, clock=lambda: 0.0)
        self._rows = RowTable(MAX_SEQS, -(-max_model_len // block_size), block_size)
        self._staging = StagingBuffer(device)
        self._num_requests = 0
        self.num_cached_tokens = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        sequence = Sequence(
            request_id=str(self._num_requests),
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            seed=0,
            max_total_tokens=len(prompt) + max_tokens,
            arrival_index=self._num_requests,
            arrival_time=0.0,
        )
        self.scheduler.add(sequence)
        self._num_requests += 1

    def add_random(self, rng: np.random.Generator, max_length: int = 30) -> None:
        """Half of the prompts begin alike, so that the prefix cache hits."""
        length = int(rng.integers(1, max_length))
        prompt = rng.integers(0, VOCAB, length)
        if rng.random() < 0.5:
            prompt[:] = np.arange(length) % VOCAB
        self.add(prompt.tolist(), int(rng.integers(1, 12)))

    def schedule(self) -> tuple[ScheduledBatch, InputBatch] | None:
        scheduled = self.scheduler.schedule()
        if scheduled.num_seqs == 0:
            return None
        self._rows.apply(scheduled)
        return scheduled, pack(self._rows, scheduled, self._staging)

    def update(self, scheduled: ScheduledBatch, token_ids: np.ndarray) -> None:
        output = StepOutput(token_ids=token_ids, is_valid=np.ones(len(token_ids), dtype=bool))
        updates = self.scheduler.update(scheduled, output)
        self.num_cached_tokens += sum(s.num_cached_tokens for s in updates.finished)


class Comparison:
    """Runs each step three times: by the runner, eagerly on its padded inputs, and unpadded.

    Each has a cache of its own, in which whatever no step wrote stays NaN. The first two must
    agree bit for bit, the third within `tolerance`. Tokens may differ from those of the third
    where its best logits lie within `tie`.
    """

    def __init__(
        self,
        model: Decoder,
        backend: TorchBackend,
        runner: GraphRunner,
        cache: PagedKVCache,
        *,
        tolerance: float = 1e-5,
        tie: float = 0.0,
    ) -> None:
        self.model = model
        self._compute_logits = model.compute_logits
        self._backend = backend
        self._runner = runner
        self._tolerance = tolerance
        self._tie = tie
        self._cache = cache
        self._reference = TorchBackend(backend.spec)
        num_blocks = cache.num_blocks
        self._twin_cache = poisoned_cache(backend.spec, num_blocks)
        self._reference_cache = poisoned_cache(backend.spec, num_blocks)
        self.steps: list[PreparedStep] = []

    def step(self, scheduled: ScheduledBatch, batch: InputBatch) -> np.ndarray:
        """Assert that all three agree; the greedy tokens."""
        is_uniform = scheduled.is_uniform_decode
        token_ids = self.compare(batch, scheduled.num_seqs, is_uniform)
        assert self.steps[-1].is_uniform_decode == is_uniform
        return token_ids

    @torch.inference_mode()
    def compare(self, batch, num_seqs: int, is_uniform: bool) -> np.ndarray:
        """As `step`, of anything that has the tensors of an InputBatch."""
        runner = self._runner
        launch = runner.dispatch(len(batch.input_ids), num_seqs, is_uniform)
        step = runner.prepare(launch, batch.input_ids, batch.positions, batch.metadata)
        self.steps.append(step)
        copy_cache(self._cache, self._twin_cache)
        hidden = runner.run(step)
        twin = self._run(self._backend, step.plan, self._twin_cache, step)
        assert torch.equal(hidden, twin[: step.num_tokens])
        assert caches_equal(self._cache, self._twin_cache)
        plan = self._reference.plan(batch.metadata)
        reference = self._run(self._reference, plan, self._reference_cache, batch)
        torch.testing.assert_close(hidden, reference, rtol=0, atol=self._tolerance)
        assert_same_blocks(self._cache, self._reference_cache, self._tolerance)
        rows = batch.logits_indices
        token_ids = self._compute_logits(hidden[rows]).argmax(-1)
        expected = self._compute_logits(reference[rows])
        chosen = expected.gather(1, token_ids[:, None])[:, 0]
        assert bool((expected.amax(-1) - chosen <= self._tie).all())
        return token_ids.cpu().numpy()

    def start_over(self) -> None:
        """Take what the runner's cache holds now for what was computed before."""
        copy_cache(self._cache, self._reference_cache)

    def _run(self, backend, plan, cache, inputs) -> torch.Tensor:
        attend = BoundAttention(backend=backend, plan=plan, cache=cache)
        return self.model(inputs.input_ids, inputs.positions, attend)
