"""Collect these tests in `make test-hosts` only: they need root and a minute or two."""

import os

collect_ignore_glob = [] if os.environ.get("RLXF_TEST_HOSTS") else ["test_*.py"]
