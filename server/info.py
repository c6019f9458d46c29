"""What a client may ask about the server: the model it has, and what it is doing. As types, and over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from jaxinfer import types
from jaxinfer.config import ModelConfig, SchedulerConfig
from jaxinfer.errors import UnsupportedError
from server import inference_pb2 as pb
from server.wire import same_fields, values_of


class ServerState(StrEnum):
    """What the server is doing."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    STUCK = "stuck"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model served, its shape, and the limits on a request; fields as in `GetModelInfoResponse`."""

    model: str
    family: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    max_waiting: int
    max_waiting_tokens: int
    prefix_caching: bool
    mesh: str

    @classmethod
    def of(cls, name: str, model: ModelConfig, scheduler: SchedulerConfig, mesh: str) -> ModelInfo:
        return cls(
            model=name,
            mesh=mesh,
            num_layers=len(model.layers),
            **{name: getattr(model, name) for name in _MODEL_FIELDS},
            **{name: getattr(scheduler, name) for name in _SCHEDULER_FIELDS},
        )


_MODEL_FIELDS = (
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *("eos_token_ids", "bos_token_id"),
)
_SCHEDULER_FIELDS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_waiting"),
    *("max_waiting_tokens", "prefix_caching"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What the server is doing now; `stats` is None until it has an engine."""

    state: ServerState
    uptime_s: float
    versions: Mapping[str, str] = field(default_factory=dict)
    stats: types.EngineStats | None = None


def model_info_to_proto(info: ModelInfo) -> pb.GetModelInfoResponse:
    return same_fields(info, pb.GetModelInfoResponse)


def model_info_from_proto(message: pb.GetModelInfoResponse) -> ModelInfo:
    values = values_of(ModelInfo, message)
    values["eos_token_ids"] = tuple(message.eos_token_ids)
    values["bos_token_id"] = message.bos_token_id if message.HasField("bos_token_id") else None
    return ModelInfo(**values)


def server_info_to_proto(info: ServerInfo) -> pb.GetServerInfoResponse:
    message = pb.GetServerInfoResponse(
        state=_STATE_TO_PROTO[info.state], uptime_s=info.uptime_s, versions=dict(info.versions)
    )
    if info.stats is not None:
        message.stats.CopyFrom(same_fields(info.stats, pb.EngineStats))
        used = info.stats.total_pages - info.stats.free_pages - info.stats.cached_pages
        message.stats.kv_use = used / info.stats.total_pages if info.stats.total_pages else 0.0
        message.stats.kv_tokens = info.stats.kv_tokens
    return message


def server_info_from_proto(message: pb.GetServerInfoResponse) -> ServerInfo:
    state = _STATE_FROM_PROTO.get(message.state)
    if state is None:
        raise UnsupportedError(f"server state {message.state} is not known to this client")
    return ServerInfo(
        state=state,
        uptime_s=message.uptime_s,
        versions=dict(message.versions),
        stats=types.EngineStats(**values_of(types.EngineStats, message.stats)) if message.HasField("stats") else None,
    )


_STATE_TO_PROTO = {state: pb.ServerState.Value(f"SERVER_STATE_{state.name}") for state in ServerState}
_STATE_FROM_PROTO = {number: state for state, number in _STATE_TO_PROTO.items()}
