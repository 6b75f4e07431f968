"""Rules and penalties against transformers' own processors, alone and all mixed in one batch.

Rows go the way that they go in an engine: rules are made of the parameters, admitted into the row
table, packed, and applied by a `TokenSampler` whose model gives the logits of the test.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attention.native_build import NativeBuildError
from runtime import token_sampler
from runtime.input_batch import InputBatch, pack
from runtime.logits_batch import apply_rules
from runtime.logits_rules import make_logits_rules
from runtime.row_table import RowTable
from runtime.sampler import sample
from runtime.sampling_params import SamplingParams
from runtime.staging import StagingBuffer
from runtime.step import ScheduledBatch, StepOutput
from runtime.token_counts import TokenCounts
from runtime.token_sampler import TokenSampler, gather_logprobs, to_step_output

VOCAB = 50
CPU = torch.device("cpu")
END = 3
NOTHING = np.empty(0, dtype=np.int64)


class Letters:
    """A tokenizer of one token a character."""

    def encode_piece(self, text: str) -> list[int]:
        return [ord(character) % VOCAB for character in text]


class Rows:
    """Sequences that all decode, with the runner's tables and sampler behind them."""

    def __init__(
        self, params: list[SamplingParams], prompts: list[list[int]], outputs: list[list[int]]
    ) -> None:
        n = len(params)
        self.params, self.prompts = params, prompts
        self.outputs = [list(ids) for ids in outputs]
        self.table = RowTable(n + 3, 8, 16)
        self.sampler = TokenSampler(n + 3, VOCAB, CPU)
        self.staging = StagingBuffer(CPU)
        self.rows = np.arange(n) + 2
        self.rules = [
            make_logits_rules(
                p,
                vocab_size=VOCAB,
                end_token_ids=(END,),
                tokenizer=Letters(),  # type: ignore[arg-type]
            )
            for p in params
        ]
        self._is_admitted = False

    def schedule(self) -> tuple[ScheduledBatch, InputBatch]:
        """One decode step of all rows; the first admits them."""
        n = len(self.params)
        lengths = np.array(
            [len(p) + len(o) for p, o in zip(self.prompts, self.outputs, strict=True)]
        )
        newest = [(p + o)[-1] for p, o in zip(self.prompts, self.outputs, strict=True)]
        looks_back = [r is not None and (r.needs_output_ids or r.has_penalties) for r in self.rules]
        host = [r is not None and r.needs_output_ids for r in self.rules]
        admitted: dict[str, Any] = {
            "admitted_rows": NOTHING,
            "admitted_params": (),
            "admitted_seeds": NOTHING.astype(np.uint64),
            "admitted_num_prompt_tokens": NOTHING,
        }
        if not self._is_admitted:
            admitted = {
                "admitted_rows": self.rows,
                "admitted_params": tuple(self.params),
                "admitted_seeds": np.array([p.seed or 0 for p in self.params], dtype=np.uint64),
                "admitted_num_prompt_tokens": np.array([len(p) for p in self.prompts]),
            }
            if any(r is not None for r in self.rules):
                admitted["admitted_rules"] = tuple(self.rules)
                admitted["admitted_token_ids"] = tuple(
                    np.array(p + o, dtype=np.int32) if wanted else None
                    for p, o, wanted in zip(self.prompts, self.outputs, looks_back, strict=True)
                )
        self._is_admitted = True
        scheduled = ScheduledBatch(
            step=0,
            rows=self.rows,
            num_computed_tokens=lengths - 1,
            num_new_tokens=np.ones(n, dtype=np.int64),
            num_decodes=n,
            token_ids=np.array(newest, dtype=np.int32),
            sampled=np.arange(n),
            released_rows=NOTHING,
            new_block_rows=NOTHING,
            new_block_indices=NOTHING,
            new_block_ids=NOTHING,
            host_rows=np.flatnonzero(host),
            **admitted,
        )
        self.table.apply(scheduled)
        self.sampler.admit(scheduled)
        return scheduled, pack(self.table, scheduled, self.staging)

    def changed_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, vocab] logits after all rules, before the temperature."""
        _, batch = self.schedule()
        changed = logits.clone()
        if batch.logits is not None:
            assert self.sampler._change(changed, batch.logits) == {}
        return changed

    def step(self, logits: torch.Tensor) -> StepOutput:
        """Draw from these logits; the drawn ids become part of the outputs."""
        _, batch = self.schedule()
        drawn = self.sampler.draw(lambda hidden: hidden, logits, batch)
        output = to_step_output(drawn, batch)
        for ids, token_id in zip(self.outputs, output.token_ids.tolist(), strict=True):
            ids.append(token_id)
        return output


def random_logits(n: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed))


def random_ids(rng: np.random.Generator, most: int, least: int = 0) -> list[int]:
    return rng.integers(0, VOCAB, int(rng.integers(least, most + 1))).tolist()


def expected_logits(
    params: SamplingParams, prompt: list[int], output: list[int], logits: torch.Tensor
) -> torch.Tensor:
    """One row after all rules, by transformers' processors and, for OpenAI's, by a loop."""
    logits = logits[None].clone()
    own = torch.tensor([output], dtype=torch.int64).reshape(1, -1)
    whole = torch.tensor([prompt + output], dtype=torch.int64)
    processors = LogitsProcessorList()
    if params.allowed_token_ids is not None:
        forbidden = sorted(set(range(VOCAB)) - set(params.allowed_token_ids))
        processors.append(SuppressTokensLogitsProcessor(forbidden, device="cpu"))
    if params.bad_words:
        words = [Letters().encode_piece(word) for word in params.bad_words]
        processors.append(NoBadWordsLogitsProcessor(words))
    if len(output) < params.min_tokens:
        ids = [*params.stop_token_ids, *([] if params.ignore_eos else [END])]
        processors.append(SuppressTokensLogitsProcessor(ids, device="cpu"))
    if params.logit_bias:
        bias = [[[id_], value] for id_, value in dict(params.logit_bias).items()]
        processors.append(SequenceBiasLogitsProcessor(bias))
    logits = processors(own, logits)
    if params.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(whole, logits)
    for token_id, count in Counter(output).items():
        logits[0, token_id] -= params.frequency_penalty * count
        logits[0, token_id] -= params.presence_penalty
    return logits[0]


RULES: list[dict[str, Any]] = [
    {},
    {"logit_bias": {4: 3.5, 7: -100.0, 9: 100.0}},
    {"allowed_token_ids": [1, 5, 9, 30]},
    {"bad_words": ["a", "bc", "cab"]},
    {"min_tokens": 5, "stop_token_ids": [8, 9]},
    {"min_tokens": 5, "stop_token_ids": [8, 9], "ignore_eos": True},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.4, "presence_penalty": -1.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2, 3, 47], "repetition_penalty": 1.1},
    {"bad_words": ["a"], "min_tokens": 2, "logit_bias": {3: 5.0, 47: 50.0}, "presence_penalty": 2},
]


def histories(n: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    prompts = [random_ids(rng, 12, least=1) for _ in range(n)]
    # "ca" at the end of some outputs, so that words of several tokens come near.
    outputs = [random_ids(rng, 9) + [49, 47] * int(rng.integers(2)) for _ in range(n)]
    return prompts, outputs


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_each_rule_changes_logits_as_transformers_does(options: dict[str, Any], seed: int) -> None:
    params = [SamplingParams(**options)] * 8
    prompts, outputs = histories(8, seed)
    logits = random_logits(8, seed)
    changed = Rows(params, prompts, outputs).changed_logits(logits)
    for row in range(8):
        expected = expected_logits(params[row], prompts[row], outputs[row], logits[row])
        torch.testing.assert_close(changed[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_in_which_every_row_differs_is_each_row_alone(seed: int) -> None:
    params = [SamplingParams(**options) for options in RULES]
    prompts, outputs = histories(len(params), seed)
    logits = random_logits(len(params), seed)
    together = Rows(params, prompts, outputs).changed_logits(logits)
    for row in range(len(params)):
        alone = Rows(params[row : row + 1], prompts[row : row + 1], outputs[row : row + 1])
        assert torch.equal(together[row], alone.changed_logits(logits[row : row + 1])[0])
        expected = expected_logits(params[row], prompts[row], outputs[row], logits[row])
        torch.testing.assert_close(together[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_rules_follow_the_output_as_it_grows(seed: int) -> None:
    """Counts added where tokens are drawn equal counts rebuilt from the whole history."""
    params = [SamplingParams(temperature=0, **options) for options in RULES]
    prompts, outputs = histories(len(params), seed)
    rows = Rows(params, prompts, outputs)
    for step in range(12):
        before = [list(ids) for ids in rows.outputs]
        logits = random_logits(len(params), seed=100 * seed + step, scale=1.0)
        output = rows.step(logits)
        assert output.is_valid.all()
        for row in range(len(params)):
            expected = expected_logits(params[row], prompts[row], before[row], logits[row])
            assert output.token_ids[row] == int(expected.argmax())
        rebuilt = Rows(params, prompts, rows.outputs)
        assert torch.equal(rows.changed_logits(logits), rebuilt.changed_logits(logits))


def test_draws_follow_the_distribution_of_the_whole_chain() -> None:
    """Chi-squared over seeded draws, each rule and filter in vLLM's order."""
    num_draws = 3000
    options: dict[str, Any] = {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {5: 1.0, 6: -1.0},
        "allowed_token_ids": [*range(0, VOCAB, 2), 5, 7],
    }
    params = [SamplingParams(seed=i, **options) for i in range(num_draws)]
    prompts, outputs = [[1, 2, 2, 5]] * num_draws, [[5, 4, 4, 6]] * num_draws
    logits = random_logits(1, seed=3, scale=1.0)
    output = Rows(params, prompts, outputs).step(logits.expand(num_draws, VOCAB).clone())
    scores = expected_logits(params[0], prompts[0], outputs[0], logits[0])
    filters = LogitsProcessorList(
        [
            TemperatureLogitsWarper(0.8),
            MinPLogitsWarper(0.02),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
        ]
    )
    probabilities = filters(torch.zeros(1, 1, dtype=torch.int64), scores[None])[0].softmax(-1)
    counts = torch.bincount(torch.from_numpy(output.token_ids), minlength=VOCAB)
    expected = num_draws * probabilities
    assert not counts[expected == 0].any()
    used = expected >= 5
    statistic = float(((counts - expected) ** 2 / expected)[used].sum())
    freedom = int(used.sum()) - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_a_seed_draws_the_same_whatever_the_neighbours_and_their_rules_are() -> None:
    own = SamplingParams(seed=42, repetition_penalty=1.2, logit_bias={3: 1.0}, top_p=0.9)
    logits = random_logits(len(RULES) + 1, seed=5, scale=0.3)

    def drawn(others: list[SamplingParams]) -> list[int]:
        n = len(others) + 1
        rows = Rows([*others, own], [[1, 2]] * n, [[3]] * n)
        for _ in range(10):
            rows.step(logits[-n:])
        return rows.outputs[-1]

    alone = drawn([])
    assert len(set(alone)) > 3
    assert drawn([SamplingParams(seed=i, **options) for i, options in enumerate(RULES)]) == alone
    assert drawn([SamplingParams(temperature=0)] * 3) == alone


