"""An input put into words but not yet tokenised, so that many can be tokenised in one call, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anycore.errors import BadRequest
from anycore.text.cut import Cutter, span_between, span_of
from anycore.text.tokenizer import check_unicode

if TYPE_CHECKING:
    from tokenizers import Encoding

    from anycore.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens ready for the engine."""

    token_ids: list[int]
    token_types: list[int] | None = None  # segment ids, where the model reads them
    truncated: bool = False
    text: str = ""  # what was tokenised; empty for token ids


@dataclass(frozen=True, slots=True)
class Draft:
    """One input.

    Args:
        text: what is tokenised; of a pair, its first text.
        pair: its second text, of which alone tokens may be cut.
        within: the run of characters of `text` whose tokens may be cut; None: all of them.

    Raises:
        BadRequest: a text is not valid Unicode; `param` names the input.
    """

    text: str
    cutter: Cutter
    pair: str | None = None
    add_special_tokens: bool = True
    within: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        try:
            check_unicode(self.text)
            if self.pair is not None:
                check_unicode(self.pair)
        except BadRequest as error:
            raise BadRequest(f"{self.cutter.param}: {error.message}", param=self.cutter.param) from None


def tokenise(drafts: list[Draft | Rendered], tokenizer: Tokenizer, rows: int | None = None) -> list[Rendered]:
    """Turn drafts into tokens, in one call of the tokenizer for those that are alike; others are there already.

    Args:
        rows: of the model's table, where the tokenizer has tokens beyond it.

    Raises:
        BadRequest: one gives no tokens or some that the model lacks, or is too long and may not be cut; `param` names
            it.
    """
    done: dict[int, Rendered] = {i: draft for i, draft in enumerate(drafts) if isinstance(draft, Rendered)}
    for special in (True, False):
        alike = {i: draft for i, draft in enumerate(drafts) if isinstance(draft, Draft)}
        alike = {i: draft for i, draft in alike.items() if draft.add_special_tokens is special}
        texts = [draft.text if draft.pair is None else (draft.text, draft.pair) for draft in alike.values()]
        encodings = tokenizer.encodings(texts, special) if texts else []
        for (i, draft), encoding in zip(alike.items(), encodings, strict=True):
            done[i] = fitted(draft, encoding, tokenizer)
            if rows is not None:
                check_rows(done[i].token_ids, rows, tokenizer, draft.cutter.param)
    return [done[i] for i in range(len(drafts))]


def check_rows(ids: list[int], rows: int, tokenizer: Tokenizer, param: str) -> None:
    """Refuse a text with a token that the tokenizer has and the model does not: its table has `rows` rows.

    Raises:
        BadRequest: naming the token.
    """
    last = max(ids)
    if last >= rows:
        raise BadRequest(
            f"{param} has the token {tokenizer.token(last)[:40]!r} ({last}), for which the model has no row: its table "
            f"has {rows}",
            param=param,
        )


def fitted(draft: Draft, encoding: Encoding, tokenizer: Tokenizer) -> Rendered:
    """Cut an encoding to its limit.

    Raises:
        BadRequest: it has no tokens.
        ContextLengthExceeded: see `Cutter.cut`.
    """
    cutter = draft.cutter
    ids: list[int] = encoding.ids
    types: list[int] | None = encoding.type_ids if tokenizer.token_types else None
    if not ids:
        raise BadRequest(f"{cutter.param} gives no tokens", param=cutter.param)
    text = draft.text if draft.pair is None else draft.text + draft.pair
    if cutter.fits(len(ids)):
        return Rendered(ids, types, False, text)
    if draft.within is None:
        run = span_of(encoding, 0 if draft.pair is None else 1)
    else:  # where tokens lie in the text is told at a price, which only those pay that are cut
        run = span_between(tokenizer.located(draft.text, draft.add_special_tokens), *draft.within)
    cut = cutter.cut(len(ids), *run)
    assert cut is not None
    del ids[cut]
    if types is not None:
        del types[cut]
    return Rendered(ids, types, True, text)


def known_ids(ids: Sequence[Any], vocab_size: int, param: str) -> list[int]:
    """Return token ids of the client if the model has them.

    Raises:
        BadRequest: naming the place.
    """
    if not isinstance(ids, (list, tuple)) or not ids:
        raise BadRequest(f"{param} must be text or a list of at least one token id", param=param)
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{param}: {str(token)[:40]!r} at position {i} is not a token id of this model (0 to {vocab_size - 1})",
                param=param,
            )
    return list(ids)


def fitted_ids(ids: list[int], cutter: Cutter, run: tuple[int, int] | None = None) -> Rendered:
    """Cut token ids to their limit, in place: those of the run [start, end), or any of them.

    Raises:
        ContextLengthExceeded: see `Cutter.cut`.
    """
    cut = cutter.cut(len(ids), *(run or (0, len(ids))))
    if cut is not None:
        del ids[cut]
    return Rendered(ids, truncated=cut is not None)
