"""Fill a decoder, one parameter after another: from a safetensors checkpoint, or with random
numbers."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, ModelLoadError, UnsupportedModelError
from .checkpoint import WEIGHT_DTYPES, StoredTensor, read_headers, read_into
from .config import load_decoder_config
from .decoder import Decoder, DecoderLayer
from .packing import WeightPacker

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from .config import DecoderConfig

_logger = logging.getLogger("stepgraph.runtime")

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_BASE_PREFIX = "model."
# Rotary buffers that old versions of transformers saved; they follow from the config.
_HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_MAX_LISTED = 10
_DUMMY_STD = 0.02


def load_decoder(
    config: DecoderConfig,
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    packing: Packing | None = None,
) -> Decoder:
    """A decoder with its weights; for arguments and errors see DecoderWeights."""
    return DecoderWeights(
        config,
        path,
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=seed,
        packing=packing,
    ).decoder


class DecoderWeights:
    """A decoder and its weights in `dtype` on `device`, which can be read again in place.

    `load_format` "auto" reads the safetensors of the model directory `path`; "dummy" reads nothing
    and draws weights from `seed` (equal for equal seed, dtype and device), for tests and
    benchmarks. With `packing` weights are packed one by one as they are read, so that memory never
    holds more than one of them twice.

    A tied head follows transformers: with only the embedding or only the head stored, both use it;
    with both stored and different, each keeps its own (logged as a warning).

    Raises ModelLoadError for missing, unexpected or misshapen tensors, naming them, and for files
    that are missing or damaged; UnsupportedModelError for packed (quantised) weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        load_format: str = "auto",
        seed: int = 0,
        packing: Packing | None = None,
    ) -> None:
        if load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ConfigError(
                f"weights can't be held in {dtype}; use float32, float16, bfloat16 or float64"
            )
        self._dtype, self._device, self._seed = dtype, device, seed
        self._path = path if load_format == "auto" else None
        stored = None
        if self._path is not None:
            stored, config = _read_stored(path, config, dtype)
        self.decoder = Decoder(
            config, dtype=dtype, device=device, weights_device=torch.device("meta")
        )
        """Stays the same object; so do its plain parameters."""
        self.is_whole = False
        """False: not all weights are in place, so nothing may run."""
        self._parts = _parts(self.decoder)
        self._shapes = {name: weight.shape for name, weight in self.decoder.named_parameters()}
        if stored is not None:
            self._check_fit(path, stored)
        self._packer = None
        if packing is not None:
            self._packer = WeightPacker(self.decoder, **packing._asdict())
        self._fill(stored)
        if self._packer is not None:
            self._packer.log()

    def reload(self, path: Path | None = None) -> None:
        """Read the weights of another checkpoint of this model, or the same one again, in place.

        What code may hold addresses of keeps them: packed weights, norms and biases always, other
        weights but for a `release` in between. All is checked before the first byte is written; if
        something fails after that, `is_whole` stays False until a reload succeeds.

        Args:
            path: the model directory; None: the one that was read last, or, where none was, the
                same random numbers.

        Raises ModelLoadError as the class does, and for a model of another config.
        """
        path = path or self._path
        stored = None
        if path is not None:
            stored, config = _read_stored(path, load_decoder_config(path), self._dtype)
            self._check_same_model(path, config)
            self._check_fit(path, stored)
        try:
            self._fill(stored)
        except Exception as error:
            raise ModelLoadError(
                f"reading weights from {path or 'the seed'} failed half-way: {error}. What is in "
                "memory now is of no use: requests are refused until they are read whole, by "
                "reload_weights(), or by wake_up() if the engine sleeps"
            ) from error
        self._path = path

    def release(self) -> None:
        """Give the memory of weights back until `reload`.

        Norms and biases, next to nothing, stay: native regions hold their addresses.
        """
        self.is_whole = False
        if self._packer is not None:
            self._packer.release()
        for name, shape in self._shapes.items():
            weight = self.decoder.get(name)
            if isinstance(weight, Tensor) and len(shape) > 1 and not name.endswith("norm"):
                weight.data = weight.new_empty(0)

    @torch.inference_mode(mode=False)  # the caller's mode would mark what is allocated
    def _fill(self, stored: dict[str, StoredTensor] | None) -> None:
        """Read every parameter, or draw it, into memory that it has or gets now."""
        self.is_whole = False
        generator = torch.Generator(device=self._device).manual_seed(self._seed)
        for name in self._shapes:
            weight = self._target(name)
            if stored is None:
                _draw(name, weight, generator)
            else:
                rows = [part.rows for part in self._parts[name]]
                for part, target in zip(self._parts[name], torch.split(weight, rows), strict=True):
                    read_into(stored[part.stored], target)
            (self._packer or self.decoder).put(name, weight)
        self.is_whole = True

    def _target(self, name: str) -> Tensor:
        """What a parameter is read into: itself, unless it is packed or has no memory yet."""
        weight, shape = self.decoder.get(name), self._shapes[name]
        if not isinstance(weight, Tensor) or weight.is_meta:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        if weight.shape != shape:  # it was released
            weight.data = weight.new_empty(shape)
        return weight

    def _check_fit(self, path: Path, stored: dict[str, StoredTensor]) -> None:
        _check_fit(path, stored, {part.stored: part for of in self._parts.values() for part in of})

    def _check_same_model(self, path: Path, config: DecoderConfig) -> None:
        """Raise ModelLoadError if the decoder's own config isn't that one."""
        ours = self.decoder.config
        theirs = dataclasses.replace(
            config,
            declared_dtype=ours.declared_dtype,
            # Ours may have been lowered.
            max_position_embeddings=min(
                config.max_position_embeddings, ours.max_position_embeddings
            ),
        )
        names = [field.name for field in dataclasses.fields(ours)]
        pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in names]
        if differences := [f"{name}={a!r}, not {b!r}" for name, a, b in pairs if a != b]:
            raise ModelLoadError(
                f"the weights in {path} are of another model than the one that runs: "
                f"{_listed(differences)}. Make a new engine for them"
            )


