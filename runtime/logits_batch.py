"""What a step does to its logits before the draw: gathered on the host, applied on the device.

Rules act as vLLM V1's do and in its order: the request's own processors (on the host, as in V0),
grammars, allowed ids, bad words, min_tokens and bias, penalties. Everything but the processors is
done for all rows at once, by as many operators whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .grammar_mask import GrammarWork
from .row_table import RowTable
from .sampling_params import LogitsProcessor
from .token_counts import PenaltyBatch

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """One row's logits processors and what they look at."""

    place: int
    """Row of the logits."""
    row: int
    """Row in the tables."""
    processors: tuple[LogitsProcessor, ...]
    """Applied one after another."""
    output_ids: tuple[int, ...]
    """All ids generated so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsBatch:
    """Changes to [n, vocab] logits. Index tensors are int64, on the logits' device."""

    edit_places: torch.Tensor | None
    """[e] rows of the logits where, with `edit_ids`, `edit_values` is added; None: nowhere."""
    edit_ids: torch.Tensor | None
    """[e]"""
    edit_values: torch.Tensor | None
    """[e] float32; -inf forbids a token."""
    allowed_places: torch.Tensor | None
    """[r] rows of the logits that have a list of allowed ids; None: no row has."""
    allowed_of: torch.Tensor | None
    """[a] for each of `allowed_ids`, whose it is: a place in `allowed_places`."""
    allowed_ids: torch.Tensor | None
    """[a]"""
    penalties: PenaltyBatch | None
    """None: no row has any."""
    host_work: tuple[HostWork, ...]
    """Rows that the host works on, which waits for the device."""
    grammar_work: tuple[GrammarWork, ...]
    """Rows whose masks the host prepares, while the device is busy."""


class LogitsPlan:
    """Collects one step's rules as arrays, which the caller carries to the device.

    Args:
        table: the rows.
        rows: [n] int64, rows in the table whose logits are wanted.
        num_outputs: [n] int64, how many ids each has generated.
    """

    def __init__(self, table: RowTable, rows: np.ndarray, num_outputs: np.ndarray) -> None:
        self._host_work: list[HostWork] = []
        self._grammar_work: list[GrammarWork] = []
        self.arrays: Arrays = {}
        """To be carried to the device, by name."""
        is_early = num_outputs < table.min_tokens[rows]
        self._add_edits(table, rows, is_early, np.flatnonzero(table.has_edits[rows] | is_early))
        self._add_penalties(table, rows, np.flatnonzero(table.has_penalties[rows]))

    def _add_edits(
        self, table: RowTable, rows: np.ndarray, is_early: np.ndarray, places: np.ndarray
    ) -> None:
        edits: list[tuple[int, np.ndarray, np.ndarray]] = []
        allowed: list[tuple[int, np.ndarray]] = []
        for place in places.tolist():
            row = int(rows[place])
            rules, output_ids = table.rules[row], table.output_ids.get(row, [])
            assert rules is not None, f"row {row} has no rules"
            if len(rules.bias_ids):
                edits.append((place, rules.bias_ids, rules.bias_values))
            forbidden = _completing_ids(rules.phrases, output_ids)
            if is_early[place]:
                forbidden += rules.early_ids.tolist()
            if forbidden:
                values = np.full(len(forbidden), -np.inf, dtype=np.float32)
                edits.append((place, np.array(forbidden, dtype=np.int64), values))
            if rules.allowed_ids is not None:
                allowed.append((place, rules.allowed_ids))
            if rules.processors:
                self._host_work.append(
                    HostWork(
                        place=place,
                        row=row,
                        processors=rules.processors,
                        output_ids=tuple(output_ids),
                    )
                )
            if rules.grammar is not None:
                work = GrammarWork(
                    place=place, row=row, matcher=table.matchers[row], output_ids=output_ids
                )
                self._grammar_work.append(work)
        arrays = self.arrays
        if edits:
            of, ids, values_of = zip(*edits, strict=True)
            arrays["edit_places"] = np.repeat(of, [len(i) for i in ids])
            arrays["edit_ids"] = np.concatenate(ids)
            arrays["edit_values"] = np.concatenate(values_of)
        if allowed:
            of, ids = zip(*allowed, strict=True)
            arrays["allowed_places"] = np.array(of)
            arrays["allowed_of"] = np.repeat(np.arange(len(ids)), [len(i) for i in ids])
            arrays["allowed_ids"] = np.concatenate(ids)

    def _add_penalties(self, table: RowTable, rows: np.ndarray, places: np.ndarray) -> None:
        if not len(places):
            return
        penalised = rows[places]
        self.arrays |= {
            "penalty_places": places,
            "penalty_rows": penalised,
            "repetition": table.repetition_penalty[penalised],
            "frequency": table.frequency_penalty[penalised],
            "presence": table.presence_penalty[penalised],
        }

    def batch(self, device: dict[str, torch.Tensor]) -> LogitsBatch | None:
        """The same on the device, from `arrays` as carried there; None if there is nothing to do.

        Args:
            device: the arrays by name, and perhaps others.
        """
        if not (self.arrays or self._host_work or self._grammar_work):
            return None
        return LogitsBatch(
            edit_places=device.get("edit_places"),
            edit_ids=device.get("edit_ids"),
            edit_values=device.get("edit_values"),
            allowed_places=device.get("allowed_places"),
            allowed_of=device.get("allowed_of"),
            allowed_ids=device.get("allowed_ids"),
            penalties=self._penalties(device) if "repetition" in self.arrays else None,
            host_work=tuple(self._host_work),
            grammar_work=tuple(self._grammar_work),
        )

    def _penalties(self, device: dict[str, torch.Tensor]) -> PenaltyBatch:
        arrays = self.arrays
        return PenaltyBatch(
            places=device["penalty_places"],
            rows=device["penalty_rows"],
            repetition=device["repetition"],
            frequency=device["frequency"],
            presence=device["presence"],
            any_repetition=bool((arrays["repetition"] != 1).any()),
            any_output=bool(arrays["frequency"].any() or arrays["presence"].any()),
        )


