"""Chat messages to token ids by the model's own Jinja template.

What people write in messages stays text: a string such as `<|im_end|>` in a message's content is marked before
the template runs, so that afterwards only the template's own control strings are turned into control tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from jaxinfer.text.sandbox import Sandbox
from jaxinfer.text.tokenizer import Tokenizer

# Operations a template may take, and bytes it may make of nothing: thousands of messages need a tenth of the former,
# and have room for themselves besides.
MAX_TEMPLATE_STEPS = 250_000
MAX_TEMPLATE_OUTPUT = 4 * 2**20
_MAX_REASON = 500  # characters of what a template says where it fails
# Characters that Unicode sets aside for a program's own use; none of them is ever text.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ChatTemplate:
    """A compiled chat template, with what templates expect of Hugging Face's `apply_chat_template`.

    It runs sandboxed, and its steps and output are bounded. Threads may share one.

    Args:
      source: the Jinja source.
      special_tokens: `bos_token`, `eos_token` and the like, as variables.

    Raises:
      CheckpointError: if the source is no Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = Sandbox(source)
        except Exception as error:  # Jinja's own errors, and those of Python where it compiles what Jinja made
            raise CheckpointError(f"the chat template is not valid Jinja: {_reason(error)}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.

        Args:
          messages: each with `role`, and `content` as a string or as a list of text parts.
          add_generation_prompt: whether to end with what opens the model's answer.
          variables: further variables of the template, such as `tools`.

        Raises:
          InvalidArgumentError: if the messages are malformed or the template refuses them.
        """
        return self._render(_check_messages(messages), add_generation_prompt, variables)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context, steps=MAX_TEMPLATE_STEPS, largest=MAX_TEMPLATE_OUTPUT)
        except Exception as error:  # a template can raise anything; RecursionError and MemoryError among it
            reason = _reason(error)
        # Not from the error, whose frames hold all that the template made.
        roles = [message["role"] for message in messages]
        raise InvalidArgumentError("messages", f"roles {roles}", f"the chat template says: {reason}")


def _reason(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    max_tokens: int | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template.

    Nothing is added to what the template writes; templates of models that want a BOS token write one.

    Args:
      max_tokens: refuse a conversation of more tokens; one that is too large for that is not encoded at all.

    Raises:
      InvalidArgumentError: if the messages are malformed or too long, or the template refuses them.
      UnsupportedError: if the model has no chat template.
    """
    if tokenizer.chat_template is None:
        raise UnsupportedError("this model has no chat template; send text or token_ids instead of messages")
    template = _compiled(tokenizer.chat_template, tuple(tokenizer.special_tokens.items()))
    checked = _check_messages(messages)
    try:
        mark = _unused_character([checked, variables])
        guard = _Guard(tokenizer, mark)
        protected, variables = guard.protect(checked), guard.protect(variables)
    except RecursionError:
        raise InvalidArgumentError("messages", "of great depth", "values nested less deeply") from None
    text = template._render(protected, add_generation_prompt, variables)
    tokenizer.check_size("messages", text, max_tokens)
    segments = tokenizer.split_control(text)
    return tokenizer.encode_segments(
        (segment.replace(mark, "") if isinstance(segment, str) else segment for segment in segments),
        max_tokens=max_tokens,
    )


@functools.lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain dicts, text parts joined to one string."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidArgumentError("messages", messages, "a list of at least one message")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidArgumentError(f"messages[{i}]", message, "a mapping with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidArgumentError(f"messages[{i}].role", role, "a string that is not empty")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            checked.append({**message})  # a call of a tool needs no text
            continue
        checked.append({**message, "content": _content(f"messages[{i}].content", content)})
    return checked


def _content(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InvalidArgumentError(field, content, "a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
        if not isinstance(text, str):
            raise InvalidArgumentError(f"{field}[{i}]", part, '{"type": "text", "text": "..."}: only text is taken')
        texts.append(text)
    return "\n".join(texts)


class _Guard:
    """Breaks the control strings in what people wrote, by a character that is taken out again afterwards.

    Not only whole ones: where a text ends with the beginning of a control string, or begins with the end of one,
    the template's own text next to it could complete it.
    """

    def __init__(self, tokenizer: Tokenizer, mark: str):
        self._break_control = tokenizer.break_control
        self._mark = mark
        control = tuple(tokenizer.control_strings)
        self._heads, self._tails = _edges(control)
        self._longest = max(map(len, control), default=0)
        self._firsts = {text[0] for text in control}
        self._lasts = {text[-1] for text in control}

    def protect(self, value: Any) -> Any:
        """A copy of the value with the strings in it broken."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self._protect_key(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item) for item in value]
        return value

    def _protect_key(self, key: Any) -> Any:
        return self._protect_text(key) if isinstance(key, str) else key

    def _protect_text(self, text: str) -> str:
        text = self._break_control(text, self._mark)
        for end in (len(text), len(text.rstrip())):  # templates like to trim
            tail = text[max(end - self._longest, 0) : end]
            if any(char in self._firsts and tail[at:] in self._heads for at, char in enumerate(tail)):
                text = text[:end] + self._mark + text[end:]
        for start in (0, len(text) - len(text.lstrip())):
            head = text[start : start + self._longest]
            if any(char in self._lasts and head[: at + 1] in self._tails for at, char in enumerate(head)):
                text = text[:start] + self._mark + text[start:]
        return text


@functools.lru_cache(maxsize=16)
def _edges(control: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """What the strings begin with and what they end with, short of the whole."""
    heads = frozenset(text[:at] for text in control for at in range(1, len(text)))
    tails = frozenset(text[at:] for text in control for at in range(1, len(text)))
    return heads, tails


def _unused_character(value: Any) -> str:
    texts = list(_strings(value))
    for char in _NONCHARACTERS:
        if not any(char in text for text in texts):
            return char
    raise InvalidArgumentError("messages", "all of U+FDD0 to U+FDEF", "one of these noncharacters must be unused")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
