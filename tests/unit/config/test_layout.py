"""Ranks of the tp-dp-pp order, worked out by hand."""

from mindspeed_rlxf.config.rank_layout import ParallelLayout


def test_ranks_follow_the_tp_dp_pp_order() -> None:
    layout = ParallelLayout(world_size=8, tp=2, pp=2)  # dp 2
    coordinates = [(layout.pp_rank(r), layout.dp_rank(r), layout.tp_rank(r)) for r in range(8)]
    assert layout.dp == 2
    assert coordinates == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert layout.leaders() == [4, 6]  # of the last stage, in data-parallel order


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    layout = ParallelLayout(world_size=8, tp=2, cp=2)  # dp 2
    coordinates = [(layout.dp_rank(r), layout.cp_rank(r), layout.tp_rank(r)) for r in range(8)]
    assert coordinates == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert layout.leaders() == [0, 4]
