"""Bounds on messages by their bytes, before they are read: no other Python code runs while protobuf reads one.

Ten megabytes of empty chat messages take it 0.3 s. So a large message's fields are measured first, from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from jaxinfer.errors import InvalidArgumentError, JaxinferError, UnsupportedError
from jaxinfer.text.tokenizer import too_large
from server import inference_pb2 as pb
from server import wire

if TYPE_CHECKING:
    from jaxinfer.engine.engine import PromptLimits

MEASURED_BYTES = 1 << 18  # a message of fewer is read in a few milliseconds, whatever is in it
MAX_MESSAGES = 10_000  # of a conversation
MAX_TOKENS_OF_TEXT = 1 << 19  # that Tokenize gives and Detokenize takes
MIN_TOKENIZED_BYTES = 4 << 20  # of text that Tokenize takes in any case
_ID_BYTES = 5  # of a token id, at most
_SMALL_FIELD_BYTES = 1 << 16  # of a field that holds no prompt
_MAX_FIELDS = 1000  # of a message; more can only be repeated without need
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Limits:
    """What of a served model bounds the size of requests."""

    prompt: PromptLimits
    vocab_size: int

    def of(self, kind: Descriptor) -> dict[str, int | None]:
        """Returns the most bytes of each field of such a message that may be large; None is no limit."""
        if kind.name == "GenerateRequest":
            # The engine itself refuses token ids exactly; here they are far too many.
            ids = 2 * _ID_BYTES * self.prompt.max_tokens + _SMALL_FIELD_BYTES
            params = _SMALL_FIELD_BYTES + 24 * self.vocab_size  # an entry of logit_bias has up to 13 bytes
            return {"text": None, "messages": None, "token_ids": ids, "sampling_params": params}
        if kind.name == "TokenizeRequest":
            text = None if self.prompt.max_bytes is None else max(self.prompt.max_bytes, MIN_TOKENIZED_BYTES)
            return {"text": text, "messages": text}
        if kind.name == "DetokenizeRequest":
            return {"token_ids": _ID_BYTES * MAX_TOKENS_OF_TEXT}
        return {}


def check(raw: bytes, kind: Descriptor, limits: Limits) -> None:
    """Raises InvalidArgumentError, which names the field and its limit, if a field would take long to read."""
    if len(raw) <= MEASURED_BYTES:
        return
    sizes: Counter[str] = Counter()
    allowed = limits.of(kind)
    for count, (number, begin, end) in enumerate(_fields(raw, 0, len(raw))):
        if count >= _MAX_FIELDS:
            raise InvalidArgumentError("message", f"over {_MAX_FIELDS} fields", f"a {kind.name} has a few")
        field = kind.fields_by_number.get(number)
        if field is None:
            raise UnsupportedError(f"this server does not know field {number} of {kind.name}")
        sizes[field.name] += end - begin
        most = allowed.get(field.name, _SMALL_FIELD_BYTES)
        if most is not None and sizes[field.name] > most:
            raise InvalidArgumentError(field.name, f"{sizes[field.name]} bytes", f"at most {most} bytes")
        bound = limits.prompt.bound
        if kind.name == "GenerateRequest" and field.name == "text" and bound is not None:
            if bound.exceeded(memoryview(raw)[begin:end], limits.prompt.max_tokens):
                raise too_large("text", f"{end - begin} bytes", limits.prompt.max_tokens, bound)
        elif field.name == "messages":
            for turn, _ in enumerate(_fields(raw, begin, end), 1):
                if turn > MAX_MESSAGES:
                    raise InvalidArgumentError("messages", f"over {MAX_MESSAGES} messages", f"at most {MAX_MESSAGES}")


def _fields(raw: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, begin, end) of each field's content (https://protobuf.dev/programming-guides/encoding/).

    Raises:
      DecodeError: the bytes are no message.
    """
    while begin < end:
        key, begin = _varint(raw, begin, end)
        kind = key & 7
        if kind == _VARINT:
            _, after = _varint(raw, begin, end)
        elif kind == _LENGTH:
            size, begin = _varint(raw, begin, end)
            after = begin + size
        elif kind in (_FIXED64, _FIXED32):
            after = begin + (8 if kind == _FIXED64 else 4)
        else:
            raise DecodeError(f"wire type {kind}")
        if after > end:
            raise DecodeError("a field ends after its message")
        yield key >> 3, begin, after
        begin = after


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise DecodeError("a number does not end")


class _Refused:
    """Stands for a message that was not read."""

    def __init__(self, error: JaxinferError) -> None:
        self.error = error


class MessageSizes(grpc.aio.ServerInterceptor):
    """Refuses requests of our service that would take long to read, and lets replies be bytes already.

    Args:
      limits: what gives them, once there is a model; until then requests are refused anyhow.
      on_refuse: is told the code of each error.
    """

    def __init__(self, limits: Callable[[], Limits | None], on_refuse: Callable[[str], None]) -> None:
        self._limits, self._on_refuse = limits, on_refuse
        service = pb.DESCRIPTOR.services_by_name["Inference"]
        self._kinds = {f"/{service.full_name}/{method.name}": method.input_type for method in service.methods}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        kind = self._kinds.get(handler_call_details.method)
        if handler is None or kind is None:
            return handler

        def read(raw: bytes) -> Message | _Refused:
            try:
                if (limits := self._limits()) is not None:
                    check(raw, kind, limits)
            except JaxinferError as error:
                return _Refused(error)
            return handler.request_deserializer(raw)

        return self._rebuilt(handler, read)

    def _rebuilt(self, handler: Any, read: Callable[[bytes], Message | _Refused]) -> grpc.RpcMethodHandler:
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def answer(message: Message | _Refused, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(message, _Refused):
                self._on_refuse(message.error.code)
                await context.abort(*wire.status_of(message.error))
            return await behaviour(message, context)

        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, request_deserializer=read, response_serializer=_bytes_of)


def _bytes_of(reply: Message | bytes) -> bytes:
    return reply if isinstance(reply, bytes) else reply.SerializeToString()