class Packing(NamedTuple):
    """How weights are packed: the arguments of WeightPacker."""

    int8: bool = False
    level: str | None = None
    cache_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A checkpoint's tensor and the rows of a parameter that it fills."""

    stored: str
    """Name in the checkpoint, which is that in transformers."""
    rows: int
    shape: tuple[int, ...]
    """Shape that the checkpoint must have; it broadcasts to the rows'."""


def _parts(decoder: Decoder) -> dict[str, tuple[_Part, ...]]:
    """What fills each parameter, by its name; first rows first."""
    parts: dict[str, tuple[_Part, ...]] = {
        "embed_tokens": (_whole(_EMBEDDING, decoder.embed_tokens),),
        "norm": (_whole("model.norm.weight", decoder.norm),),
    }
    if decoder.lm_head is not None:
        parts["lm_head"] = (_whole(_HEAD, decoder.lm_head),)
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        for name, of in _layer_parts(layer, prefix):
            parts[f"registered_layers.{index}.{name}"] = of
    return parts


def _layer_parts(layer: DecoderLayer, prefix: str) -> Iterator[tuple[str, tuple[_Part, ...]]]:
    yield "input_norm", (_whole(f"{prefix}input_layernorm.weight", layer.input_norm),)
    post_norm = layer.post_attention_norm
    yield "post_attention_norm", (_whole(f"{prefix}post_attention_layernorm.weight", post_norm),)
    query_rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    inner = layer.down_weight.shape[1]
    fused = (
        (("q_proj", "k_proj", "v_proj"), (query_rows, kv_rows, kv_rows), "self_attn", "qkv"),
        (("o_proj",), (layer.o_weight.shape[0],), "self_attn", "o"),
        (("gate_proj", "up_proj"), (inner, inner), "mlp", "gate_up"),
        (("down_proj",), (layer.down_weight.shape[0],), "mlp", "down"),
    )
    for names, rows, block, parameter in fused:
        for kind in ("weight", "bias"):
            whole: Tensor | None = getattr(layer, f"{parameter}_{kind}")
            if whole is not None:
                yield (
                    f"{parameter}_{kind}",
                    tuple(
                        _Part(
                            stored=f"{prefix}{block}.{name}.{kind}",
                            rows=count,
                            shape=(count, *whole.shape[1:]),
                        )
                        for name, count in zip(names, rows, strict=True)
                    ),
                )
    if layer.qk_norm is not None:
        # The checkpoint has one row for all heads of a kind.
        heads = {"q_norm": layer.num_heads, "k_norm": layer.num_kv_heads}
        yield (
            "qk_norm",
            tuple(
                _Part(stored=f"{prefix}self_attn.{name}.weight", rows=n, shape=(layer.head_dim,))
                for name, n in heads.items()
            ),
        )


