"""An executor as the cache sees it: plain blocking calls, and streams that a test breaks at will."""

from __future__ import annotations

import queue
from typing import Any

import grpc

from jitney.block_ops import Batch, BatchAnswer
from jitney.cache.v1 import cache_pb2 as pb
from jitney.cache.v1 import cache_pb2_grpc
from jitney.cache_codec import decode_answer, encode_batch
from jitney.serving.channels import sync_channel
from jitney.serving.status import from_rpc_error
from tests.support.ledger_rig import BLOCK_TOKENS


class Client:
    """One executor, with plain blocking calls and streams that are broken at will."""

    def __init__(self, target: str, executor: str = "executor-0", incarnation: int = 1) -> None:
        self.executor, self.incarnation = executor, incarnation
        self.connect(target)
        self.epoch, self.boot_id, self.op_seq = 0, b"", 0
        self._outgoing: queue.SimpleQueue[pb.Batch | None] = queue.SimpleQueue()
        self._answers: Any = None

    def connect(self, target: str) -> None:
        self.channel = sync_channel(target)
        self.stub: Any = cache_pb2_grpc.CacheStub(self.channel)

    def open(self, redeclares: bool = False, blocks: int = 16) -> None:
        answer = self.call(
            self.stub.Open,
            pb.OpenRequest(
                executor=self.executor,
                incarnation=self.incarnation,
                blocks=blocks,
                block_bytes=1,
                block_tokens=BLOCK_TOKENS,
                redeclares=redeclares,
            ),
        )
        self.epoch, self.boot_id, self.op_seq = answer.epoch, answer.boot_id, 0

    def message(self, number: int, **operations: Any) -> pb.Batch:
        message = encode_batch(Batch(number, **operations), self.executor)
        message.epoch, message.boot_id = self.epoch, self.boot_id
        return message

    def apply(self, **operations: Any) -> BatchAnswer:
        self.op_seq += 1
        return self.send(self.message(self.op_seq, **operations))

    def send(self, message: pb.Batch) -> BatchAnswer:
        if self._answers is None:
            self._outgoing = queue.SimpleQueue()
            self._answers = self.stub.Apply(iter(self._outgoing.get, None))
        self._outgoing.put(message)
        try:
            return decode_answer(next(self._answers))
        except grpc.RpcError as error:
            self.break_stream()
            raise from_rpc_error(error) from error

    def break_stream(self) -> None:
        if self._answers is not None:
            self._answers.cancel()
            self._outgoing.put(None)
            self._answers = None

    def redeclare(self, *messages: pb.Declaration) -> Any:
        for message in messages:
            message.executor, message.epoch, message.boot_id = self.executor, self.epoch, self.boot_id
        return self.call(self.stub.Redeclare, iter(messages))

    def call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=10)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def close(self) -> None:
        self.break_stream()
        self.channel.close()
