"""Which prompt rows are scored: each one once, over chunks, preemption, failed steps and hits.

The stand-in for the model gives, as the log-probability of a prompt token, the position of the
token before it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from runtime.logprobs import LogprobsOutput, LogprobsRecord
from runtime.step import ScheduledBatch, StepOutput


def scored(batch: ScheduledBatch) -> LogprobsOutput:
    scoring = batch.scoring
    starts = np.concatenate([[0], batch.num_new_tokens.cumsum()])
    of = np.searchsorted(starts, scoring.places, side="right") - 1
    assert batch.rows[of].tolist() == np.repeat(scoring.rows, scoring.counts).tolist()
    positions = batch.num_computed_tokens[of] + scoring.places - starts[of]
    inside = scoring.places + 1 < starts[of + 1]
    known = batch.token_ids[scoring.places[inside] + 1]
    assert known.tolist() == scoring.next_ids[inside].tolist()
    return LogprobsOutput(
        token_ids=scoring.next_ids[:, None].astype(np.int32),
        logprobs=positions[:, None].astype(np.float32),
        ranks=np.ones(len(positions), dtype=np.int32),
    )


@pytest.fixture
def make_scoring_bench(make_bench):
    """A bench whose steps give log-probabilities, and whose every prompt may want them."""

    def make(**options):
        bench = make_bench(**options)
        execute = bench.model.execute

        def execute_and_score(batch, **kwargs) -> StepOutput:
            output = execute(batch, **kwargs)
            if batch.scoring is None:
                return output
            return dataclasses.replace(output, prompt_logprobs=scored(batch))

        bench.model.execute = execute_and_score
        return bench

    return make


def add(bench, prompt, max_tokens=4, *, wants=True):
    sequence = bench.add(prompt, max_tokens)
    sequence.prompt_logprobs = LogprobsRecord(0) if wants else None
    return sequence


def check(sequence):
    """Every prompt token but the first was scored, once and in order."""
    prompt = sequence.token_ids[: sequence.num_prompt_tokens].tolist()
    found = sequence.prompt_logprobs.as_dicts(None)
    assert [next(iter(entry)) for entry in found] == prompt[1:]
    positions = [entry[id_].logprob for entry, id_ in zip(found, prompt[1:], strict=True)]
    assert positions == [*range(len(prompt) - 1)]


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("budget", [1, 5, 16, 64])
def test_each_prompt_token_but_the_first_is_scored_in_any_chunks(
    make_scoring_bench, num_tokens, budget
):
    bench = make_scoring_bench(budget=budget)
    sequence = add(bench, [(7 * i) % 97 for i in range(num_tokens)])
    bench.run()
    bench.output(sequence)
    check(sequence)


def test_a_prompt_that_is_scored_reads_nothing_from_the_cache_and_fills_it(make_scoring_bench):
    bench = make_scoring_bench()
    prompt = [(7 * i) % 97 for i in range(50)]
    for wants, cached in ((True, 0), (True, 0), (False, 48)):
        sequence = add(bench, prompt, wants=wants)
        bench.run()
        assert sequence.num_cached_tokens == cached
        if wants:
            check(sequence)


def test_after_a_failed_step_it_goes_on_where_the_scores_end(make_scoring_bench):
    """20 of 60 tokens are scored, one block of them full: the cache gives that block back."""
    bench = make_scoring_bench(budget=20)
    sequence = add(bench, [(7 * i) % 97 for i in range(60)])
    bench.step()
    assert len(sequence.prompt_logprobs) == 20
    bench.scheduler.rollback(bench.schedule())
    batch = bench.schedule()
    assert batch.num_computed_tokens.tolist() == [16]
    assert batch.scoring.places.tolist() == [*range(4, 20)], "16 to 19 are scored already"
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    check(sequence)


def test_once_all_is_scored_a_preempted_sequence_uses_the_cache_as_any_other(make_scoring_bench):
    bench = make_scoring_bench(budget=64)
    sequence = add(bench, [(7 * i) % 97 for i in range(40)], 20)
    for _ in range(3):
        bench.step()
    bench.scheduler.rollback(bench.schedule())
    batch = bench.schedule()
    assert batch.num_computed_tokens.tolist() == [32]
    assert batch.scoring is None
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    check(sequence)


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_with_failed_steps_and_few_blocks_scores_each_token_once(
    make_scoring_bench, seed
):
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 2, 16]))
    bench = make_scoring_bench(
        num_blocks=int(96 / block_size), block_size=block_size, budget=int(rng.integers(8, 40))
    )
    shared = rng.integers(0, 97, 40).tolist()
    sequences = []
    while len(sequences) < 30 or bench.scheduler.has_unfinished:
        if len(sequences) < 30 and rng.random() < 0.3:
            prompt = (
                shared[: rng.integers(0, 40)] + rng.integers(0, 97, rng.integers(1, 20)).tolist()
            )
            wants = bool(rng.random() < 0.7)
            sequences.append(add(bench, prompt, int(rng.integers(1, 12)), wants=wants))
        batch = bench.schedule()
        if batch.num_seqs == 0:
            continue
        if rng.random() < 0.1:
            bench.scheduler.rollback(batch)
        else:
            if rng.random() < 0.02:
                bench.scheduler.abort(bench.scheduler.running_sequences()[0])
            bench.scheduler.update(batch, bench.model.execute(batch))
    bench.scheduler.check_integrity()
    for sequence in sequences:
        bench.output(sequence)
        if sequence.prompt_logprobs is not None and sequence.finish_reason != "abort":
            check(sequence)
