"""Protobuf messages to and from jaxinfer's types, and errors to and from gRPC statuses. Pure functions.

No other module knows a gRPC status code, but for the one that the protocol of health itself asks for. What each field
means stands in `inference.proto`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxinfer import errors, types
from jaxinfer.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    JaxinferError,
    QueueFullError,
    UnsupportedError,
)
from server import inference_pb2 as pb

MAX_REQUEST_ID_LENGTH = 256

type Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One whole sample: all its deltas in one, and how it ended."""

    output: types.Delta
    end: types.SampleEnd


@dataclass(frozen=True, slots=True)
class Generation:
    """All that a request yielded, samples in order of index; `prompt_logprobs` is None if not asked for."""

    request_id: str
    samples: tuple[Sample, ...]
    usage: types.Usage
    timings: types.Timings
    prompt_logprobs: types.PromptLogprobs | None = None


# --- requests


def request_from_proto(
    message: pb.GenerateRequest, *, request_id: str, timeout_s: float | None = None
) -> types.Request:
    """The request, under `request_id` (the message's own, or one that the server made).

    `timeout_s` is what is left of the call's time; None is no end.

    Raises:
      InvalidArgumentError: a value is out of range, or no prompt is given.
      UnsupportedError: the message has fields that this version does not know.
      DeadlineExceededError: the time is over already.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise DeadlineExceededError(f"the call's deadline passed {-timeout_s:.3f} s before its request was read")
    _refuse_unknown_fields(message)
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_LENGTH:
        raise InvalidArgumentError("request_id", request_id, f"1 to {MAX_REQUEST_ID_LENGTH} characters")
    prompt = _prompt_from_proto(message, message.WhichOneof("prompt"))
    if message.HasField("parse_special") and "text" not in prompt:
        raise InvalidArgumentError("parse_special", message.parse_special, "given only with a prompt as text")
    return types.Request(
        request_id=request_id,
        params=params_from_proto(message.sampling_params),
        parse_special=message.parse_special,
        priority=message.priority,
        timeout_s=timeout_s,
        **prompt,
    )


def _prompt_from_proto(message: pb.GenerateRequest | pb.TokenizeRequest, kind: str | None) -> dict[str, Any]:
    if kind == "text":
        return {"text": message.text}
    if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
        _refuse_unknown_fields(message.token_ids)
        return {"token_ids": list(message.token_ids.ids)}
    if kind == "messages":
        return {"messages": _messages_from_proto(message.messages)}
    allowed = "token_ids " if isinstance(message, pb.GenerateRequest) else ""
    raise InvalidArgumentError("prompt", None, f"exactly one of text, {allowed}and messages".replace(", and", " and"))


def _messages_from_proto(message: pb.ChatMessages) -> list[dict[str, str]]:
    _refuse_unknown_fields(message)
    for turn in message.messages:
        _refuse_unknown_fields(turn)
    return [{"role": turn.role, "content": turn.content} for turn in message.messages]


def params_from_proto(message: pb.SamplingParams) -> types.SamplingParams:
    """What is unset takes the default of `types.SamplingParams`, but for max_tokens: the rest of the context.

    Raises:
      InvalidArgumentError: a value is out of range.
      UnsupportedError: the message has parameters that this version does not know.
    """
    _refuse_unknown_fields(message)
    given = {name: getattr(message, name) for name in _OPTIONAL_PARAMS if message.HasField(name)}
    given.setdefault("max_tokens", None)
    given |= {name: list(getattr(message, name)) for name in _REPEATED_PARAMS}
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        _refuse_unknown_fields(message.allowed_token_ids)
        given["allowed_token_ids"] = list(message.allowed_token_ids.ids)
    return types.SamplingParams(**given)


_REPEATED_PARAMS = ("stop", "stop_token_ids", "bad_words")
_OPTIONAL_PARAMS = tuple(
    name
    for name in pb.SamplingParams.DESCRIPTOR.fields_by_name
    if name not in (*_REPEATED_PARAMS, "logit_bias", "allowed_token_ids")
)


def _refuse_unknown_fields(message: Message) -> None:
    numbers = sorted({unknown.field_number for unknown in UnknownFieldSet(message)})
    if numbers:
        name = message.DESCRIPTOR.name
        raise UnsupportedError(f"this server does not know field {numbers} of {name}: its client is newer than it is")


def request_to_proto(
    prompt: Prompt,
    params: types.SamplingParams | None = None,
    *,
    request_id: str | None = None,
    model: str | None = None,
    parse_special: bool | None = None,
    priority: int | None = None,
) -> pb.GenerateRequest:
    """The message for a prompt; None leaves a field unset, and so to the server's default.

    Raises:
      InvalidArgumentError: the prompt or a value is of a kind that the message cannot hold.
    """
    message = pb.GenerateRequest()
    _set_prompt(message, prompt)
    if params is not None:
        message.sampling_params.CopyFrom(params_to_proto(params))
    _set(message, request_id=request_id, model=model, parse_special=parse_special, priority=priority)
    return message


def params_to_proto(params: types.SamplingParams) -> pb.SamplingParams:
    """Every parameter is said, so that the server's defaults play no part."""
    message = pb.SamplingParams(logit_bias=params.logit_bias)
    for name in _REPEATED_PARAMS:
        getattr(message, name).extend(getattr(params, name))
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.ids.extend(params.allowed_token_ids)
    _set(message, **{name: getattr(params, name) for name in _OPTIONAL_PARAMS if name != "seed"})
    if params.seed is not None:
        message.seed = params.seed - 2**types.SEED_BITS if params.seed >= 2 ** (types.SEED_BITS - 1) else params.seed
    return message


