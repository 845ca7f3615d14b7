"""How an input is fitted to a length: what is too long is refused with the numbers, or cut where it may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anycore.errors import BadRequest, ContextLengthExceeded

if TYPE_CHECKING:
    from tokenizers import Encoding

Truncate = bool | int | None
"""None or False: too long is an error. True or -1: cut to the model's length. A count: cut to so many tokens."""


@dataclass(frozen=True, slots=True)
class Cutter:
    """What one request wishes for an input.

    Args:
        longest: the model's length in tokens.
        truncate: see `Truncate`.
        room: tokens to leave for the output; None leaves the check of the length to the caller.
        side: where tokens are taken away, "left" or "right".
        param: the request's field, for errors.
        stays: the field of what stands before it and is never cut, if there is one.

    Raises:
        BadRequest: the side is neither. What is wrong with `truncate` is raised when it is first looked at.
    """

    longest: int
    truncate: Truncate
    side: str
    room: int | None
    param: str
    stays: str | None = None

    def __post_init__(self) -> None:
        if self.side not in ("left", "right"):
            raise BadRequest(f"truncation_side must be left or right, not {self.side[:40]!r}", param="truncation_side")

    def fits(self, length: int) -> bool:
        """Whether an input of so many tokens stays as it is."""
        limit = self.limit()
        return limit is None or length <= limit

    def cut(self, length: int, start: int, end: int) -> slice | None:
        """Return the tokens to take away of `length`, all of them within start … end - 1; None if it fits.

        Raises:
            ContextLengthExceeded: it is too long, and cutting was not asked for or would leave nothing.
        """
        limit = self.limit()
        if limit is None or length <= limit:
            return None
        if limit < 1:
            raise ContextLengthExceeded(
                f"{self.room} tokens of output leave no room for {self.param}: the model takes at most {self.longest} "
                "tokens, input and output together",
                param="max_tokens",
            )
        surplus, kept = length - limit, length - (end - start)
        if self.stays is not None and kept >= limit:
            raise ContextLengthExceeded(
                f"{self.stays} takes {kept} tokens with special tokens and template, of at most {limit} for it and "
                f"{self.param} together: shorten it, it is never cut",
                param=self.stays,
            )
        if self.truncate is None or self.truncate is False:
            answer = f", {self.longest} with the output's {self.room}" if self.room else ""
            raise ContextLengthExceeded(
                f"{self.param} has {length} tokens, the model takes at most {limit}{answer}: shorten or truncate it",
                param=self.param,
            )
        if surplus >= end - start:
            raise ContextLengthExceeded(
                f"{self.param} has {length} tokens and must be cut to {limit}, but {kept} of them must "
                "stay (special tokens, query, template): nothing would be left",
                param=self.param,
            )
        return slice(end - surplus, end) if self.side == "right" else slice(start, start + surplus)

    def limit(self) -> int | None:
        """Return the most tokens the input may have; None if that is for the caller to check.

        Raises:
            BadRequest: `truncate` is none of its values.
        """
        longest = self.longest - (self.room or 0)
        if self.truncate is None or self.truncate is False:
            return None if self.room is None else longest
        if self.truncate is True or self.truncate == -1:
            return longest
        if not isinstance(self.truncate, int):
            raise BadRequest(
                f"truncate_prompt_tokens must be True, False or a count of tokens, not {self.truncate!r}",
                param="truncate_prompt_tokens",
            )
        if not 1 <= self.truncate <= self.longest:
            raise BadRequest(
                f"truncate_prompt_tokens must be between 1 and the model's length of {self.longest} tokens, or -1 for "
                f"that length, not {self.truncate}",
                param="truncate_prompt_tokens",
            )
        return min(self.truncate, longest)


def span_of(encoding: Encoding, sequence: int) -> tuple[int, int]:
    """Return the run [start, end) of the tokens of the first (0) or second (1) text, added special tokens left out."""
    owners = encoding.sequence_ids
    if sequence not in owners:
        return 0, 0
    return owners.index(sequence), len(owners) - owners[::-1].index(sequence)


def span_between(encoding: Encoding, start: int, end: int) -> tuple[int, int]:
    """Return the run of tokens that lie within characters start … end - 1; the first may begin before them."""
    inside = [i for i, (first, last) in enumerate(encoding.offsets) if first < last and start < last <= end]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
