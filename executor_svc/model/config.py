"""The shape of a Llama-family model, read from the config.json of a directory or from the metadata of a GGUF file.

Llama, Mistral, SmolLM, Qwen2 and Qwen3 are one network here: biases are used where a file has them, a norm of each
query and key head where the architecture says so. Everything else is refused with one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitney.errors import InvalidRequest

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
GGUF_BOS = "tokenizer.ggml.bos_token_id"
MAX_HEAD_SIZE = 65536
MAX_INTEGER = 2**31 - 1


class BadModel(InvalidRequest):
    """A model file is missing, truncated, foreign, or holds a network that is not built here: one sentence."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of the network."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    context_tokens: int
    norm_epsilon: float
    rope_base: float
    rope_divisors: tuple[float, ...]  # of the rotary frequencies, [head_size / 2]; all 1 where nothing is scaled
    tied: bool  # the head is the embedding
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocabulary", "context_tokens"):
            if getattr(self, name) <= 0:
                raise BadModel(f"the model says {name} = {getattr(self, name)}", field=name, limit="> 0")
        if self.heads % self.kv_heads or self.head_size % 2:
            raise BadModel(
                f"{self.heads} heads of {self.head_size} do not go with {self.kv_heads} key-value heads", field="heads"
            )
        if not (
            self.rope_base > 0.0 and self.norm_epsilon >= 0.0 and all(0.0 < d < math.inf for d in self.rope_divisors)
        ):
            what = (
                f"the model has no usable rotary base {self.rope_base}, factors of it, or epsilon {self.norm_epsilon}"
            )
            raise BadModel(what, field="rope")
        if len(self.rope_divisors) != self.head_size // 2:
            raise BadModel(
                f"the model scales {len(self.rope_divisors)} rotary frequencies of {self.head_size // 2}", field="rope"
            )

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head is normalised before the rotation."""
        return self.architecture == "qwen3"

    def to_json(self) -> str:
        """As text, for the header of a cache file."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> LlamaConfig:
        """The reverse of `to_json`."""
        fields = json.loads(text)
        fields["rope_divisors"] = tuple(fields["rope_divisors"])
        fields["eos_ids"] = tuple(fields["eos_ids"])
        return LlamaConfig(**fields)