def _completing_ids(phrases: tuple[tuple[int, ...], ...], output_ids: list[int]) -> list[int]:
    """Last ids of the phrases whose other ids the output ends with."""
    return [phrase[-1] for phrase in phrases if output_ids[1 - len(phrase) :] == list(phrase[:-1])]


def apply_rules(logits: torch.Tensor, batch: LogitsBatch) -> None:
    """Apply allowed ids, bad words, min_tokens and bias to [n, vocab] float32 logits, in place."""
    if batch.allowed_places is not None:
        assert batch.allowed_of is not None, "allowed ids without owners"
        assert batch.allowed_ids is not None, "rows without allowed ids"
        kept = logits.new_full((len(batch.allowed_places), logits.shape[-1]), -torch.inf)
        values = logits[batch.allowed_places[batch.allowed_of], batch.allowed_ids]
        kept.index_put_((batch.allowed_of, batch.allowed_ids), values)
        logits.index_copy_(0, batch.allowed_places, kept)
    if batch.edit_places is not None:
        assert batch.edit_ids is not None, "edits without ids"
        assert batch.edit_values is not None, "edits without values"
        places = (batch.edit_places, batch.edit_ids)
        logits.index_put_(places, batch.edit_values, accumulate=True)


def run_processors(logits: torch.Tensor, batch: LogitsBatch) -> dict[int, str]:
    """Let each row's processors change its logits, in place.

    Returns:
        What went wrong, by row of the tables; the logits of such a row are NaN.
    """
    errors = {}
    for work in batch.host_work:
        changed = _process_row(logits[work.place], work)
        if isinstance(changed, str):
            errors[work.row] = changed
            logits[work.place] = torch.nan
        else:
            logits[work.place] = changed
    return errors


def _process_row(logits: torch.Tensor, work: HostWork) -> torch.Tensor | str:
    """[vocab] logits after all of a row's processors, or what went wrong."""
    for index, processor in enumerate(work.processors):
        changed = _run_processor(processor, logits, work.output_ids)
        if isinstance(changed, str):
            return f"logits_processors[{index}] {changed}"
        logits = changed
    return logits


def _run_processor(
    processor: LogitsProcessor, logits: torch.Tensor, output_ids: tuple[int, ...]
) -> torch.Tensor | str:
    """The changed logits, or what is wrong with them."""
    try:
        changed: object = processor(list(output_ids), logits.clone())
    except Exception as error:  # noqa: BLE001 - it is the caller's code, and may raise anything
        return f"raised {type(error).__name__}: {error}"
    if not isinstance(changed, torch.Tensor):
        return f"returned a {type(changed).__name__}: return the logits, a tensor"
    if changed.shape != logits.shape or not changed.is_floating_point():
        shape, wanted = tuple(changed.shape), tuple(logits.shape)
        return f"returned {changed.dtype} of shape {shape}: return floats of shape {wanted}"
    changed = changed.to(logits)
    # sync: a bad result must be laid at the processor's door, and its kind waits anyway
    if not changed.max().isfinite() and logits.max().isfinite():
        return "returned NaN, +inf, or -inf for all tokens: leave at least one finite"
    return changed
