"""Virtual token counters of tenants, and how they are remembered between decisions: as lifts, since what was served
comes with each snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from jitney.columns import I64, U32

MAX_TENANTS: Final = 2000
"""Are remembered: those with the largest counters, since the others would be lifted anyway."""
WAITED: Final = np.uint32(1 << 31)  # beside the weight: whether it had a request waiting


@dataclass(frozen=True, slots=True)
class Kept:
    """What is remembered [N], and the smallest counter of those that wait, or last did."""

    level: int
    lift: I64
    counter: I64  # when it was last seen
    tenant: U32
    weight: U32  # with WAITED

    @classmethod
    def read(cls, memory: bytes) -> Kept:
        """Level, then the columns, one after the other."""
        if len(memory) < 8:
            memory = bytes(8)
        count = (len(memory) - 8) // 24
        wide = np.frombuffer(memory, "<i8", 1 + 2 * count)
        narrow = np.frombuffer(memory, "<u4", 2 * count, offset=8 + 16 * count)
        return cls(int(wide[0]), wide[1 : 1 + count], wide[1 + count :], narrow[:count], narrow[count:])

    def take(self, rows: NDArray[Any]) -> Kept:
        """Some of it."""
        return Kept(self.level, self.lift[rows], self.counter[rows], self.tenant[rows], self.weight[rows])

    def write(self) -> bytes:
        """At most MAX_TENANTS of it."""
        if len(self.tenant) > MAX_TENANTS:
            return self.take(np.lexsort((self.tenant, -self.counter))[:MAX_TENANTS]).write()
        columns = (self.lift, self.counter, self.tenant, self.weight)
        return b"".join((np.int64(self.level).tobytes(), *(column.tobytes() for column in columns)))


@dataclass(frozen=True, slots=True)
class Counters:
    """[T] each. `left`: tenants that have no request now, but were served more than those that wait."""

    tenant: U32
    weight: I64
    served: I64  # over the weight
    value: I64  # the counter: served and lift
    waits: NDArray[np.bool_]
    level: int  # the smallest counter of those that wait, or last did
    left: Kept

    def remembered(self) -> bytes:
        """For the next decision."""
        waited = self.weight.astype(np.uint32) | np.where(self.waits, WAITED, np.uint32(0))
        return Kept(
            self.level,
            np.append(self.value - self.served, self.left.lift),
            np.append(self.value, self.left.counter),
            np.append(self.tenant, self.left.tenant),
            np.append(waited, self.left.weight & (WAITED - 1)),
        ).write()
