"""What a step holds, who is admitted, who is preempted, and how sequences end."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from runtime.errors import InvalidRequestError, LogitsProcessorError, NonFiniteLogitsError
from runtime.sequence import SequenceStatus


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + 13 * i) % 97 for i in range(num_tokens)]


def test_the_scheduler_imports_no_torch():
    code = "import sys, runtime.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_decodes_come_first_and_a_prompt_gets_the_rest_of_the_budget(make_bench):
    """Budget 100, five sequences decoding, a prompt of 1000: 5 + 95 tokens, 905 are left."""
    bench = make_bench(budget=100, num_blocks=200)
    for i in range(5):
        bench.add(prompt(10, i), 50)
    bench.step()
    long = bench.add(prompt(1000, 7), 5)
    batch = bench.schedule()
    assert batch.num_decodes == 5
    assert batch.num_new_tokens.tolist() == [1, 1, 1, 1, 1, 95]
    assert batch.num_tokens == 100
    assert batch.sampled.tolist() == [0, 1, 2, 3, 4]
    assert 1000 - int(batch.num_computed_tokens[5] + batch.num_new_tokens[5]) == 905
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    assert len(bench.output(long)) == 5


@pytest.mark.parametrize(
    ("block_size", "prompts", "budget"),
    [(256, [300], 100), (256, [300] * 4, 1024), (16, [20], 6), (16, [33, 47, 5], 7)],
)
def test_a_prompt_may_be_cut_anywhere_inside_a_block(make_bench, block_size, prompts, budget):
    bench = make_bench(block_size=block_size, budget=budget)
    sequences = [bench.add(prompt(n, 5 * i), 40) for i, n in enumerate(prompts)]
    bench.run()
    assert [len(bench.output(s)) for s in sequences] == [40] * len(prompts)


def test_what_can_never_fit_is_refused_by_name_and_limit_and_others_go_on(make_bench):
    bench = make_bench(num_blocks=4, block_size=256, budget=64)
    with pytest.raises(InvalidRequestError, match=r"2000 tokens .* KV pool's 1024 tokens"):
        bench.add(prompt(2000))
    small = bench.add(prompt(10))
    bench.run()
    assert len(bench.output(small)) == 8
    with pytest.raises(InvalidRequestError, match=r"5000 tokens .* max_model_len=4096"):
        bench.add(prompt(5000))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        bench.add([])


def test_a_lone_sequence_at_the_pools_end_finishes_and_keeps_its_tokens(make_bench):
    bench = make_bench(num_blocks=4, block_size=256, budget=512)
    sequence = bench.add(prompt(1000), 100)
    bench.run()
    assert sequence.finish_reason == "length"
    assert len(bench.output(sequence)) == 24
    assert sequence.num_preemptions == 0


def test_max_model_len_ends_a_sequence(make_bench):
    bench = make_bench(max_model_len=300, num_blocks=100)
    sequence = bench.add(prompt(290), 500)
    bench.run()
    assert (sequence.finish_reason, len(bench.output(sequence))) == ("length", 10)


def test_prompts_and_resumed_sequences_longer_than_the_budget_still_run(make_bench):
    bench = make_bench(num_blocks=8, block_size=256, budget=600)
    lengths = [200, 599, 310, 420, 533, 275]
    sequences = [bench.add(prompt(n, i), 100 + 79 * i) for i, n in enumerate(lengths)]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for i, sequence in enumerate(sequences):
        assert len(bench.output(sequence)) == 100 + 79 * i


def test_every_decode_advances_in_every_step_beside_a_long_prompt(make_bench):
    bench = make_bench(num_blocks=600, budget=512)
    first = [bench.add(prompt(4, i), 30) for i in range(2)]
    bench.step()
    long = bench.add(prompt(4096 - 600), 2)
    short = [bench.add(prompt(4, 20 + i), 50) for i in range(3)]
    for step in range(20):
        bench.step()
        assert {len(bench_output(bench, s)) for s in first} == {step + 2}
    # The long prompt takes 7 steps of about 510 tokens; the short ones start in the last of them.
    assert long.first_token_time is not None
    assert all(len(bench_output(bench, s)) >= 20 - 7 for s in short)
    bench.run()
    assert [len(bench.output(s)) for s in short] == [50, 50, 50]


def bench_output(bench, sequence) -> list[int]:
    """Tokens so far of a sequence that may still run."""
    if sequence.row < 0:
        return sequence.output_token_ids
    table = bench.scheduler._table
    known = table.token_ids[sequence.row, : table.num_tokens[sequence.row]]
    return known[sequence.num_prompt_tokens :].tolist()


def test_a_chunk_limit_lets_short_prompts_start_beside_a_long_one(make_bench):
    bench = make_bench(num_blocks=600, budget=512, max_prefill_chunk=400)
    bench.add(prompt(3000), 2)
    short = [bench.add(prompt(4, 20 + i), 5) for i in range(3)]
    batch = bench.schedule()
    assert batch.num_new_tokens.tolist() == [400, 4, 4, 4]
    bench.scheduler.update(batch, bench.model.execute(batch))
    assert all(s.first_token_time is not None for s in short)
    bench.run()


def test_a_stream_of_full_prompts_never_stops_a_decode(make_bench):
    bench = make_bench(num_blocks=4000, budget=64)
    decoding = bench.add(prompt(5), 200)
    bench.step()
    for step in range(100):
        bench.add(prompt(64, step), 1)
        bench.step()
        assert len(bench_output(bench, decoding)) == step + 2


def test_prefill_first_runs_prompts_alone_and_decodes_only_when_none_wait(make_bench):
    bench = make_bench(budget=64, policy="prefill_first")
    sequences = [bench.add(prompt(30, i), 6) for i in range(2)]
    bench.step()
    late = bench.add(prompt(100, 9), 6)
    kinds = []
    for _ in range(4):
        batch = bench.schedule()
        kinds.append((batch.num_decodes, batch.num_seqs))
        bench.scheduler.update(batch, bench.model.execute(batch))
    assert kinds == [(0, 1), (0, 1), (3, 3), (3, 3)]
    bench.run()
    assert [len(bench.output(s)) for s in (*sequences, late)] == [6, 6, 6]


def test_no_more_sequences_own_blocks_than_max_num_seqs(make_bench):
    bench = make_bench(max_num_seqs=2)
    sequences = [bench.add(prompt(10, i), 20) for i in range(6)]
    while bench.scheduler.has_unfinished:
        bench.step()
        assert sum(bool(s.blocks) for s in sequences) <= 2
    assert [len(bench.output(s)) for s in sequences] == [20] * 6


def test_a_preempted_sequence_keeps_its_tokens_and_emits_none_twice(make_bench):
    def outputs(num_blocks):
        bench = make_bench(num_blocks=num_blocks, budget=24)
        sequences = [bench.add(prompt(40, i), 50) for i in range(2)]
        emitted = {id(s): [] for s in sequences}
        while bench.scheduler.has_unfinished:
            updates = bench.step()
            for sequence, token in zip(updates.sequences, updates.token_ids, strict=True):
                emitted[id(sequence)].append(int(token))
        for sequence in sequences:
            assert emitted[id(sequence)] == bench.output(sequence)
            assert sequence.num_prompt_tokens == 40
        return [bench.output(s) for s in sequences], bench.scheduler.num_preemptions

    tight, num_preemptions = outputs(9)
    roomy, none = outputs(100)
    assert tight == roomy
    assert [len(output) for output in tight] == [50, 50]
    assert (num_preemptions > 0, none) == (True, 0)


def test_a_shortage_costs_each_victim_one_preemption(make_bench):
    """Between two preemptions of one sequence another one ends: no eviction in circles."""
    bench = make_bench(num_blocks=32, budget=256)
    sequences = [bench.add(prompt(64, i), 192) for i in range(6)]
    num_endings, seen, last = 0, [0] * 6, [-1] * 6
    while bench.scheduler.has_unfinished:
        num_endings += len(bench.step().finished)
        for i, sequence in enumerate(sequences):
            if sequence.num_preemptions > seen[i]:
                assert sequence.num_preemptions == seen[i] + 1
                assert num_endings > last[i]
                seen[i], last[i] = sequence.num_preemptions, num_endings
    assert max(seen) > 0
    assert seen[0] == 0, "the first admitted is never the victim"
    assert all(len(bench.output(s)) == 192 for s in sequences)


def test_a_resumed_sequence_computes_only_what_the_cache_lost(make_bench):
    """Two equal prompts of 3 blocks + 5: the second is resumed within its own length."""
    bench = make_bench(budget=64, num_blocks=20)
    first, second = (bench.add(prompt(3 * 16 + 5), 10) for _ in range(2))
    bench.step()
    bench.step()
    bench.scheduler._preempt(second)
    assert second.status is SequenceStatus.WAITING
    batch = bench.schedule()
    row = batch.rows.tolist().index(second.row)
    assert int(batch.num_computed_tokens[row]) == 48
    assert int(batch.num_new_tokens[row]) == len(second.token_ids) - 48
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    assert bench.output(first) == bench.output(second)


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_after_preemption_only_surviving_leading_blocks_are_hit(make_bench, lost):
    bench = make_bench(budget=128, num_blocks=8)
    sequence = bench.add(prompt(4 * 16 + 7), 6)
    bench.step()
    bench.scheduler._preempt(sequence)
    if lost:
        # Four blocks are free and empty; a stranger of (4 + lost) blocks evicts `lost` of ours.
        stranger = bench.add(prompt((4 + lost) * 16 - 1, 50), 1)
        stranger.arrival_index = -1
        bench.scheduler._waiting._heap.clear()
        bench.scheduler._waiting._length = 0
        bench.scheduler._waiting.push(stranger)
        bench.step()
        assert stranger.is_finished
        bench.scheduler._waiting.push(sequence)
    batch = bench.schedule()
    assert batch.num_computed_tokens.tolist() == [(4 - lost) * 16]
    bench.scheduler.update(batch, bench.model.execute(batch))
    bench.run()
    assert len(bench.output(sequence)) == 6


@pytest.mark.parametrize("budget", [256, 40])
@pytest.mark.parametrize("order", [1, -1])
def test_equal_prompts_share_within_one_step(make_bench, budget, order):
    shared = prompt(3 * 16)
    prompts = [[*shared, 1], [*shared, 2], shared][::order]
    bench = make_bench(budget=budget)
    together = [bench.add(p, 5) for p in prompts]
    bench.run()
    alone = []
    for p in prompts:
        single = make_bench(budget=budget)
        sequence = single.add(p, 5)
        single.run()
        alone.append(single.output(sequence))
    assert [bench.output(s) for s in together] == alone
    # The bare prompt of three blocks hits two: one token is always computed.
    assert [s.num_cached_tokens for s in together] == [0, 48, 32 if order == 1 else 48]


def test_blocks_filled_while_decoding_are_hit_and_partial_ones_are_not(make_bench):
    bench = make_bench()
    first = bench.add(prompt(16 + 5), 14)  # 35 tokens: 2 blocks and 3
    bench.run()
    tokens = first.token_ids.tolist()
    again = bench.add([*tokens, 1, 2, 3, 4], 4)
    other = bench.add([*tokens[:21], 90, 91], 4)
    bench.run()
    assert (again.num_cached_tokens, other.num_cached_tokens) == (32, 16)
    bench.output(again)
    bench.output(other)


@pytest.mark.parametrize("budget", [5, 512])
@pytest.mark.parametrize("together", [True, False])
def test_block_borders_in_decode(make_bench, budget, together):
    lengths = [1, 14, 15, 16, 17, 31, 32, 33]
    bench = make_bench(budget=budget, num_blocks=100)
    for i, n in enumerate(lengths):
        sequence = bench.add(prompt(n, i), 40)
        if not together:
            bench.run()
            assert len(bench.output(sequence)) == 40
    bench.run()
    assert all(len(bench.output(s)) == 40 for s in bench.added)


def test_end_tokens_stop_lengths_and_ignore_eos(make_bench):
    probe = make_bench()
    sequence = probe.add(prompt(9), 10)
    probe.run()
    tokens = probe.output(sequence)
    end = tokens[4]
    first_at = tokens.index(end) + 1

    def run(max_tokens, **params):
        bench = make_bench(end_token_ids=(end,))
        s = bench.add(prompt(9), max_tokens, **params)
        bench.run()
        return s.finish_reason, bench.output(s)

    assert run(10) == ("stop", tokens[:first_at])
    assert run(first_at) == ("stop", tokens[:first_at]), "stop wins over length"
    assert run(first_at - 1) == ("length", tokens[: first_at - 1])
    assert run(10, ignore_eos=True) == ("length", tokens)
    assert run(10, min_tokens=10)[1] == tokens, "no stop counts before min_tokens"
    bench = make_bench()
    s = bench.add(prompt(9), 10, stop_token_ids=(end,))
    bench.run()
    assert (s.finish_reason, bench.output(s)) == ("stop", tokens[:first_at])


def test_priority_decides_the_queue_and_the_victim(make_bench):
    bench = make_bench(policy="priority", max_num_seqs=1)
    order = [bench.add(prompt(10, i), 3, priority=p) for i, p in enumerate([5, 1, 3])]
    finished = []
    while bench.scheduler.has_unfinished:
        finished += bench.step().finished
    assert finished == [order[1], order[2], order[0]]
    bench = make_bench(policy="priority", num_blocks=8, budget=256)
    urgent = bench.add(prompt(40, 1), 60, priority=0)
    patient = bench.add(prompt(40, 2), 60, priority=9)
    middle = bench.add(prompt(16, 3), 60, priority=5)
    bench.run()
    assert urgent.num_preemptions == 0
    assert patient.num_preemptions > 0
    assert all(len(bench.output(s)) == 60 for s in (urgent, patient, middle))


def test_a_nan_row_ends_with_an_error_and_its_cache_serves_nobody(make_bench):
    bench = make_bench(budget=256)
    good = [bench.add(prompt(20, i), 6) for i in range(3)]
    bad = bench.add(prompt(40, 50), 6)
    bench.step()
    batch = bench.schedule()
    position = batch.rows[batch.sampled].tolist().index(bad.row)
    updates = bench.scheduler.update(
        batch, bench.model.execute(batch, invalid=frozenset([position]))
    )
    bench.scheduler.check_integrity()
    assert updates.finished == [bad]
    assert bad not in updates.sequences
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, NonFiniteLogitsError)
    assert len(bad.output_token_ids) == 1
    bench.run()
    assert all(len(bench.output(s)) == 6 for s in good)
    again = bench.add(prompt(40, 50), 6)
    bench.run()
    assert again.num_cached_tokens == 0


def test_abort_waiting_running_and_in_flight(make_bench):
    bench = make_bench(max_num_seqs=2, budget=64)
    running, in_flight, waiting, last = (bench.add(prompt(20, i), 10) for i in range(4))
    bench.step()
    bench.scheduler.abort(waiting)
    batch = bench.schedule()
    bench.scheduler.abort(in_flight)
    bench.scheduler.check_integrity()
    updates = bench.scheduler.update(batch, bench.model.execute(batch))
    assert updates.sequences == [running]
    bench.scheduler.abort(running)
    bench.scheduler.abort(running)
    bench.run()
    for sequence in (running, in_flight, waiting):
        assert (sequence.finish_reason, sequence.is_finished) == ("abort", True)
    assert len(bench.output(running)) == 2
    assert len(bench.output(last)) == 10


def test_a_row_in_flight_is_free_only_when_its_step_has_ended(make_bench):
    bench = make_bench(max_num_seqs=1)
    sequence = bench.add(prompt(20), 10)
    for end in (bench.scheduler.update, lambda batch, _: bench.scheduler.rollback(batch)):
        batch = bench.schedule()
        bench.scheduler.abort(sequence)
        assert bench.scheduler._table.num_free_rows == 0
        end(batch, bench.model.execute(batch))
        assert bench.scheduler._table.num_free_rows == 1
        sequence = bench.add(prompt(20), 10)
    bench.run()


def test_a_stop_string_ends_a_sequence_wherever_it_stands(make_bench):
    bench = make_bench(max_num_seqs=2, budget=64)
    running, finished, waiting = (bench.add(prompt(20, i), n) for i, n in enumerate((9, 1, 9)))
    bench.step()
    assert finished.finish_reason == "length"
    for sequence in (running, finished, waiting):
        bench.scheduler.stop(sequence, "END")
        bench.scheduler.check_integrity()
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")
        assert not sequence.is_ended_by_token
    assert not bench.scheduler.has_unfinished
    assert len(bench.output(running)) == len(bench.output(finished)) == 1


def test_a_failed_logits_processor_is_told_from_bad_logits_and_spares_the_cache(make_bench):
    bench = make_bench(block_size=4)
    sequence = bench.add(prompt(20), 5)
    batch = bench.schedule()
    output = bench.model.execute(batch, invalid=frozenset({0}))
    row = int(batch.rows[0])
    output = dataclasses.replace(output, row_errors={row: "logits_processors[0] raised"})
    (failed,) = bench.scheduler.update(batch, output).finished
    assert failed is sequence
    assert isinstance(sequence.error, LogitsProcessorError)
    assert str(sequence.error) == "request r0, output token 0: logits_processors[0] raised"
    again = bench.add(prompt(20), 2)
    bench.run()
    assert again.num_cached_tokens == 16


def test_a_failed_step_loses_no_token_and_no_block(make_bench):
    bench = make_bench(budget=64)
    sequences = [bench.add(prompt(40), 10), bench.add(prompt(40), 10), bench.add(prompt(30, 5), 10)]
    bench.step()
    for _ in range(3):
        batch = bench.schedule()
        bench.scheduler.rollback(batch)  # nothing of it was written
        bench.scheduler.check_integrity()
        assert bench.scheduler.num_running == 0
        bench.step()
    bench.run()
    assert [len(bench.output(s)) for s in sequences] == [10, 10, 10]


def test_steps_do_not_grow_with_context(make_bench):
    """A decode step of many long sequences is as small a message as one of short ones."""
    sizes = []
    for length in (10, 2000):
        bench = make_bench(num_blocks=1100, budget=4000, max_num_seqs=8)
        for i in range(8):
            bench.add(prompt(length, i), 20)
        while bench.scheduler.num_waiting or bench.scheduler._prefilling:
            bench.step()
        batch = bench.schedule()
        arrays = [getattr(batch, name) for name in batch.__dataclass_fields__]
        sizes.append(sum(a.nbytes for a in arrays if hasattr(a, "nbytes")))
    assert abs(sizes[0] - sizes[1]) <= 8 * 3 * 8, sizes  # at most one new block each
