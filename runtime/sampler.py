"""Draws the next token of each row from its logits, one uniform number a row.

A draw must not depend on the rest of the batch, so no rounding may depend on how a sum is
grouped. Probabilities are therefore scaled to whole numbers ("weights", 2**50 for probability 1)
whose sums are below 2**53 and so are exact in float64 in any order, on any device. The draw is the
first token, in vocabulary order, at which the running sum of the kept weights exceeds
floor(uniform * total): never one of weight 0, and always one that exists, since uniform < 1.

Filters act in vLLM's order: temperature, min_p, top_k, top_p, each with the meaning that
transformers' logits processor of that name gives it. Where several tokens tie at the edge of
top_p, lower ids are kept first. The vocabulary is sorted only for top_p.

Nothing here waits for an accelerator. On a CPU, where reading is free, rows that use a filter
are drawn one by one from their few candidates instead of sorting the vocabulary, and all others by
a native library where there is one; both give the same tokens as the batched way, but for the last
bit of a probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from .native_sampler import draw_native

_SCALE = 2.0**50
_GROUP = 128
"""Tokens summed at once while searching for the drawn one."""

_DIVISOR_MIN = torch.finfo(torch.float32).tiny
_DIVISOR_MAX = torch.finfo(torch.float32).max

_Floats = npt.NDArray[np.float32]
_Indices = npt.NDArray[np.intp]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling inputs of one step for the n rows whose next token is wanted.

    The flags say which stages the step needs; the host decides them, so that no stage has to ask
    the device. A flag that is set without need costs time and changes no token.
    """

    temperature: torch.Tensor
    """[n] float32, device; 0 is greedy."""
    top_k: torch.Tensor
    """[n] int32, device; 0 is off."""
    top_p: torch.Tensor
    """[n] float32, device; 1 is off."""
    min_p: torch.Tensor
    """[n] float32, device; 0 is off."""
    uniforms: torch.Tensor
    """[n] float32 in [0, 1), device; see `stateless_uniforms`."""
    all_greedy: bool
    """Every row has temperature 0."""
    max_top_k: int
    """Largest value of top_k; 0: no row uses it."""
    any_top_p: bool
    """Some row has top_p below 1."""
    any_min_p: bool
    """Some row has min_p above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The outcome of one `sample`."""

    token_ids: torch.Tensor
    """[n] int64, device."""
    is_valid: torch.Tensor
    """[n] bool, device; False, with token 0, where the logits hold NaN or +inf, or only -inf."""


def stateless_uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each (seed, output position), a pure function of the two.

    SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
    with direct access: each seed is mixed into the start of its own stream, and the number is that
    stream's output at the position. The top 24 bits are used, which float32 holds exactly.

    Args:
        seeds: [n] uint64.
        positions: [n] int64, not negative.

    Returns:
        [n] float32, multiples of 2**-24.
    """
    return stream_uniforms(seed_streams(seeds), positions)


def seed_streams(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[n] uint64, where each seed's stream starts: the part of `stateless_uniforms` that stays."""
    return _mix64(seeds + _GOLDEN_GAMMA)


