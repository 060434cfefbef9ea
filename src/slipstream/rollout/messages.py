"""What is said to a rollout engine and what it answers. Both implementations speak exactly this."""

from dataclasses import dataclass, field
from typing import Any

from slipstream.data.trajectory import IntArray, Sample


@dataclass(frozen=True)
class SamplingParameters:
    """How responses are drawn. `temperature` 0 means greedy; its log-probs are then those at temperature 1."""

    temperature: float
    max_response_tokens: int
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class GroupRequest:
    """Ask for `samples` responses to one prompt. Sample i is drawn with seed `seed + i`."""

    group_id: str
    prompt_tokens: IntArray
    samples: int
    seed: int


@dataclass(frozen=True)
class ResponseResult:
    """One response to a request, drawn with seed `seed + sample_index`. `sample.seconds` counts from the call."""

    group_id: str
    sample_index: int
    sample: Sample


@dataclass(frozen=True)
class RolloutEngineSpec:
    """Everything an engine needs to start; made by the controller from the configuration.

    `tensor_parallel` workers share the weights of each layer; `threads` is what each of them computes with, and
    `kv_cache_bytes` what they have together.
    """

    model_path: str
    dtype: str
    device: str
    max_sequence_tokens: int
    max_concurrent_sequences: int
    kv_cache_bytes: int
    gpu_memory_share: float
    threads: int
    seed: int
    engine_index: int
    recompute_cache_on_update: bool = False
    tensor_parallel: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStatistics:
    """Counters since start. `busy_seconds` are summed over calls, also over those at the same time."""

    policy_version: int
    generated_tokens: int
    busy_seconds: float
    memory_bytes: int
