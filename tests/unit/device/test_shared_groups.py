"""Process groups of a layout are made once, and dropped when the process leaves its world."""

from typing import Any

from mindspeed_rlxf.device import worlds


def test_a_layout_is_made_once_and_its_users_do_not_see_each_others_changes() -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"tp": object()}

    worlds.leave()
    one = worlds.groups_of_layout((2, 1, 1), make)
    one["rank"] = 1
    other = worlds.groups_of_layout((2, 1, 1), make)
    assert other == {"tp": one["tp"]} and len(made) == 1
    worlds.groups_of_layout((1, 2, 1), make)
    assert len(made) == 2
    worlds.leave()
    worlds.groups_of_layout((2, 1, 1), make)
    assert len(made) == 3
    worlds.leave()
