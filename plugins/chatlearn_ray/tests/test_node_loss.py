from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import write_distribution

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_lost_node_takes_nothing_with_it(tmp_path: Path) -> None:
    """Roles spread over two nodes; one node is killed and another joins: replica and rank are rebuilt there."""
    write_distribution(tmp_path, "1.0")
    program = Path(__file__).parent / "node_loss.py"
    answer = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=700, check=True
    )
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "spread": True,
        "answered": [f"r{i}" for i in range(8)],
        "trained": 3.0,
        "lost": "role 'trainer', rank 1 of 2",
        "restarts": 1,
        "replica_0_stayed": True,
        "replica_1_moved": True,
    }
