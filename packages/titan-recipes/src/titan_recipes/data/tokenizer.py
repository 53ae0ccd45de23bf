"""The tokenizer of a run: TorchTitan's, without the state that its files carry for another use.

What a training token is, is decided here and nowhere else. The ids of a text are those of the tokenizer's model, with
nothing added, cut or filled in, and the end-of-text token after them. The ids of a conversation are those of
Transformers' `apply_chat_template`, which renders it here too.

tokenizer.json may hold a length to cut at and a length to fill up to, since Transformers saves those of the last call;
and a post-processor, which adds tokens to what a classifier reads. None of the three is about training text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from ..errors import UserError

__all__ = ["Spans", "TrainingTokenizer", "training_tokenizer"]

Spans = list[tuple[int, int]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TrainingTokenizer(HuggingFaceTokenizer):
    """TorchTitan's tokenizer without truncation, padding and post-processor, and with Transformers' chat templates."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        pass

    def __init__(self, config: Config | None = None, *, tokenizer_path: str) -> None:
        self.templates: dict[str, str] = {}
        """Chat templates by name. A folder with one template calls it `default`."""
        super().__init__(config, tokenizer_path=tokenizer_path)
        file = Path(tokenizer_path) / self.CHAT_TEMPLATE_FILE
        if not self.templates and file.is_file():  # TorchTitan looks for it only beside a tokenizer_config.json
            self.set_chat_template(file.read_text(encoding="utf-8"))

    def _load_tokenizer_from_path(self, tokenizer_path: str) -> Tokenizer:
        tokenizer = super()._load_tokenizer_from_path(tokenizer_path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = None
        return tokenizer

    def set_chat_template(self, template: str | Sequence[dict[str, str]] | None) -> None:
        """Keep a chat template, or a list of named ones as tokenizer_config.json may have. It is compiled when it is
        used.

        Raises:
            UserError: the list is not one of names and templates.
        """
        if template is None or isinstance(template, str):
            self.templates = {} if template is None else {"default": template}
            return
        try:
            self.templates = {str(one["name"]): str(one["template"]) for one in template}
        except (TypeError, KeyError):
            raise UserError(
                f"The chat_template in {self.tokenizer_path} is {str(template)[:80]!r}; expected a template, or a "
                "list of "
                '{"name": ..., "template": ...}.'
            ) from None

    def template_for(self, tools: Any = None) -> str:
        """Return the template that Transformers would take: `tool_use` for a conversation with tools, else `default`.

        Raises:
            UserError: there are named templates, and none of them is the default.
        """
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" not in self.templates:
            raise UserError(
                f"The tokenizer in {self.tokenizer_path} has the chat templates "
                f"{', '.join(self.templates) or 'none'}, and no default. "
                "Write the one to train with to chat_template.jinja in that folder."
            )
        return self.templates["default"]

    def render(self, messages: Sequence[dict[str, Any]], tools: Any = None, **options: Any) -> tuple[str, Spans | None]:
        """Render a conversation as Transformers does.

        Returns:
            The text, and the [begin, end) character spans that the template marks with `{% generation %}`. None in
            their place when the template marks nothing.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self.template_for(tools)
        marks = _GENERATION.search(template) is not None
        (text,), spans = render_jinja_template(
            conversations=[list(messages)],
            tools=tools or None,
            chat_template=template,
            return_assistant_tokens_mask=marks,
            **(self._special_tokens() | options),
        )
        return text, [(int(begin), int(end)) for begin, end in spans[0]] if marks else None

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Return the text of a conversation, as Transformers renders it."""
        return self.render(messages, **options)[0]

    def _special_tokens(self) -> dict[str, str]:
        """The special tokens that a template may name, as Transformers hands them to it."""
        config = self._hf_config or {}
        found = {name: self._get_token_from_config(config, name) for name in _SPECIAL}
        return {name: token for name, token in found.items() if token is not None}


@lru_cache(maxsize=4)
def training_tokenizer(tokenizer: BaseTokenizer) -> BaseTokenizer:
    """Return the tokenizer to make training tokens with: TorchTitan's stock one loaded anew as this module's, any
    other as it is.
    """
    if type(tokenizer) is HuggingFaceTokenizer:
        return TrainingTokenizer(tokenizer_path=tokenizer.tokenizer_path)
    return tokenizer
