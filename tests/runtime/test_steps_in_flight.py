"""Scheduling a step while another's tokens are still to come, against the stand-in model."""

from __future__ import annotations

import numpy as np


def prompt(length, first=0):
    return [(first + i) % 97 for i in range(length)]


def decoding(make_bench, *lengths, max_tokens=20, **options):
    """A bench whose sequences have their first token, with nothing in flight."""
    bench = make_bench(**options)
    sequences = [bench.add(prompt(n, 7 * i), max_tokens) for i, n in enumerate(lengths)]
    bench.step()
    return bench, sequences


def test_a_decode_whose_input_is_being_drawn_gets_a_placeholder(make_bench):
    bench, (first, second) = decoding(make_bench, 5, 9)
    assert bench.launch()
    assert bench.launch()
    known, ahead = bench.in_flight
    assert len(known.placeholders) == 0
    assert ahead.placeholders.tolist() == [0, 1]
    assert ahead.token_ids.tolist() == [0, 0]
    assert ahead.num_computed_tokens.tolist() == [6, 10]
    bench.finish()
    bench.finish()
    bench.run()
    assert len(bench.output(first)) == len(bench.output(second)) == 20


def test_the_first_decode_after_a_prompt_is_a_placeholder_beside_another_prompts_chunk(make_bench):
    bench = make_bench(budget=16)
    bench.add(prompt(12))
    bench.add(prompt(30, 50))
    bench.launch()
    bench.launch()
    ahead = bench.in_flight[1]
    assert ahead.num_decodes == 1
    assert ahead.placeholders.tolist() == [0]
    assert ahead.num_new_tokens.tolist() == [1, 15]
    bench.run()
    for sequence in bench.added:
        bench.output(sequence)


def test_who_ends_for_certain_is_not_scheduled_again(make_bench):
    bench, (short, _) = decoding(make_bench, 5, 9)
    short_row = short.row
    bench.scheduler._table.max_total_tokens[short_row] = 7  # one more token
    bench.launch()
    bench.launch()
    assert short_row in bench.in_flight[0].rows
    assert short_row not in bench.in_flight[1].rows


def test_nothing_is_scheduled_ahead_where_all_end_with_the_step_in_flight(make_bench):
    bench = make_bench()
    bench.add(prompt(5), 1)
    assert bench.launch()
    assert not bench.launch()
    (ended,) = bench.finish().finished
    assert len(bench.output(ended)) == 1


def test_the_row_of_who_has_ended_runs_on_unseen_and_is_not_given_away_meanwhile(make_bench):
    bench, (stopped,) = decoding(make_bench, 5, max_num_seqs=1)
    waiting = bench.add(prompt(4, 30))
    bench.launch()
    bench.launch()
    bench.finish()
    bench.scheduler.stop(stopped, "a string")
    num_tokens = len(stopped.token_ids)
    assert bench.scheduler._table.num_free_rows == 0, "the row is still in flight"
    assert not bench.launch()
    assert bench.finish().sequences == []
    assert len(stopped.token_ids) == num_tokens
    assert bench.scheduler._table.num_free_rows == 1
    bench.run()
    assert len(bench.output(waiting)) == 8


def test_a_row_that_is_left_with_two_steps_in_flight_waits_for_both(make_bench):
    bench, (sequence,) = decoding(make_bench, 5, max_num_seqs=1)
    bench.launch()
    bench.launch()
    bench.scheduler.abort(sequence)
    for num_free in (0, 1):
        assert bench.scheduler._table.num_free_rows == 0
        assert bench.finish().sequences == []
        assert bench.scheduler._table.num_free_rows == num_free


def test_blocks_are_short_so_the_step_in_flight_comes_in_before_anyone_is_preempted(make_bench):
    bench, _ = decoding(make_bench, 7, 7, block_size=4, num_blocks=4)
    bench.launch()  # both blocks of both are full
    assert not bench.launch()
    assert bench.scheduler.num_preemptions == 0
    assert len(bench.finish().sequences) == 2
    assert bench.launch()
    assert bench.scheduler.num_preemptions == 1
    bench.run()
    for sequence in bench.added:
        bench.output(sequence)


def test_a_block_is_findable_once_all_its_ids_are_known(make_bench):
    bench, (sequence,) = decoding(make_bench, 2, block_size=4)
    bench.launch()
    bench.launch()  # fills the first block with an id that isn't known yet
    assert bench.blocks.num_registered_blocks == 0
    bench.finish()
    assert bench.blocks.num_registered_blocks == 1
    table = bench.scheduler._table
    known = table.token_ids[sequence.row, :5]
    (block,) = bench.blocks.find_prefix(known)
    assert block.content == known[:4].tobytes()
    assert bench.fail(bench.in_flight[0]) == [sequence]
    assert bench.blocks.num_registered_blocks == 0, "nobody knows whether its last slot is written"
    bench.run()
    assert len(bench.output(sequence)) == 20


def test_a_failed_step_takes_the_one_after_it_along_and_names_its_own_sequences(make_bench):
    bench = make_bench(budget=8, block_size=4)
    first, second = bench.add(prompt(8)), bench.add(prompt(9))
    bench.launch()
    bench.launch()
    failed, following = bench.in_flight
    assert (failed.num_seqs, following.num_seqs) == (1, 2)
    assert second.num_cached_tokens == 8, "it hit what the step in flight is to fill"
    assert bench.fail(failed) == [first]
    assert bench.scheduler.num_running == 0
    assert bench.blocks.num_registered_blocks == 0
    assert bench.blocks.num_free_blocks == bench.blocks.num_usable_blocks
    bench.run()
    assert len(bench.output(first)) == len(bench.output(second)) == 8


def test_the_later_step_can_fail_alone(make_bench):
    bench, (sequence,) = decoding(make_bench, 5)
    bench.launch()
    bench.launch()
    bench.finish()
    assert bench.fail(bench.in_flight[0]) == [sequence]
    assert len(sequence.output_token_ids) == 2, "what came in stays"
    bench.run()
    assert len(bench.output(sequence)) == 20


def test_late_ids_are_the_drawn_ones_and_name_who_has_ended(make_bench):
    bench, (first, second) = decoding(make_bench, 5, 9)
    bench.launch()
    bench.launch()
    rows = {"first": first.row, "second": second.row}
    drawn = bench.finish().token_ids
    bench.scheduler.abort(second)
    late = bench.scheduler.late_ids(bench.in_flight[0])
    assert late.token_ids[0] == drawn[0]
    assert late.ended_rows.tolist() == [rows["second"]]
    bench.run()


def test_prompts_that_are_scored_may_have_two_chunks_in_flight(make_bench):
    """A chunk is scored from where the one before it, whose scores aren't in, leaves off."""
    from runtime.logprobs import LogprobsRecord

    bench = make_bench(budget=8)
    sequence = bench.add(prompt(20))
    sequence.prompt_logprobs = LogprobsRecord(0)
    bench.launch()
    bench.launch()
    scorings = [batch.scoring for batch in bench.in_flight]
    assert [scoring.firsts.tolist() for scoring in scorings] == [[0], [8]]
    next_ids = np.concatenate([scoring.next_ids for scoring in scorings])
    assert next_ids.tolist() == prompt(17)[1:]
    bench.run()
