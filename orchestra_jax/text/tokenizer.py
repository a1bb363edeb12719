"""Byte-level BPE tokenizers from Hugging Face folders, with text and markup kept apart.

A chat model is steered by *added tokens* (``<|im_end|>``, ``<tool_call>``): ids that no plain text should ever
produce, since a tool that returns "<|im_end|>" would otherwise end the user's turn. So there are two encoders:
``encode_text`` knows no added tokens at all, and ``encode_markup`` is for strings that we wrote ourselves.
"""

import codecs
import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

ASSETS = Path(__file__).parent / "assets"
BUILTIN = {"market": ASSETS / "market_tokenizer"}

# A Unicode noncharacter, never used for text: put inside a string that looks like an added token, it stops
# encode_markup from seeing one there. It is taken out again before the text is encoded.
SHIELD = "\ufdd0"
REPLACEMENT = "\ufffd"
_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A byte-level BPE tokenizer: Qwen, Llama 3, SmolLM2, or the market's own.

    Attributes:
        source: where it was read from, for error messages.
        added_tokens: content -> id of every added token, special or not.
        special_tokens: the named ones a chat template may use, such as ``{"bos_token": "<|begin_of_text|>"}``.
        eos_ids: the ids that end generation, the tokenizer's own first, then those of ``generation_config.json``.
        chat_template: Jinja source, or None.
        vocab_size: the highest id plus one (a model may have more, padded, rows).
    """

    def __init__(self, definition: dict[str, Any], config: dict[str, Any], *, source: str = "tokenizer"):
        """Builds it from the parsed ``tokenizer.json`` and ``tokenizer_config.json``.

        Raises:
            ValueError: if the definition is not byte-level BPE, or has added tokens that swallow spaces around them.
        """
        self.source = source
        _check_definition(definition, source)
        vocab = definition["model"]["vocab"]
        self.added_tokens: dict[str, int] = {t["content"]: t["id"] for t in definition.get("added_tokens") or []}
        self._token_ids: dict[str, int] = {**vocab, **self.added_tokens}
        self._id_tokens = {i: token for token, i in self._token_ids.items()}
        self._added_ids = frozenset(self.added_tokens.values())
        self._id_bytes: dict[int, bytes] = {i: token.encode() for token, i in self.added_tokens.items()}
        self._plain = _without_added_tokens(definition, source)
        # Ids that are an added token and in the BPE vocabulary: merges might reach them from text.
        self._shared_ids = self._added_ids.intersection(vocab.values())
        self._missing_bytes = bytes(b for b, char in enumerate(_BYTE_CHARS) if char not in vocab)
        longest_first = sorted(map(re.escape, self.added_tokens), key=len, reverse=True)
        # Templates repeat long runs (instructions and tools), and encoding takes microseconds a token.
        self._encode_run = lru_cache(maxsize=512)(self.encode_text)
        self._added_pattern = re.compile(f"({'|'.join(longest_first)})" if longest_first else "(?!)")
        self.vocab_size = max(self._id_tokens) + 1
        self.special_tokens = _special_tokens(config)
        self.eos_ids = self._eos_ids(config)
        self.chat_template = _chat_template(config, source)
        if self.decode(self.encode_text("a b\n12")) != "a b\n12":
            raise ValueError(f"{source}: does not give text back unchanged (a prefix space or lossy normalizer?)")

    def encode_text(self, text: str) -> list[int]:
        """Encodes text that may come from anywhere. Never yields the id of an added token.

        Lone surrogates, and characters for which the vocabulary lacks bytes, become U+FFFD. A normalizer of the
        tokenizer (NFC in Qwen's) applies; but for these, ``decode(encode_text(text)) == text``.
        """
        if self._missing_bytes or not text.isascii():
            text = self._encodable(text)
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self._shared_ids and not self._shared_ids.isdisjoint(ids):
            return self._encode_split(text)
        return ids

    def encode_markup(self, text: str) -> list[int]:
        """Encodes a string in which added tokens are meant, such as a chat template's rendering.

        Text between two added tokens is encoded as one run, as Hugging Face does. Shielded parts (see ``shield``)
        are plain text.
        """
        ids: list[int] = []
        for index, piece in enumerate(self._added_pattern.split(text)):
            if index % 2:
                ids.append(self.added_tokens[piece])
            elif piece := piece.replace(SHIELD, ""):
                ids += self._encode_run(piece)
        return ids

    def shield(self, text: str, keep: Collection[str] = ()) -> str:
        """Marks text so that ``encode_markup`` sees no added token in it, except those named in ``keep``.

        A shield goes after the first character of each place where an added token starts. A shield character that is
        already in the text becomes U+FFFD, so that nobody can use one.
        """
        text = text.replace(SHIELD, REPLACEMENT)
        if not self._added_pattern.search(text):
            return text
        hidden = [token for token in self.added_tokens if token not in keep]
        starts = re.compile(f"(?={'|'.join(map(re.escape, hidden))})(.)" if hidden else "(?!)()", re.DOTALL)
        return starts.sub(rf"\g<1>{SHIELD}", text)

    def find_added_token(self, text: str) -> str | None:
        """The first added token that occurs in a text, or None."""
        match = self._added_pattern.search(text)
        return match.group() if match else None

    def split_at_added_tokens(self, text: str) -> tuple[str, str, str]:
        """Splits markup into (up to the first added token, from the first to the last, after the last)."""
        spans = [match.span() for match in self._added_pattern.finditer(text)]
        if not spans:
            return text, "", ""
        start, stop = spans[0][0], spans[-1][1]
        return text[:start], text[start:stop], text[stop:]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, added tokens included. Bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: for an id that is not in the vocabulary.
        """
        if not isinstance(ids, list):
            ids = np.asarray(ids).tolist()
        known = self._id_bytes
        return b"".join([known[i] if i in known else self.token_bytes(i) for i in ids]).decode("utf-8", "replace")

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds; joined they are ``decode(ids)``.

        A character that is spread over several tokens comes with the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self.token_bytes(i), final=n == len(ids)) for n, i in enumerate(ids, start=1)]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for. Raises ValueError for an unknown id."""
        if token_id not in self._id_bytes:
            if token_id not in self._id_tokens:
                raise ValueError(f"{self.source}: token id {token_id} is not in the vocabulary of {self.vocab_size}")
            self._id_bytes[token_id] = _token_to_bytes(self._id_tokens[token_id])
        return self._id_bytes[token_id]

    def token_to_id(self, token: str) -> int:
        """The id of an added token, or of a vocabulary entry in its byte-level spelling.

        Raises:
            ValueError: if there is no such token.
        """
        if token not in self._token_ids:
            raise ValueError(f"{self.source}: has no token {token!r}")
        return self._token_ids[token]

    def _encodable(self, text: str) -> str:
        text = _SURROGATES.sub(REPLACEMENT, text)
        missing = self._missing_bytes
        data = text.encode()
        if not missing or len(data.translate(None, missing)) == len(data):
            return text
        mark = "?" if set(REPLACEMENT.encode()) & set(missing) else REPLACEMENT
        return "".join(mark if set(char.encode()) & set(missing) else char for char in text)

    def _encode_split(self, text: str) -> list[int]:
        """Encodes with cuts inside all added tokens that occur, so that no merge can cross them."""
        ids = [
            i
            for piece in self.shield(text).split(SHIELD)
            for i in self._plain.encode(piece, add_special_tokens=False).ids
        ]
        forged = self._shared_ids.intersection(ids)
        if forged:
            raise ValueError(
                f"{self.source}: plain text gives the added token {self._id_tokens[min(forged)]!r}; "
                "remove it from added_tokens or from the vocabulary"
            )
        return ids

    def _eos_ids(self, config: dict[str, Any]) -> tuple[int, ...]:
        ids = [self.token_to_id(self.special_tokens["eos_token"])] if "eos_token" in self.special_tokens else []
        extra = config.get("eos_token_id") or []
        return tuple(dict.fromkeys(ids + (extra if isinstance(extra, list) else [extra])))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a Hugging Face folder's tokenizer, or a built-in one by name ("market").

    Reads ``tokenizer.json``, ``tokenizer_config.json``, and where present ``chat_template.jinja`` (which wins over
    the template in the configuration) and the stop ids of ``generation_config.json``.

    Raises:
        ValueError: if a file is missing or is not what it should be. The message names it.
    """
    folder = BUILTIN.get(str(path), Path(path))
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, and no built-in tokenizer of that name ({', '.join(BUILTIN)})")
    definition = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    if (file := folder / "chat_template.jinja").exists():
        config["chat_template"] = file.read_text("utf-8")
    if (file := folder / "generation_config.json").exists():
        config["eos_token_id"] = _read_json(file).get("eos_token_id")
    return Tokenizer(definition, config, source=str(folder))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{file}: missing. A tokenizer folder needs tokenizer.json and tokenizer_config.json"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: must hold a JSON object, not a {type(data).__name__}")
    return data