def _set(message: Message, **values: object) -> None:
    for name, value in values.items():
        if value is not None:
            try:
                setattr(message, name, value)
            except (TypeError, ValueError) as error:  # a UnicodeError is a ValueError
                raise InvalidArgumentError(name, value, str(error)) from None


def _set_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    allowed = "a string, a list of token ids, or a list of messages"
    if isinstance(prompt, str):
        _set(message, text=prompt)
    elif isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidArgumentError("prompt", prompt, allowed)
    elif len(prompt) and isinstance(prompt[0], Mapping):
        message.messages.CopyFrom(_messages_to_proto(prompt))  # type: ignore[arg-type]  # the first tells the kind
    elif isinstance(message, pb.GenerateRequest):
        try:
            message.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]  # what is none is caught
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError("prompt", prompt, f"{allowed} ({error})") from None
    else:
        raise InvalidArgumentError("prompt", prompt, "a string or a list of messages")


def _messages_to_proto(messages: Sequence[Mapping[str, Any]]) -> pb.ChatMessages:
    made = pb.ChatMessages()
    for number, turn in enumerate(messages):
        if not isinstance(turn, Mapping) or set(turn) != {"role", "content"}:
            raise InvalidArgumentError(f"messages[{number}]", turn, "a mapping with `role` and `content` and no more")
        _set(made.messages.add(), **turn)
    return made


def tokenize_to_proto(
    prompt: str | Sequence[Mapping[str, Any]], *, model: str | None, parse_special: bool | None, add_bos: bool | None
) -> pb.TokenizeRequest:
    message = pb.TokenizeRequest()
    _set_prompt(message, prompt)
    _set(message, model=model, parse_special=parse_special, add_bos=add_bos)
    return message


def tokenize_from_proto(message: pb.TokenizeRequest) -> dict[str, Any]:
    """Either `messages`, or `text` with `parse_special` and `add_bos`.

    Raises:
      InvalidArgumentError: there is neither, or an option that goes only with text.
    """
    _refuse_unknown_fields(message)
    prompt = _prompt_from_proto(message, message.WhichOneof("input"))
    if "text" in prompt:
        add_bos = message.add_bos if message.HasField("add_bos") else True
        return {**prompt, "parse_special": message.parse_special, "add_bos": add_bos}
    for name in ("parse_special", "add_bos"):
        if message.HasField(name):
            raise InvalidArgumentError(name, getattr(message, name), "given only with text")
    return prompt


