"""How long a step takes on hardware that isn't here: a roofline from data sheets.

Each part of a step takes the longer one of computing and of reading memory (Williams et al., 2009),
and the parts follow one another: the layers' matrices, what is done value by value, attention, the
output head. The host adds its own time, and a step is never shorter than its launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.device_rates import GPU_RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What decides how long a step takes; `num_kv_tokens` and `num_pairs` may be [n] int64."""

    num_tokens: int
    """Tokens that run, padding included."""
    num_sampled: int
    """Sequences whose next token is wanted."""
    num_kv_tokens: int | np.ndarray
    """K/V rows that attention reads: the context of each sequence after the step, summed."""
    num_pairs: int | np.ndarray
    """Pairs of a query and a key that attention looks at."""
    is_uniform_decode: bool = False
    is_captured: bool = False
    """Whether it runs under graphs."""


class StepTime(Protocol):
    """Tells the time of steps; also a `runtime.step_cost.StepCost`, for the scheduler."""

    def step_seconds(self, shape: StepShape) -> float | np.ndarray:
        """Time of a step or of [n] steps; the same to the last bit either way."""
        ...

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """What a scheduler that knows no more than these numbers predicts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator as its data sheet describes it."""

    name: str
    flop_rate: float
    """Dense bfloat16 operations a second, accumulated in float32."""
    bandwidth: float
    """Bytes a second of its memory."""
    memory: float
    """Bytes; what data sheets call GB is 2**30 of them."""


def _hardware(gpu: str, name: str, gigabytes: int) -> Hardware:
    rates = GPU_RATES[gpu]
    return Hardware(
        name=name,
        flop_rate=rates.flop_rate,
        bandwidth=rates.bandwidth,
        memory=gigabytes * 2**30,
    )


HARDWARE = {
    "rtx4090": _hardware("RTX 4090", "RTX 4090", 24),
    "a100": _hardware("A100", "A100 80GB SXM", 80),
    "h100": _hardware("H100", "H100 SXM", 80),
    "h200": _hardware("H200", "H200 SXM", 141),
    "b200": _hardware("B200", "B200", 180),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a decoder decides its cost; bfloat16 weights and K/V."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices: those that every token is multiplied with."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        projections = self.hidden_size * self.head_dim * heads
        return self.num_layers * (projections + 3 * self.hidden_size * self.intermediate_size)

    @property
    def elementwise_bytes(self) -> int:
        """What norms, rotation and the gate move of one token, in all layers."""
        heads = self.num_heads + self.num_kv_heads
        values = 6 * self.hidden_size + 2 * self.head_dim * heads + 3 * self.intermediate_size
        return 2 * self.num_layers * values

    @property
    def head_weights(self) -> int:
        """Weights of the output head, which sampled tokens are multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, the embedding included."""
        return 2 * (self.layer_weights + self.head_weights * (2 - self.tie_word_embeddings))

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token's keys and values in all layers."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim


MODELS = {
    "qwen3-8b": ModelShape(
        name="Qwen3-8B",
        num_layers=36,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
    ),
    "llama-3.1-8b": ModelShape(
        name="Llama 3.1 8B",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    "qwen3-0.6b": ModelShape(
        name="Qwen3-0.6B",
        num_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": ModelShape(
        name="SmolLM2-135M",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineStepTime:
    """Time of a step from the model's shape and the hardware's data sheet.

    The factors below are assumptions about kernels and host, the same for all hardware and
    fitted to nothing.
    """

    model: ModelShape
    hardware: Hardware
    compute_efficiency: float = 0.75
    """Share of the data sheet's rate that matrix products reach."""
    attention_efficiency: float = 0.5
    """The same of attention's products."""
    bandwidth_efficiency: float = 0.85
    """Share of the data sheet's bandwidth that reading weights and K/V reaches."""
    host_seconds: float = 500e-6
    """Of a step: scheduling, packing, planning, sampling, waiting for the ids."""
    launches_per_layer: int = 14
    """Kernels of a layer without graphs, two of them attention's."""
    launch_seconds: float = 12e-6
    """Of one kernel from eager PyTorch, with its share of Python."""
    graph_launch_seconds: float = 10e-6
    """Of one graph; a mixed step has one between any two attentions, which run eagerly."""

    def step_seconds(self, shape: StepShape) -> float | np.ndarray:
        """As `StepTime.step_seconds`."""
        model, flop_rate = self.model, self.hardware.flop_rate
        matrix_rate = flop_rate * self.compute_efficiency
        bandwidth = self.hardware.bandwidth * self.bandwidth_efficiency
        layers = max(
            2.0 * model.layer_weights * shape.num_tokens / matrix_rate,
            2.0 * model.layer_weights / bandwidth,
        )
        elementwise = float(model.elementwise_bytes) * shape.num_tokens / bandwidth
        head = 0.0
        if shape.num_sampled:
            head = max(
                2.0 * model.head_weights * shape.num_sampled / matrix_rate,
                2.0 * model.head_weights / bandwidth,
            )
        flops_per_pair = 4.0 * model.num_layers * model.num_heads * model.head_dim
        attention = np.maximum(
            flops_per_pair * shape.num_pairs / (flop_rate * self.attention_efficiency),
            float(model.kv_bytes_per_token) * shape.num_kv_tokens / bandwidth,
        )
        on_device = layers + elementwise + head + attention
        return self.host_seconds + np.maximum(on_device, self._launching(shape))

    def seconds(self, num_tokens: int, num_kv_tokens: int, num_pairs: int) -> float:
        """As `StepTime.seconds`: as if every token were sampled."""
        shape = StepShape(
            num_tokens=num_tokens,
            num_sampled=num_tokens,
            num_kv_tokens=num_kv_tokens,
            num_pairs=num_pairs,
        )
        return float(self.step_seconds(shape))

    def _launching(self, shape: StepShape) -> float:
        if not shape.is_captured:
            return self.model.num_layers * self.launches_per_layer * self.launch_seconds
        if shape.is_uniform_decode:
            return self.graph_launch_seconds
        return self.model.num_layers * (self.graph_launch_seconds + 2 * self.launch_seconds)

    @property
    def ridge(self) -> int:
        """Tokens from which the layers' matrices are bound by computation."""
        rate = self.hardware.flop_rate * self.compute_efficiency
        bandwidth = self.hardware.bandwidth * self.bandwidth_efficiency
        return max(1, round(rate / bandwidth))

    def num_kv_blocks(
        self, block_size: int, *, utilization: float = 0.9, reserved: float = 1e9
    ) -> int:
        """Blocks of the KV pool beside the weights, the null block not counted.

        Args:
            block_size: tokens of a block.
            utilization: share of the memory that is used at all.
            reserved: bytes for activations, graphs and libraries.
        """
        left = self.hardware.memory * utilization - self.model.weight_bytes - reserved
        num_blocks = int(left // (self.model.kv_bytes_per_token * block_size))
        if num_blocks < 1:
            raise ValueError(
                f"{self.model.name} leaves no memory for K/V on one {self.hardware.name}"
            )
        return num_blocks
