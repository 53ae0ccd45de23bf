"""The fields of a message: which are read, which are harmless, and which would change what is learned without being
read.

A field that changes what is learned is heeded or refused, and never dropped. So a field that is not in these tables,
and is not empty, is an error that names it.
"""

import json
from typing import Any

from ..errors import UserError

__all__ = ["Conversation", "read_messages", "read_tools"]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""One field under three names; templates get the first, and Transformers fills in the others."""

LEARNED = ("weight", "loss", "train", "training", "trainable")
"""Whether an assistant's turn is learned: true or false, 1 or 0."""

HARMLESS = {"id", "name", "tool_call_id", "created_at", "date", "index", "metadata", "model", "timestamp", "turn"}
"""Fields that say who or when. They go to the template as they are; Qwen's write none of them."""

REFUSED = {
    "function_call": 'write it as "tool_calls": [{"type": "function", "function": {...}}]',
    "audio": "this toolkit trains on text",
    "images": "this toolkit trains on text",
    "refusal": 'write what the assistant said as "content"',
    "prefix": "take the message out, or finish it",
}
"""Fields that change what a turn says, and what to do about each."""

Conversation = tuple[list[dict[str, Any]], list[bool]]
"""Messages as a template takes them, and for each whether it is learned if it is an assistant's."""


def read_messages(messages: Any, place: str) -> Conversation:
    """Check the messages of a row.

    Args:
        messages: a list of messages, or a JSON text of one.
        place: the row, for errors.

    Raises:
        UserError: it is no conversation, or a message has a field that would be lost.
    """
    found = messages
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, list) or not found:
        raise _no_conversation(place, f"found {str(messages)[:60]!r}")
    read = [_read_message(message, place) for message in found]
    return [message for message, _ in read], [learned for _, learned in read]


def _no_conversation(place: str, what: str) -> UserError:
    return UserError(f'{place}: {what}; expected messages as [{{"role": "user", "content": "..."}}, ...].')


def _read_message(message: Any, place: str) -> tuple[dict[str, Any], bool]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _no_conversation(place, f"a message {str(message)[:60]!r} without a role")
    # A template takes a field that is there for meant, and may write None as a word.
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.pop("role")
    content = _content(fields.pop("content", None), role, bool(fields.get("tool_calls")), place)
    thought = _thought(fields, role, place)
    learned = _learned(fields, role, place)
    calls = {"tool_calls": _calls(fields.pop("tool_calls"), role, place)} if "tool_calls" in fields else {}
    for name in fields.keys() - HARMLESS:
        if fields[name] in ("", [], {}, False):
            continue
        advice = REFUSED.get(name, "take the field out of the data if it means nothing")
        raise UserError(
            f"{place}: {_a(role)} message has {name} = {str(fields[name])[:60]!r}, which would be lost: {advice}.\n"
            f"Fields that are read: role, content, tool_calls, {', '.join(THOUGHTS + LEARNED)}."
        )
    harmless = {name: value for name, value in fields.items() if name in HARMLESS}
    return {"content": content, "role": role, **harmless, **thought, **calls}, learned


def _a(role: str) -> str:
    return f"{'an' if role == 'assistant' else 'a'} {role}"


def _content(content: Any, role: str, calls: bool, place: str) -> str:
    """The text of a message; parts of text, as OpenAI has them, are put together."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") for part in content):
        others = sorted({str(part["type"]) for part in content} - {"text"})
        texts = [part.get("text") for part in content]
        if others or not all(isinstance(text, str) for text in texts):
            raise _no_conversation(
                place, f"the content of {_a(role)} message has parts of {', '.join(others) or 'no text'}, not a string"
            )
        return "".join(map(str, texts))
    if not isinstance(content, str) and not (content is None and calls):
        raise _no_conversation(place, f"the content of {_a(role)} message is {str(content)[:60]!r}, not a string")
    return content or ""


def _thought(fields: dict[str, Any], role: str, place: str) -> dict[str, str]:
    """What the assistant thought, under one name. Takes its names out of `fields`."""
    given = {name: fields.pop(name) for name in THOUGHTS if name in fields}
    if not given:
        return {}
    if len(set(map(str, given.values()))) > 1:
        raise UserError(f"{place}: {' and '.join(given)} of {_a(role)} message differ; keep one.")
    name, thought = next(iter(given.items()))
    if not isinstance(thought, str):
        raise UserError(f"{place}: {name} of {_a(role)} message is {str(thought)[:60]!r}, not a string.")
    if role != "assistant":
        if thought:
            raise UserError(f"{place}: {_a(role)} message has {name}, which only an assistant's turn holds.")
        return {}
    return {THOUGHTS[0]: thought}


def _learned(fields: dict[str, Any], role: str, place: str) -> bool:
    """Whether the turn is learned. Takes its names out of `fields`."""
    given = {name: fields.pop(name) for name in LEARNED if name in fields}
    for name, value in given.items():
        if value not in (0, 1):
            raise UserError(f"{place}: {name} of {_a(role)} message is {value!r}; a turn is learned (1) or not (0).")
        if value and role != "assistant":
            raise UserError(
                f"{place}: {_a(role)} message has {name} = {value!r}, but only the assistant's turns are learned."
            )
    if len(set(map(bool, given.values()))) > 1:
        raise UserError(f"{place}: {' and '.join(given)} of {_a(role)} message differ; keep one.")
    return all(map(bool, given.values()))


def _calls(calls: Any, role: str, place: str) -> list[dict[str, Any]]:
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        return calls
    raise UserError(f"{place}: tool_calls of {_a(role)} message are {str(calls)[:60]!r}; expected a list of objects.")


def read_tools(tools: Any, place: str) -> list[dict[str, Any]]:
    """The tools as a list of objects; tables often hold them as JSON, since their schemas differ from row to row.

    Raises:
        UserError: they are something else.
    """
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
