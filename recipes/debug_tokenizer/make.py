"""Make this folder's tokenizer: byte-level BPE, 2,048 ids, with Qwen's special tokens and a ChatML template.

    uv run python recipes/debug_tokenizer/make.py

Trained on the training part of the text that the `debug` recipe uses (the language reference in the Python standard
library), so it changes a little with the Python release; the committed files came from CPython 3.11.
"""

import json
from pathlib import Path

import numpy as np
from titan_recipes.data.documents import digest, held_out, python_docs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2048

# Qwen3's added tokens in the order of their ids; True marks those that decoding with skip_special_tokens leaves out.
SPECIAL = {
    "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True,
    "<|object_ref_start|>": True, "<|object_ref_end|>": True, "<|box_start|>": True, "<|box_end|>": True,
    "<|quad_start|>": True, "<|quad_end|>": True, "<|vision_start|>": True, "<|vision_end|>": True,
    "<|vision_pad|>": True, "<|image_pad|>": True, "<|video_pad|>": True,
    "<tool_call>": False, "</tool_call>": False,
    "<|fim_prefix|>": False, "<|fim_middle|>": False, "<|fim_suffix|>": False, "<|fim_pad|>": False,
    "<|repo_name|>": False, "<|file_sep|>": False,
    "<tool_response>": False, "</tool_response>": False, "<think>": False, "</think>": False,
}  # fmt: skip

# Contractions, letter runs with one leading non-letter, single digits, punctuation runs, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Write the tokenizer into this folder."""
    folder = Path(__file__).parent
    documents = python_docs()
    sizes = np.array([len(d) for d in documents])
    (out,) = held_out({"python-docs": (np.array([digest(d) for d in documents], np.uint64), sizes)}, 0.1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d for i, d in enumerate(documents) if not out[i]), trainer)
    added = [AddedToken(text, special=special, normalized=False) for text, special in SPECIAL.items()]
    tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 131072,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "errors": "replace",
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text, "special": special,
                "normalized": False, "lstrip": False, "rstrip": False, "single_word": False,
            }
            for text, special in SPECIAL.items()
        },
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    print(f"{folder / 'tokenizer.json'}: {tokenizer.get_vocab_size()} ids")


if __name__ == "__main__":
    main()
