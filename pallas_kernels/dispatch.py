"""Chooses an implementation of an op. A refusal always has a reason that can be printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


class KernelError(ValueError):
    """An op was called with something it cannot serve, or a forced implementation refused."""


def choose[F: Callable](
    op: str, implementations: Mapping[str, tuple[F, Callable[[], str | None]]], order: Sequence[str], forced: str | None
) -> F:
    """The first implementation of `order` that does not refuse, or the forced one.

    Args:
      op: the op's name, for messages.
      implementations: name -> (function, refusal); the refusal returns why it cannot serve this call, or None.
      order: names by preference on this device.
      forced: a name that must be used.

    Raises:
      KernelError: the forced implementation is unknown or refuses, or all refuse.
    """
    if forced is not None and forced not in implementations:
        raise KernelError(f"{op}: no implementation {forced!r}; there are {', '.join(sorted(implementations))}")
    reasons = []
    for name in (forced,) if forced is not None else order:
        function, refusal = implementations[name]
        reason = refusal()
        if reason is None:
            return function
        reasons.append(f"{name}: {reason}")
    raise KernelError(f"{op}: no implementation serves this call ({'; '.join(reasons)})")
