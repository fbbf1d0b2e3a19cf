"""The token of a cluster: every node has the same one, also where each has a home of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatlearn_core.exceptions import ConfigError
from chatlearn_hosting.reserved_port import ReservedPort
from chatlearn_ray.cluster_token import use_token, write_token

CHATLEARN = (sys.executable, "-c", "from chatlearn_cli.main import main; main()")
DRIVER = Path(__file__).with_name("token_cluster.py")


def test_the_head_writes_a_token_that_only_its_owner_can_read(tmp_path: Path) -> None:
    file = tmp_path / "run" / "token"
    environment: dict[str, str] = {}
    assert use_token(environment, file, is_head=True) == f"token: the file {file}"
    assert environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
    assert (file.stat().st_mode & 0o777, len(file.read_text())) == (0o600, 64)
    assert list(file.parent.iterdir()) == [file]
    before = file.read_text()
    write_token(file)
    assert file.read_text() == before, "a cluster that is brought up again keeps its token"


def test_the_environments_own_token_counts_unless_a_file_is_named(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_TOKEN": "secret"}
    said = use_token(environment, None, is_head=False)
    assert environment == {"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "token"}
    assert "secret" not in said
    use_token(environment, tmp_path / "token", is_head=True)
    assert environment == {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_AUTH_MODE": "token"}


def test_without_anything_it_is_rays_file_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environment: dict[str, str] = {}
    use_token(environment, None, is_head=True)
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / ".ray" / "auth_token")
    assert (tmp_path / ".ray" / "auth_token").exists()


def test_a_node_without_the_token_says_how_to_provide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"its own home directory, and the head writes only its own copy.*--token-file FILE"
    ):
        use_token({}, None, is_head=False, wait_s=0.0)
    with pytest.raises(ConfigError, match=r"the head writes the file, so it must be on a shared disk"):
        use_token({}, tmp_path / "token", is_head=False, wait_s=0.0)


def test_a_token_file_readable_by_others_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0" * 64)
    file.chmod(0o644)
    assert use_token({}, file, is_head=False).endswith("can read: chmod 600")


def test_disabled_authentication_stays_off_and_is_reported(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_MODE": "disabled"}
    assert "any process that reaches the cluster's ports can run code" in use_token(environment, None, is_head=True)
    assert environment == {"RAY_AUTH_MODE": "disabled"}
    with pytest.raises(ConfigError, match="--token-file is given, but RAY_AUTH_MODE is 'disabled'"):
        use_token(environment, tmp_path / "token", is_head=True)


def test_an_unwritable_token_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="token cannot be written to"):
        write_token(tmp_path / "file" / "token")


def environment_of(home: Path, **settings: str) -> dict[str, str]:
    """As on a machine of its own: no word on authentication."""
    home.mkdir(exist_ok=True)
    unset = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return {**kept, "HOME": str(home), "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **settings}


def up(folder: Path, rank: int, port: int, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*CHATLEARN, "cluster", "up", f"--port={port}", f"--token-file={folder / 'token'}", *arguments],
        env=environment_of(folder / f"node-{rank}", GROUP_RANK=str(rank), CHATLEARN_TEST_NODE=str(rank)),
        stdout=(folder / f"node-{rank}.log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def drive(home: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(DRIVER), *arguments],
        check=False,
        env=environment_of(home),
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """Two nodes of a cluster, the worker up first; the folder that both see, and the head's port."""
    folder = tmp_path_factory.mktemp("cluster")
    with ReservedPort() as reserved:
        port = reserved.number
    started = [up(folder, 1, port), up(folder, 0, port)]
    yield folder, port
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        process.wait(60)


@pytest.mark.engine
@pytest.mark.slow
def test_nodes_and_drivers_with_homes_of_their_own_meet_by_a_token_file(nodes: tuple[Path, int]) -> None:
    folder, port = nodes
    address, token = f"127.0.0.1:{port}", (folder / "token")
    deadline = time.monotonic() + 120
    while not all("started" in (folder / f"node-{rank}.log").read_text() for rank in range(2)):
        logs = [(folder / f"node-{rank}.log").read_text() for rank in range(2)]
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
    assert drive(folder / "driver", address, str(token)) == {"homes": [str(folder / "node-0"), str(folder / "node-1")]}
    refused = drive(folder / "stranger", address)["error"]
    assert "does not accept this driver's token, or the driver has none" in refused
    assert "runtime.options.token_file" in refused
    for rank in range(2):
        said = (folder / f"node-{rank}.log").read_text()
        assert "RAY_USAGE_STATS_ENABLED=0" in said
        assert token.read_text() not in said
        assert not (folder / f"node-{rank}" / ".ray" / "auth_token").exists()
