"""The text of one output: token ids in, text out, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from .detokenizer import DetokenizerFactory
from .sampling_params import SamplingParams


class OutputText:
    """Joined, its pieces are the output's text; no part of a stop string is among them.

    The text is the same however the ids are cut into pushes: the stop string that counts is the
    one that is complete first, and of those that are complete at the same character the longest.
    What could still become a stop string is withheld.

    Args:
        detokenizers: of the model's tokenizer.
        params: of the request. Under detokenize=False there is no text.
    """

    def __init__(self, detokenizers: DetokenizerFactory, params: SamplingParams) -> None:
        self._detokenizer = detokenizers.create(
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._is_wanted = params.detokenize
        self._stop = tuple(params.stop)
        self._includes_stop = params.include_stop_str_in_output
        self._num_unstoppable = params.min_tokens if self._stop else 0
        """Tokens still to come in whose text no stop string ends."""
        self._withheld = ""
        self._num_searched = 0
        """Leading characters of `_withheld` that no stop string that counts can end in."""
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    def push(self, token_ids: Sequence[int], *, is_ended_by_token: bool = False) -> str:
        """Take in the next ids; returns the text that became final, often none.

        Args:
            token_ids: any number of them.
            is_ended_by_token: the last one is an end or stop token, whose text is left out unless
                include_stop_str_in_output.
        """
        if is_ended_by_token and not self._includes_stop:
            token_ids = token_ids[:-1]
        if not self._is_wanted or self.stop_string is not None:
            return ""
        if not self._stop:
            return self._detokenizer.push(token_ids)
        pieces = []
        if self._num_unstoppable:
            early = token_ids[: self._num_unstoppable]
            token_ids = token_ids[len(early) :]
            self._num_unstoppable -= len(early)
            self._withheld += self._detokenizer.push(early)
            self._num_searched = len(self._withheld)
            pieces.append(self._release())
        self._withheld += self._detokenizer.push(token_ids)
        return "".join([*pieces, self._release()])

    def finish(self) -> str:
        """The withheld rest. Call it once, last."""
        if not self._is_wanted or self.stop_string is not None:
            return ""
        return self._withheld + self._detokenizer.finish()

    def _release(self) -> str:
        """What of the withheld text is final; finds the stop string."""
        text, self._withheld = self._withheld, ""
        found = self._find_stop(text)
        if found is not None:
            start, self.stop_string = found
            return text[: start + len(self.stop_string) * self._includes_stop]
        num_final = len(text) - self._num_open(text)
        self._withheld = text[num_final:]
        self._num_searched = len(self._withheld)
        return text[:num_final]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Start of the stop string that counts, and the string itself."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(self._num_searched - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _num_open(self, text: str) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
