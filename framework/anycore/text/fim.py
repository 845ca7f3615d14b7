"""Fill in the middle: prompts for models that were trained to write what stands between a prefix and a suffix.

The tokens that mark the parts are found in the vocabulary; each family orders the parts in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anycore.errors import Unsupported
from anycore.text.cut import Cutter, Truncate
from anycore.text.draft import Rendered, fitted_ids, known_ids

if TYPE_CHECKING:
    from anycore.text.render import Renderer
    from anycore.text.tokenizer import Tokenizer

MARK = "☺"
"""Put before a text, and taken off its tokens, so that the vocabulary adds no space to the text itself."""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models marks the parts. `middle` comes last; without one, the prefix does."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    ends: tuple[str, ...] = ()  # tokens, beside the model's EOS, after which nothing belongs to the middle


FAMILIES = (
    # Qwen 2.5 Coder, Qwen 3 Coder, CodeGemma
    Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder 2, Granite Code; SantaCoder
    Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<|endoftext|>", "<file_sep>")),
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),
    # Code Llama
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    Family("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    # DeepSeek Coder
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),
    # Codestral
    Family("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """One model's way."""

    family: Family
    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]  # ids


def infill_of(tokenizer: Tokenizer) -> Infill:
    """Find the tokens of a model.

    Raises:
        Unsupported: it has none.
    """
    for family in FAMILIES:
        prefix, suffix = tokenizer.id_of(family.prefix), tokenizer.id_of(family.suffix)
        middle = tokenizer.id_of(family.middle) if family.middle else None
        if prefix is None or suffix is None or (family.middle and middle is None):
            continue
        ends = (tokenizer.id_of(token) for token in family.ends)
        return Infill(family, prefix, suffix, middle, tuple(token for token in ends if token is not None))
    looked_for = ", ".join(family.prefix for family in FAMILIES)
    raise Unsupported(
        f"suffix needs a model that fills in the middle, and this one's vocabulary has no token for it ({looked_for})",
        param="suffix",
    )


def render_infill(
    renderer: Renderer,
    prefix: str | list[int],
    suffix: str,
    add_special_tokens: bool = True,
    *,
    truncate: Truncate = None,
    side: str = "left",
    room: int | None = None,
    param: str = "prompt",
) -> Rendered:
    """Render the prompt whose completion stands between `prefix` and `suffix`; arguments are as `Renderer.text`'s.

    What is cut is the far end of the prefix (left) or of the suffix (right).

    Raises:
        Unsupported: the model has no tokens for it.
        ContextLengthExceeded: it is too long.
    """
    tokenizer, size = renderer.tokenizer, renderer.spec.vocab_size
    infill = infill_of(tokenizer)
    before = tokenizer.encode(prefix, False) if isinstance(prefix, str) else known_ids(prefix, size, param)
    after = _bare(tokenizer, suffix)
    bos = tokenizer.encode("")[:1] if add_special_tokens else []
    start = [token for token in bos if token == tokenizer.bos_id]
    opening, closing = [infill.prefix, *before], [infill.suffix, *after]
    ids = start + (closing + opening if infill.family.suffix_first else opening + closing)
    if infill.middle is not None:
        ids.append(infill.middle)
    left = len(start) + 1 + (len(closing) if infill.family.suffix_first else 0)
    right = len(start) + 1 + (0 if infill.family.suffix_first else len(opening))
    span = (right, right + len(after)) if side == "right" else (left, left + len(before))
    return fitted_ids(ids, Cutter(renderer.max_model_len, truncate, side, room, param), span)


def _bare(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that does not begin a word of its own."""
    if not tokenizer.drops_first_space:
        return tokenizer.encode(text, False)
    ids, lead = tokenizer.encode(MARK + text, False), tokenizer.encode(MARK, False)
    return ids[len(lead) :] if ids[: len(lead)] == lead else tokenizer.encode(text, False)
