"""Numbers and words that error messages recommend."""

from mindspeed_rlxf.config.problems import closest, divisors, multiples_around, neighbours, use


def test_divisors_are_all_and_in_order() -> None:
    assert divisors(1) == [1]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(16) == [1, 2, 4, 8, 16]
    assert len(divisors(10**9)) == 100  # 2^9 * 5^9: no long wait for a mistyped batch size


def test_neighbours_are_positive_numbers() -> None:
    assert neighbours(5, [1, 4, 6, 12]) == [4, 6]
    assert neighbours(1, [1, 2]) == [2]
    assert multiples_around(100, 8) == [96, 104]
    assert multiples_around(3, 8) == [8]
    assert use([96, 104]) == "use 96 or 104"


def test_the_closest_word_of_a_misspelt_or_shortened_one_is_found() -> None:
    known = ["actor_rollout_ref", "actor_rollout", "critic", "ref"]
    assert closest("critc", known) == "critic"
    assert closest("actor", known) == "actor_rollout"
    assert closest("zz", known) is None
