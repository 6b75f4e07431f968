"""Engine options: what the caller says, and what follows from it for one model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from attention import FlashInferOptions, block_size_multiple, preferred_block_size
from attention.metadata import MAX_BLOCK_SIZE
from graphs import GraphMode, compiler_refusal
from graphs.capture_sizes import CaptureLadders

from . import config_checks as checks
from . import model_source
from .device_rates import device_rates
from .environment import read_environment
from .errors import ConfigError
from .resolved_config import LoadFormat, Quantization, ResolvedConfig
from .scheduler_config import Policy
from .step_cost import estimated_cost

if TYPE_CHECKING:
    from .models import DecoderConfig

logger = logging.getLogger("stepgraph.runtime")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. None means: chosen by `resolve`, which keeps the reason.

    For each option an explicit value wins over its environment variable, and that over the
    default. Unknown options raise TypeError, wrong values ConfigError.
    """

    model: str
    """A local Hugging Face directory, a hub id, a .gguf file, or "smollm2-135m-instruct"."""
    tokenizer: str | None = None
    """A directory or hub id to take the tokenizer from; None: the model's own."""
    load_format: LoadFormat = "auto"
    """"auto" reads safetensors; "dummy" makes random weights from config.json alone."""
    dtype: str = "auto"
    """"float32", "bfloat16", "float16", or "auto": the dtype that config.json declares, else the
    one the weights are stored in, else bfloat16. The KV cache has the same dtype."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1", ..., or "auto": cuda where there is one, else cpu."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output together; None: the model's own limit."""
    max_num_seqs: int | None = None
    """Most sequences running at a time; None: 256, or the token budget if that is less."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: 512 on a CPU, 8192 on CUDA. Larger: more throughput while
    prompts come in. Smaller: shorter gaps between the tokens of running sequences."""
    max_prefill_chunk: int | None = None
    """Most prompt tokens of one sequence in a step; None: what the budget leaves."""
    block_size: int | None = None
    """Tokens of a KV block: a power of two from 1 to 256. None: 16, or 256 where attention runs
    with flash_attn, whose kernels read pages of that size."""
    num_kv_blocks: int | None = None
    """KV blocks that sequences can use; None: as many as the memory options below give."""
    kv_cache_bytes: int | None = None
    """Memory of the KV pool; None: on a CPU 4 GiB or a quarter of what is free, whichever is
    less; on CUDA what `gpu_memory_utilization` leaves. Never more than all rows can use."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and KV pool together."""
    enable_prefix_caching: bool = True
    """Keep the K/V of past prompts and outputs and share it with prompts that start alike."""
    policy: Policy = "fcfs"
    """"fcfs", "priority" (lower first), or "prefill_first": no mixing, as a baseline."""
    graph_mode: GraphMode | None = None
    """Which steps run under captured graphs: "none"; "full": decode steps; "piecewise": all, in
    segments around attention; "full_and_piecewise". None: STEPGRAPH_GRAPH_MODE, else
    "full_and_piecewise" on CUDA and "none" on a CPU, where graphs are emulated for tests."""
    capture_sizes: str | Sequence[int] | None = None
    """Sizes that graphs are captured at and steps padded to, as numbers or as text like
    "1,2,4,8-64:8,128": of decode steps in sequences, of others in tokens. Without graphs nothing
    is padded. None: STEPGRAPH_CAPTURE_SIZES, else what suits the limits and the model."""
    lazy_capture: bool | None = None
    """Capture each size when a step first takes it, in place of all of them at the start, save
    the largest of each kind. Starts sooner; those steps take longer. None:
    STEPGRAPH_LAZY_CAPTURE, else off."""
    bucket_fitting: bool = False
    """Shorten the last chunk of a step to a captured size where that saves time."""
    compile: bool | None = None
    """Compile what lies between two attention calls, by torch.compile, before the first request;
    where no compiler is found a warning says so and layers run as they are. None:
    STEPGRAPH_COMPILE, else True on CUDA and False on a CPU."""
    itl_target_ms: float | None = None
    """Longest gap that decoding sequences should see between two tokens, in milliseconds: prompts
    get what fits beside the decodes in steps of that length. None: what the budget leaves."""
    overlap_scheduling: bool | None = None
    """Schedule, pack and plan a step while the one before runs. An end that its tokens bring is
    seen one step late, and the token after it dropped. None: True on CUDA, False on a CPU."""
    attention_backend: str | None = None
    """"flashinfer" or "flash_attn" on CUDA, "native" on a CPU, "torch", or "auto": the first that
    can run; None: STEPGRAPH_ATTENTION, else "auto"."""
    flashinfer_options: FlashInferOptions | None = None
    """Kernels of attention backend "flashinfer"; None: those that are right everywhere."""
    quantization: Quantization | None = None
    """"int8": weights of bfloat16 on a CPU are rounded to int8, one factor for each output, which
    makes steps of few sequences up to twice as fast. None: they stay as they are."""
    max_logprobs: int = 20
    """Most likeliest tokens that a request may want log-probabilities of, for each token of its
    output or prompt; -1: the whole vocabulary."""
    seed: int = 0
    """Of the seeds given to requests that have none, and of dummy weights."""
    nvtx: bool | None = None
    """NVTX ranges around the stages of a step; None: STEPGRAPH_NVTX, else off."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, checks.positive(name, value))
        size = self.block_size or 1
        if size > MAX_BLOCK_SIZE or size & (size - 1):
            raise ConfigError(f"block_size={size} is not a power of two from 1 to {MAX_BLOCK_SIZE}")
        checks.one_of("load_format", self.load_format, get_args(LoadFormat))
        checks.one_of("policy", self.policy, get_args(Policy))
        checks.one_of("quantization", self.quantization, (None, *get_args(Quantization)))
        checks.one_of("dtype", self.dtype, ("auto", *DTYPES))
        if self.graph_mode is not None:
            checks.one_of("graph_mode", self.graph_mode, get_args(GraphMode))
        checks.texts(self, ("tokenizer", "device", "attention_backend"))
        object.__setattr__(self, "seed", checks.whole("seed", self.seed, *_SEEDS))
        checks.share("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.capture_sizes is not None:
            object.__setattr__(self, "capture_sizes", checks.capture_sizes(self.capture_sizes))
        if self.itl_target_ms is not None:
            checks.itl_target_ms(self.itl_target_ms, self.policy)
        object.__setattr__(
            self, "max_logprobs", checks.whole("max_logprobs", self.max_logprobs, *_TOPS)
        )
        options = self.flashinfer_options
        if not isinstance(options, FlashInferOptions | None):
            raise ConfigError(f"flashinfer_options={options!r} are not FlashInferOptions")
        for name in ("enable_prefix_caching", "bucket_fitting", *_OPEN_SWITCHES):
            value = getattr(self, name)
            may_be_open = name in _OPEN_SWITCHES
            if not isinstance(value, bool) and not (may_be_open and value is None):
                raise ConfigError(f"{name}={value!r} is not True or False")

    def resolve_model(self) -> Path:
        """The model's local directory, fetched or converted first if need be.

        Raises:
            ModelLoadError: there is no such model, or it can't be fetched.
        """
        cache_dir = read_environment().get("STEPGRAPH_CACHE_DIR")
        return model_source.resolve_model(self.model, cache_dir=cache_dir)

    def resolve_tokenizer(self) -> Path:
        """The local directory that the tokenizer is in; raises as `resolve_model`."""
        if self.tokenizer is None:
            return self.resolve_model()
        return dataclasses.replace(self, model=self.tokenizer).resolve_model()

    def resolve(
        self,
        decoder: DecoderConfig,
        path: Path,
        stored_dtype: torch.dtype | None,
        environ: Mapping[str, str] | None = None,
    ) -> ResolvedConfig:
        """Decide everything left open, for one model; nothing is allocated.

        Args:
            decoder: the model's shape.
            path: the model's directory.
            stored_dtype: of the checkpoint's weights; None if there are none.
            environ: in place of os.environ.

        Raises:
            ConfigError: two options, or an option and the model, don't go together.
        """
        env = read_environment(environ)
        reasons: dict[str, str] = {}
        device = checks.resolve_device(self.device, reasons)
        budget = self._resolve_budget(device, env, reasons)
        num_seqs = self._resolve_num_seqs(budget, reasons)
        dtype = self._resolve_dtype(decoder, stored_dtype, reasons)
        if self.quantization is not None and (device.type, dtype) != ("cpu", torch.bfloat16):
            raise ConfigError(
                f"quantization={self.quantization!r} is for bfloat16 on a CPU, not for {dtype} on "
                f"{device}; leave it out, or ask for dtype='bfloat16' and device='cpu'"
            )
        graph_mode = self._resolve_graph_mode(device, env, reasons)
        ladders = None
        if graph_mode != "none":
            rates = device_rates(device)
            ridge = estimated_cost(decoder, bytes_per_value=dtype.itemsize, rates=rates).ridge
            ladders = self._resolve_ladders(graph_mode, num_seqs, budget, ridge, env, reasons)
        if self.bucket_fitting and (ladders is None or ladders.mixed is None):
            raise ConfigError(
                f"bucket_fitting=True, but under graph_mode={graph_mode!r} no sizes are captured "
                f"that prompts could be fitted to; use 'piecewise' or 'full_and_piecewise'"
            )
        resolved = ResolvedConfig(
            model_path=path,
            load_format=self.load_format,
            dtype=dtype,
            device=device,
            max_model_len=self._resolve_model_len(decoder, reasons),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=self.max_prefill_chunk,
            block_size=self.block_size or DEFAULT_BLOCK_SIZE,
            num_kv_blocks=self.num_kv_blocks,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=float(self.gpu_memory_utilization),
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.policy,
            graph_mode=graph_mode,
            ladders=ladders,
            lazy_capture=self._resolve_switch("lazy_capture", env, reasons),
            bucket_fitting=self.bucket_fitting,
            compile=self._resolve_compile(device, env, reasons),
            itl_target_ms=None if self.itl_target_ms is None else float(self.itl_target_ms),
            overlap_scheduling=self._resolve_overlap(device, reasons),
            attention_backend=self.attention_backend or env.get("STEPGRAPH_ATTENTION", "auto"),
            flashinfer_options=self.flashinfer_options,
            quantization=self.quantization,
            max_logprobs=self.max_logprobs,
            seed=self.seed,
            nvtx=self._resolve_switch("nvtx", env, reasons),
            cache_dir=env.get("STEPGRAPH_CACHE_DIR", model_source.cache_directory()),
            reasons=reasons,
        )
        block_size = self._resolve_block_size(resolved, decoder, reasons)
        return dataclasses.replace(resolved, block_size=block_size)

    def _resolve_dtype(
        self, decoder: DecoderConfig, stored_dtype: torch.dtype | None, reasons: dict[str, str]
    ) -> torch.dtype:
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        if decoder.declared_dtype is not None:
            dtype, reason = decoder.declared_dtype, "declared in config.json"
        elif stored_dtype is not None:
            dtype, reason = stored_dtype, "the dtype the weights are stored in"
        else:
            dtype, reason = torch.bfloat16, "neither declared nor stored"
        if dtype not in DTYPES.values():
            raise ConfigError(
                f"the model's dtype {dtype} ({reason}) can't be run; ask for one of "
                f"{', '.join(DTYPES)}"
            )
        reasons["dtype"] = reason
        return dtype

    def _resolve_model_len(self, decoder: DecoderConfig, reasons: dict[str, str]) -> int:
        limit = decoder.max_position_embeddings
        if self.max_model_len is None:
            reasons["max_model_len"] = "the positions that the model has"
            return limit
        if self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len={self.max_model_len} exceeds the model's {limit} positions; "
                f"ask for at most {limit}, or set a rope scaling in config.json"
            )
        return self.max_model_len

    def _resolve_budget(
        self, device: torch.device, env: Mapping[str, Any], reasons: dict[str, str]
    ) -> int:
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if "STEPGRAPH_MAX_NUM_BATCHED_TOKENS" in env:
            reasons["max_num_batched_tokens"] = "STEPGRAPH_MAX_NUM_BATCHED_TOKENS"
            return int(env["STEPGRAPH_MAX_NUM_BATCHED_TOKENS"])
        reasons["max_num_batched_tokens"] = f"the default on {device.type}"
        return 512 if device.type == "cpu" else 8192

    def _resolve_num_seqs(self, budget: int, reasons: dict[str, str]) -> int:
        if self.max_num_seqs is None:
            reasons["max_num_seqs"] = "256, or the token budget if that is less"
            return min(256, budget)
        if self.max_num_seqs > budget:
            raise ConfigError(
                f"max_num_seqs={self.max_num_seqs} exceeds the token budget "
                f"max_num_batched_tokens={budget}, so not every decode would fit into a step; "
                f"lower the one or raise the other"
            )
        return self.max_num_seqs

    def _resolve_block_size(
        self, resolved: ResolvedConfig, decoder: DecoderConfig, reasons: dict[str, str]
    ) -> int:
        """Last, since which attention backend runs depends on the other choices."""
        backend = resolved.attention_backend
        if self.block_size is None:
            spec = resolved.attention_spec(decoder)
            size, why = preferred_block_size(backend, spec, cache_dir=resolved.cache_dir)
            reasons["block_size"] = why
            return size
        multiple = block_size_multiple(backend)
        if self.block_size % multiple:
            raise ConfigError(
                f"block_size={self.block_size} is not a multiple of {multiple}, as "
                f"attention_backend={backend!r} needs; leave block_size open, or ask for {multiple}"
            )
        return self.block_size

    def _resolve_switch(self, name: str, env: Mapping[str, Any], reasons: dict[str, str]) -> bool:
        value, variable = getattr(self, name), f"STEPGRAPH_{name.upper()}"
        if value is None and variable in env:
            reasons[name] = variable
            value = env[variable]
        return bool(value)

    def _resolve_graph_mode(
        self, device: torch.device, env: Mapping[str, Any], reasons: dict[str, str]
    ) -> GraphMode:
        if self.graph_mode is not None:
            return self.graph_mode
        if "STEPGRAPH_GRAPH_MODE" in env:
            reasons["graph_mode"] = "STEPGRAPH_GRAPH_MODE"
            return cast("GraphMode", env["STEPGRAPH_GRAPH_MODE"])
        reasons["graph_mode"] = f"the default on {device.type}"
        return "none" if device.type == "cpu" else "full_and_piecewise"

    def _resolve_compile(
        self, device: torch.device, env: Mapping[str, Any], reasons: dict[str, str]
    ) -> bool:
        wanted = self._resolve_switch("compile", env, reasons)
        if self.compile is None and "compile" not in reasons:
            wanted = device.type == "cuda"
            # profiling/RESULTS.md compares it with native regions.
            why = "" if wanted else ", where it gains a few percent at most"
            reasons["compile"] = f"the default on {device.type}{why}"
        refusal = compiler_refusal(device) if wanted else None
        if refusal is not None:
            reasons["compile"] = refusal
            logger.warning("layers can't be compiled and run uncompiled: %s", refusal)
        return wanted and refusal is None

    def _resolve_overlap(self, device: torch.device, reasons: dict[str, str]) -> bool:
        if self.overlap_scheduling is not None:
            return self.overlap_scheduling
        reasons["overlap_scheduling"] = f"the default on {device.type}"
        return device.type == "cuda"

    def _resolve_ladders(
        self,
        graph_mode: GraphMode,
        num_seqs: int,
        budget: int,
        ridge: int,
        env: Mapping[str, Any],
        reasons: dict[str, str],
    ) -> CaptureLadders:
        sizes = self.capture_sizes
        if sizes is None and "STEPGRAPH_CAPTURE_SIZES" in env:
            reasons["ladders"] = "STEPGRAPH_CAPTURE_SIZES"
            sizes = env["STEPGRAPH_CAPTURE_SIZES"]
        if sizes is None:
            reasons["ladders"] = "chosen by the limits and the model's shape"
            ladders = CaptureLadders.default(
                max_num_seqs=num_seqs, max_num_batched_tokens=budget, ridge=ridge
            )
        else:
            assert not isinstance(sizes, str), "parsed when the options were made"
            ladders = CaptureLadders.explicit(
                sizes, max_num_seqs=num_seqs, max_num_batched_tokens=budget
            )
        if graph_mode == "full":
            return ladders.without_piecewise_graphs()
        return ladders.without_full_graphs() if graph_mode == "piecewise" else ladders


_OPEN_SWITCHES = ("compile", "lazy_capture", "nvtx", "overlap_scheduling")
_SEEDS = (-(2**63), 2**64 - 1, "a whole number of 64 bits")
_TOPS = (-1, 2**31 - 1, "a whole number of at least 0, or -1")
_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_prefill_chunk",
    "block_size",
    "num_kv_blocks",
    "kv_cache_bytes",
)
