"""Which sizes are captured, and the size that each step is padded to. Pure: imports no torch."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

LaunchMode = Literal["eager", "full", "piecewise"]

_FORM = 'sizes and ranges start-stop:step with commas between, as in "1,2,4,8-64:8,128"'
MAX_SIZE = 1 << 20
"""Largest size that can be asked for, in tokens."""
MAX_NUM_SIZES = 1024
"""Most sizes of one list: each one costs a capture and its memory."""
MAX_PADDING = 2
"""A step is never padded to more than this many times its tokens."""

_ITEM = re.compile(r"([0-9]+)(?:\s*-\s*([0-9]+)\s*:\s*([0-9]+))?", re.ASCII)
_CONTEXT_FACTOR = 1.5
"""By how much the K/V of decodes, which is read too, lifts the ridge of a mixed step."""
_MIN_SPACE = 32
"""Sizes nearer to each other than this save too little to be captured."""
_SPACE_SHARE = 1 / 12
"""Spaces grow with the size once this share of it is the larger one."""
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
class Launch:
    """How one step runs."""

    mode: LaunchMode
    """full: one graph; piecewise: graph segments around attention; eager: no graph."""
    size: int
    """Tokens that run: the captured size, or the batch's own count when eager."""
    fall: str = ""
    """Why no graph was used where graphs are on; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureLadders:
    """The sizes of both kinds of graph, and the choice among them for each step.

    Scheduler and graph runner ask the same value, so the bucket that the one counts with is the
    size that the other launches. A size may be in both ladders: those are two graphs.
    """

    decode: CaptureSizes | None
    """Of full graphs, for uniform decode, in sequences, which are as many tokens. None: there are
    no full graphs, and decode steps are launched as the others are."""
    mixed: CaptureSizes | None
    """Of piecewise graphs, for any step, in tokens. None: there are no such graphs."""

    @classmethod
    def default(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, ridge: int
    ) -> CaptureLadders:
        """Ladders that hold every step, none of it padded above MAX_PADDING times.

        One list of sizes for both, see `default_sizes`, to which the limits themselves belong.

        Args:
            max_num_seqs: most sequences of a step.
            max_num_batched_tokens: most tokens of a step.
            ridge: tokens from which a step without context is bound by computation.
        """
        sizes = default_sizes(max_num_batched_tokens, ridge=round(_CONTEXT_FACTOR * ridge))
        return cls.explicit(
            (*sizes, max_num_seqs),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    @classmethod
    def explicit(
        cls, sizes: Iterable[int], *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> CaptureLadders:
        """One list for both kinds of graph, cut at the limit of each. Larger steps run eagerly."""
        sizes = tuple(sizes)
        return cls(
            decode=CaptureSizes.up_to(max_num_seqs, sizes),
            mixed=CaptureSizes.up_to(max_num_batched_tokens, sizes),
        )

    def without_full_graphs(self) -> CaptureLadders:
        """Decode steps are piecewise too, and bring their sizes along."""
        if self.decode is None or self.mixed is None:
            return CaptureLadders(decode=None, mixed=self.mixed)
        sizes = CaptureSizes((*self.decode.sizes, *self.mixed.sizes))
        return CaptureLadders(decode=None, mixed=sizes)

    def without_piecewise_graphs(self) -> CaptureLadders:
        """Steps other than uniform decode run eagerly."""
        return CaptureLadders(decode=self.decode, mixed=None)

    @property
    def num_sizes(self) -> int:
        """Different sizes of both ladders together."""
        return len(
            {size for ladder in (self.decode, self.mixed) if ladder for size in ladder.sizes}
        )

    def choose(self, num_tokens: int, *, is_uniform_decode: bool) -> Launch:
        """How to run a step of at least one token, by its kind.

        Uniform decode that no full graph fits is piecewise; what fits no graph is eager.
        """
        ladders: tuple[tuple[LaunchMode, CaptureSizes | None], ...] = (
            ("full", self.decode if is_uniform_decode else None),
            ("piecewise", self.mixed),
        )
        fall = ""
        for mode, ladder in ladders:
            if ladder is None:
                continue
            size = ladder.lookup(num_tokens)
            if size is None:
                fall = "above the largest size"
            elif size > MAX_PADDING * num_tokens:
                fall = f"padding above {MAX_PADDING}x"
            else:
                return Launch(mode=mode, size=size)
        return Launch(mode="eager", size=num_tokens, fall=fall)

    def lookup(self, num_tokens: int, *, is_uniform_decode: bool) -> int | None:
        """The size that a step is padded to, by its kind; None if it runs at its own size."""
        launch = self.choose(num_tokens, is_uniform_decode=is_uniform_decode)
        return None if launch.mode == "eager" else launch.size


def default_sizes(limit: int, *, ridge: int) -> tuple[int, ...]:
    """Doubling sizes up to the ridge, then evenly spaced ones, then ones with growing spaces.

    Below the ridge padding costs nearly nothing in time, so MAX_PADDING alone decides. Above it
    each token costs the same: spaces of half the ridge bound the time that is lost, and where a
    twelfth of the size is more than that, a twelfth bounds its share. The number of sizes thus
    grows with the limit, ever slower.

    Args:
        limit: the largest size, always present.
        ridge: where the doubling ends.
    """
    ridge = max(ridge, _MIN_SPACE)
    sizes = [1]
    while 2 * sizes[-1] <= min(ridge, limit):
        sizes.append(2 * sizes[-1])
    first, space = sizes[-1], max(_MIN_SPACE, ridge / 2)
    # Spaces from `first` to a size, as a number: even up to `turn`, geometric beyond.
    turn = max(first, space / _SPACE_SHARE)
    num_even = (min(limit, turn) - first) / space
    num_growing = math.log(max(limit, turn) / turn) / _SPACE_SHARE
    num_spaces = math.ceil(num_even + num_growing)
    for place in range(1, num_spaces):
        number = (num_even + num_growing) * place / num_spaces
        size = first + number * space
        if number > num_even:
            size = turn * math.exp((number - num_even) * _SPACE_SHARE)
        sizes.append(min(limit, -(-round(size) // _ROUNDING) * _ROUNDING))
    return tuple(sorted({*sizes, limit}))
