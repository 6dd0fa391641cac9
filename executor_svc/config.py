"""Configuration of the executor."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from executor_svc.limits import Limits
from jitney.presets import PRESETS
from jitney.scheduler_codec import digest_of
from jitney.serving.config import ConfigError, ServingConfig, option
from jitney.snapshot import Batching, HorizonKind, LowerTiers, PolicyChoice, PolicyTable, Settings

SERVICE = "executor"
MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig(ServingConfig):
    """The executor: owns requests, tokens and the step clock, and runs the model."""

    model: Path | None = option(None, "GGUF file or Hugging Face folder; absent: the default model, if it was fetched")
    cache_dir: Path | None = option(
        None, "Folder of fetched models and prepared weights; absent: ~/.cache/jitney", env="JITNEY_CACHE_DIR"
    )
    name: str = option("executor-0", "Name of this executor, stable over its restarts")
    schedulers: tuple[str, ...] = option(("127.0.0.1:50052",), "Addresses of the schedulers, comma separated")
    cache: str = option("127.0.0.1:50053", "Address of the cache")
    metrics_port: int = option(0, "Port for Prometheus, on --host; 0: no metrics", minimum=0, maximum=65535)
    shared_dir: Path | None = option(
        None, "Folder shared with the cache, for the lock that says that this process lives; absent: in shared memory"
    )
    copy_mib_per_s: int = option(
        0, "Most MiB a second copied to and from the CPU tier, each way; 0: no limit", minimum=0, maximum=1 << 20
    )
    scheduler_ca: Path | None = option(None, "PEM file with the schedulers' authority; turns TLS to them on")

    backend: Literal["auto", "cpu", "torch_cuda", "cupy_cuda"] = option(
        "auto", "What computes; auto: a GPU where there is one, with our kernels where CuPy is installed"
    )
    emulated: bool = option(False, "Run a GPU backend on this CPU, its kernels emulated: for tests, very slow")
    fixed_splits: bool = option(False, "cupy_cuda: split contexts alike whatever is in the batch")
    arithmetic: Literal["auto", "fp16", "bf16", "int16", "int8", "fp32"] = option(
        "auto",
        "Weights; auto: on a CPU int16, which is as exact as fp16 and faster, or fp16 where the native kernels do not "
        "run, the model's own type on a GPU; int8: on a CPU, faster yet and less exact; fp32: the reference",
    )
    kv: Literal["auto", "fp16", "bf16", "fp32"] = option(
        "auto", "Type of keys and values in the pool; auto: fp16 on a CPU, that of the arithmetic on a GPU"
    )
    native: bool = option(True, "Use the native kernels where they run")
    threads: int = option(0, "Threads that compute; 0: as many as are fastest here", minimum=0, maximum=1024)
    pool_blocks: int = option(2048, "Blocks of the KV pool", minimum=2, maximum=1 << 24)
    block_tokens: int = option(16, "Tokens of a block", minimum=1, maximum=256)
    context_tokens: int = option(0, "Context limit, if lower than the model's; 0: the model's", minimum=0)

    preset: Literal["", "interactive", "batch"] = option(
        "", "Sizes of a step by what the server is for, where they are left at their defaults"
    )
    max_rows: int = option(64, "Requests that compute in one step", minimum=1, maximum=4096)
    max_step_tokens: int = option(
        0, "Tokens computed in one step; 0: one a row, and what uses this machine well", minimum=0, maximum=1 << 20
    )
    chunk_cap_tokens: int = option(
        0, "Tokens of one prompt in one step; 0: half of the step's, or what uses this machine well", minimum=0
    )
    block_reserve: int = option(0, "Blocks that admission leaves free for decoding", minimum=0)
    max_preemptions: int = option(2, "How often a request may be preempted", minimum=0, maximum=255)
    max_waiting_requests: int = option(4096, "Requests that may wait; 0: no limit", minimum=0)
    max_waiting_tokens: int = option(0, "Tokens that may wait; 0: no limit", minimum=0)

    target_tpot_ms: float = option(
        0.0, "Milliseconds between two tokens of an answer that bound rows and tokens of a step; 0: no bound", minimum=0
    )
    batching: Literal["continuous", "static_padded", "static_dropping"] = option(
        "continuous", "static: collect, run to the end together; what ended is computed as padding, or dropped"
    )
    horizon: Literal["auto", "steps", "until_event"] = option(
        "auto", "How long a decision holds; auto: as `steps`, but nobody is asked where there is nothing to decide"
    )
    horizon_steps: int = option(1, "Steps that a decision holds for", minimum=1, maximum=1 << 20)

    lower_tiers: Literal["measured", "always", "never"] = option(
        "measured", "When hits are loaded from lower tiers and victims swapped to them, not computed again"
    )

    tenants: Path | None = option(
        None, "TOML file, a table a tenant: weight, max_rows, max_waiting_tokens, max_priority"
    )
    policy: str = option("fcfs", "Scheduling policy")
    policy_parameters: tuple[str, ...] = option((), "Its parameters as name=integer, comma separated")
    length_table: Path | None = option(None, "Learned lengths of answers, made by `jitney lengths train`")
    coast_after_ms: int = option(50, "How late a decision may be before running rows go on without it", minimum=1)
    scheduler_timeout_s: float = option(1.0, "How long one scheduler has for one decision", minimum=0.01, maximum=60)
    decision_log: Path | None = option(None, "Folder of the log of every decision; absent: none is kept")
    decision_log_mib: int = option(256, "MiB that the decision log may take; the oldest goes", minimum=1)
    rotate_schedulers: bool = option(False, "Ask another scheduler at each step")
    cache_timeout_s: float = option(60.0, "How long to wait for the cache at start", minimum=0, maximum=86400)

    reader_timeout_s: float = option(30.0, "A stream whose reader takes nothing for so long is ended", minimum=0.1)
    cached_price: float = option(
        0.02, "Price of a cached prompt token, as a share of a computed one", minimum=0, maximum=1
    )

    def validate(self) -> None:
        """See ServingConfig."""
        ServingConfig.validate(self)
        if not self.name or len(self.name.encode()) > 64 or not self.name.isprintable():
            raise ConfigError("--name must be 1 to 64 bytes of printable text", field="name", value=self.name)
        if not self.schedulers:
            raise ConfigError("--schedulers must name at least one address", field="schedulers")
        if 0 < self.max_step_tokens < self.max_rows:
            what = (
                f"--max-rows {self.max_rows} is over --max-step-tokens {self.max_step_tokens}: each row needs a token"
            )
            raise ConfigError(what, field="max_rows", limit=self.max_step_tokens, value=self.max_rows)
        if self.emulated and self.backend not in ("torch_cuda", "cupy_cuda"):
            what = f"--emulated needs --backend torch_cuda or cupy_cuda, not {self.backend}"
            raise ConfigError(what, field="emulated", limit="torch_cuda, cupy_cuda", value=self.backend)
        self.policy_choice()

    def policy_choice(self) -> PolicyChoice:
        """The policy with which the executor starts."""
        parameters: dict[str, int] = {}
        for text in self.policy_parameters:
            name, _, value = text.partition("=")
            try:
                parameters[name.strip()] = int(value)
            except ValueError:
                what = f"--policy-parameters must be name=integer, got {text!r}"
                raise ConfigError(what, field="policy_parameters", value=text) from None
        return PolicyChoice(self.policy, tuple(sorted(parameters.items())), self._tables())

    def _tables(self) -> tuple[PolicyTable, ...]:
        if self.length_table is None:
            return ()
        try:
            content = self.length_table.read_bytes()
        except OSError as error:
            what = f"--length-table {self.length_table} cannot be read: {error}"
            raise ConfigError(what, field="length_table", value=self.length_table) from None
        return (PolicyTable("lengths", digest_of(content), content),)

    def settled(self) -> Self:
        """See ServingConfig: with the values of its preset, in place of those that are left at their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        values: dict[str, Any] = dict(PRESETS.get(self.preset, {}))
        return replace(self, **{name: v for name, v in values.items() if getattr(self, name) == defaults[name]})

    def settings(self, context_tokens: int) -> Settings:
        """What deciding depends on; `context_tokens` is the limit in force. The step's size is set, or measured."""
        return Settings(
            max_step_tokens=self.max_step_tokens,
            max_rows=self.max_rows,
            block_tokens=self.block_tokens,
            context_tokens=context_tokens,
            chunk_cap_tokens=self.chunk_cap_tokens,
            block_reserve=self.block_reserve,
            max_preemptions=self.max_preemptions,
            batching=Batching[self.batching.upper()],
            horizon_kind=HorizonKind.UNTIL_EVENT if self.horizon == "until_event" else HorizonKind.STEPS,
            horizon_steps=self.horizon_steps,
            target_tpot_us=round(self.target_tpot_ms * 1000),
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            lower_tiers=LowerTiers[self.lower_tiers.upper()],
        )

    def limits(self) -> Limits:
        """The door's."""
        return Limits(request_bytes=self.max_message_bytes, reader_timeout_s=self.reader_timeout_s)

    @property
    def rests(self) -> bool:
        """Whether nobody is asked where there is nothing to decide; a log of decisions is to have every step."""
        return self.horizon == "auto" and self.decision_log is None and not self.rotate_schedulers

    @property
    def cached_price_ppm(self) -> int:
        """`cached_price` in millionths."""
        return round(self.cached_price * MICRO)