def detokenize_to_proto(
    token_ids: Sequence[int], *, model: str | None, skip_special_tokens: bool | None
) -> pb.DetokenizeRequest:
    try:
        message = pb.DetokenizeRequest(token_ids=token_ids)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("token_ids", token_ids, f"a list of token ids ({error})") from None
    _set(message, model=model, skip_special_tokens=skip_special_tokens)
    return message


# --- events


# Log-probabilities become bytes a few hundred positions at a time: no other Python code runs while protobuf writes a
# message, and those of 100,000 positions are 23 MB.
_POSITIONS_AT_ONCE = 256


def event_to_bytes(request_id: str, event: types.PromptLogprobs | types.Delta | types.Finished) -> bytes:
    """Returns a GenerateResponse, written out."""
    response = pb.GenerateResponse(request_id=request_id)
    if isinstance(event, types.Finished):
        response.finished.CopyFrom(_finished_to_proto(event))
        return response.SerializeToString()
    if isinstance(event, types.PromptLogprobs):
        return response.SerializeToString() + _field(
            pb.GenerateResponse, "prompt_logprobs", _positions_to_bytes(pb.PromptLogprobs, "positions", event.positions)
        )
    return response.SerializeToString() + _field(pb.GenerateResponse, "delta", _delta_to_bytes([event]))


def num_positions(event: types.Event) -> int:
    """Returns how many positions' log-probabilities an event holds; they are most of the work of writing it."""
    return len(event.positions if isinstance(event, types.PromptLogprobs) else getattr(event, "logprobs", ()))


def generation_to_bytes(request_id: str, events: Sequence[types.Event]) -> bytes:
    """Returns a UnaryGenerateResponse of all events of a request, the last one Finished, written out."""
    finished = next(event for event in events if isinstance(event, types.Finished))
    done = _finished_to_proto(finished)
    parts = [
        pb.UnaryGenerateResponse(request_id=request_id, usage=done.usage, timings=done.timings).SerializeToString()
    ]
    for end in done.ends:
        deltas = [event for event in events if isinstance(event, types.Delta) and event.index == end.index]
        output = _field(pb.Sample, "output", _delta_to_bytes(deltas or [types.Delta(end.index, "", ())]))
        sample = output + pb.Sample(end=end).SerializeToString()
        parts.append(_field(pb.UnaryGenerateResponse, "samples", sample))
    for event in events:
        if isinstance(event, types.PromptLogprobs):
            positions = _positions_to_bytes(pb.PromptLogprobs, "positions", event.positions)
            parts.append(_field(pb.UnaryGenerateResponse, "prompt_logprobs", positions))
    return b"".join(parts)


def _delta_to_bytes(deltas: Sequence[types.Delta]) -> bytes:
    """Returns one Delta of all that these say, which are of one sample."""
    joined = pb.Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
    )
    logprobs = [at for delta in deltas for at in delta.logprobs]
    return joined.SerializeToString() + _positions_to_bytes(pb.Delta, "logprobs", logprobs)


def _positions_to_bytes(kind: type[Message], name: str, positions: Sequence[types.PositionLogprobs]) -> bytes:
    """Returns a message that has nothing but these in a repeated field: messages written one after another are one."""
    return b"".join(
        kind(
            **{name: map(_position_to_proto, positions[first : first + _POSITIONS_AT_ONCE])}  # type: ignore[arg-type]
        ).SerializeToString()
        for first in range(0, len(positions), _POSITIONS_AT_ONCE)
    )


def _field(kind: type[Message], name: str, content: bytes) -> bytes:
    """Returns a field that is a message, written out (https://protobuf.dev/programming-guides/encoding/)."""
    number = kind.DESCRIPTOR.fields_by_name[name].number
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes((*written, value))


