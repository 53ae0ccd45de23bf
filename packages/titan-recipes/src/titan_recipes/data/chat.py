"""Conversations as text, by the chat template that ships with the tokenizer, and which of it the assistant said.

A template may mark what the assistant says with `{% generation %}`. Qwen's do not; they mark turns as ChatML:
<|im_start|>ROLE, a newline, the content, <|im_end|>. There each assistant turn is learned from after its header to the
end of its <|im_end|>. The turns are found in the rendered text, not by rendering prefixes: Qwen3's template writes a
turn differently when it is the last (thinking is kept only there).

Whether the template wrote what was given is found by rendering twice, the second time with a mark before and after what
each turn says: between its marks stands all of it, and without them the two texts are the same.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .messages import read_messages, read_tools
from .tokenizer import Spans, TrainingTokenizer

__all__ = ["CHATML", "END", "ready_template", "render"]

START, END = "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of a tokenizer that has none of its own."""

_TURN = re.compile(re.escape(START) + r"assistant\n(.*?" + re.escape(END) + ")", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_MARKED = re.compile("\x02([0-9]+)<(.*?)>\\1\x03", re.DOTALL)

Message = dict[str, Any]


def ready_template(tokenizer: Any) -> bool:
    """True when the tokenizer has a chat template; else plain ChatML is set, which needs its two marks in the
    vocabulary.
    """
    if not isinstance(tokenizer, TrainingTokenizer):
        raise UserError(f"{type(tokenizer).__name__} renders no chat template; chat data needs TorchTitan's tokenizer.")
    if tokenizer.templates:
        return tokenizer.templates != {"default": CHATML}
    missing = [mark for mark in (START, END) if tokenizer.token_to_id(mark) is None]
    if missing:
        raise UserError(
            f"The tokenizer has neither a chat template nor the token {missing[0]}: chat data cannot be rendered.\n"
            "Point --hf_assets_path at a tokenizer with a chat template (any Qwen3's)."
        )
    tokenizer.set_chat_template(CHATML)
    return False


@dataclass
class _Rendered:
    text: str
    turns: Spans
    """What the assistant says, [begin, end) of each turn."""


def render(messages: Any, tokenizer: TrainingTokenizer, place: str, tools: Any = None) -> tuple[str, Spans] | None:
    """The conversation's text and the [begin, end) character spans that are learned: the assistant's turns, but for
    those that a message keeps out (`weight: 0`).

    None when a message's own text, or a tool's, contains a turn's mark: it would be read as one, and foreign words
    learned as the assistant's. Raises UserError, naming `place`, for what is no conversation and for a message that the
    template leaves out.
    """
    talk, learned = read_messages(messages, place)
    tools = read_tools(tools, place)
    if any(mark in str(value) for part in (*talk, *tools) for value in part.values() for mark in (START, END)):
        return None
    said = [(message, wanted) for message, wanted in zip(talk, learned, strict=True) if message["role"] == "assistant"]
    rendered = _render(talk, tokenizer, place, tools)
    if len(rendered.turns) != len(said):
        raise UserError(
            f"{place}: {len(said)} assistant messages, but the chat template rendered {len(rendered.turns)} turns "
            "of the form "
            f"{START}assistant ... {END} or between {{% generation %}} marks.\n"
            "Chat data is supported for templates that mark turns so, as Qwen's do."
        )
    _check_all_there(talk, tools, rendered, place)
    _check_answers(talk, rendered, lambda marked: _render(marked, tokenizer, place, tools), place)
    return rendered.text, [span for span, (_, wanted) in zip(rendered.turns, said, strict=True) if wanted]


def _render(talk: list[Message], tokenizer: TrainingTokenizer, place: str, tools: list[Any]) -> _Rendered:
    try:
        text, turns = tokenizer.render(talk, tools)
    except UserError:
        raise
    except Exception as error:  # whatever a template raises of its own
        raise UserError(f"{place}: the chat template fails on this conversation: {error}") from None
    return _Rendered(text, [match.span(1) for match in _TURN.finditer(text)] if turns is None else turns)


def _lost(place: str, what: str, words: str, advice: str = "") -> UserError:
    advice = advice or (
        "Qwen's templates write the roles system, user, assistant and tool, and the tools; use one, or take what "
        "it cannot "
        "write out of the data."
    )
    return UserError(f"{place}: the chat template leaves out {what}, {words[:60]!r}. {advice}")


def _check_all_there(talk: list[Message], tools: list[Message], rendered: _Rendered, place: str) -> None:
    """UserError for words that the text does not have where they belong: before, in or after the turn that they are
    of.
    """
    text, turns = rendered.text, iter([*rendered.turns, (len(rendered.text), len(rendered.text))])
    after, (begin, end) = 0, next(turns)
    for tool in tools:
        if _name(tool) not in text:
            raise _lost(place, "a tool", _name(tool))
    for number, message in enumerate(talk):
        if message["role"] != "assistant":
            if (words := message["content"].strip()) not in text[after:begin]:
                raise _lost(place, f"the words of a {message['role']!r} message", words)
            continue
        turn = text[begin:end]
        for words in _of_calls(message):
            if not any(
                form in turn for form in (words, json.dumps(words, ensure_ascii=False)[1:-1], json.dumps(words)[1:-1])
            ):
                raise _lost(place, "a tool call", words)
        thought = message.get("reasoning_content", "").strip()
        # Of earlier turns Qwen3's template leaves out the thinking: that is how the model is used.
        if number == len(talk) - 1 and thought not in turn:
            raise _lost(place, "what the assistant thought", thought)
        after, (begin, end) = end, next(turns)


def _of_calls(message: Message) -> Iterator[str]:
    """The names and the words of a message's tool calls."""
    for call in message.get("tool_calls", ()):
        yield _name(call)
        arguments = (
            call.get("function", call).get("arguments") if isinstance(call.get("function", call), dict) else None
        )
        yield from _words(arguments)


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _words(one)


def _check_answers(talk: list[Message], rendered: _Rendered, again: Any, place: str) -> None:
    """UserError for an answer of which the template writes a part, or beside which it writes something that was not
    said.
    """
    last = len(talk) - 1
    marked, answers = [], {}
    for number, message in enumerate(talk):
        if message["role"] == "assistant":
            before, answer = _split_thought(message["content"])
            answers[number] = answer
            message = message | {"content": f"{before}\x02{number}<{answer}>{number}\x03"}
        marked.append(message)
    other = again(marked).text
    found = {int(match[1]): match[2] for match in _MARKED.finditer(other)}
    for number, answer in answers.items():
        before, _ = _split_thought(talk[number]["content"])
        if found.get(number) != answer:
            advice = (
                "Write what the assistant thought as reasoning_content, beside the content."
                if "</think>" in answer
                else ""
            )
            raise _lost(place, "words of an assistant message", answer.strip(), advice)
        thought = before.replace("<think>", "").replace("</think>", "").strip()
        if number == last and thought not in rendered.text[slice(*rendered.turns[-1])]:
            raise _lost(place, "what the assistant thought", thought)
    if "".join(_MARKED.sub(lambda match: match[2], other).split()) != "".join(rendered.text.split()):
        raise UserError(
            f"{place}: the chat template writes an assistant's turn otherwise than it was given: "
            f"{rendered.text[slice(*rendered.turns[-1])][:80]!r}."
        )


def _split_thought(content: str) -> tuple[str, str]:
    """The thinking that a content begins with, its marks included, and the answer after it."""
    match = _THOUGHT.match(content)
    return (content[: match.end()], content[match.end() :]) if match else ("", content)


def _name(function: Any) -> str:
    """The name of a tool or of a call, nested as OpenAI does or not."""
    found = function.get("function", function) if isinstance(function, dict) else None
    return str(found.get("name", "")) if isinstance(found, dict) else ""
