"""The shapes that rows of conversations come in, recognised by their fields: each becomes messages.

    messages            {"messages": [{"role", "content"}, ...]}, also as a JSON text of them
    sharegpt            {"conversations": [{"from", "value"}, ...], "system"}
    prompt-completion   {"prompt", "completion"}, texts or lists of messages
    alpaca              {"instruction", "input", "output", "system"}

A shape is the same for all rows of a source. Which it is, the first row says.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

__all__ = ["SHAPES", "Row", "Shape", "shape_of"]

Row = dict[str, Any]

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's `from`, as a role."""


@dataclass(frozen=True)
class Shape:
    """Fields that a row of the shape has, those that it may have, and how it is read."""

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    read: Callable[[Row, tuple[str, ...], str], Any]
    """(row, the fields of `needs` by their names in this row, place) -> messages, unchecked."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field of a row that is read."""
        return (*self.needs, *self.may, "tools")

    def messages(self, row: Row, place: str) -> Any:
        """Return the row's messages, for `read_messages` to check.

        Raises:
            UserError: the row has not the fields of this shape.
        """
        missing = [name for name in self.needs if name not in row]
        if missing:
            raise UserError(f"{place}: no {missing[0]!r} in this row; it has: {', '.join(row) or 'nothing'}.")
        return self.read(row, self.needs, place)


def _messages(row: Row, fields: tuple[str, ...], place: str) -> Any:
    """Messages of either spelling: role and content, or ShareGPT's from and value."""
    found = row[fields[0]]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return found
    if isinstance(found, list):
        found = [_spoken(one, place) if isinstance(one, dict) and "from" in one else one for one in found]
        return _with_system(row.get("system"), found, place)
    return found


def _with_system(system: Any, talk: list[Any], place: str) -> list[Any]:
    """The messages after a row's system prompt, unless they begin with it."""
    if not system:
        return talk
    first = talk[0] if talk and isinstance(talk[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *talk]
    if first.get("content") != system:
        raise UserError(f"{place}: the row's system prompt and its first message, a system message, differ; keep one.")
    return talk


def _spoken(turn: Row, place: str) -> Row:
    speaker, more = turn["from"], {name: value for name, value in turn.items() if name not in ("from", "value")}
    if speaker not in SPEAKERS:
        raise UserError(
            f"{place}: a turn is from {speaker!r}; known are {', '.join(SPEAKERS)}.\n"
            "Write others, such as calls of functions, as messages with a role and tool_calls."
        )
    return {"role": SPEAKERS[speaker], "content": turn.get("value"), **more}


def _prompt_completion(row: Row, fields: tuple[str, ...], place: str) -> Any:
    prompt, completion = row[fields[0]], row[fields[1]]
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    # Turns of the assistant in a prompt are what came before: they are given and not learned.
    asked = [one | {"weight": 0} if isinstance(one, dict) and one.get("role") == "assistant" else one for one in asked]
    return [*asked, *said]


def _alpaca(row: Row, fields: tuple[str, ...], place: str) -> Any:
    instruction, given = row[fields[0]], row.get("input")
    if given and isinstance(instruction, str) and isinstance(given, str):
        instruction = f"{instruction}\n\n{given}"
    talk = [{"role": "user", "content": instruction}, {"role": "assistant", "content": row[fields[1]]}]
    if row.get("history"):
        raise UserError(
            f"{place}: a history of earlier turns beside an instruction is not read; write the row as messages."
        )
    return _with_system(row.get("system"), talk, place)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("messages", ("messages",), ("system",), _messages),
        Shape("sharegpt", ("conversations",), ("system",), _messages),
        Shape("prompt-completion", ("prompt", "completion"), (), _prompt_completion),
        Shape("alpaca", ("instruction", "output"), ("input", "system", "history"), _alpaca),
    )
}


def shape_of(fields: Collection[str], format: str, column: str | None, place: str) -> Shape:
    """Return the shape of rows with these fields.

    Args:
        fields: the names in the first row, or a table's columns.
        format: `chat` to find out, or a shape's name.
        column: the field of the messages, where it has another name.
        place: the row or the file, for errors.

    Raises:
        UserError: the fields are of no shape, or of two.
    """
    if column is not None:
        if format not in ("chat", "messages", "sharegpt"):
            raise UserError(
                f"dataloader.column {column} is for texts and for messages; rows of format {format} have several."
            )
        return Shape("messages", (column,), ("system",), _messages)
    if format != "chat":
        return SHAPES[format]
    found = [shape for shape in SHAPES.values() if all(name in fields for name in shape.needs)]
    if len(found) == 1 or (found and found[0].name == "messages"):
        return found[0]
    has = ", ".join(fields) or "nothing"
    if found:
        raise UserError(
            f"{place}: rows of {' or of '.join(shape.name for shape in found)}? They have: {has}.\n"
            f"Say which with --dataloader.format {found[0].name}."
        )
    known = "; ".join(f"{shape.name}: {' and '.join(shape.needs)}" for shape in SHAPES.values())
    raise UserError(
        f"{place}: no 'messages' in this row; it has: {has}. Conversations are read by their fields ({known}).\n"
        "Name the field of the messages with --dataloader.column."
    )
