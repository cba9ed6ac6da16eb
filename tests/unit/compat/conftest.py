"""The small valid tree of the configuration's tests."""

from tests.unit.config.conftest import make_tree, no_cluster, problems

__all__ = ["make_tree", "no_cluster", "problems"]