class _Fields:
    """Typed look-ups in a file's own key-value pairs; what is missing or of another type is one sentence."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadModel(f"{self.source} has no usable {name} (found {value!r})", field=name, value=value)
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or abs(value) > MAX_INTEGER:
            raise BadModel(f"{self.source}: {name} is {value}, not a usable whole number", field=name, value=value)
        return int(value)

    def head_size(self, name: str, hidden: int, heads: int) -> int:
        """Said by the file, or what the heads make of the hidden size; before anything is made of that size."""
        size = self.integer(name, hidden // max(heads, 1))
        if size > MAX_HEAD_SIZE:
            raise BadModel(f"{self.source}: {name} is {size}, at most {MAX_HEAD_SIZE} is built", field=name, value=size)
        return size

    def tokens(self, name: str, value: Any) -> tuple[int, ...]:
        """A token id, a list of them, or none."""
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(isinstance(token, int) for token in ids):
            raise BadModel(f"{self.source}: {name} is {value!r}, no token id", field=name, value=value)
        return ids


def from_directory(directory: Path) -> LlamaConfig:
    """Reads config.json, and generation_config.json for the ids that end an answer."""
    values = _read_json(directory / "config.json")
    names = values.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else "(none)"
    architecture = HF_ARCHITECTURES.get(named)
    if architecture is None:
        raise BadModel(
            f"{directory}: architecture {named} is not built here; these are: {', '.join(HF_ARCHITECTURES)}",
            field="architectures",
            value=named,
        )
    activation = values.get("hidden_act", "silu")
    quantised = values.get("quantization_config")
    for field, value, usable, why in (
        ("quantization_config", quantised, quantised is None, "is quantised in a form that is not read here"),
        ("hidden_act", activation, activation == "silu", f"uses the activation {activation}, which is not built here"),
    ):
        if not usable:
            raise BadModel(f"{directory}: the model {why} ({field} is {value!r})", field=field, value=value)
    fields = _Fields(f"{directory / 'config.json'}", values)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    head_size = fields.head_size("head_dim", hidden, heads)
    context = fields.integer("max_position_embeddings")
    if values.get("sliding_window") is not None and values.get("use_sliding_window", True):
        context = min(context, fields.integer("sliding_window"))  # inside the window all attention is full
    base, divisors = _hf_rope(fields, head_size)
    return LlamaConfig(
        architecture=architecture,
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_size=head_size,
        ffn=fields.integer("intermediate_size"),
        vocabulary=fields.integer("vocab_size"),
        context_tokens=context,
        norm_epsilon=fields.number("rms_norm_eps"),
        rope_base=base,
        rope_divisors=divisors,
        tied=bool(values.get("tie_word_embeddings", False)),
        bos_id=next(iter(fields.tokens("bos_token_id", values.get("bos_token_id"))), None),
        eos_ids=_hf_eos(directory, fields),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadModel(f"{path} is missing", field=path.name) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(f"{path} cannot be read as JSON: {error}", field=path.name) from None
    if not isinstance(values, dict):
        raise BadModel(f"{path} holds no JSON object", field=path.name)
    return values


def _hf_eos(directory: Path, fields: _Fields) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    eos = _read_json(path).get("eos_token_id") if path.exists() else None
    return fields.tokens("eos_token_id", fields.values.get("eos_token_id") if eos is None else eos)


def _hf_rope(fields: _Fields, head_size: int) -> tuple[float, tuple[float, ...]]:
    """Base and divisors from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    values = fields.values
    inner = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(inner, dict):
        raise BadModel(
            f"{fields.source}: rotary scaling {inner!r} is not built here", field="rope_scaling", value=inner
        )
    rope = _Fields(fields.source, inner)
    base = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = inner.get("rope_type", inner.get("type", "default"))
    partial = inner.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        what = f"{fields.source}: rotary embedding of a part of each head ({partial}) is not built here"
        raise BadModel(what, field="partial_rotary_factor", value=partial)
    if kind == "default":
        return base, (1.0,) * (head_size // 2)
    if kind == "linear":
        return base, (rope.number("factor"),) * (head_size // 2)
    if kind == "llama3":
        return base, _llama3_divisors(rope, base, head_size)
    raise BadModel(f"{fields.source}: rotary scaling {kind!r} is not built here", field="rope_type", value=kind)


def _llama3_divisors(rope: _Fields, base: float, head_size: int) -> tuple[float, ...]:
    """Long wavelengths are divided by the factor, short ones not, those between by a smooth mixture (Llama 3.1)."""
    factor, low, high = (rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = rope.number("original_max_position_embeddings")
    if not (factor > 0.0 and base > 0.0 and high > low):
        what = f"{rope.source}: rotary scaling by {factor} between {low} and {high} of base {base} is not usable"
        raise BadModel(what, field="rope_scaling")
    divisors = []
    for index in range(head_size // 2):
        turns = trained / (2.0 * math.pi * base ** (2.0 * index / head_size))  # turns within the trained context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return tuple(divisors)


def from_gguf(source: str, metadata: Mapping[str, Any], tied: bool, rope_divisors: tuple[float, ...]) -> LlamaConfig:
    """From the key-value pairs of a GGUF file; `rope_divisors` come from its tensor of factors, empty: none."""
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise BadModel(
            f"{source}: architecture {architecture} is not built here; these are: {', '.join(GGUF_ARCHITECTURES)}",
            field="general.architecture",
            value=architecture,
        )
    fields = _Fields(source, {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()})
    if (experts := fields.integer("expert_count", 0)) > 0:
        what = f"{source}: mixtures of experts are not built here, this is one of {experts}"
        raise BadModel(what, field="expert_count", value=experts)
    kind = fields.values.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise BadModel(f"{source}: rotary scaling {kind!r} is not built here", field="rope.scaling.type", value=kind)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_size = fields.head_size("attention.key_length", hidden, heads)
    if (rotated := fields.integer("rope.dimension_count", head_size)) != head_size:
        what = f"{source}: rotary embedding of {rotated} of the {head_size} dimensions of a head is not built here"
        raise BadModel(what, field="rope.dimension_count", limit=head_size, value=rotated)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0)) if kind == "linear" else 1.0
    context = fields.integer("context_length")
    eos = [
        token
        for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        for token in fields.tokens(name, metadata.get(name))
    ]
    return LlamaConfig(
        architecture=architecture,
        layers=fields.integer("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_size=head_size,
        ffn=fields.integer("feed_forward_length"),
        vocabulary=fields.integer("vocab_size", _length(metadata.get("tokenizer.ggml.tokens"))),
        context_tokens=min(context, fields.integer("attention.sliding_window", context)),
        norm_epsilon=fields.number("attention.layer_norm_rms_epsilon"),
        rope_base=fields.number("rope.freq_base", 10000.0),
        rope_divisors=rope_divisors or (factor or 1.0,) * (head_size // 2),
        tied=tied,
        bos_id=next(iter(fields.tokens(GGUF_BOS, metadata.get(GGUF_BOS))), None),
        eos_ids=tuple(dict.fromkeys(eos)),
    )


def _length(array: object) -> int:
    """Of an array in the metadata; 0 if it is none."""
    return len(array) if isinstance(array, range) else 0