def test_an_id_listed_twice_counts_once_and_an_empty_output_is_no_match() -> None:
    params = SamplingParams(allowed_token_ids=[4, 4, 5], bad_words=["ab", "ab"], logit_bias={4: 1})
    logits = random_logits(1)
    changed = Rows([params], [[1]], [[]]).changed_logits(logits)[0]
    assert changed[4] == logits[0, 4] + 1
    assert changed[5] == logits[0, 5]
    assert torch.isfinite(changed).sum() == 2


# -- what nobody uses ------------------------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def operators_of_draw(params: list[SamplingParams]) -> tuple[list[str], list[str]]:
    """Those of the whole draw, and those of bare sampling from the same logits."""
    n = len(params)
    rows = Rows(params, [[1, 2]] * n, [[]] * n)
    _, batch = rows.schedule()
    logits = random_logits(n)
    with torch.inference_mode(), Operators() as whole:
        rows.sampler.draw(lambda hidden: logits, logits, batch)
    with torch.inference_mode(), Operators() as bare:
        sample(logits, batch.sampling, rows.sampler._library)
    assert rows.sampler._counts is None or any(p.repetition_penalty != 1 for p in params)
    return whole.names, bare.names


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_a_batch_without_rules_runs_no_operator_but_those_of_sampling(
    options: dict[str, Any],
) -> None:
    whole, bare = operators_of_draw([SamplingParams(seed=1, **options)] * 3)
    assert whole == bare


