"""Text to token ids and back, and chats to text.

:class:`Tokenizer` wraps the ``tokenizers`` library, from a hub folder or a GGUF file. :class:`CharTokenizer` has one
token per character, for the built-in arithmetic. Both have the same members, which are all that a trainer uses:
``vocab_size``, ``eos_id``, ``pad_id``, ``stop_ids``, ``encode``, ``decode`` and ``encode_prompt``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logitless.train.bounds import TooLong, memory_limit, time_limit
from logitless.train.files import in_a_line, package
from logitless.train.model import ModelError

NO_TOKENIZERS = ModelError("tokenizers need the tokenizers package: pip install 'logitless[train]'")
TEMPLATE_SECONDS, TEMPLATE_BYTES = 5.0, 256 << 20
"""Limits for rendering a chat: seconds and bytes."""
Messages = Sequence[dict[str, str]]
"""A chat: ``{"role": "system" | "user" | "assistant", "content": text}`` each."""


class Tokenizer:
    """A byte-level BPE tokenizer with its special tokens and its chat template."""

    def __init__(self, backend: Any, settings: dict[str, Any], source: str, stop_ids: Sequence[int] = ()) -> None:
        """``backend`` is a ``tokenizers.Tokenizer``, ``settings`` a hub folder's ``tokenizer_config.json``."""
        self._backend, self._settings, self._source = backend, settings, source
        self.vocab_size: int = backend.get_vocab_size()
        eos = self._special("eos_token")
        if eos is None:
            raise ModelError(f"{source}: no eos_token, so that no completion would ever end.")
        pad = self._special("pad_token")
        self.eos_id: int = eos
        self.pad_id: int = eos if pad is None else pad
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((eos, *stop_ids)))  # each ends a completion
        for token_id in (*self.stop_ids, self.pad_id):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise ModelError(f"{source}: token id {token_id!r}, expected 0 to {self.vocab_size - 1}.")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several by name
            template = next((one["template"] for one in template if one.get("name") == "default"), None)
        self.chat_template: str | None = template
        if not isinstance(self.chat_template, str | None):
            raise ModelError(f"{source}: the chat template is {self.chat_template!r}, expected a text.")

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """From ``tokenizer.json``, ``tokenizer_config.json`` and, where there are any, the chat template's and
        the generation settings' own files."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelError(f"{folder}: holds no tokenizer.json.")
        try:
            backend = package("tokenizers", NO_TOKENIZERS).Tokenizer.from_file(str(file))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{file}: not readable as a tokenizer: {error}") from None
        settings = _json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.is_file():
            settings["chat_template"] = template.read_text(errors="replace")
        stop = _json(folder / "generation_config.json").get("eos_token_id") or []
        return cls(backend, settings, str(folder), stop if isinstance(stop, list) else [stop])

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """From the metadata of a GGUF file."""
        from logitless.train.gguf import tokenizer_from_gguf

        return cls(*tokenizer_from_gguf(path), str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it are recognised, none is added."""
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a text that is no Unicode; an unknown token that a stranger's file lacks
            raise ModelError(f"{self._source}: cannot encode {text[:80]!r}: {error}") from None

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of some ids."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def encode_prompt(self, prompt: str, *, chat: bool, system: str | None = None) -> list[int]:
        """Ids of a prompt: the bare text, or a user's message up to where the assistant's answer starts. Without
        ``system``, a chat begins with the template's own system message."""
        if not chat:
            if system is not None:
                raise ModelError("a system message needs a chat: a bare prompt has no place for it.")
            return self.encode(prompt)
        messages = [] if system is None else [{"role": "system", "content": system}]
        return self.encode(self.chat([*messages, {"role": "user", "content": prompt}]))

    def chat(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """A chat as text, by the tokenizer's own template."""
        if self.chat_template is None:
            raise ModelError(f"{self._source}: has no chat template; use bare prompts, or an instruction-tuned model.")
        return render(self.chat_template, messages, add_generation_prompt, self._special_texts())

    def _special(self, key: str) -> int | None:
        text = self._special_texts().get(key)
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise ModelError(f"{self._source}: {key} is {text!r}, which is not in the vocabulary.")
        return token_id

    def _special_texts(self) -> dict[str, str]:
        found = {key: self._settings.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
        for key, text in texts.items():
            if not isinstance(text, str) and found[key] is not None:
                raise ModelError(f"{self._source}: {key} is {found[key]!r}, expected a text.")
        return {key: text for key, text in texts.items() if text is not None}


class CharTokenizer:
    """One token per character of ``"0123456789+-= "``, and two more for the end and for padding: 16."""

    CHARACTERS = "0123456789+-= "

    def __init__(self) -> None:
        self.vocab_size = len(self.CHARACTERS) + 2
        self.eos_id, self.pad_id = self.vocab_size - 2, self.vocab_size - 1
        self.stop_ids: tuple[int, ...] = (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a character outside the alphabet is an error."""
        unknown = sorted(set(text) - set(self.CHARACTERS))
        if unknown:
            raise ModelError(f"CharTokenizer: {text!r} holds {unknown}, which are not among {self.CHARACTERS!r}.")
        return [self.CHARACTERS.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, end and padding left out."""
        return "".join(self.CHARACTERS[i] for i in ids if i < len(self.CHARACTERS))

    def encode_prompt(self, prompt: str, *, chat: bool, system: str | None = None) -> list[int]:
        """Ids of a bare prompt; 16 characters have no chat."""
        if chat or system is not None:
            raise ModelError("CharTokenizer has no chat template; use bare prompts.")
        return self.encode(prompt)


TextTokenizer = Tokenizer | CharTokenizer


def load_tokenizer(source: str | Path, cache_dir: str | Path | None = None) -> TextTokenizer:
    """The tokenizer at ``source``: a folder, a ``.gguf``, a fetched name, or ``"char"``."""
    if str(source) == "char":
        return CharTokenizer()
    from logitless.train.hub import local_source
    from logitless.train.weights import untrusted

    path = local_source(source, cache_dir)
    with untrusted(path):
        return Tokenizer.from_gguf(path) if path.suffix == ".gguf" else Tokenizer.from_folder(path)


def render(template: str, messages: Messages, add_generation_prompt: bool, special: dict[str, str]) -> str:
    """A chat by a jinja2 template, in jinja2's sandbox and within bounds: templates come from strangers."""
    try:
        with time_limit(TEMPLATE_SECONDS), memory_limit(TEMPLATE_BYTES):
            return _compiled(template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **special
            )
    except ModelError:
        raise
    except TooLong:
        raise ModelError(f"the chat template is not rendered after {TEMPLATE_SECONDS:g} s; it may be a loop") from None
    except Exception as error:  # whatever a template divides by, asks for or nests
        raise ModelError(f"the chat template cannot be rendered: {in_a_line(error)}") from None


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """Compiled once: it takes longer than rendering, and a data set has thousands of chats."""
    sandbox = package("jinja2.sandbox", ModelError("chat templates need jinja2: pip install 'logitless[train]'"))

    def raise_exception(message: str) -> None:
        raise ModelError(f"the chat template refuses these messages: {message}")

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def _json(path: Path) -> dict[str, Any]:
    """A folder's optional settings; empty where the file is not there."""
    from logitless.train.weights import read_json

    return read_json(path) if path.is_file() else {}
