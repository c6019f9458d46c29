"""The errors people meet, each with a stable code.

Every error that leaves the engine is one of these. `code` never changes once released: scripts match on it,
and `server/wire.py` alone turns it into a gRPC status.
"""

from __future__ import annotations


class JaxinferError(Exception):
    """Base of all errors raised on purpose by jaxinfer."""

    code = "internal"


class InvalidArgumentError(JaxinferError, ValueError):
    """A value the caller gave cannot be used; the message names the field, the value and what is allowed."""

    code = "invalid_argument"

    def __init__(self, field: str, value: object, allowed: str):
        shown = repr(value)
        if len(shown) > 200:
            shown = f"{shown[:200]}... ({len(shown)} characters)"
        super().__init__(f"{field} = {shown} is not allowed: {allowed}")
        self.field = field


class UnsupportedError(JaxinferError):
    """The request is sound, but this version cannot do it; the message says what it can do."""

    code = "unsupported"


class ModelNotFoundError(JaxinferError):
    """`--model` names nothing that can be found; the message lists where it was looked for."""

    code = "model_not_found"


class CheckpointError(JaxinferError):
    """A checkpoint's files are broken or do not fit the model; the message names the file or the tensor."""

    code = "bad_checkpoint"


class RequestExistsError(JaxinferError):
    """A live request already has this id."""

    code = "request_exists"


class QueueFullError(JaxinferError):
    """The bounded queue of waiting requests is full; try again after about `retry_after_s` seconds."""

    code = "queue_full"
    retry_after_s: float | None = None


class DeadlineExceededError(JaxinferError, TimeoutError):
    """The request's time ran out, or would have before its first token; what it had started was ended."""

    code = "deadline_exceeded"


class RequestFailedError(JaxinferError):
    """Host work of this one request failed (for example its tokenizer); nothing else is affected."""

    code = "request_failed"


class StepFailedError(JaxinferError):
    """The device step this request was in failed; the engine goes on without its tokens."""

    code = "step_failed"


class NotCompiledError(JaxinferError):
    """A step asked for a program outside the closed list that warm-up compiled (a bug; counted, never hidden)."""

    code = "not_compiled"


class EngineStuckError(JaxinferError):
    """The device has been at one step for too long; nothing new is taken until it goes on."""

    code = "engine_stuck"


class EngineDeadError(JaxinferError):
    """The engine stopped for good; the message carries the cause."""

    code = "engine_dead"


class DrainingError(JaxinferError):
    """The engine is shutting down and takes no new requests."""

    code = "draining"
