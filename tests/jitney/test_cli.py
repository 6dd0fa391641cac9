"""The command line, against a scripted executor on a real gRPC server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jitney import errors, models
from jitney.cli import app
from jitney.cli.common import EXIT_CODES, exit_code
from jitney.cli.serve import ready_line
from tests.support.default_model import default_model
from tests.support.scripted_executor import IDS, PIECES, TEXT, Break, InThread, ScriptedExecutor

runner = CliRunner()


@pytest.fixture
def executor() -> ScriptedExecutor:
    """What answers; a test may script it before the first call."""
    return ScriptedExecutor()


@pytest.fixture
def target(executor: ScriptedExecutor) -> Iterator[str]:
    """Where it answers."""
    with InThread(executor) as address:
        yield address


def jitney(*words: str, stdin: str | None = None) -> Result:
    """Runs the command."""
    return runner.invoke(app, list(words), input=stdin)


def test_generate_streams_the_text_and_nothing_else(executor: ScriptedExecutor, target: str) -> None:
    done = jitney("generate", "to be", "-t", target)
    assert (done.exit_code, done.stdout, done.stderr) == (0, TEXT + "\n", "")
    [request] = executor.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "to be")]


def test_generate_passes_its_options_on(executor: ScriptedExecutor, target: str) -> None:
    words = ["-n", "3", "-T", "0.5", "--top-p", "0.5", "--top-k", "4", "--min-p", "0.25", "--seed", "9", "--stop", "x"]
    words += [
        "--stop",
        "y",
        "--priority",
        "-3",
        "--tenant",
        "me",
        "--salt",
        "s",
        "--deadline-ms",
        "5000",
        "--logprobs",
        "2",
        "--request-id",
        "r1",
    ]
    done = jitney("generate", "-", "--system", "be brief", "--json", *words, "--target", target, stdin="from stdin")
    assert done.exit_code == 0, done.output
    [request] = executor.requests
    assert request.request_id == "r1"
    assert [message.content for message in request.chat.messages] == ["be brief", "from stdin"]
    assert (request.max_tokens, list(request.stop), request.priority, request.tenant) == (3, ["x", "y"], -3, "me")
    assert request.salt == "s"
    assert (request.sampling.temperature, request.sampling.seed, request.deadline_ms) == (0.5, 9, 5000)
    found = json.loads(done.stdout)
    assert (found["token_ids"], found["finish_reason"], len(found["logprobs"])) == (list(IDS[:3]), "length", 3)
    assert (found["usage"]["cached_device_tokens"], found["usage"]["cached_ssd_tokens"]) == (2, 2)
    assert found["usage"]["billable_tokens"] == 5


def test_generate_shows_several_answers_one_after_the_other(executor: ScriptedExecutor, target: str) -> None:
    done = jitney("generate", "to be", "--choices", "2", "-t", target)
    assert executor.requests[-1].n == 2
    assert done.stdout == f"[1] (stop)\n{''.join(PIECES[:-1])}\n\n[0] (stop)\n{TEXT}\n\n"
    plain = json.loads(jitney("generate", "to be", "--choices", "2", "--json", "-t", target).stdout)
    assert [choice["text"] for choice in plain["choices"]] == [TEXT, "".join(PIECES[:-1])]


def test_generate_raw_sends_the_text_as_it_is(executor: ScriptedExecutor, target: str) -> None:
    assert jitney("generate", "to be", "--raw", "--stats", "-t", target).exit_code == 0
    assert executor.requests[0].text == "to be"
    refused = jitney("generate", "to be", "--raw", "--system", "x", "-t", target)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_stats_go_to_stderr(target: str) -> None:
    done = jitney("generate", "to be", "--stats", "-t", target)
    assert done.stdout == TEXT + "\n"
    cached = "5 prompt tokens, 4 of them cached (2 on the device, 2 on disk)"
    assert done.stderr.startswith(f"{cached} · 16 generated · 18 billed · first after")


def test_a_broken_stream_is_not_seen(executor: ScriptedExecutor, target: str) -> None:
    import grpc

    executor.breaks = [Break(4, grpc.StatusCode.UNAVAILABLE)]
    assert jitney("generate", "to be", "-t", target).stdout == TEXT + "\n"
    assert len(executor.requests) == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidRequest("top_p must be at most 1, not 7", field="top_p"), 2),
        (errors.Expired("deadline passed"), 4),
        (errors.TooLarge("the queue is full", retry_after_us=2_000_000), 5),
        (errors.Aborted("ended by another call"), 1),
        (errors.JitneyError("broken"), 1),
    ],
)
def test_an_error_is_one_line_and_a_status(
    executor: ScriptedExecutor, target: str, error: errors.JitneyError, code: int
) -> None:
    executor.breaks = [Break(0, error=error, before_started=True)]
    done = jitney("generate", "to be", "-t", target)
    assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
    assert done.stderr.startswith(f"jitney: {error.message}")
    assert ("try again in 2.0 s" in done.stderr) == (error.retry_after_us > 0)


@pytest.mark.parametrize(
    "words",
    [["generate", "x"], ["status"], ["chat"], ["explain", "x"], ["policy", "set", "fcfs"], ["cache", "explain", "x"]],
)
def test_nobody_there_is_one_line(words: list[str]) -> None:
    done = jitney(*words, "-t", "127.0.0.1:1", "--patience", "0", stdin="hello\n")
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == "jitney: no executor answers at 127.0.0.1:1 (Connection refused)\n"


def test_a_name_that_nobody_has_is_one_line() -> None:
    done = jitney("status", "-t", "no-such-host.invalid:1", "--patience", "0")
    assert done.exit_code == 3
    assert done.stderr.startswith("jitney: no executor answers at no-such-host.invalid:1 (") and "]" not in done.stderr


def test_the_target_comes_from_the_environment_too(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_TARGET", target)
    assert jitney("generate", "to be").stdout == TEXT + "\n"


def test_chat_takes_a_line_a_turn(executor: ScriptedExecutor, target: str) -> None:
    lines = "hello\n\n/help\nand then\n/new\nagain\n/stats\n/quit\nnever\n"
    done = jitney("chat", "--system", "be brief", "-t", target, stdin=lines)
    assert (done.exit_code, done.stdout) == (0, (TEXT + "\n") * 3)
    sent = [[message.content for message in request.chat.messages] for request in executor.requests]
    assert sent == [["be brief", "hello"], ["be brief", "hello", TEXT, "and then"], ["be brief", "again"]]


def test_chat_goes_on_after_a_turn_that_failed(executor: ScriptedExecutor, target: str) -> None:
    executor.breaks = [Break(2, error=errors.TooLarge("the queue is full"))]
    done = jitney("chat", "-t", target, stdin="one\ntwo\n")
    assert done.exit_code == 0
    assert "jitney: the queue is full" in done.stderr
    assert [message.content for message in executor.requests[1].chat.messages] == ["two"]


def test_status_is_a_table_or_json(executor: ScriptedExecutor, target: str) -> None:
    done = jitney("status", "-t", target)
    assert done.exit_code == 0
    for part in ("executor scripted", "3 running, 2 waiting (2 blocks)", "fcfs chunk_cap=64", "7 decisions", "native"):
        assert part in done.stdout
    found = json.loads(jitney("status", "--json", "-t", target).stdout)
    assert (found["num_running"], found["finished"]["stop"], found["waiting_reasons"]) == (3, 5, {"blocks": 2})
    assert found["backend"] == "native"
    executor.not_ready = "the model loads"
    assert jitney("status", "-t", target).exit_code == 3


def test_model_show_names_the_model(target: str) -> None:
    assert "scripted" in jitney("model", "show", "-t", target).stdout
    assert json.loads(jitney("model", "show", "--json", "-t", target).stdout)["vocabulary"] == 200


def test_policy_set_sends_sorted_integers(executor: ScriptedExecutor, target: str) -> None:
    done = jitney("policy", "set", "fcfs", "b=2", "a=-1", "-t", target)
    assert (done.exit_code, done.stdout) == (0, "fcfs decides from step 42 on\n")
    assert [(item.name, item.value) for item in executor.policies[0].parameters] == [("a", -1), ("b", 2)]
    wrong = jitney("policy", "set", "fcfs", "a=much", "-t", target)
    assert (wrong.exit_code, wrong.stderr) == (2, "jitney: a parameter must be NAME=INTEGER, not 'a=much'\n")


def test_explain_says_one_sentence_and_the_history(target: str) -> None:
    done = jitney("explain", "mine", "-t", target)
    assert done.stdout == "waiting: needs 37 blocks, 12 free after 25 reserved\n  arrived\n"
    assert json.loads(jitney("explain", "mine", "--json", "-t", target).stdout)["reason"] == "blocks"


def test_model_fetch_prints_the_path(tmp_path: Path) -> None:
    path = models.default_model_path(tmp_path)
    path.parent.mkdir(parents=True)
    path.symlink_to(default_model())
    done = jitney("model", "fetch", "--cache-dir", str(tmp_path))
    assert (done.exit_code, done.stdout) == (0, f"{path}\n")


def test_model_fetch_of_nonsense_is_one_line(tmp_path: Path) -> None:
    done = jitney("model", "fetch", "no such thing", "--cache-dir", str(tmp_path))
    assert (done.exit_code, done.stderr) == (2, 'jitney: model must be "default" or ORG/NAME, not "no such thing"\n')


def test_wrong_words_are_a_usage_error() -> None:
    assert jitney("generate").exit_code == 2
    assert jitney("serve", "--model", "no/such.gguf").stderr == "jitney: there is no file or folder no/such.gguf\n"
    assert jitney("no-such-command").exit_code == 2
    assert jitney("generate", "x", "--temperature", "hot").exit_code == 2
    refused = jitney("generate", "x", "--choices", "100")
    assert refused.exit_code == 2 and "--choices" in refused.stderr
    ids = jitney("cache", "explain", "3, hi", "--ids", "-t", "127.0.0.1:1")
    assert (ids.exit_code, ids.stderr) == (2, "jitney: --ids takes whole numbers, not 'hi'\n")


def test_a_state_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["serve", "--model", str(tmp_path), "--state-dir", str(tmp_path / "file")]
    command = [sys.executable, "-c", "from jitney.cli import main; main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == f"jitney: {tmp_path / 'file'} cannot be the folder of lock and log: File exists"


def test_serve_says_where_the_commands_find_it() -> None:
    assert ready_line("127.0.0.1:50051").startswith("ready: jitney generate, jitney chat and jitney status talk")
    assert "jitney generate -t 127.0.0.1:51551, " in ready_line("127.0.0.1:51551")


def test_every_kind_of_error_has_a_status() -> None:
    assert [exit_code(kind("x")) for kind, _ in EXIT_CODES] == [code for _, code in EXIT_CODES]
    assert exit_code(errors.Missing("x")) == 1
