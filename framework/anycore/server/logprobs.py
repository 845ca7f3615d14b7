"""Log-probabilities in the shapes of the chat, completions and prompt_logprobs replies. Every number is finite."""

from __future__ import annotations

import codecs
import math
from collections.abc import Collection, Sequence

from anycore.engine.request import TokenLogprob
from anycore.errors import NonFiniteOutput
from anycore.server.protocol_replies import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TopLogprob
from anycore.text.tokenizer import Tokenizer

LOWEST = -9999.0  # what the OpenAI API writes for "very unlikely"; JSON has no infinity


class LogprobFormat:
    """Writes tokens as text: a token that is part of a character as `bytes:\\xf0\\x9f`, or every token as its id."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skip_special = skip_special_tokens

    def token(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, entries: list[TokenLogprob]) -> ChatLogprobs:
        """One entry a token, each with its most likely alternatives."""
        return {
            "content": [
                {**self._top(e.token_id, e.logprob), "top_logprobs": [self._top(*pair) for pair in e.top]}
                for e in entries
            ],
            "refusal": None,
        }

    def offsets(self, start: int) -> Offsets:
        """Of a text whose first token begins at character `start`."""
        return Offsets(self._tokenizer, self._tokenizer.special_ids if self._skip_special else frozenset(), start)

    def completion(
        self, entries: Sequence[TokenLogprob | None], ids: list[int], offsets: Offsets, count: int
    ) -> CompletionLogprobs:
        """Parallel lists over `ids`, which follow what `offsets` has seen; `entries` has None where there is none.

        The token itself is always among its alternatives, as in the OpenAI API, so there may be `count` + 1.
        """
        tops: list[dict[str, float] | None] = []
        for entry in entries:
            if entry is None:
                tops.append(None)
                continue
            top = {self.token(i): finite(value) for i, value in entry.top[:count]}
            tops.append(top | {self.token(entry.token_id): finite(entry.logprob)})
        return {
            "tokens": [self.token(i) for i in ids],
            "token_logprobs": [None if e is None else finite(e.logprob) for e in entries],
            "top_logprobs": tops,
            "text_offset": offsets.of(ids),
        }

    def prompt(self, entries: list[TokenLogprob | None]) -> PromptLogprobs:
        """As vLLM: for each prompt token but the first, a map of token id to what is known of it."""
        found: PromptLogprobs = []
        for entry in entries:
            if entry is None:
                found.append(None)
                continue
            ranked = [(i, value, rank) for rank, (i, value) in enumerate(entry.top, 1)]
            if entry.token_id not in [i for i, _, _ in ranked]:
                ranked.append((entry.token_id, entry.logprob, entry.rank))
            found.append(
                {
                    str(i): {"logprob": finite(value), "rank": rank, "decoded_token": self.token(i)}
                    for i, value, rank in ranked
                }
            )
        return found

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": self.token(token_id), "logprob": finite(logprob), "bytes": list(raw)}


class Offsets:
    """Where the tokens of a sequence begin in its text, whatever chunks they come in and whatever text is held back."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int], start: int) -> None:
        """`hidden`: tokens that have no text; `start`: the character at which the first one begins."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, ids: list[int]) -> list[int]:
        """Character at which each of the next tokens begins; the parts of one character begin where it does."""
        found = []
        for i in ids:
            raw = b"" if i in self._hidden else self._tokenizer.token_bytes(i)
            if raw and raw[0] & 0xC0 != 0x80:  # it begins a character, so one that was begun will stay a part
                self._at += len(self._decoder.decode(b"", final=True))
            found.append(self._at)
            self._at += len(self._decoder.decode(raw))
        return found


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def finite(value: float) -> float:
    """Return a log-probability that JSON can carry.

    Raises:
        NonFiniteOutput: it is no number at all.
    """
    if math.isnan(value):
        raise NonFiniteOutput("a log-probability is not a number")
    return max(value, LOWEST)