def test_rules_run_as_many_operators_for_many_rows_as_for_two() -> None:
    options = {"repetition_penalty": 1.2, "logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2]}
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, **options)]
    few, _ = operators_of_draw(params)
    many, bare = operators_of_draw(params * 20)
    assert few == many
    assert len(many) > len(bare)


def _no_library(**options: Any) -> str:
    raise NativeBuildError("there is no compiler")


def test_without_a_compiler_the_same_is_drawn_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = [SamplingParams(temperature=i % 3, seed=i) for i in range(6)]

    def drawn() -> list[list[int]]:
        rows = Rows(params, [[1, 2]] * 6, [[3]] * 6)
        for step in range(5):
            rows.step(random_logits(6, seed=step))
        return rows.outputs

    expected = drawn()
    caplog.set_level("INFO", logger="stepgraph.runtime")
    monkeypatch.setattr(token_sampler, "sampler_library", _no_library)
    assert drawn() == expected
    assert "drawn by torch's operators: there is no compiler" in caplog.text


def test_the_vocabulary_is_sorted_for_top_p_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import sampler

    monkeypatch.setattr(sampler, "_draw_on_host", sampler._draw_batched)
    monkeypatch.setattr(token_sampler, "sampler_library", _no_library)

    def names(**options: Any) -> set[str]:
        whole, _ = operators_of_draw([SamplingParams(seed=1, **options)] * 3)
        return {name.split(".")[1] for name in whole}

    assert not {"sort", "topk"} & names()
    assert not {"sort", "topk"} & names(min_p=0.1)
    assert {"topk"} == {"sort", "topk"} & names(top_k=5)
    assert {"sort"} == {"sort", "topk"} & names(top_p=0.5)


