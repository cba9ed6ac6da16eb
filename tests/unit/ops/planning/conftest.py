"""The configurations are those of the tests of the configuration."""

from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]
