"""What a cluster offers, in words and numbers."""

import random

import pytest

from mindspeed_rlxf.cluster.nodes import (
    Node,
    Place,
    choose_model,
    describe_places,
    fits,
    order_ranks,
    take_devices,
)
from mindspeed_rlxf.config.problems import UserError


def node(number: int, count: int, free: int = 0, model: str = "") -> Node:
    return Node(f"id{number}", f"node{number}", f"10.0.0.{number}", count, free, model)


@pytest.mark.parametrize(
    ("shape", "counts", "possible"),
    [
        ([2, 1], [1, 2], True),
        ([2, 2], [4], False),  # one entry per node
        ([2, 2], [1, 2, 8], True),
        ([3], [2, 2], False),
        ([1], [], False),
    ],
)
def test_each_entry_needs_a_node_of_its_own(
    shape: list[int], counts: list[int], possible: bool
) -> None:
    assert fits(shape, counts) is possible


def test_a_pool_asks_for_one_model_where_there_are_several() -> None:
    old, new = node(1, 8, model="A2"), node(2, 8, model="A3")
    assert (
        choose_model("main", [8], [old, node(3, 8)]) is None
    )  # one known model: nothing to choose
    assert choose_model("main", [8], [new, old]) == "A2"  # the first by address, on every start
    assert choose_model("main", [8, 8], [old, new, node(3, 8, model="A3")]) == "A3"
    assert choose_model("main", [8, 8, 8], [old, new]) is None  # more nodes may come
    free = node(2, 8, 8, "A3")
    assert choose_model("main", [8], [old, free]) == "A3"  # free devices come first
    assert choose_model("main", [8], take_devices([old, free], [4], "A3")) == "A2"


def test_a_pool_takes_the_nodes_that_it_fills_best() -> None:
    nodes = [node(1, 8, 8), node(2, 8, 4), node(3, 8, 4, "A2")]
    left = take_devices(nodes, [4, 2], None)
    assert [n.free for n in left] == [8, 0, 2]
    assert [n.free for n in take_devices(nodes, [4], "A2")] == [8, 4, 0]
    assert take_devices(nodes, [9], None) == nodes


def test_a_mixture_of_models_is_refused_by_name() -> None:
    with pytest.raises(UserError) as caught:
        choose_model("main", [8, 8], [node(1, 8, 8, "A2"), node(2, 8, 8, "A3")])
    assert str(caught.value) == (
        "resource_pool.main=[8, 8] must be on devices of one model; the cluster has "
        "node1 (10.0.0.1): 8 of 8 A2 free, node2 (10.0.0.2): 8 of 8 A3 free; "
        "make the pool smaller, or add nodes of the same model"
    )


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
