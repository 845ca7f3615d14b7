"""Token ids to text while they are generated, and the search for stop strings in it. One object a sequence.

Work per token does not grow with the text: bytes pass through an incremental UTF-8 decoder, characters through one
automaton a stop string. Text is held back only while it is part of an unfinished character or may be the beginning
of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from anycore.engine.request import FinishReason, SamplingParams
from anycore.errors import ConfigError
from anycore.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens added: text that may be sent, and whether a stop string ended the sequence."""

    text: str = ""
    stop: str | None = None  # the stop string that was found
    tokens: int = 0  # how many of the tokens fed were used; those after a stop string are not


class Detokenizer:
    """Text of one generated sequence.

    The concatenated pieces are `Tokenizer.decode` of the ids, however they are split into calls. Of several stop
    strings the one that is complete first wins, and of those complete at the same character the longest. One that is
    complete within the first `min_tokens` tokens does not count.

    `kept` are special tokens that are text all the same. `spaces_between_special_tokens` changes nothing: fast
    tokenizers put none there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        kept: frozenset[int] = frozenset(),
    ) -> None:
        if not tokenizer.streams:
            raise ConfigError("this tokenizer cannot write text token by token, so it cannot generate")
        self._tokenizer = tokenizer
        self._params = params
        self._skipped: frozenset[int] = tokenizer.special_ids - kept if params.skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [StopMatcher(stop) for stop in params.stop]
        self._held = ""  # decoded, but perhaps part of a stop string
        self._count = 0  # tokens so far
        # After a prompt the first space is part of the continuation.
        self._drop_space = tokenizer.drops_first_space and not prompt_ids
        self._done = False

    def feed(self, token_ids: Sequence[int], finish: FinishReason | None = None, all_text: bool = False) -> Piece:
        """Add tokens; `finish` is the engine's verdict on the sequence, with its last tokens.

        After a finish, or a stop string found, everything is flushed and nothing more is taken. With
        `FinishReason.STOP` the last id is the one that stopped: its text is left out, unless
        `include_stop_str_in_output`, or `all_text` says that it is none.
        """
        if self._done:
            return Piece()
        out = []
        leave_out = finish is FinishReason.STOP and not (all_text or self._params.include_stop_str_in_output)
        for i, token in enumerate(token_ids):
            self._count += 1
            if leave_out and i == len(token_ids) - 1:
                break
            text = self._utf8.decode(self._bytes(token))
            if not text:
                continue
            sent, stop = self._scan(text)
            out.append(sent)
            if stop is not None:
                self._done = True
                return Piece("".join(out), stop, i + 1)
        stop = None
        if finish is not None:
            self._done = True
            sent, stop = self._scan(self._utf8.decode(b"", final=True))
            out += [sent, self._held if stop is None else ""]
        return Piece("".join(out), stop, len(token_ids))

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._tokenizer.token_bytes(token)

    def _scan(self, text: str) -> tuple[str, str | None]:
        """Take new text; return what may be sent of all that is held, and the stop string if one is complete."""
        if self._drop_space and text:
            text, self._drop_space = text.removeprefix(" "), False
        if not self._matchers:
            return text, None
        start = len(self._held)
        self._held += text
        counts = self._count > self._params.min_tokens
        for i, character in enumerate(text):
            complete = [m.stop for m in self._matchers if m.step(character)]
            if complete and counts:
                stop = max(complete, key=len)
                end = start + i + 1
                return self._held[: end if self._params.include_stop_str_in_output else end - len(stop)], stop
        keep = max(m.matched for m in self._matchers)
        cut = len(self._held) - keep
        sent, self._held = self._held[:cut], self._held[cut:]
        return sent, None


class StopMatcher:
    """Knuth, Morris and Pratt's automaton: `matched` is how much of the stop string the text now ends with."""

    __slots__ = ("fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self.fallback = [0] * len(stop)  # [i]: longest proper prefix of stop[: i + 1] that is also its suffix
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self.fallback[length - 1]
            length += stop[i] == stop[length]
            self.fallback[i] = length

    def step(self, character: str) -> bool:
        """Take one character; return whether the stop string is complete with it."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self.fallback[self.matched - 1]
        self.matched += character == self.stop[self.matched]
        if self.matched < len(self.stop):
            return False
        self.matched = self.fallback[-1]  # a match that does not count may overlap one that does
        return True
