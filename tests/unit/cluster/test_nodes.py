"""The order of ranks over the nodes of a cluster."""

import random

from mindspeed_rlxf.cluster.nodes import Place, describe_places, order_ranks


def test_ranks_go_by_node_then_device_whatever_the_order_of_start() -> None:
    started = [
        ("c", Place("b", "10.0.0.10", 0, (2,))),
        ("b", Place("a", "10.0.0.9", 1, (10,))),  # as numbers: 9 before 10, device 2 before 10
        ("a", Place("a", "10.0.0.9", 1, (2,))),
        ("d", Place("b", "10.0.0.10", 0, (3,))),
        ("f", Place("c", "fd00::1", 2, (1,))),
        ("e", Place("c", "fd00::1", 2, (0,))),
    ]
    for seed in range(5):
        random.Random(seed).shuffle(started)
        processes, places = order_ranks(started)
        assert "".join(processes) == "abcdef"
        assert [place.host for place in places] == ["a", "a", "b", "b", "c", "c"]


def test_entries_of_other_sizes_keep_the_order_of_the_list() -> None:
    """`[2, 1, 1]`: the plan shows two ranks on the first node, whatever its address."""
    started = [
        ("c", Place("y", "10.0.0.2", 2, (0,))),
        ("b", Place("z", "10.0.0.3", 0, (1,))),
        ("d", Place("x", "10.0.0.9", 1, (0,))),
        ("a", Place("z", "10.0.0.3", 0, (0,))),
    ]
    processes, places = order_ranks(started)
    assert "".join(processes) == "abcd"
    assert describe_places(places) == (
        "ranks 0-1 on z (10.0.0.3), rank 2 on y (10.0.0.2), rank 3 on x (10.0.0.9)"
    )
