"""What is asked: six questions about one document, and a conversation of six rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

QUESTIONS = (
    "How old must a Representative be?",
    "How many Senators does each State have, and for how long are they chosen?",
    "Who acts as President when the President cannot?",
    "What may Congress not do about speech and the press?",
    "How is the Constitution amended?",
    "Which amendment abolished slavery, and what does it say?",
)

ROUNDS = (
    "What is the purpose of the article I have just quoted?",
    "Put that in one sentence.",
    "Which offices does it name?",
    "What would a critic say about it?",
    "And what would its authors answer?",
    "Thank you. Sum up our conversation.",
)


def document_prompts(tokenizer: Any, document: str) -> Iterator[list[int]]:
    """Token ids of each question behind the whole document."""
    for question in QUESTIONS:
        yield _chat(tokenizer, [("user", f"{document}\n\nQuestion: {question}")])


def opening(document: str) -> str:
    """The article that the conversation is about: Article II, on the executive."""
    return document[document.index("Article II\n") : document.index("Article III\n")]


def interlude(tokenizer: Any, document: str) -> list[int]:
    """Token ids of a request of somebody else, a tenth as long as the document: its last words."""
    return _chat(tokenizer, [("user", f"Translate:\n\n{document[-len(document) // 10 :]}")])


class Conversation:
    """A chat whose prompt of each round is everything said before and a new message."""

    def __init__(self, tokenizer: Any, document: str) -> None:
        self._tokenizer = tokenizer
        self._messages = [("user", f"{opening(document)}\n\n{ROUNDS[0]}")]
        self._ids = _chat(tokenizer, self._messages)

    def prompts(self) -> Iterator[list[int]]:
        """Token ids of each round's prompt; `reply` must be called before the next is taken."""
        yield self._ids
        for message in ROUNDS[1:]:
            self._messages.append(("user", message))
            if self._tokenizer.chat_template:
                self._ids = _chat(self._tokenizer, self._messages)
            else:
                self._ids = self._ids + self._tokenizer.encode(_turn("user", message) + _turn("assistant", ""))
            yield self._ids

    def reply(self, ids: list[int]) -> None:
        """What the model answered to the last prompt."""
        self._messages.append(("assistant", self._tokenizer.decode(ids, skip_special_tokens=True)))
        self._ids = self._ids + ids


def _turn(role: str, text: str) -> str:
    return f"\n\n{role.capitalize()}: {text}"


def _chat(tokenizer: Any, messages: list[tuple[str, str]]) -> list[int]:
    """Token ids of a chat that ends where the answer begins, by the tokenizer's template where it has one."""
    ids: list[int]
    if tokenizer.chat_template:
        chat = [{"role": role, "content": text} for role, text in messages]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    else:
        text = "".join(_turn(role, text) for role, text in messages) + _turn("assistant", "")
        ids = tokenizer.encode(text)
    return ids
