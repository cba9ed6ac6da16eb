from __future__ import annotations

from mindspeed_rlxf.runtime.places import Place, by_rank


def test_ranks_go_by_node_then_device_whatever_the_order_of_start() -> None:
    started = [
        ("d", Place("b", "10.0.0.10", 0, (0,), "")),
        ("c", Place("a", "10.0.0.9", 1, (10,), "")),  # as numbers: 9 before 10, device 2 before 10
        ("b", Place("a", "10.0.0.9", 1, (2,), "")),
        ("e", Place("b", "10.0.0.10", 0, (1,), "")),
        ("f", Place("c", "fd00::1", 2, (), "")),
        ("a", Place("a", "10.0.0.9", 0, (11,), "")),  # two entries on one node stay together
    ]
    processes, places = by_rank(started)
    assert "".join(processes) == "abcdef"
    assert [place.host for place in places] == ["a", "a", "a", "b", "b", "c"]
