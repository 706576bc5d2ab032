"""The shards of sites that come and go."""

import pytest

from orrery.elastic.ledger import ShardMap
from orrery.elastic.types import ElasticError, SiteMember


def site(number: int, shard: int | None = None) -> SiteMember:
    return SiteMember(f"{number:032x}", "127.0.0.1", 4000 + number, shard)


def test_no_document_is_trained_twice_while_sites_come_and_go():
    rounds = [[1, 2], [1, 2, 3], [1, 3], [1, 3, 4], [4, 5], [1, 2, 4, 5]]
    shards, used = ShardMap([0] * 4), set()
    shards.finish_round((), 0)
    for numbers in rounds:
        for number, shard in shards.holders.items():
            place = {(shard, shards.trained[shard] + i) for i in range(10)}
            assert not place & used, f"site {number} repeats {place & used}"
            used |= place
        shards.finish_round(tuple(site(number) for number in numbers), 10)
    assert sum(shards.trained) == len(used) == 10 * (2 + 3 + 2 + 3 + 2)


def test_a_member_keeps_its_shard_and_a_wish_counts_if_it_is_free():
    shards = ShardMap([0] * 4)
    shards.finish_round((site(1), site(2, shard=3), site(3, shard=0)), 0)
    assert list(shards.holders.values()) == [0, 3, 1]
    shards.finish_round((site(2, shard=3), site(3), site(4)), 10)
    assert list(shards.holders.values()) == [3, 1, 0] and shards.trained == [10, 10, 0, 10]


def test_documents_that_a_lost_site_trained_while_its_round_was_in_flight_count():
    shards = ShardMap([0] * 4)
    shards.finish_round((site(1), site(2)), 0, 3)
    shards.finish_round((site(1), site(3)), 10, 3)
    assert shards.trained == [10, 13, 0, 0] and list(shards.holders.values()) == [0, 1]


def test_more_sites_than_shards_are_refused_by_name():
    with pytest.raises(ElasticError, match="num_shards 1: 2 sites take part"):
        ShardMap([0]).finish_round((site(1), site(2)), 0)
