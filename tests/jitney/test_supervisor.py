"""`jitney serve`: the three real services with a tiny model, killed, started again and stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitney.client import Client, Options
from jitney.errors import Away, Conflict, InvalidRequest, Missing
from jitney.supervisor import ServeOptions, Supervisor
from tests.support.processes import is_running, wait_until
from tests.support.tiny_llama import make_tiny_llama

FLAGS = ("--pool-blocks=64", "--threads=1", "--max-step-tokens=256", "--native=false")
NAMES = ["cache", "executor", "scheduler-0", "scheduler-1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def services(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    folder = tmp_path_factory.mktemp("state")
    options = ServeOptions(state_dir=folder, schedulers=2, executor_args=(f"--model={model}", *FLAGS))
    with Supervisor(options) as supervisor:
        yield supervisor


def answer(supervisor: Supervisor) -> tuple[int, ...]:
    with Client(supervisor.executor_target) as client:
        completion = client.generate_once("one two three", Options(max_tokens=6, ignore_eos=True))
    assert len(completion.token_ids) == 6
    return completion.token_ids


def test_it_serves_and_says_where(services: Supervisor) -> None:
    answer(services)
    said = json.loads((services.options.state_dir / "endpoints.json").read_text())
    assert said == {
        "executor": services.executor_target,
        "cache": services.cache_target,
        "schedulers": services.scheduler_targets,
    }
    assert sorted(services.pids) == NAMES
    assert len(set(services.pids.values())) == 4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_killed_comes_back_at_its_address(services: Supervisor, name: str) -> None:
    before, restarts = answer(services), services.restarts[name]
    killed = services.kill(name)
    assert services.wait_serving(name, not_pid=killed) != killed
    assert services.restarts[name] == restarts + 1
    services.wait_serving("executor")
    assert answer(services) == before


def test_a_folder_belongs_to_one(services: Supervisor) -> None:
    with pytest.raises(Conflict, match="in use by another jitney serve"):
        Supervisor(services.options).start()
    answer(services)


@pytest.mark.parametrize("below", ["", "state"])
def test_a_file_is_no_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=r"file.* cannot be the folder of lock and log") as caught:
        Supervisor(ServeOptions(state_dir=tmp_path / "file" / below)).start()
    assert (caught.value.field, caught.value.value) == ("state_dir", str(tmp_path / "file" / below))


def test_an_ssd_that_is_a_file_does_not_start(model: Path, tmp_path: Path) -> None:
    (tmp_path / "ssd").touch()
    arguments, ssd = (f"--model={model}", *FLAGS), f"--ssd-dir={tmp_path / 'ssd'}"
    with pytest.raises(Away, match=r"must be a folder, .*ssd is not one"):
        Supervisor(ServeOptions(state_dir=tmp_path, executor_args=arguments, cache_args=(ssd,))).start()


def test_names_are_checked(services: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="'scheduler-7'"):
        services.kill("scheduler-7")
    with pytest.raises(InvalidRequest, match="schedulers must be 1 to 16, got 0"):
        Supervisor(ServeOptions(state_dir=tmp_path, schedulers=0))


def is_free(folder: Path) -> bool:
    with (folder / "serve.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def test_a_model_that_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    supervisor = Supervisor(ServeOptions(state_dir=tmp_path, executor_args=("--model=/no/such/model",)))
    with pytest.raises(Away, match=r"executor ended with status 1 while starting: .*/no/such/model"):
        supervisor.start()
    assert not any(supervisor.pids.values())
    assert is_free(tmp_path)


def test_a_flag_that_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    supervisor = Supervisor(ServeOptions(state_dir=tmp_path, cache_args=("--no-such-flag",)))
    with pytest.raises(Away, match=r"cache ended with status 2 .* unrecognized arguments: --no-such-flag"):
        supervisor.start()
    assert not any(supervisor.pids.values())
    assert is_free(tmp_path)


def test_stop_while_starting(tmp_path: Path, model: Path) -> None:
    supervisor = Supervisor(ServeOptions(state_dir=tmp_path, executor_args=(f"--model={model}", *FLAGS)))
    timer = threading.Timer(0.5, supervisor.stop)
    timer.start()
    with pytest.raises(Away, match="stopped while starting"):
        supervisor.start()
    timer.join()
    assert not any(supervisor.pids.values())
    assert is_free(tmp_path)


def command(folder: Path, model: Path, port: int = 0) -> list[str]:
    flags = [f"--executor={flag}" for flag in FLAGS]
    serve = ["serve", f"--model={model}", f"--state-dir={folder}", f"--port={port}", *flags]
    return [sys.executable, "-c", "from jitney.cli import main; main()", *serve]


@contextlib.contextmanager
def running(folder: Path, model: Path, port: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """`jitney serve`, once it says that it is ready; what it says is in `folder`/said."""
    said = folder / "said"
    with (
        said.open("wb") as file,
        subprocess.Popen(command(folder, model, port), stderr=file, cwd=Path.cwd()) as process,
    ):
        try:
            wait_until(lambda: b"ready" in said.read_bytes() or process.poll() is not None, 60.0)
            assert process.poll() is None, said.read_text()
            yield process
        finally:
            process.kill()


def logged_pids(folder: Path) -> set[int]:
    return {json.loads(line)["pid"] for line in (folder / "jitney.log").read_text().splitlines() if line[:1] == "{"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_cleanly(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running(tmp_path, model, port) as process:
        with Client(f"127.0.0.1:{port}") as client:
            assert client.generate_once("one", Options(max_tokens=1)).token_ids
        process.send_signal(number)
        assert process.wait(60.0) == 0
    assert (tmp_path / "said").read_text().rstrip().endswith("stopped")
    pids = logged_pids(tmp_path)
    assert len(pids) >= 3
    assert not any(map(is_running, pids))


def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model) as process:
        process.kill()
    pids = logged_pids(tmp_path)
    assert len(pids) >= 3
    wait_until(lambda: not any(map(is_running, pids)), 60.0)