def test_only_rows_with_rules_need_the_host_and_only_some_of_them() -> None:
    def needs(**options: Any) -> bool:
        (rules,) = Rows([SamplingParams(**options)], [[1]], [[]]).rules
        return rules is not None and rules.needs_output_ids

    assert not needs()
    assert not needs(repetition_penalty=1.2, logit_bias={1: 1}, allowed_token_ids=[1, 2])
    assert not needs(bad_words=["a"], min_tokens=3)
    assert needs(bad_words=["ab"])
    assert needs(logits_processors=[lambda ids, logits: logits])


def test_a_device_is_never_asked_for_a_value() -> None:
    # Meta tensors have no values: item(), nonzero() and boolean indexing raise on them.
    params = [SamplingParams(**options) for options in RULES]
    rows = Rows(params, *histories(len(params), 0))
    _, batch = rows.schedule()
    assert batch.logits is not None
    meta = torch.device("meta")
    logits = torch.empty(len(params), VOCAB, device=meta)

    def to_meta(value: Any) -> Any:
        return value.to(meta) if isinstance(value, torch.Tensor) else value

    def move(value: Any) -> Any:
        return type(value)(**{name: to_meta(getattr(value, name)) for name in value.__slots__})

    apply_rules(logits, move(batch.logits))
    assert batch.logits.penalties is not None
    counts, penalties = TokenCounts(20, VOCAB, meta), move(batch.logits.penalties)
    counts.penalise(logits, penalties)
    counts.add(penalties, torch.zeros(len(params), dtype=torch.int64, device=meta))
    own_ids = torch.zeros(len(params), dtype=torch.int64, device=meta)
    assert gather_logprobs(logits, own_ids, 3).token_ids.shape == (len(params), 4)


# -- logits processors -----------------------------------------------------------------------------