def _whole(stored: str, parameter: Tensor) -> _Part:
    return _Part(stored=stored, rows=parameter.shape[0], shape=tuple(parameter.shape))


def _read_stored(
    path: Path, config: DecoderConfig, dtype: torch.dtype
) -> tuple[dict[str, StoredTensor], DecoderConfig]:
    """A checkpoint's tensors by their names in a model with a head, and the config they settle."""
    stored = _with_base_prefix(read_headers(path))
    stored = {name: t for name, t in stored.items() if not name.endswith(_HARMLESS_SUFFIXES)}
    _refuse_packed(path, stored)
    return stored, _settle_head(config, path, stored, dtype)


def _with_base_prefix(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Names as in a model with a head; a checkpoint of the bare decoder lacks their prefix."""
    if any(name.startswith(_BASE_PREFIX) for name in stored):
        return stored
    return {name if name == _HEAD else _BASE_PREFIX + name: t for name, t in stored.items()}


def _refuse_packed(path: Path, stored: dict[str, StoredTensor]) -> None:
    packed = [
        f"{name} ({tensor.dtype_code})"
        for name, tensor in stored.items()
        if tensor.dtype_code not in WEIGHT_DTYPES
    ]
    if packed:
        raise UnsupportedModelError(
            f"{path} holds packed or quantised weights, which aren't supported: {_listed(packed)}; "
            f"supported are {', '.join(WEIGHT_DTYPES)}"
        )


def _check_fit(path: Path, stored: dict[str, StoredTensor], parts: dict[str, _Part]) -> None:
    missing = [name for name in parts if name not in stored]
    unexpected = [name for name in stored if name not in parts]
    misshapen = [
        f"{name} (expected {list(part.shape)}, found {list(stored[name].shape)})"
        for name, part in parts.items()
        if name in stored and stored[name].shape != part.shape
    ]
    problems = [
        f"{len(names)} {kind}: {_listed(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        )
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"the weights in {path} don't fit its config.json; {'; '.join(problems)}. Check that "
            "both are of the same model (sizes, attention_bias, mlp_bias, tie_word_embeddings)"
        )


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _settle_head(
    config: DecoderConfig, path: Path, stored: dict[str, StoredTensor], dtype: torch.dtype
) -> DecoderConfig:
    """Leave one of a tied decoder's two names in `stored`, or untie it if their values differ."""
    if not config.tie_word_embeddings or _HEAD not in stored:
        return config
    if _EMBEDDING not in stored:
        stored[_EMBEDDING] = stored.pop(_HEAD)
        return config
    shape = (config.vocab_size, config.hidden_size)
    both = {name: stored[name] for name in (_EMBEDDING, _HEAD)}
    _check_fit(path, both, {n: _Part(stored=n, rows=shape[0], shape=shape) for n in both})
    embedding, head = (torch.empty(shape, dtype=dtype) for _ in both)
    read_into(stored[_EMBEDDING], embedding)
    read_into(stored[_HEAD], head)
    if torch.equal(head, embedding):
        del stored[_HEAD]
        return config
    _logger.warning(
        "the config of %s ties the head to the embedding, but its weights hold two different "
        "ones: each is used as stored",
        path,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _draw(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Norm weights 1, everything else normal with a standard deviation that keeps logits finite."""
    if name.endswith("norm"):
        weight.fill_(1.0)
    else:
        weight.normal_(0.0, _DUMMY_STD, generator=generator)
