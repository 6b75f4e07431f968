"""Text to token ids and back, and the ids that end a generation."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_format import ChatFormat, Message, check_messages
from .errors import InvalidRequestError, ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as TokenizersBackend

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory.

    Only local files are read and no code from the directory is run. Raises ModelLoadError when
    there is none, it is damaged, or it has no implementation in the `tokenizers` library.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelLoadError(f"{path} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    try:
        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise ModelLoadError(f"the tokenizer in {path} can't be loaded: {error}") from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"the tokenizer in {path} is a {type(loaded).__name__}, which runs in Python only; "
            "a tokenizer.json is needed"
        )
    return Tokenizer(loaded, name=str(path))


def load_end_token_ids(path: Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Ids that end a generation, without repeats: those of generation_config.json, of config.json
    and that of `tokenizer`, if one is given.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids += _read_end_ids(path / name)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(ids))


def _read_end_ids(file: Path) -> list[int]:
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8"))["eos_token_id"]
    except KeyError:
        return []
    except (ValueError, TypeError) as error:
        raise ModelLoadError(f"{file} is not a JSON object: {error}") from error
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ModelLoadError(f"{file}: eos_token_id must be a token id or a list of them: {value}")
    return ids


class Tokenizer:
    """A model's tokenizer; all of its work is done by the `tokenizers` library."""

    def __init__(self, loaded: Any, *, name: str) -> None:
        """Wrap a fast tokenizer of transformers; `name` is what errors call the model."""
        self.loaded = loaded
        """The same as transformers has it."""
        self._name = name
        self.backend: TokenizersBackend = loaded.backend_tokenizer
        """The tokenizer of the `tokenizers` library, for decoding in steps."""
        # Some repositories store these, and prompts would be cut or padded in silence.
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that decode to nothing when special tokens are skipped."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model may have more rows of embedding."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, None where the tokenizer names none."""
        eos: int | None = self.loaded.eos_token_id
        return eos

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens (BOS, say) that the model was trained on."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` for each text, on several threads."""
        for index, text in enumerate(texts):
            _check_text(text, index)
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]

    def encode_piece(self, text: str) -> list[int]:
        """Token ids of a piece of a text: without the special tokens of a whole one."""
        _check_text(text, 0)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces as they are; ids past the vocabulary decode to nothing."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], chat_format: ChatFormat | None = None
    ) -> list[int]:
        """Token ids of a chat, formatted by the model's template, or by `chat_format`'s own.

        Anything wrong with the chat or the template is an InvalidRequestError.
        """
        options = ChatFormat() if chat_format is None else chat_format
        checked = check_messages(messages)
        if options.chat_template is None and not self.loaded.chat_template:
            raise InvalidRequestError(
                f"model {self._name} has no chat template; pass chat_template, or a plain prompt"
            )
        apply = self.loaded.apply_chat_template
        for name in options.chat_template_kwargs:
            if name in inspect.signature(apply).parameters:
                raise InvalidRequestError(
                    f"chat_template_kwargs has {name!r}, which is not a variable of its own; give "
                    "another name, or the argument of that name if there is one"
                )
        try:
            ids: list[int] = apply(
                checked,
                tools=None if options.tools is None else list(options.tools),
                chat_template=options.chat_template,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tokenize=True,
                return_dict=False,
                **options.chat_template_kwargs,
            )
        except Exception as error:  # a template is a program, and may raise anything
            own = "" if options.chat_template is None else ", given as chat_template,"
            raise InvalidRequestError(
                f"the chat template of model {self._name}{own} can't format these messages: "
                f"{error or type(error).__name__}"
            ) from error
        return ids


def _check_text(text: object, index: int) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"text {index} is a {type(text).__name__}, but must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"text {index} has half a surrogate pair at character {error.start}, so it is not text"
        ) from error
