"""Which attention backend serves a pool."""

from __future__ import annotations

from executor_svc.attention import AttentionBackend, KVShape
from executor_svc.attention_native import NativeAttention
from executor_svc.attention_torch import PlainAttention, TorchAttention
from executor_svc.kernels.library import load
from jitney.errors import InvalidRequest

NATIVE = "native"


def select_backend(shape: KVShape, prefer: str | None = None) -> AttentionBackend:
    """A backend with a fresh pool. Without a preference: native where the kernels run, or torch.

    `prefer` is "native", "native-avx512", "native-avx2", "native-portable", "torch" or "plain". Raises
    InvalidRequest for one that is unknown or does not run here.
    """
    if prefer == TorchAttention.name:
        return TorchAttention(shape)
    if prefer == PlainAttention.name:
        return PlainAttention(shape)
    library = load()
    if library is None:
        if prefer is None:
            return TorchAttention(shape)
        raise InvalidRequest("the native kernels do not run here", field="attention", limit="torch", value=prefer)
    names = {NATIVE: None, None: None} | {f"{NATIVE}-{isa}": isa for isa in library.isas}
    if prefer not in names:
        known = ", ".join([NATIVE, *(f"{NATIVE}-{isa}" for isa in library.isas), "torch", "plain"])
        raise InvalidRequest(f"attention must be one of {known}", field="attention", limit=known, value=prefer)
    return NativeAttention(shape, library, names[prefer])
