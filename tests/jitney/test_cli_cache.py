"""`jitney cache` and `jitney audit`, against a real cache process and a scripted executor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from jitney.block_ops import Release, RequestId
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.cli import app
from jitney.service_process import ServiceProcess
from tests.support.cache_caller import Client
from tests.support.ledger_rig import boarding, prompt
from tests.support.processes import service
from tests.support.scripted_executor import InThread, ScriptedExecutor

runner = CliRunner()
ONE = prompt(0, 0, 1)
OTHER = prompt(1, 1)


def jitney(*words: str, stdin: str | None = None) -> Result:
    """Runs the command."""
    return runner.invoke(app, list(words), input=stdin)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service("cache_svc", folder=tmp_path_factory.mktemp("cache")) as process:
        yield process


@pytest.fixture
def target(cache: ServiceProcess) -> str:
    """A cache that holds three blocks of tenant a and two of tenant b."""
    client = Client(cache.target, "e")
    client.open()
    for number, (wanted, tenant) in enumerate(((ONE, "a"), (OTHER, "b")), 1):
        new = client.apply(**boarding((number, wanted, 0))).reserves[0].blocks
        client.apply(seals=[wanted.seal(number, new, tenant=tenant)], releases=[Release(RequestId(number))])
    client.close()
    return cache.target


def gone(done: Result) -> list[int]:
    assert done.exit_code == 0, done.output
    return [int(word) for word in done.stdout.replace(",", "").split() if word.isdigit()]


def test_audit_says_how_much_was_checked(target: str) -> None:
    done = jitney("audit", "--cache", target)
    assert (done.exit_code, done.stdout) == (0, "16 blocks checked: nothing wrong\n")
    assert json.loads(jitney("audit", "--json", "--cache", target).stdout) == {"findings": [], "checked_blocks": 16}


def test_status(target: str) -> None:
    done = jitney("cache", "status", "--cache", target)
    assert done.exit_code == 0, done.output
    for part in ("0.0 % of", "11 free, 5 cached, 0 granted, 0 leaving, of 16; 0 requests"):
        assert part in done.stdout
    found = json.loads(jitney("cache", "status", "--json", "--cache", target).stdout)
    assert (found["executors"][0]["executor"], found["not_ready"], found["hit_rate"]) == ("e", "", 0.0)


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        (["--tenant", "a"], 3),
        (["--tenant", "nobody"], 0),
        (["--salt", ""], 5),
        (["--salt", "mine"], 0),
        (["--model-version", "model"], 5),
        (["--key", ONE.keys[1].hex()], 2),
        (["--key", OTHER.root.hex()], 5),
    ],
)
def test_invalidate(target: str, words: list[str], blocks: int) -> None:
    assert gone(jitney("cache", "invalidate", *words, "--cache", target)) == [blocks, 0, 0]
    again = jitney("cache", "invalidate", *words, "--json", "--cache", target)
    assert json.loads(again.stdout) == {"device_blocks": 0, "cpu_blocks": 0, "ssd_blocks": 0}


def test_invalidate_a_prompt_from_its_first_block_with_a_token_of_the_text(target: str) -> None:
    root, first, second = ONE.root, *ONE.keys[:2]
    others = {"": [root, first, b"a" * 32], "?": [root, first, b"b" * 32]}
    executor = ScriptedExecutor(keys=others | {"once upon": [root, *ONE.keys]})
    with InThread(executor) as address:
        words = ["cache", "invalidate", "--prefix", "-", "--system", "be brief", "--salt", "s"]
        assert gone(jitney(*words, "-t", address, "--cache", target, stdin="once upon")) == [2, 0, 0]
        said = [[message.content for message in asked.chat.messages] for asked in executor.explained]
        assert said == [["be brief", "once upon"], ["be brief", ""], ["be brief", "?"]]
        assert {asked.salt for asked in executor.explained} == {"s"}
        again = jitney(*words, "-t", address, "--cache", target, stdin="once upon")
        assert again.stdout.startswith("nothing of it was cached") and gone(again) == [0, 0, 0]
        executor.keys["as another begins"] = [root, first, b"a" * 32, second]
        executor.keys["?"] = [root, b"c" * 32]
        words = ["cache", "invalidate", "--prefix", "as another begins", "-t", address, "--cache", target]
        assert gone(jitney(*words)) == [1, 0, 0]


@pytest.mark.parametrize("words", [["once upon", "--raw"], ["1, 2", "--ids"]])
def test_invalidate_a_prompt_that_is_no_chat_from_its_first_block(target: str, words: list[str]) -> None:
    executor = ScriptedExecutor(keys={"": [ONE.root, *ONE.keys]})
    with InThread(executor) as address:
        assert gone(jitney("cache", "invalidate", "--prefix", *words, "-t", address, "--cache", target)) == [3, 0, 0]
    [asked] = executor.explained
    assert asked.text == "once upon" or list(asked.token_ids.ids) == [1, 2]


def test_invalidate_says_when_no_block_has_a_token_of_the_text(target: str) -> None:
    executor = ScriptedExecutor(keys={"": [ONE.root, ONE.keys[0]]})
    with InThread(executor) as address:
        done = jitney("cache", "invalidate", "--prefix", "hi", "-t", address, "--cache", target)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"--key {ONE.keys[0].hex()} removes such blocks, with all that begins with the 16 tokens" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--tenant", "a", "--salt", "s"],
        ["--key", "xyz"],
        ["--key", "00"],
        ["--prefix", "1 x", "--ids"],
        ["--prefix", "1", "--raw", "--system", "x"],
    ],
)
def test_invalidate_refuses_what_it_cannot_mean(target: str, words: list[str]) -> None:
    with InThread(ScriptedExecutor()) as address:
        done = jitney("cache", "invalidate", *words, "--cache", target, "-t", address)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_explain_says_where_a_prompt_leaves_the_cache() -> None:
    executor = ScriptedExecutor()
    with InThread(executor) as address:
        done = jitney("cache", "explain", "hello", "--system", "be brief", "--salt", "s", "-t", address)
        assert done.stdout.splitlines() == [
            "100 tokens in blocks of 16: it leaves the cached prefix at token 48: kept no more",
            "         0 to 31       on the device",
            "        32 to 47       on disk",
            "        48 to 99       not cached",
        ]
        [asked] = executor.explained
        assert ([m.content for m in asked.chat.messages], asked.salt) == (["be brief", "hello"], "s")
        found = json.loads(jitney("cache", "explain", "hello", "--raw", "--json", "-t", address).stdout)
        assert (found["cached_tokens"], found["hit_tokens"], executor.explained[1].text) == (48, 48, "hello")
        assert (found["cached_key"], found["prefix_key"]) == ("03" * 32, "06" * 32) and "keys" not in found
        assert jitney("cache", "explain", "-", "-t", address, stdin="from stdin").exit_code == 0
    assert executor.explained[2].chat.messages[0].content == "from stdin"


def test_a_cache_that_finds_something_wrong() -> None:
    class Wrong(cache_pb2_grpc.CacheServicer):
        def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
            return pb.AuditResponse(ok=False, findings=["block 7 is in two states"], checked_blocks=9)

    server = grpc.server(ThreadPoolExecutor(1))
    cache_pb2_grpc.add_CacheServicer_to_server(Wrong(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    done = jitney("audit", "--cache", f"127.0.0.1:{port}")
    server.stop(None).wait()
    assert (done.exit_code, done.stdout) == (1, "block 7 is in two states\n9 blocks checked: 1 wrong\n")


def test_nobody_there_is_one_line() -> None:
    for words in (["audit"], ["cache", "status"], ["cache", "invalidate", "--tenant", "a"]):
        done = jitney(*words, "--cache", "127.0.0.1:1")
        assert (done.exit_code, done.stdout) == (3, "")
        assert done.stderr == "jitney: no cache answers at 127.0.0.1:1 (Connection refused)\n"


def test_the_cache_of_jitney_serve_is_found_by_itself(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITNEY_STATE_DIR", str(tmp_path))
    lost = jitney("audit")
    assert (lost.exit_code, lost.stderr.count("\n")) == (2, 1)
    assert "say --cache HOST:PORT" in lost.stderr
    (tmp_path / "endpoints.json").write_text(json.dumps({"cache": target}), encoding="utf-8")
    assert jitney("audit").exit_code == 0
    assert jitney("audit", "--cache", "127.0.0.1:1").exit_code == 3
