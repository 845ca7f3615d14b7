"""The form of one reply: how the model is held to it, and who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anycore.errors import BadRequest, Unsupported
from anycore.text.grammar import composed, mark_tokens, speller
from anycore.text.replies.choose import choose
from anycore.text.replies.parts import Format, Reader, ReasoningFormat, Tool, ToolFormat
from anycore.text.replies.reasoning import PlainReader, ReasoningReader, thinking, thought

if TYPE_CHECKING:
    from anycore.text.tokenizer import Tokenizer

ANY = r"TEXT: /(.|\n)*/"
SPACE = r"SPACE: /[ \n\r\t]{0,8}/"
BARE = r"PLAIN: /([^ \n\r\t\[{](.|\n)*)?/"
"""Text that cannot be the beginning of calls where those have no opening mark."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants its reply to be like."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False  # nothing but calls
    parallel: bool = True  # several calls in one reply
    answer: str | None = None  # the grammar of what is said, as `text.grammar` makes it
    budget: int | None = None  # tokens of reasoning

    @property
    def held(self) -> bool:
        """Whether calls are held to a grammar."""
        return bool(self.tools) and (self.forced or not self.parallel or any(tool.strict for tool in self.tools))


@dataclass(frozen=True, slots=True)
class Form:
    """What the engine holds a reply to, and what is needed to read it."""

    grammar: str | None
    kept: frozenset[int]  # special tokens that stay in the text for the reader
    formats: Formats
    tools: tuple[Tool, ...]
    inside: bool  # the prompt ends within reasoning

    def reader(self) -> Reader:
        """Return a reader for one choice."""
        formats = self.formats
        calls = formats.tools.reader(self.tools) if self.tools and formats.tools is not None else PlainReader()
        if formats.reasoning is None:
            return calls
        return ReasoningReader(formats.reasoning, calls, inside=self.inside)


class Formats:
    """How one model writes what is not mere text.

    Args:
        templates: the model's chat templates, by which formats are chosen.
        tool_parser: name of the format of calls; "auto" chooses, "none" reads none.
        reasoning_parser: the same for reasoning.
        formats: those that plugins bring, in the order in which they are tried.

    Raises:
        ConfigError: no format has such a name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Sequence[str],
        formats: Sequence[Format],
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        template = "\n".join(templates)
        tools = [form for form in formats if isinstance(form, ToolFormat)]
        self.tools = choose(tools, template, tool_parser, "tool_parser")
        ways = [form for form in formats if isinstance(form, ReasoningFormat)]
        self.reasoning = choose(ways, template, reasoning_parser, "reasoning_parser")
        self._holdable = tokenizer.streams and tokenizer.eos_id is not None
        self._special = tokenizer.special_ids
        self._marks = mark_tokens(tokenizer)
        self._spell = speller(self._marks)

    @property
    def described(self) -> dict[str, Any]:
        """What the model's replies may be, beside text."""
        return {
            "structured_outputs": self._holdable,
            "tool_parser": None if self.tools is None else self.tools.name,
            "reasoning_parser": None if self.reasoning is None else self.reasoning.name,
        }

    def form(self, wanted: Wanted, prompt: str) -> Form:
        """Return the form of a reply to a prompt.

        Raises:
            Unsupported: the model has no format for it.
            BadRequest: a schema cannot be held to.
        """
        inside = self.reasoning is not None and thinking(self.reasoning, prompt)
        kept = self._kept(bool(wanted.tools))
        return Form(self._grammar(wanted, prompt, inside), kept, self, wanted.tools, inside)

    def _kept(self, tools: bool) -> frozenset[int]:
        marks = list(self.tools.marks) if tools and self.tools is not None else []
        if self.reasoning is not None:
            marks += [self.reasoning.start, self.reasoning.end]
        ids = self._marks.items()
        return frozenset(i for text, i in ids if any(text in mark for mark in marks)) & self._special

    def _grammar(self, wanted: Wanted, prompt: str, inside: bool) -> str | None:
        tools = wanted.tools
        if not wanted.held and wanted.answer is None and wanted.budget is None:
            return None
        rules: list[str] = []
        lead = self._lead(wanted.budget, prompt, inside, rules)
        if wanted.held or (tools and wanted.answer is not None):
            body = self._calls(wanted, rules)
        elif wanted.answer is not None:
            body = "@answer"
        else:
            rules.append(ANY)
            body = self._free()
        top = [f"start: {lead} {body}".rstrip(), *dict.fromkeys(rules)]
        return composed("\n".join(top), wanted.answer, "tools" if tools else "structured_outputs")

    def _lead(self, budget: int | None, prompt: str, inside: bool, rules: list[str]) -> str:
        """Rules for the reasoning before anything else, and the term that stands for it."""
        form = self.reasoning
        if form is None or thought(form, prompt):
            if budget is not None and form is None:
                raise Unsupported("this model does not reason: leave the field out", param="thinking_token_budget")
            return ""
        spell = self._spell
        end = spell(form.end)
        rules.append(SPACE)
        if end.startswith("<["):  # a token of its own: text cannot hold it
            limit = "" if budget is None else f"[max_tokens={budget}]"
            rules.append(f"thought{limit}: /(.|\\n)*/")
            reasoning = f"thought {end} SPACE"
        elif budget is None:
            rules.append(f"thought[suffix={end}]: /(.|\\n)*/")
            reasoning = "thought SPACE"
        else:
            raise Unsupported(
                f"a budget needs a token that ends reasoning, and {form.end} is none of this model's",
                param="thinking_token_budget",
            )
        if inside:
            return reasoning
        return f"(SPACE {spell(form.start)} {reasoning})?"

    def _calls(self, wanted: Wanted, rules: list[str]) -> str:
        """Rules for calls, and for what may stand in their place."""
        form = self.tools
        if form is None:
            raise no_tools()
        spell = self._spell
        # Where the model is free to call or not, only strict tools are held to their schema.
        tools = [t if wanted.forced or t.strict else replace(t, parameters={"type": "object"}) for t in wanted.tools]
        rules.append(form.grammar(tools, spell, wanted.parallel))
        opening = spell(form.opening) if form.opening else ""
        calls = f"{opening} calls"
        if wanted.forced:
            return calls
        if wanted.answer is not None:
            return f"({calls} | @answer)"
        if not opening:
            rules += [SPACE, BARE]
            return "SPACE (calls | PLAIN)"
        rules.append(ANY)
        if opening.startswith("<["):
            return f"TEXT ({calls})?"
        rules.append(f"before[suffix={opening}]: /(.|\\n)*/")
        return "(TEXT | before calls)"

    def _free(self) -> str:
        """Any text, and in it any mark of the model's."""
        marks = " | ".join(f"<[{token}]>" for token in self._marks.values())
        return f"(TEXT | {marks})*" if marks else "TEXT"


def no_tools() -> BadRequest:
    return Unsupported(
        "this model's chat template shows no way of calling tools that is known here: start the server with "
        "--tool-parser NAME, or send tool_choice: none",
        param="tools",
    )