def stream_uniforms(
    streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """[n] float32: `stateless_uniforms` of the seeds whose `seed_streams` these are."""
    mixed = positions.astype(np.uint64)
    mixed += np.uint64(1)
    mixed *= _GOLDEN_GAMMA
    mixed += streams
    uniforms: npt.NDArray[np.float32] = (_mix64(mixed) >> np.uint64(40)).astype(np.float32)
    uniforms *= np.float32(2.0**-24)
    return uniforms


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser, David Stafford's variant 13 of MurmurHash3's."""
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def sample(logits: torch.Tensor, batch: SamplingBatch, library: str | None = None) -> SampledTokens:
    """Draw one token a row.

    Args:
        logits: [n, vocab] float32; not changed.
        batch: the n rows' options, on the logits' device.
        library: on a CPU, what `sampler_library` gave; None: torch's operators alone.
    """
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32"
    assert logits.shape[0] == batch.temperature.shape[0], "one row of logits for each row"
    if library is not None:
        return _sample_natively(library, logits, batch)
    best_logits, best_ids = _row_max(logits)
    is_valid = best_logits.isfinite()
    token_ids = best_ids
    if not batch.all_greedy:
        draw = _draw_on_host if logits.device.type == "cpu" else _draw_batched
        token_ids = draw(logits, best_logits, best_ids, batch)
    return SampledTokens(token_ids=token_ids.where(is_valid, 0), is_valid=is_valid)


def _row_max(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of each row and the first token that has it; NaN counts as largest."""
    if logits.device.type != "cpu":
        values, ids = logits.max(dim=-1)
        return values, ids
    # numpy's is vectorised over the row, torch's is not: a tenth of the time.
    ids = torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    return logits.gather(-1, ids[:, None])[:, 0], ids


def _weights(
    logits: torch.Tensor, best_logits: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """[n, vocab] float32: floor(2**50 * probability); NaN all over in an invalid row."""
    # The largest scaled logit is 0 and all others are below, so no temperature can overflow;
    # the clamp keeps greedy rows of a mixed batch from 0 / 0.
    divisor = temperature.clamp(_DIVISOR_MIN, _DIVISOR_MAX)
    scaled = (logits - best_logits[:, None]).div_(divisor[:, None])
    return scaled.softmax(dim=-1).mul_(_SCALE).floor_()


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[n] int64: the first token at which the running sum exceeds floor(uniform * total).

    Searches the sums of groups of tokens, then the one group. An invalid row gives some number.
    """
    n, vocab = weights.shape
    num_groups = -(-vocab // _GROUP)
    padded = functional.pad(weights, (0, -vocab % _GROUP)) if vocab % _GROUP else weights
    groups = padded.view(n, num_groups, _GROUP)
    sums = groups.double().sum(dim=-1)
    ends = sums.cumsum(dim=-1)
    targets = (uniforms.double() * ends[:, -1]).floor_()[:, None]
    # Some end is past the target, except in invalid rows, which may weigh nothing at all.
    group = (ends <= targets).sum(dim=-1, keepdim=True).clamp_(max=num_groups - 1)
    begin = (ends - sums).gather(-1, group)
    inside = groups.gather(1, group[:, :, None].expand(-1, -1, _GROUP))[:, 0]
    offset = (inside.double().cumsum(dim=-1).add_(begin) <= targets).sum(dim=-1)
    return group[:, 0] * _GROUP + offset


# -- all rows at once, without a look at the values: for accelerators ------------------------------


def _draw_batched(
    logits: torch.Tensor, best_logits: torch.Tensor, best_ids: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """[n] int64: greedy rows' best tokens and all others' drawn ones."""
    weights = _kept_weights(logits, best_logits, best_ids, batch)
    return _pick(weights, batch.uniforms).where(batch.temperature > 0, best_ids)


def _kept_weights(
    logits: torch.Tensor, best_logits: torch.Tensor, best_ids: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """[n, vocab] weights with 0 for the tokens that the filters drop."""
    weights = _weights(logits, best_logits, batch.temperature)
    if batch.any_min_p:
        smallest = batch.min_p[:, None] * weights.gather(-1, best_ids[:, None])
        weights = weights.masked_fill(weights < smallest, 0)
    if batch.max_top_k:
        weights = _keep_top_k(weights, logits, batch.top_k, batch.max_top_k)
    if batch.any_top_p:
        weights = _keep_top_p(weights, batch.top_p)
    return weights


def _keep_top_k(
    weights: torch.Tensor, logits: torch.Tensor, top_k: torch.Tensor, max_top_k: int
) -> torch.Tensor:
    """Weights with 0 for the tokens below their row's k-th largest logit."""
    k = min(max_top_k, logits.shape[-1])
    largest = logits.topk(k, dim=-1).values
    kth = largest.gather(-1, (top_k.long() - 1).clamp(0, k - 1)[:, None])
    return weights.masked_fill((logits < kth) & (top_k > 0)[:, None], 0)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Weights with 0 for the tokens whose likelier ones hold top_p already."""
    ordered, token_ids = weights.sort(dim=-1, descending=True, stable=True)
    ordered_sums = ordered.double().cumsum(dim=-1)
    limits = (top_p.double()[:, None] * ordered_sums[:, -1:]).clamp(min=1)
    keep = ordered_sums - ordered < limits
    return torch.zeros_like(weights).scatter(-1, token_ids, ordered.where(keep, 0))


# -- row by row, each from its few candidates: for the CPU -----------------------------------------


def _draw_on_host(
    logits: torch.Tensor, best_logits: torch.Tensor, best_ids: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """As `_draw_batched`, but works only on the rows that are drawn at all."""
    rows = ((batch.temperature > 0) & best_logits.isfinite()).nonzero()[:, 0]
    return best_ids.index_put((rows,), _draw_rows(rows, logits, best_logits, batch))


def _sample_natively(library: str, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    temperature, is_filtered = batch.temperature, None
    if batch.max_top_k or batch.any_top_p or batch.any_min_p:
        is_filtered = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
        is_filtered &= temperature > 0
        temperature = temperature.masked_fill(is_filtered, 0)
    token_ids, best_logits = draw_native(library, logits, temperature, batch.uniforms)
    is_valid = torch.from_numpy(np.isfinite(best_logits.numpy()))  # several operators in torch
    if is_filtered is not None:
        rows = (is_filtered & is_valid).nonzero()[:, 0]
        token_ids[rows] = _draw_rows(rows, logits, best_logits, batch)
    return SampledTokens(token_ids=token_ids.where(is_valid, 0), is_valid=is_valid)


def _draw_rows(
    rows: torch.Tensor, logits: torch.Tensor, best_logits: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """[len(rows)] int64: the drawn tokens of some rows, given in ascending order."""
    logits = _take(logits, rows)
    weights = _weights(logits, best_logits[rows], batch.temperature[rows])
    uniforms = batch.uniforms[rows]
    top_k, top_p = batch.top_k[rows].numpy(), batch.top_p[rows].numpy()
    min_p = batch.min_p[rows].numpy()
    is_filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    drawn = np.empty(len(rows), dtype=np.int64)
    whole = np.flatnonzero(~is_filtered)
    if len(whole):
        chosen = torch.from_numpy(whole)
        drawn[whole] = _pick(_take(weights, chosen), uniforms[chosen]).numpy()
    for i in np.flatnonzero(is_filtered).tolist():
        drawn[i] = _draw_row(
            logits[i].detach().numpy(),
            weights[i].numpy(),
            top_k=int(top_k[i]),
            top_p=float(top_p[i]),
            min_p=min_p[i],
            uniform=float(uniforms[i]),
        )
    return torch.from_numpy(drawn)


def _take(rows_of: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The given rows, ascending; no copy if that is all of them."""
    return rows_of if len(rows) == len(rows_of) else rows_of[rows]


def _draw_row(
    logits: _Floats,
    weights: _Floats,
    *,
    top_k: int,
    top_p: float,
    min_p: np.float32,
    uniform: float,
) -> int:
    """The token of one row that uses at least one filter.

    Candidates are ascending token ids throughout: the running sum goes in vocabulary order.
    """
    kept = _top_k_candidates(logits, top_k) if top_k > 0 else None
    if min_p > 0:
        # The likeliest token is always among the k, so this may come second, and is cheaper so.
        kept = _min_p_candidates(weights, kept, min_p)
    if top_p < 1:
        kept = _top_p_candidates(weights, kept, top_p)
    assert kept is not None, "a filtered row has a filter"
    ends = weights[kept].cumsum(dtype=np.float64)
    return int(kept[np.searchsorted(ends, np.floor(uniform * ends[-1]), side="right")])


def _top_k_candidates(logits: _Floats, top_k: int) -> _Indices:
    """Tokens whose logit is not below the k-th largest."""
    vocab = len(logits)
    if top_k >= vocab:
        return np.arange(vocab)
    # Split the row into groups: the k-th largest of the groups' maxima is a lower bound of the k-th
    # largest logit, and with many more groups than k a tight one.
    depth = min(max(vocab // (8 * top_k), 1), 64)
    width = vocab // depth
    maxima = logits[: depth * width].reshape(depth, width).max(axis=0)
    bound = np.partition(maxima, width - top_k)[width - top_k]
    candidates = np.flatnonzero(logits >= bound)
    values = logits[candidates]
    kth = np.partition(values, len(values) - top_k)[len(values) - top_k]
    keep: _Mask = values >= kth
    return candidates[keep]


def _top_p_candidates(weights: _Floats, kept: _Indices | None, top_p: float) -> _Indices:
    """Of the kept tokens (None: all) those whose likelier ones do not hold top_p already."""
    if kept is None:
        total = float(weights.sum(dtype=np.float64))
        limit = _mass_limit(top_p, total)
        # Tokens of at most this weight hold less together than top_p leaves out.
        kept = np.flatnonzero(weights > (total - limit) / len(weights) * (1 - 1e-9))
        values = weights[kept]
    else:
        values = weights[kept]
        limit = _mass_limit(top_p, float(values.sum(dtype=np.float64)))
    # Bins of an eighth of an octave, which are the leading bits of the floats, find the weight at
    # the edge up to a factor of 1.125; only its bin is sorted.
    bins = values.view(np.int32) >> 20
    bins -= bins.min()
    sums = np.bincount(bins, weights=values)
    likelier_sums = sums[::-1].cumsum()[::-1] - sums
    edge = np.flatnonzero(likelier_sums < limit)[0]
    at_edge = values[bins == edge]
    ordered = np.sort(at_edge)[::-1]
    before = likelier_sums[edge] + (ordered.cumsum(dtype=np.float64) - ordered)
    num_kept = np.count_nonzero(before < limit)
    smallest = ordered[num_kept - 1]
    num_tied_kept = num_kept - np.count_nonzero(at_edge > smallest)
    keep: _Mask = values > smallest
    keep[np.flatnonzero(values == smallest)[:num_tied_kept]] = True
    return kept[keep]


def _mass_limit(top_p: float, total: float) -> float:
    """A token stays while likelier ones weigh less than this; 1 leaves the likeliest."""
    return max(top_p * total, 1.0)


def _min_p_candidates(weights: _Floats, kept: _Indices | None, min_p: np.float32) -> _Indices:
    """Of the kept tokens (None: all) those not below min_p times the likeliest one's weight."""
    if kept is None:
        return np.flatnonzero(weights >= min_p * weights.max())
    values = weights[kept]
    keep: _Mask = values >= min_p * values.max()
    return kept[keep]
