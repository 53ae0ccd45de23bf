"""Conversations as text, by the chat template that ships with the tokenizer, and which of it the assistant said.

Qwen's templates mark turns as ChatML: <|im_start|>ROLE, a newline, the content, <|im_end|>. What is learned is each
assistant turn from after its header up to and including <|im_end|>. The turns are found in the rendered text, not by
rendering prefixes: Qwen3's template writes a turn differently when it is the last (thinking is kept only there).
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from ..errors import UserError

__all__ = ["CHATML", "Spans", "ready_template", "render"]

START, END = "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template for a tokenizer that has none of its own."""

_TURN = re.compile(re.escape(START) + r"assistant\n(.*?" + re.escape(END) + ")", re.DOTALL)

Spans = list[tuple[int, int]]


def ready_template(tokenizer: Any) -> bool:
    """True when the tokenizer has a chat template; else plain ChatML is set, which needs its two marks in the
    vocabulary.
    """
    if not hasattr(tokenizer, "apply_chat_template"):
        raise UserError(f"{type(tokenizer).__name__} renders no chat template; chat data needs TorchTitan's tokenizer.")
    if getattr(tokenizer, "_chat_template", None) is not None:
        return True
    missing = [mark for mark in (START, END) if tokenizer.token_to_id(mark) is None]
    if missing:
        raise UserError(
            f"The tokenizer has neither a chat template nor the token {missing[0]}: chat data cannot be rendered.\n"
            "Point --hf_assets_path at a tokenizer with a chat template (any Qwen3's)."
        )
    tokenizer.set_chat_template(CHATML)
    return False


def render(messages: Any, tokenizer: Any, place: str, tools: Any = None) -> tuple[str, Spans] | None:
    """The conversation's text and the [begin, end) character spans that the assistant said.

    None when a message's own text, or a tool's, contains a turn's mark: it would be read as one, and foreign words
    learned as the assistant's. Raises UserError, naming `place`, for what is no conversation and for a message that the
    template leaves out.
    """
    messages, tools = _checked(messages, place), _checked_tools(tools, place)
    if any(mark in str(value) for part in (*messages, *tools) for value in part.values() for mark in (START, END)):
        return None
    options = {"tools": tools} if tools else {}
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # whatever a template raises of its own
        raise UserError(f"{place}: the chat template fails on this conversation: {error}") from None
    spans = [match.span(1) for match in _TURN.finditer(text)]
    said = sum(message["role"] == "assistant" for message in messages)
    if len(spans) != said:
        raise UserError(
            f"{place}: {said} assistant messages, but the chat template rendered {len(spans)} turns of the form "
            f"{START}assistant ... {END}.\nChat data is supported for templates that mark turns so, as Qwen's do."
        )
    for what, words in _must_be_there(messages, tools):
        if words not in text:
            raise UserError(
                f"{place}: the chat template leaves out {what}, {words[:60]!r}. Qwen's templates write the roles "
                "system, user, assistant and tool, and the tools; use one, or take what it cannot write out of the "
                "data."
            )
    return text, spans


def _must_be_there(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(what, words) that every faithful rendering has. Of earlier answers Qwen3's template leaves out the thinking."""
    for message in messages:
        yield f"the words of a {message['role']!r} message", message["content"].rpartition("</think>")[2].strip()
        for call in message.get("tool_calls", ()):
            yield "a tool call", _name(call)
    for tool in tools:
        yield "a tool", _name(tool)


def _name(function: Any) -> str:
    """Return the name of a tool or of a call, nested as OpenAI does it or not."""
    found = function.get("function", function) if isinstance(function, dict) else None
    return str(found.get("name", "")) if isinstance(found, dict) else ""


def _checked(messages: Any, place: str) -> list[dict[str, Any]]:
    def wrong(what: str) -> UserError:
        return UserError(f'{place}: {what}; expected messages as [{{"role": "user", "content": "..."}}, ...].')

    if not isinstance(messages, list) or not messages:
        raise wrong(f"found {str(messages)[:60]!r}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(f"a message {str(message)[:60]!r} without a role")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise wrong(f"the content of a {message['role']} message is {str(content)[:60]!r}, not a string")
    # A template takes a field that is there for meant, and may write None as a word.
    return [{"content": ""} | {k: v for k, v in message.items() if v is not None} for message in messages]


def _checked_tools(tools: Any, place: str) -> list[dict[str, Any]]:
    """The tools as a list of objects; tables often hold them as JSON, since their schemas differ from row to row."""
    found = tools
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else []
        except (ValueError, RecursionError):
            found = None
    found = [] if tools is None else found
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise UserError(f"{place}: tools are {str(tools)[:60]!r}; expected a list of objects, or one as JSON.")
    return found
