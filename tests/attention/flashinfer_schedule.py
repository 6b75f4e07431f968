"""How the stand-in for FlashInfer plans, and how its kernel follows the plan.

The arithmetic of `make_schedule` is that of the package's PrefillSplitQOKVIndptr and PrefillPlan
(scheduler.cuh), as far as it decides how much workspace is needed and how sequences are split.
A schedule is a list of int32: items, tokens of a part, page size; then request and part of each
item. Results are computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graphs.host_graph import leaf

NUM_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a plan is made for, besides the lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    is_graph: bool
    version: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The planner's result."""

    words: list[int]
    vector: list[int]
    float_bytes: int
    int_bytes: int


def make_schedule(shape: Shape, num_rows: list[int], num_pages: list[int]) -> Schedule:
    """Plan sequences of so many query rows and pages."""
    group, num_seqs = shape.num_heads // shape.num_kv_heads, len(num_rows)
    most_parts = 2 * NUM_SMS // shape.num_kv_heads
    mean = group if shape.is_graph else sum(num_rows) * group // num_seqs
    tile = 128 if mean > 64 and shape.head_dim < 256 else 64 if mean > 16 else 16
    tiles = [-(-rows * group // tile) for rows in num_rows]
    if shape.window_left >= 0:
        limit = -(-(shape.window_left + tile) // shape.page_size)
        num_pages = [min(pages, limit) for pages in num_pages]
    pages = [max(1, n) for n in num_pages]
    low, high = max(128 // shape.page_size, 1), max(pages)
    while low < high:
        middle = (low + high) // 2
        if sum(t * -(-n // middle) for t, n in zip(tiles, pages, strict=True)) > most_parts:
            low = middle + 1
        else:
            high = middle
    split = shape.is_graph or low < max(pages)
    if shape.is_graph and shape.version >= (0, 7, 4) and sum(tiles) > most_parts:
        split = False
    chunks = [-(-n // low) for n in pages]
    padded = sum(t * c for t, c in zip(tiles, chunks, strict=True))
    if shape.is_graph:
        most_tiles = sum(tiles)
        if shape.version < (0, 7, 4):
            most_tiles = -(-num_seqs * group // tile) + num_seqs - 1
        assert padded <= max(most_parts, most_tiles), "more parts than were reserved"
        padded = max(most_parts, most_tiles)
    partial = padded * tile
    if shape.version >= (0, 7, 1):
        partial = -(-partial // group)
    items = [(r, c) for r, n in enumerate(chunks) if num_rows[r] for c in range(n)]
    words = [len(items), low * shape.page_size if split else 1 << 30, shape.page_size]
    return Schedule(
        words=words + [word for item in items for word in item],
        vector=[padded, tile, int(shape.is_graph), int(split)],
        float_bytes=split * shape.num_heads * partial * (shape.head_dim + 1) * 4,
        int_bytes=13 * padded + 4 * (num_seqs + split * sum(num_rows) + 6),
    )


@leaf
def attend_pages(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    int_workspace: torch.Tensor,
    options: tuple[bool, int, float, float, float],
) -> None:
    """The kernel. Rows of requests that no item of the schedule names keep what they hold.

    Args:
        q: [num_rows, num_heads, head_dim].
        cache: keys and values, [num_pages, page_size, num_kv_heads, head_dim].
        out: like q.
        qo_indptr: [num_seqs + 1].
        kv_pages: indptr, indices and last_page_len, read when it runs.
        int_workspace: where the schedule lies, read when it runs.
        options: causal, window_left, soft cap, scale, and the result of rows without keys.
    """
    words = int_workspace.view(torch.int32)
    num_items, chunk, page_size = words[:3].tolist()
    parts: dict[int, list[int]] = {}
    for request, part in words[3 : 3 + 2 * num_items].view(-1, 2).tolist():
        parts.setdefault(request, []).append(part)
    indptr, indices, last_page_len = kv_pages
    rows, pages = qo_indptr.tolist(), indptr.tolist()
    for request, numbers in parts.items():
        own = indices[pages[request] : pages[request + 1]].long()
        num_keys = (len(own) - 1) * page_size + int(last_page_len[request]) if len(own) else 0
        num_rows = rows[request + 1] - rows[request]
        start = max(0, num_keys - num_rows - options[1]) if options[1] >= 0 else 0
        seen = [
            torch.arange(start + n * chunk, min(start + (n + 1) * chunk, num_keys))
            for n in numbers
            if start + n * chunk < num_keys
        ]
        target = slice(rows[request], rows[request + 1])
        if not seen:
            out[target] = options[4]
            continue
        position = torch.cat(seen)
        slots = own[position // page_size], position % page_size
        keys, values = (tensor[slots].double() for tensor in cache)
        out[target] = _attend(q[target].double(), keys, values, position, num_keys, options)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    num_keys: int,
    options: tuple[bool, int, float, float, float],
) -> torch.Tensor:
    """Rows are the last tokens of num_keys; keys and values lie at the positions given."""
    causal, window_left, soft_cap, scale, _ = options
    num_rows, num_heads, head_dim = query.shape
    grouped = query.view(num_rows, keys.shape[1], -1, head_dim)
    scores = torch.einsum("rhgd,khd->rhgk", grouped, keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row = torch.arange(num_keys - num_rows, num_keys)[:, None]
    hidden = position > row if causal else torch.zeros(num_rows, len(position), dtype=torch.bool)
    if window_left >= 0:
        hidden = hidden | (position < row - window_left)
    weights = scores.masked_fill(hidden[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("rhgk,khd->rhgd", weights, values).reshape(num_rows, num_heads, head_dim)