def _check_definition(definition: dict[str, Any], source: str) -> None:
    model = definition.get("model")
    byte_level = all('"ByteLevel"' in json.dumps(definition.get(part)) for part in ("pre_tokenizer", "decoder"))
    if not isinstance(model, dict) or model.get("type") != "BPE" or not byte_level:
        raise ValueError(f"{source}: only byte-level BPE tokenizers are supported (Qwen, Llama 3, SmolLM2)")
    for token in definition.get("added_tokens") or []:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise ValueError(
                f"{source}: added token {token['content']!r} has lstrip, rstrip or single_word set: unsupported"
            )


def _without_added_tokens(definition: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    plain = {
        **definition,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": {**definition["model"], "unk_token": None},
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{source}: tokenizer.json is not valid ({error})") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens; a configuration writes each as a string or as {"content": string, ...}."""
    named = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)}
    return {key: value if isinstance(value, str) else value["content"] for key, value in named.items()}


def _chat_template(config: dict[str, Any], source: str) -> str | None:
    """The template, or of a list of named ones the one for tools, else the default."""
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        named = {entry["name"]: entry["template"] for entry in template}
        return named["tool_use"] if "tool_use" in named else named["default"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{source}: chat_template must be a string, or a list with one named 'default'") from error


def _byte_chars() -> list[str]:
    """The character that byte-level BPE (GPT-2) writes for each byte: printable Latin-1 as is, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(moved)) for b in range(256)]


_BYTE_CHARS = _byte_chars()
_CHAR_BYTES = {char: b for b, char in enumerate(_BYTE_CHARS)}


def _token_to_bytes(token: str) -> bytes:
    try:
        return bytes(_CHAR_BYTES[char] for char in token)
    except KeyError:  # an entry that is not in byte-level spelling stands for itself
        return token.encode()


def byte_level(text: str) -> str:
    """A text in the spelling of byte-level vocabularies (a space is "Ġ")."""
    return "".join(_BYTE_CHARS[b] for b in text.encode())
