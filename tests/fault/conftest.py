"""What the files of this folder share."""

from __future__ import annotations

import pytest

from tests.fault import hosts


@pytest.fixture
def server() -> hosts.RankServer:
    """Forks ranks; the same for all files."""
    return hosts.rank_server()
