"""Runs the loads over the peers, round by round, and keeps what comes. Goes on from what a file has already."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.environments import NotToBeHad
from bench.peers import figures
from bench.peers.figures import OURS, Absent, Capacity, Measured, Record, Results, Tried
from bench.peers.loads import Ask, Load, asks, climb, context_tokens, mean_new_tokens, trial
from bench.peers.measuring import Taken, take
from bench.peers.servers import Failed, Peer, Server
from bench.roofline import measure_machine

TRIAL_ROUND = 1000  # ids of its own
WARM_ROUND = 2000
WARM_REQUESTS = 2
WARM_TOKENS = 8
POISSON_SHARE = 0.7


Work = Callable[[Load, Peer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Options:
    """What is run. `limit_s` ends a measurement that takes longer: what came until then counts."""

    loads: Sequence[Load]
    rounds: int
    scale: float
    slots: Sequence[int]
    drop_below: float
    capacity_tokens_per_s: float
    limit_s: float
    file: Path | None


class Bench:
    """Runs what is missing in the results, and writes what comes."""

    def __init__(self, options: Options, peers: Sequence[Peer], vocabulary: int) -> None:
        self._options = options
        self._peers = peers
        self._vocabulary = vocabulary
        self._servers: dict[tuple[str, int], Server] = {}
        self.results = Results(_read(options.file))

    async def run(self) -> None:
        """All loads in all rounds; servers stay up between."""
        try:
            for load in self._options.loads:
                for peer in self._peers:
                    await self._guarded(load, peer, self._find_slots)
                for number in range(self._options.rounds):
                    await self._round(load, number)
                following = self._options.loads[self._options.loads.index(load) + 1 :]
                if not following or context_tokens(following[0]) != context_tokens(load):
                    await self._stop_servers()
        finally:
            await self._stop_servers()

    async def _round(self, load: Load, number: int) -> None:
        todo = [
            peer
            for peer in self._peers
            if not self.results.has(load.name, peer.name, number) and not self.results.is_left(load.name, peer.name)
        ]
        if todo and not any(isinstance(record, Capacity) and record.round == number for record in self.results.records):
            self._keep(await self.capacity(number))
        for peer in todo:
            await self._guarded(load, peer, self._warm)
        turn = number % len(todo) if todo else 0
        for peer in [*todo[turn:], *todo[:turn]]:
            await self._guarded(load, peer, lambda load, peer: self._measure(load, peer, number))
        for left in self.results.too_slow(load.name, self._options.drop_below):
            self._keep(left)

    async def _guarded(self, load: Load, peer: Peer, work: Work) -> None:
        """A peer that cannot be had or fails is noted, once, and left out."""
        if self.results.is_absent(load.name, peer.name):
            return
        try:
            await work(load, peer)
        except NotToBeHad as reason:
            self._keep(Absent(peer.name, str(reason)))
        except (Failed, OSError) as reason:
            self._keep(Absent(peer.name, str(reason), load.name))

    async def _find_slots(self, load: Load, peer: Peer) -> None:
        """Trials until the best number is known."""
        await asyncio.to_thread(peer.prepare)
        while not load.fixed_slots and (slots := climb(self._tried(load, peer), self._options.slots)):
            asked = trial(load, TRIAL_ROUND + slots, self._vocabulary, self._options.scale)
            taken = await self._take(load, peer, slots, asked)
            self._keep(Tried(_tuned_as(load), peer.name, slots, taken.tokens_per_s))
            await self._stop_servers()

    def _tried(self, load: Load, peer: Peer) -> dict[int, float]:
        return self.results.tried(_tuned_as(load), peer.name)

    def _best_slots(self, load: Load, peer: Peer) -> int:
        tried = self._tried(load, peer)
        return load.fixed_slots or max(tried, key=lambda count: tried[count])

    async def _warm(self, load: Load, peer: Peer) -> None:
        """Its server for the load runs and is warm."""
        await self._server(load, peer, self._best_slots(load, peer))

    async def _measure(self, load: Load, peer: Peer, number: int) -> None:
        slots = self._best_slots(load, peer)
        per_s = POISSON_SHARE * self._our_speed() / mean_new_tokens(load) if load.poisson else 0.0
        wanted = asks(load, number, self._vocabulary, self._options.scale, per_s)
        taken = await self._take(load, peer, slots, wanted)
        self._keep(
            Measured(
                round=number,
                load=load.name,
                peer=peer.name,
                precision=peer.precision,
                slots=slots,
                requests=len(wanted),
                **asdict(taken),
            )
        )

    async def capacity(self, number: int) -> Capacity:
        """What the machine can do, measured between the others."""
        found = await asyncio.to_thread(measure_machine)
        return Capacity(number, found.read_bytes_per_s / 1e9, found.flops / 1e9)

    def _our_speed(self) -> float:
        """Ours in the mixed load, tokens/s."""
        if self._options.capacity_tokens_per_s:
            return self._options.capacity_tokens_per_s
        ours = self.results.speed("mixed", OURS)
        if ours is None:
            raise Failed(f"{OURS} was not measured in the mixed load: name its tokens/s with --capacity")
        return ours.median

    async def _server(self, load: Load, peer: Peer, slots: int) -> Server:
        """One that runs and is warm."""
        key = (peer.name, slots)
        if key not in self._servers:
            self._servers[key] = await peer.start(slots, context_tokens(load))
            warm = [
                Ask(ask.prompt_ids, min(ask.new_tokens, WARM_TOKENS))
                for ask in asks(load, WARM_ROUND, self._vocabulary, 0.0, per_s=1.0)[:WARM_REQUESTS]
            ]
            await take(self._servers[key], load, warm, self._options.limit_s)
        return self._servers[key]

    async def _take(self, load: Load, peer: Peer, slots: int, wanted: Sequence[Ask]) -> Taken:
        """One measurement; a server that had to be cut short is ended."""
        server = await self._server(load, peer, slots)
        taken = await self.measure(server, load, wanted)
        if taken.cut:
            await self._servers.pop((peer.name, slots)).stop()
        return taken

    async def measure(self, server: Server, load: Load, wanted: Sequence[Ask]) -> Taken:
        """One measurement: nothing else of this bench computes meanwhile."""
        return await take(server, load, wanted, self._options.limit_s)

    async def _stop_servers(self) -> None:
        while self._servers:
            await self._servers.popitem()[1].stop()

    def _keep(self, record: Record) -> None:
        line = json.dumps(figures.to_json(record))
        print(line, flush=True)
        self.results.records.append(record)
        if self._options.file is not None:
            with self._options.file.open("a") as file:
                file.write(line + "\n")


def _tuned_as(load: Load) -> str:
    """Whose best number of slots is taken: with arrivals spread out, that of the same requests all at once."""
    return "mixed" if load.poisson else load.name


def _read(file: Path | None) -> list[Record]:
    if file is None or not file.exists():
        return []
    return [figures.from_json(json.loads(line)) for line in file.read_text().splitlines()]
