"""After a step that raised: which of its requests was at fault?"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable

from .engine import Engine
from .errors import EngineDeadError
from .sampling_params import SamplingParams
from .sequence import Sequence
from .step import SequenceUpdates, StepFailure

logger = logging.getLogger("stepgraph.runtime")


class StepRecovery:
    """Tries the requests of a failed step in halves, so that only the one at fault has to end.

    All others are held meanwhile. A group is cleared once each of its sequences has got a token
    or has ended; one whose step fails is halved again; who fails alone, twice, is at fault. One
    faulty request among n costs about 2 log2(n) steps. A failure that passes, or a step that only
    was too large for the memory, ends nobody.

    If no step has run since the first one failed, a request of one token, of the engine's own,
    then tells a faulty request from an engine that can't run any step.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group: list[Sequence] = []  # being tried
        self._passed: set[Sequence] = set()  # those of it that got a token
        self._untried: list[list[Sequence]] = []
        self._held: list[Sequence] = []  # neither suspected nor tried
        self._has_step_run = False
        self._failed_alone: Sequence | None = None
        self._probe: Sequence | None = None
        self.is_active = False
        """True while sequences are held."""

    def hold(self, sequences: Iterable[Sequence]) -> None:
        """Newcomers wait until the search is over."""
        self._engine.scheduler.hold(sequences)
        self._held += sequences

    def take_failure(self, failure: StepFailure) -> Sequence | None:
        """Choose what is tried next.

        Returns:
            The sequence at fault, which the caller has to end; None: not known yet.

        Raises:
            EngineDeadError: the engine can't run any step.
        """
        suspects = failure.sequences
        scheduler = self._engine.scheduler
        if not self.is_active:
            logger.error(
                "a step of %d sequences failed; looking for the one at fault",
                len(suspects),
                exc_info=failure.error,
            )
            self.is_active, self._has_step_run = True, False
            self._engine.runs_ahead = False  # how a group fared decides on the next step
            unsuspected = _without(self._engine.unfinished_sequences(), suspects)
            scheduler.hold(unsuspected)
            self._held += unsuspected
        else:
            self._set_aside(_without(self._group, suspects))
        self._group, self._passed = [], set()
        if len(suspects) > 1:
            half = len(suspects) // 2
            self._set_aside(suspects[half:])
            self._group = suspects[:half]
            return None
        if suspects[0] is not self._failed_alone:
            self._failed_alone = suspects[0]
            self._group = suspects
            return None
        self._failed_alone = None
        if suspects[0] is self._probe:
            raise EngineDeadError(
                f"no step runs any more, not even one of a single token: {failure.error!r}"
            ) from failure.error
        if not self._has_step_run:
            scheduler.hold(suspects)
            self._probe = self._engine.add_request(
                [0],
                SamplingParams(temperature=0, max_tokens=1),
                request_id=f"stepgraph-probe-{uuid.uuid4().hex}",
            )
            self._group = [self._probe]
        return suspects[0]

    def take_success(self, updates: SequenceUpdates) -> None:
        """A step ran."""
        self._has_step_run = True
        if self.is_active:
            self._passed.update(updates.sequences)

    def go_on(self) -> None:
        """Call before each step: goes on to the next group once the last one is cleared."""
        scheduler = self._engine.scheduler
        while self.is_active and all(s.is_finished or s in self._passed for s in self._group):
            scheduler.hold(self._group)
            self._held += self._group
            self._group, self._passed = [], set()
            if self._untried:
                self._group = self._untried.pop()
                scheduler.resume(self._group)
            else:
                scheduler.resume(self._held)
                self._held = []
                self._failed_alone = self._probe = None
                self.is_active, self._engine.runs_ahead = False, True

    def _set_aside(self, sequences: list[Sequence]) -> None:
        if sequences:
            self._engine.scheduler.hold(sequences)
            self._untried.append(sequences)


def _without(sequences: list[Sequence], others: list[Sequence]) -> list[Sequence]:
    left_out = set(others)
    return [sequence for sequence in sequences if sequence not in left_out]