def _finished_to_proto(event: types.Finished) -> pb.Finished:
    message = pb.Finished(usage=same_fields(event.usage, pb.Usage), timings=same_fields(event.timings, pb.Timings))
    for end in event.ends:
        made = message.ends.add(index=end.index, finish_reason=_REASON_TO_PROTO[end.finish_reason])
        if isinstance(end.stop_reason, str):
            made.stop_string = end.stop_reason
        elif end.stop_reason is not None:
            made.stop_token_id = end.stop_reason
    return message


def _position_to_proto(at: types.PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(chosen=_logprob_to_proto(at.chosen), top=map(_logprob_to_proto, at.top))


def _logprob_to_proto(logprob: types.TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, rank=logprob.rank)


def event_from_proto(message: pb.GenerateResponse) -> types.PromptLogprobs | types.Delta | types.Finished:
    """Raises UnsupportedError where a newer server says what this client does not know."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _delta_from_proto(message.delta)
    if kind == "prompt_logprobs":
        return _prompt_logprobs_from_proto(message.prompt_logprobs)
    if kind == "finished":
        done = message.finished
        return types.Finished(tuple(map(_end_from_proto, done.ends)), *_costs_from_proto(done))
    raise UnsupportedError("the server sent an event that this client does not know: the client is older than it is")


def generation_from_proto(message: pb.UnaryGenerateResponse) -> Generation:
    """Raises UnsupportedError where a newer server says what this client does not know."""
    asked = message.HasField("prompt_logprobs")
    return Generation(
        message.request_id,
        tuple(Sample(_delta_from_proto(each.output), _end_from_proto(each.end)) for each in message.samples),
        *_costs_from_proto(message),
        prompt_logprobs=_prompt_logprobs_from_proto(message.prompt_logprobs) if asked else None,
    )


def _costs_from_proto(message: pb.Finished | pb.UnaryGenerateResponse) -> tuple[types.Usage, types.Timings]:
    usage = types.Usage(**values_of(types.Usage, message.usage))
    return usage, types.Timings(**values_of(types.Timings, message.timings))


def _delta_from_proto(message: pb.Delta) -> types.Delta:
    positions = tuple(map(_position_from_proto, message.logprobs))
    return types.Delta(message.index, message.text, tuple(message.token_ids), positions)


def _prompt_logprobs_from_proto(message: pb.PromptLogprobs) -> types.PromptLogprobs:
    return types.PromptLogprobs(tuple(map(_position_from_proto, message.positions)))


def _position_from_proto(message: pb.PositionLogprobs) -> types.PositionLogprobs:
    return types.PositionLogprobs(_logprob_from_proto(message.chosen), tuple(map(_logprob_from_proto, message.top)))


def _end_from_proto(message: pb.SampleEnd) -> types.SampleEnd:
    reason = _REASON_FROM_PROTO.get(message.finish_reason)
    if reason is None:
        raise UnsupportedError(f"finish reason {message.finish_reason} is not known to this client")
    kind = message.WhichOneof("stop_reason")
    return types.SampleEnd(message.index, reason, getattr(message, kind) if kind else None)


def _logprob_from_proto(message: pb.TokenLogprob) -> types.TokenLogprob:
    return types.TokenLogprob(message.token_id, message.logprob, message.rank)


_REASON_TO_PROTO = {reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in types.FinishReason}
_REASON_FROM_PROTO = {number: reason for reason, number in _REASON_TO_PROTO.items()}


def same_fields[M: Message](value: Any, message_type: type[M]) -> M:
    """A message whose fields are named as the dataclass's are."""
    return message_type(**{each.name: getattr(value, each.name) for each in fields(value)})


def values_of(dataclass_type: type, message: Message) -> dict[str, Any]:
    return {each.name: getattr(message, each.name) for each in fields(dataclass_type)}


# --- errors

ERROR_CODE_KEY = "jaxinfer-error-code"
RETRY_KEY = "grpc-retry-pushback-ms"  # gRPC's own: a client with a retry policy waits for as long by itself
MAX_ERROR_LENGTH = 1000  # characters; a status travels in a header block of at most 8 KB, percent-encoded


class WarmingUpError(JaxinferError):
    """The server is up, but its model is still loading or compiling."""

    code = "warming_up"


class UnauthenticatedError(JaxinferError, PermissionError):
    """The server wants an API key, and none was sent, or one that it does not know."""

    code = "unauthenticated"


class ServerUnreachableError(JaxinferError, ConnectionError):
    """No server answers at this address, or the connection to it was lost."""

    code = "unreachable"


class CallFailedError(JaxinferError):
    """A call failed with a gRPC status that jaxinfer did not give; the message names it."""

    code = "call_failed"


class Status(NamedTuple):
    """How a call ends that failed: the arguments of gRPC's `context.abort`, in order."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str], ...]


_STATUS_OF_CODE = {
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
    "model_not_found": grpc.StatusCode.NOT_FOUND,
    "bad_checkpoint": grpc.StatusCode.INTERNAL,
    "request_exists": grpc.StatusCode.ALREADY_EXISTS,
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "request_failed": grpc.StatusCode.INTERNAL,
    "step_failed": grpc.StatusCode.INTERNAL,
    "not_compiled": grpc.StatusCode.INTERNAL,
    "engine_stuck": grpc.StatusCode.UNAVAILABLE,
    "engine_dead": grpc.StatusCode.UNAVAILABLE,
    "draining": grpc.StatusCode.UNAVAILABLE,
    "warming_up": grpc.StatusCode.UNAVAILABLE,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "internal": grpc.StatusCode.INTERNAL,
}

_CLASS_OF_CODE: dict[str, type[JaxinferError]] = {
    each.code: each
    for each in [*vars(errors).values(), WarmingUpError, UnauthenticatedError]
    if isinstance(each, type) and issubclass(each, JaxinferError)
}

# Statuses that gRPC itself gives, on either side, before or after our code has its say.
_CLASS_OF_BARE_STATUS: dict[grpc.StatusCode, type[JaxinferError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: ServerUnreachableError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
}


def status_of(error: JaxinferError) -> Status:
    """How a call that met `error` ends. A subclass that has no status of its own takes its parent's."""
    words = (getattr(each, "code", "") for each in type(error).__mro__)
    word = next(each for each in words if each in _STATUS_OF_CODE)
    message = str(error) or type(error).__name__
    if len(message) > MAX_ERROR_LENGTH:
        message = message[:MAX_ERROR_LENGTH] + "..."
    metadata = [(ERROR_CODE_KEY, word)]
    if isinstance(error, QueueFullError) and error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(max(1, math.ceil(1e3 * error.retry_after_s)))))
    return Status(_STATUS_OF_CODE[word], message, tuple(metadata))


