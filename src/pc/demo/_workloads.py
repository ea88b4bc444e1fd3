"""The prompts of the demo: six questions about one document, and a conversation of six rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

QUESTIONS = (
    "Who acts as President when the President dies or resigns?",
    "Who is the Commander in Chief of the Army and Navy?",
    "How many witnesses are needed to convict a person of treason?",
    "Who may admit new States into the Union?",
    "Who can propose amendments to the Constitution?",
    "What is the supreme law of the land?",
)
"""Questions about the document that a model of 135 million parameters can answer."""

WORKED = (
    "Questions and short answers about the text above.\n\n"
    "Q: In what is the executive power vested?\nA: In a President of the United States of America."
)
"""A question with its answer. Small models follow the form of the example."""

ROUNDS = (
    "What is this text about?",
    "Put that in one sentence.",
    "Who was the first President of the United States?",
    "In which year was the Constitution signed?",
    "Write two lines of verse about it.",
    "Thank you. What did we talk about?",
)


def excerpt(document: str) -> str:
    """Return Articles II to VI of the document: the executive, the courts, the States, amendments."""
    return between(document, "Article II\n", "Article VII\n")


def between(document: str, start: str, end: str) -> str:
    """Return the text from the heading `start` up to the heading `end`."""
    begin = document.index(start)
    return document[begin : document.index(end, begin)]


def document_prompts(tokenizer: Any, text: str) -> Iterator[list[int]]:
    """Yield the token ids of each question, preceded by the whole text."""
    for question in QUESTIONS:
        ids: list[int] = tokenizer.encode(f"The text:\n\n{text}\n\n{WORKED}\n\nQ: {question}\nA:")
        yield ids


def line_end(tokenizer: Any) -> int | None:
    """Return the token that ends a line, and so an answer, or None if the tokenizer has no single one."""
    ids = tokenizer.encode("\n", add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def answer_ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer of one line: the end of a line and the model's own end tokens."""
    own = model.generation_config.eos_token_id
    ends = line_end(tokenizer), *([own] if isinstance(own, int) else own or [])
    return [end for end in ends if end is not None]


def interlude(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of an unrelated request about the last tenth of the text."""
    return _chat(tokenizer, [("user", f"Translate:\n\n{text[-len(text) // 10 :]}")])


class Conversation:
    """A chat in which each round's prompt is the whole conversation so far and a new message."""

    def __init__(self, tokenizer: Any, document: str) -> None:
        self._tokenizer = tokenizer
        subject = between(document, "Article IV\n", "Article VI\n")  # the States, amendments
        self._messages = [("user", f"{subject}\n\n{ROUNDS[0]}")]
        self._ids = _chat(tokenizer, self._messages)

    def prompts(self) -> Iterator[list[int]]:
        """Yield the token ids of each round's prompt. The caller must call `reply` before the next round."""
        yield self._ids
        for message in ROUNDS[1:]:
            self._messages.append(("user", message))
            if self._tokenizer.chat_template:
                self._ids = _chat(self._tokenizer, self._messages)
            else:
                self._ids = self._ids + self._tokenizer.encode(_turn("user", message) + _turn("assistant", ""))
            yield self._ids

    def reply(self, ids: list[int]) -> None:
        """Extend the conversation by the model's answer to the last prompt."""
        self._messages.append(("assistant", self._tokenizer.decode(ids, skip_special_tokens=True)))
        self._ids = self._ids + ids


def _turn(role: str, text: str) -> str:
    return f"\n\n{role.capitalize()}: {text}"


def _chat(tokenizer: Any, messages: list[tuple[str, str]]) -> list[int]:
    """Return the token ids of a chat up to the start of the answer, by the tokenizer's template if it has one."""
    ids: list[int]
    if tokenizer.chat_template:
        chat = [{"role": role, "content": text} for role, text in messages]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    else:
        text = "".join(_turn(role, text) for role, text in messages) + _turn("assistant", "")
        ids = tokenizer.encode(text)
    return ids