def raises(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such thing")


def only_minus_infinity(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf)


FAILURES: list[tuple[Any, str]] = [
    (raises, "raised KeyError: 'no such thing'"),
    (lambda ids, logits: None, "returned a NoneType"),
    (lambda ids, logits: logits[:-1], r"returned torch.float32 of shape \(49,\)"),
    (lambda ids, logits: logits[None], r"shape \(1, 50\)"),
    (lambda ids, logits: logits.long(), "returned torch.int64"),
    (lambda ids, logits: logits * torch.nan, "returned NaN"),
    (lambda ids, logits: logits + torch.inf, "returned NaN"),
    (lambda ids, logits: logits.fill_(torch.nan), "returned NaN"),
    (only_minus_infinity, "-inf for all tokens"),
]


@pytest.mark.parametrize(("processor", "text"), FAILURES)
def test_a_failing_processor_is_named_and_fails_its_own_row(processor: Any, text: str) -> None:
    def nudge(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + 1

    greedy = SamplingParams(temperature=0)
    bad = SamplingParams(temperature=0, logits_processors=[nudge, processor])
    logits = random_logits(3)
    output = Rows([greedy, bad, greedy], [[1]] * 3, [[]] * 3).step(logits)
    assert output.is_valid.tolist() == [True, False, True]
    assert [*output.token_ids[[0, 2]]] == logits.argmax(-1)[[0, 2]].tolist()
    (error,) = output.row_errors.items()
    assert error[0] == 3, "the row of the tables"
    assert re.search(r"logits_processors\[1\] .*" + text, error[1])


def test_processors_get_copies_and_run_in_their_order() -> None:
    seen: list[list[int]] = []

    def spoil(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        ids.clear()
        logits[:] = 0.0
        return logits

    def favour(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert not logits.any(), "the one before has made them all 0"
        logits[10 + len(ids)] += 5
        return logits

    params = SamplingParams(temperature=0, logits_processors=[spoil, favour], logprobs=0)
    rows = Rows([params, SamplingParams(temperature=0)], [[1], [1]], [[7], []])
    logits = random_logits(2)
    before = logits.clone()
    outputs = [rows.step(logits) for _ in range(3)]
    assert torch.equal(logits, before)
    assert rows.outputs[0] == [7, 11, 12, 13]
    assert rows.outputs[1] == [int(logits[1].argmax())] * 3
    assert seen == [[7], [7, 11], [7, 11, 12]]
    raw = logits[0].log_softmax(-1)
    assert outputs[0].logprobs.logprobs[0, 0] == pytest.approx(float(raw[11])), "of the raw logits"


def test_bad_logits_of_the_model_are_not_laid_at_a_processors_door() -> None:
    params = SamplingParams(temperature=0, logits_processors=[lambda ids, logits: logits])
    logits = random_logits(1)
    logits[0, 3] = torch.nan
    output = Rows([params], [[1]], [[]]).step(logits)
    assert not output.is_valid.any()
    assert output.row_errors == {}


def test_a_half_precision_result_is_taken() -> None:
    params = SamplingParams(temperature=0, logits_processors=[lambda ids, logits: logits.double()])
    output = Rows([params], [[1]], [[]]).step(random_logits(1))
    assert output.token_ids[0] == random_logits(1)[0].argmax()


# -- log-probabilities -----------------------------------------------------------------------------


def test_logprobs_are_those_of_log_softmax_and_ranks_count_what_is_at_least_as_likely() -> None:
    logits = random_logits(40, seed=8)
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    gathered = gather_logprobs(logits, ids, 7)
    expected = logits.double().log_softmax(-1)
    assert gathered.token_ids[:, 0].tolist() == ids.tolist()
    torch.testing.assert_close(
        gathered.logprobs.double(),
        expected.gather(-1, gathered.token_ids.long()),
        rtol=0,
        atol=1e-6,
    )
    top = expected.topk(7)
    assert torch.equal(gathered.token_ids[:, 1:].long(), top.indices)
    order = expected.argsort(descending=True).argsort()
    assert gathered.ranks.tolist() == (order.gather(-1, ids[:, None])[:, 0] + 1).tolist()


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    gathered = gather_logprobs(random_logits(2), torch.tensor([1, 2]), VOCAB + 5)
    assert gathered.token_ids.shape == (2, VOCAB + 1)


def test_logprobs_come_for_the_rows_that_want_them_and_before_all_rules() -> None:
    options = {"temperature": 0.5, "top_k": 1, "presence_penalty": 2.0, "logit_bias": {1: 9.0}}
    params = [
        SamplingParams(**options),
        SamplingParams(logprobs=2, **options),
        SamplingParams(logprobs=4, **options),
    ]
    logits = random_logits(3, seed=9)
    output = Rows(params, [[1]] * 3, [[1, 2]] * 3).step(logits)
    assert output.logprobs_of.tolist() == [1, 2]
    assert output.logprobs.token_ids.shape == (2, 5)
    assert output.logprobs.token_ids[:, 0].tolist() == output.token_ids[1:].tolist()
    expected = (
        logits[1:].log_softmax(-1).gather(-1, torch.from_numpy(output.logprobs.token_ids).long())
    )
    np.testing.assert_allclose(output.logprobs.logprobs, expected, rtol=0, atol=1e-6)
