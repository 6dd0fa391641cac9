"""A chat of ten turns prefills at most its new tokens and one block a turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jitney.client import Client, Completion, Options
from jitney.supervisor import ServeOptions, Supervisor
from tests.support.default_model import default_model
from tests.support.house import tiny_house

TURNS = (
    "Which way to the river?", "And then?", "How long does it take on foot?", "Is there a bus?", "When does it go?",
    "What does a ticket cost?", "May I bring a bicycle on it?", "What is there to see — a château, perhaps?",
    "Where can one eat?", "Thank you, goodbye!",
)  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Of a tiny model that says noise: its text, tokenised again, would give other ids."""
    with tiny_house(context=4096) as house, Client(house.executor_target) as client:
        yield client


def ten_turns(client: Client, options: Options) -> None:
    """Talks, and holds every turn to what it may compute."""
    block = client.model_info().block_tokens
    chat = client.chat("You know the way.", options)
    before: Completion | None = None
    for text in TURNS:
        done = chat.ask(text)
        assert done.finished.reason.whole
        usage, prompt = done.finished.usage, done.started.prompt_token_ids
        if before is not None:
            known = before.started.prompt_token_ids + before.token_ids
            assert prompt[: len(known)] == known, "the prompt does not begin with what the executor has computed"
            new = len(prompt) - len(known)
            assert usage.computed_prompt_tokens <= new + block
        assert usage.cached_tokens + usage.computed_prompt_tokens == len(prompt)
        before = done
    assert len(chat.messages) == 1 + 2 * len(TURNS)


@pytest.mark.parametrize(
    "options",
    [
        Options(max_tokens=40, return_prompt_token_ids=True),
        Options(max_tokens=33, temperature=1.0, seed=5, return_prompt_token_ids=True),
        Options(max_tokens=60, temperature=1.0, seed=6, stop=("e", "a"), return_prompt_token_ids=True),
        Options(max_tokens=15, temperature=1.0, seed=7, ignore_eos=True, return_prompt_token_ids=True),
    ],
    ids=["greedy", "drawn", "stop-strings", "short"],
)
def test_a_turn_computes_only_what_is_new(client: Client, options: Options) -> None:
    ten_turns(client, options)


@pytest.mark.slow
def test_a_turn_computes_only_what_is_new_on_the_default_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = default_model()
    flags = (f"--model={path}", "--threads=2", "--max-step-tokens=256")
    options = ServeOptions(state_dir=tmp_path_factory.mktemp("state"), grace_s=1.0, executor_args=flags)
    with Supervisor(options) as house, Client(house.executor_target) as client:
        ten_turns(client, Options(max_tokens=32, return_prompt_token_ids=True))
