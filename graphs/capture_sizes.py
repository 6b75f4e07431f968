"""Which sizes are captured, and the size that a step is padded to. Pure: imports no torch."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_FORM = 'sizes and ranges start-stop:step with commas between, as in "1,2,4,8-64:8,128"'
MAX_SIZE = 1 << 20
"""Largest size that can be asked for, in tokens."""
MAX_NUM_SIZES = 1024
"""Most sizes of one list: each one costs a capture and its memory."""
DEFAULT_NUM_SIZES = 24
"""Sizes of the default ladders, both together."""

_ITEM = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+)\s*:\s*([0-9]+))?", re.ASCII)
_SMALLEST_MIXED = 64
"""First mixed size: below it, time hardly depends on the size."""
_CONTEXT_FACTOR = 1.5
"""By how much the K/V of decodes, which is read too, lifts the ridge of a mixed step."""
_ROUNDING = 8
"""Sizes above the ridge are multiples of it where they can be, which the kernels prefer."""


def parse_capture_sizes(text: str) -> tuple[int, ...]:
    """Sizes in ascending order, each once, from text as "1,2,4,8-64:8,128".

    A range holds start, start + step, ... up to stop, stop included if it is reached. Spaces,
    duplicates and any order are allowed.

    Raises:
        ValueError: one line that says what is wrong and what is allowed.
    """
    sizes: set[int] = set()
    try:
        for item in text.split(","):
            sizes.update(_parse_item(item.strip()))
        _check_count(len(sizes))
    except ValueError as error:
        raise ValueError(f"{error}; allowed: {_FORM}") from None
    return tuple(sorted(sizes))


def _parse_item(item: str) -> Iterable[int]:
    match = _ITEM.fullmatch(item)
    if match is None:
        what = repr(item) if item else "an empty entry"
        raise ValueError(f"{what} is neither a size nor a range start-stop:step")
    # Longer ones are out of range whatever they are; int() itself refuses thousands of digits.
    numbers = [int(number[:18]) for number in match.groups() if number is not None]
    for number in numbers:
        _check_size(number, repr(item))
    if len(numbers) == 1:
        return numbers
    start, stop, step = numbers
    if start > stop:
        raise ValueError(f"the range {item!r} starts above its stop")
    sizes = range(start, stop + 1, step)
    _check_count(len(sizes))
    return sizes


def _check_size(size: int, where: str) -> None:
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{size} in {where} is not from 1 to {MAX_SIZE}")


def _check_count(count: int) -> None:
    if count > MAX_NUM_SIZES:
        raise ValueError(f"more than {MAX_NUM_SIZES} sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingStatistics:
    """What padding to a ladder costs over a number of steps."""

    num_steps: int
    """Steps, those off the ladder included."""
    num_off_ladder: int
    """Steps above the largest size, which run unpadded."""
    num_tokens: int
    """Real tokens."""
    num_padding_tokens: int
    """Tokens added by padding."""
    seconds: float
    """Time of the padded steps by the cost function; 0 without one."""
    padding_seconds: float
    """How much of it the unpadded steps would not take."""

    @property
    def fraction(self) -> float:
        """Share of padding in all tokens that ran."""
        total = self.num_tokens + self.num_padding_tokens
        return self.num_padding_tokens / total if total else 0.0

    @property
    def time_fraction(self) -> float:
        """Share of padding in the time; 0 where padding rides along free."""
        return self.padding_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """One ladder: the sizes that are captured, ascending, and the lookup among them."""

    sizes: tuple[int, ...]
    """Ascending, each once, at least one."""
    _index: list[int] = field(init=False, repr=False, compare=False)
    """[largest + 1] place in `sizes` of the smallest size that is no smaller."""

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("no capture sizes; give at least one")
        for size in self.sizes:
            if isinstance(size, bool) or not isinstance(size, int):
                raise ValueError(f"the capture size {size!r} is not a whole number")
            _check_size(size, "the capture sizes")
        ascending = tuple(sorted(set(self.sizes)))
        _check_count(len(ascending))
        object.__setattr__(self, "sizes", ascending)
        index = [0]
        for place, size in enumerate(ascending):
            index += [place] * (size + 1 - len(index))
        object.__setattr__(self, "_index", index)

    @classmethod
    def up_to(cls, limit: int, sizes: Iterable[int]) -> CaptureSizes:
        """A ladder of `sizes` in which none is larger than can be used.

        If some exceed `limit`, they become `limit` itself, so that what they were to hold still
        has a size.
        """
        return cls(tuple(min(size, limit) for size in sizes))

    @property
    def largest(self) -> int:
        """The top: nothing larger can be padded."""
        return self.sizes[-1]

    def lookup(self, num_tokens: int) -> int | None:
        """The smallest size that holds `num_tokens`, which is at least 1; None above the top."""
        assert num_tokens > 0, f"{num_tokens} tokens have no size"
        return self.sizes[self._index[num_tokens]] if num_tokens < len(self._index) else None

    def floor(self, num_tokens: int) -> int | None:
        """The largest size that `num_tokens` fills; None below the smallest."""
        place = bisect.bisect_right(self.sizes, num_tokens) - 1
        return self.sizes[place] if place >= 0 else None

    def padding(
        self, step_tokens: Iterable[int], seconds: Callable[[int], float] | None = None
    ) -> PaddingStatistics:
        """What padding steps of these token counts costs; `seconds` of a step by its tokens."""
        num_steps = num_off = num_tokens = num_padding = 0
        total = exact = 0.0
        for count in step_tokens:
            size = self.lookup(count)
            num_steps += 1
            num_off += size is None
            num_tokens += count
            padded = size or count
            num_padding += padded - count
            if seconds is not None:
                total += seconds(padded)
                exact += seconds(count)
        return PaddingStatistics(
            num_steps=num_steps,
            num_off_ladder=num_off,
            num_tokens=num_tokens,
            num_padding_tokens=num_padding,
            seconds=total,
            padding_seconds=total - exact,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLadders:
    """The ladders of both kinds of step. A size may be in both: those are two graphs."""

    decode: CaptureSizes
    """For uniform decode, in sequences, which are as many tokens."""
    mixed: CaptureSizes
    """For all other steps, in tokens."""

    @classmethod
    def default(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        ridge: int,
        num_sizes: int = DEFAULT_NUM_SIZES,
    ) -> CaptureLadders:
        """Ladders whose tops are the limits themselves, so that every step has a size.

        Decode sizes double; padding a decode step costs little, since it reads the weights
        whatever its size. The rest of `num_sizes` goes to mixed steps: few below the ridge, where
        padding is almost free, and evenly spaced ones above it, where each token costs the same.

        Args:
            max_num_seqs: most sequences of a step.
            max_num_batched_tokens: most tokens of a step.
            ridge: tokens from which a step without context is bound by computation.
            num_sizes: most sizes, both ladders together; at least 4.

        Raises:
            ValueError: `num_sizes` is too small.
        """
        if num_sizes < 4:
            raise ValueError(f"num_sizes={num_sizes} is below 4, two for each ladder")
        decode = default_sizes(
            max_num_seqs, ridge=max_num_seqs, num_sizes=max(2, num_sizes * 3 // 8)
        )
        mixed = default_sizes(
            max_num_batched_tokens,
            ridge=round(_CONTEXT_FACTOR * ridge),
            num_sizes=num_sizes - len(decode),
            smallest=_SMALLEST_MIXED,
            ratio=4,
        )
        return cls(decode=CaptureSizes(decode), mixed=CaptureSizes(mixed))

    @classmethod
    def explicit(
        cls, sizes: Iterable[int], *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> CaptureLadders:
        """One list for both kinds of step, cut at the limit of each. Larger steps run eagerly."""
        sizes = tuple(sizes)
        return cls(
            decode=CaptureSizes.up_to(max_num_seqs, sizes),
            mixed=CaptureSizes.up_to(max_num_batched_tokens, sizes),
        )

    @property
    def num_sizes(self) -> int:
        """Sizes of both ladders: as many captures."""
        return len(self.decode.sizes) + len(self.mixed.sizes)

    def lookup(self, num_tokens: int, *, is_uniform_decode: bool) -> int | None:
        """The size that a step is padded to, by its kind; None above the top."""
        return (self.decode if is_uniform_decode else self.mixed).lookup(num_tokens)


def default_sizes(
    limit: int, *, ridge: int, num_sizes: int, smallest: int = 1, ratio: float = 2.0
) -> tuple[int, ...]:
    """Geometric sizes from `smallest` to the ridge, then evenly spaced ones up to `limit`.

    Padding a step below the ridge by a constant factor costs nearly nothing in time, and above
    it each token costs the same, so there only an even spacing bounds the time that is lost.

    Args:
        limit: the largest size, always present.
        ridge: where the spacing changes; a size itself if there is one above it.
        num_sizes: most sizes, at least 2.
        smallest: the first size, where the limit allows it.
        ratio: of neighbours below the ridge; larger where `num_sizes` leaves no room for it.
    """
    if num_sizes < 2:
        raise ValueError(f"num_sizes={num_sizes} is below 2")
    if smallest >= limit:
        return (limit,)
    ridge = max(smallest, min(ridge, limit))
    most_below = num_sizes - 1 if ridge == limit else max(1, num_sizes // 2)
    # A last step barely above `ratio` is not worth a size of its own.
    num_below = min(most_below, max(1, math.ceil(math.log(ridge / smallest, ratio) - 0.1)))
    ratio = max(ratio, (ridge / smallest) ** (1 / num_below))
    sizes = {min(limit, round(smallest * ratio**place)) for place in range(num_below)}
    num_spaces = num_sizes - num_below - 1
    for place in range(num_spaces if ridge < limit else 0):
        size = ridge + (limit - ridge) * place / num_spaces
        sizes.add(min(limit, -(-round(size) // _ROUNDING) * _ROUNDING))
    return tuple(sorted(sizes | {limit}))
