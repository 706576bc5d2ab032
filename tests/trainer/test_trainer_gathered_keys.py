"""Order and work of latent keys that context-parallel ranks gather."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from orrery.kernels.attention import Documents
from orrery.trainer.parallel.context_parallel import contiguous, zigzag_of_whole
from orrery.trainer.parallel.gathered_keys import KeyOrder

LENGTHS = [1, 2, 3, 21, 5, 8, 1, 13, 64]
cases = pytest.mark.parametrize("size", [2, 3, 4])


def order(size, rank, is_latent, lengths=LENGTHS):
    """Return this rank's order, and the padded stream as (document, position) of each place."""
    shards = [zigzag_of_whole(lengths, size, each) for each in range(size)]
    offsets = torch.from_numpy(shards[rank].cu_seqlens)
    documents = Documents(offsets, int(offsets.diff().max()))
    found = KeyOrder.of(documents, len(shards[rank].source), size, rank, is_latent)
    return found, shards, offsets.tolist()


def padded_stream(lengths, offsets):
    """Return the token at each place: padding repeats the last one of its document."""
    begin, stream = 0, []
    for length, first, last in zip(lengths, offsets, offsets[1:], strict=False):
        stream += [begin + min(place, length - 1) for place in range(last - first)]
        begin += length
    return np.array(stream)


@cases
def test_gathered_keys_stand_in_the_order_of_whole_padded_documents(size):
    for rank in range(size):
        found, shards, offsets = order(size, rank, is_latent=True)
        gathered = np.concatenate([shard.source for shard in shards])
        stream = padded_stream(LENGTHS, offsets)
        assert (gathered[found.row] == stream).all()
        assert (stream[found.last] == shards[rank].source).all()
        begins = [max(b for b in offsets if b <= last) for last in found.last.tolist()]
        assert found.first.tolist() == begins


@cases
def test_dense_queries_read_their_document_up_to_themselves(size):
    """The last key of the i-th query from the end of a piece is the i-th key from the end."""
    for rank in range(size):
        found, shards, offsets = order(size, rank, is_latent=False)
        gathered = np.concatenate([shard.source for shard in shards])[found.row]
        stream = padded_stream(LENGTHS, offsets)
        places = order(size, rank, is_latent=True)[0]
        q, k = found.queries.cu_seqlens.tolist(), found.keys.cu_seqlens.tolist()
        assert len(q) == len(k) == 2 * len(LENGTHS) + 1 and q[-1] == len(shards[rank].source)
        assert found.queries.max_seqlen == max(np.diff(q))
        assert found.keys.max_seqlen >= max(np.diff(k))
        for piece in range(2 * len(LENGTHS)):
            for back in range(1, q[piece + 1] - q[piece] + 1):
                query = q[piece + 1] - back
                first, last = places.first[query], places.last[query]
                read = gathered[k[piece] : k[piece + 1] - back + 1]
                assert (read == stream[first : last + 1]).all()


@cases
def test_parts_cover_all_keys_read_and_repeat_no_row_inside_one(size):
    for rank in range(size):
        found, _, _ = order(size, rank, is_latent=False)
        places = torch.cat([place for _, place in found.parts]).sort().values
        assert (places == torch.arange(len(found.row))).all()
        for rows, place in found.parts:
            assert len(rows.unique()) == len(rows)
            assert (found.row[place] == rows).all()


@pytest.mark.parametrize("lengths", [[131_072], [70_000, 40_000, 3000, 900, 17]])
def test_ranks_score_equally_many_keys_as_contiguous_shares_would_not(lengths):
    def scored(rank):
        found, _, _ = order(4, rank, is_latent=True, lengths=lengths)
        return int((found.last.long() - found.first + 1).sum())

    def contiguously(rank):
        place = contiguous(lengths, 4, rank).source
        begins = np.append(0, np.cumsum(lengths))[:-1]
        return int((place - begins[np.searchsorted(begins, place, side="right") - 1] + 1).sum())

    work = [scored(rank) for rank in range(4)]
    assert max(work) == min(work)
    other = [contiguously(rank) for rank in range(4)]
    assert max(other) > 1.3 * sum(other) / 4


def test_the_benchmark_of_a_rank_runs_and_its_four_ranks_equal_one():
    script = Path(__file__).parents[2] / "benchmarks" / "trainer" / "context_rank.py"
    ran = subprocess.run(
        [sys.executable, script, "--smoke"], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
