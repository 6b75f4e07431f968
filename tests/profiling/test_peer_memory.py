"""The memory as an engine."""

from __future__ import annotations

import peer_worker
import pytest


@pytest.mark.parametrize("threads", [1, 3])
def test_it_reads_all_weights_once_for_each_token(tmp_path, threads):
    (tmp_path / "model-1.safetensors").write_bytes(bytes(1000))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(3000))
    engine = peer_worker.MemoryLimit(str(tmp_path), {"threads": threads})
    read = []
    engine._pool.map = lambda function, parts: read.append([function(part) for part in parts]) or []
    times = peer_worker.serve(engine, [{"max_tokens": 4, "arrival": 0.0}])
    assert len(times[0]) == len(read) == 4
    assert sum(part.nbytes for part in engine._parts) == 4000 // 64 * 64
    assert all(len(values) == threads for values in read)
