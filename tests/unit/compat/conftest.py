"""The small valid tree of the configuration's tests."""

from tests.unit.config.conftest import check_case, make_tree, no_cluster, problems

__all__ = ["check_case", "make_tree", "no_cluster", "problems"]