def error_of(failed: grpc.RpcError) -> JaxinferError:
    """The error that a failed call stands for: of the same class that the server met, where it said so."""
    code, message = failed.code(), failed.details() or ""  # type: ignore[attr-defined]  # a call too, always
    said = dict(failed.trailing_metadata() or ())  # type: ignore[attr-defined]
    made_by = _CLASS_OF_CODE.get(said.get(ERROR_CODE_KEY, "")) or _CLASS_OF_BARE_STATUS.get(code)
    if made_by is None:
        return CallFailedError(f"{code.name}: {message}")
    error = made_by.__new__(made_by, message)  # past __init__: an InvalidArgumentError's wants the message's parts
    if isinstance(error, InvalidArgumentError):
        error.field = message.partition(" = ")[0]
    if isinstance(error, QueueFullError) and (pushback_ms := said.get(RETRY_KEY, "")).isdecimal():
        error.retry_after_s = int(pushback_ms) / 1e3
    return error


def may_come_up(failed: grpc.RpcError) -> str:
    """In words, a health check's failure that waiting may cure: nothing answers, or not in time.

    Raises:
      CallFailedError: any other failure.
    """
    if failed.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):  # type: ignore[attr-defined]
        raise error_of(failed) from None
    return f"{failed.code().name}: {failed.details()}"  # type: ignore[attr-defined]


def not_ready_error(address: str, timeout_s: float, last: str) -> DeadlineExceededError:
    return DeadlineExceededError(f"the server at {address} is not ready after {timeout_s:g} s; its health: {last}")
