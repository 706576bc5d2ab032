"""Sites behind NAT, and a slow edge, in network namespaces: log, links, relay and speeds."""

import pytest
from networks import PUBLIC, Networks, lacking
from placed_sites import rounds_of

from orrery.elastic.routes import relay

in_namespaces = pytest.mark.skipif(bool(lacking()), reason=lacking())


@in_namespaces
def test_two_sites_behind_nat_train_with_a_third(tmp_path):
    with Networks("orn") as networks:
        spaces = [networks.public(1), networks.private(11), networks.private(12)]
        found = rounds_of(spaces, [f"{PUBLIC}.1", "", ""], 2, tmp_path)
        (one, last, _), (two, _, _) = found[1:]
        assert relay(last.epoch, one, two) == found[0][0]
        assert networks.sent_bytes(spaces[0]) > 1.5 * networks.sent_bytes(spaces[1])


@in_namespaces
def test_bytes_of_a_slow_edge_go_over_the_third_site(tmp_path):
    with Networks("ors") as networks:
        spaces = [networks.public(number) for number in (1, 2, 3)]
        networks.limit_edge(spaces[0], 2, 8)
        networks.limit_edge(spaces[1], 1, 8)
        for space in spaces:
            networks.limit(space, 200)
        found = rounds_of(spaces, [f"{PUBLIC}.{i}" for i in (1, 2, 3)], 3, tmp_path)
        (one, last, _), (two, _, _), (third, _, _) = found
        assert last.epoch.speeds[one][two] < 20 < last.epoch.speeds[one][third]
        assert relay(last.epoch, one, two) == third
