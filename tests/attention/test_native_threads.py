"""The threads that native libraries share: who works on a job, and who waits for whom."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest

from attention import native_build
from attention.native_build import NativeBuildError, build_library, find_compiler

try:
    find_compiler()
except NativeBuildError as error:
    pytest.skip(str(error), allow_module_level=True)

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Threads:
    """The library, with Python functions for jobs."""

    def __init__(self) -> None:
        path = build_library(native_build._THREADS_SOURCE, "generic")
        self._run_job = ctypes.CDLL(str(path)).stepgraph_run_job
        self._kept: list[object] = []  # functions must outlive the threads that may call them
        self.num_dropped = 0

    def run(self, work: Callable[[], None], num_helpers: int) -> None:
        def drop(state: object) -> None:
            self.num_dropped += 1

        functions = CALLBACK(lambda state: work()), CALLBACK(drop)
        self._kept.append(functions)
        self._run_job(functions[0], None, functions[1], num_helpers)


@pytest.fixture
def threads() -> Threads:
    return Threads()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.001)


@pytest.mark.parametrize("num_helpers", [1, 3])
def test_the_caller_and_as_many_helpers_as_are_wanted_work(
    threads: Threads, num_helpers: int
) -> None:
    workers: set[int] = set()
    all_here = threading.Barrier(num_helpers + 1, timeout=30)

    def work() -> None:
        workers.add(threading.get_native_id())
        all_here.wait()  # so each place needs a thread of its own

    threads.run(work, num_helpers)
    assert threading.get_native_id() in workers
    assert len(workers) == num_helpers + 1
    until(lambda: threads.num_dropped == 1)


def test_a_late_helper_does_not_hold_the_caller_up(threads: Threads) -> None:
    caller, may_go = threading.get_native_id(), threading.Event()
    helper_is_in = threading.Event()
    helpers: list[int] = []

    def work() -> None:
        if threading.get_native_id() == caller:
            assert helper_is_in.wait(30)
            return
        helpers.append(threading.get_native_id())
        helper_is_in.set()
        may_go.wait(30)

    threads.run(work, 1)
    assert threads.num_dropped == 0, "the job lives as long as anybody works on it"
    done: list[int] = []
    threads.run(lambda: done.append(threading.get_native_id()), 1)  # the helper is busy
    assert caller in done
    may_go.set()
    until(lambda: threads.num_dropped == 2)
    assert len(helpers) == 1


def test_jobs_of_several_callers_at_once_are_all_done_and_dropped_once(threads: Threads) -> None:
    counts = [0] * 4

    def call(index: int) -> None:
        me = threading.get_native_id()

        def work() -> None:
            if threading.get_native_id() == me:
                counts[index] += 1

        for _ in range(200):
            threads.run(work, 2)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts == [200] * 4
    until(lambda: threads.num_dropped == 800)


def test_a_forked_process_has_threads_of_its_own(threads: Threads) -> None:
    threads.run(lambda: None, 1)
    child = os.fork()
    if child == 0:
        try:
            both = threading.Barrier(2, timeout=20)
            threads.run(lambda: both.wait() and None, 1)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must not go on as a second test run
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_idle_threads_sleep(threads: Threads) -> None:
    threads.run(lambda: None, 1)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25, "a thread computes though there is no job"
