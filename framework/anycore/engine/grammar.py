"""Grammars that outputs keep to: compiled beside the engine's thread, and followed while the device computes.

A grammar is text in llguidance's serialised form, made at the door by `text.grammar`. Compiling and filling masks
release Python's lock. Both are limited in work, so that a hostile grammar ends its own request and nobody else's.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anycore.errors import AnycoreError, InvalidGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    Vocabulary = Callable[[], LLTokenizer]

KEPT = 64  # compiled grammars, the ones used last
COMPILING = 2  # at a time
SECONDS = 5.0  # for compiling one, from arrival, or from when the vocabulary was there
HEAVY = 1.0  # seconds: what takes longer to compile takes much memory, too, and is not kept for others
LEXER_FUEL = 200_000  # work and states that llguidance may take for one grammar: less than its own limits
LEXER_STATES = 100_000
MOMENT = 0.01  # seconds that an engine with nothing else to do waits for a grammar, or for token texts, at a time


class GrammarState:
    """Where one sequence is within its grammar. Its matcher is not to be used by two threads at a time.

    What is said of the last token that was taken is a copy, for whoever does not own the matcher.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.seconds = 0.0  # that it took to compile
        self.allowed = True  # the last token was one that the grammar allows
        self.ended = False  # nothing may follow it but the end
        self.error = ""  # why it was not allowed, or no mask could be had, such as a limit on work
        self.note(True)

    def note(self, allowed: bool) -> None:
        """Say what has become of the matcher, whose own word on a token this is."""
        wrong = self.matcher.is_error()  # the end of a text may leave it so, although it was allowed
        self.allowed, self.ended = allowed and not wrong, self.matcher.is_stopped()
        self.error = self.matcher.get_error().split("\n")[0] if wrong else ""

    def copy(self) -> GrammarState:
        return GrammarState(self.matcher.deep_copy())


@dataclass(frozen=True, slots=True)
class Awaited:
    """A request whose grammar is being compiled."""

    grammar: str
    compiled: Future[GrammarState]
    since: float


class Grammars:
    """The grammars of one engine.

    Args:
        vocabulary: makes the tokens' texts; called on a thread of its own, when the first grammar comes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: Future[LLTokenizer] | None = None
        self._threads = ThreadPoolExecutor(COMPILING + 1, thread_name_prefix="grammar")
        self._since = -1.0  # when the vocabulary was there; below 0 until then
        self._compiled: OrderedDict[str, Future[GrammarState]] = OrderedDict()
        self.awaited: dict[str, Awaited] = {}  # by the ids of the requests

    def begin(self, request_id: str, grammar: str, now: float) -> None:
        """Begin to compile a request's grammar; `ready` tells when it is."""
        self.awaited[request_id] = Awaited(grammar, self.compile(grammar), now)

    def ready(self, now: float, idle: bool) -> Iterator[tuple[str, GrammarState | AnycoreError]]:
        """Yield requests that need to wait no longer, each with its grammar, of which to take copies, or with an error.

        With `idle`, wait a moment for one.
        """
        if self._since < 0 and self._tokens is not None and self._tokens.done():
            self._since = now
        if idle:
            wait([request.compiled for request in self.awaited.values()], MOMENT, FIRST_COMPLETED)
        for name, request in list(self.awaited.items()):
            outcome: GrammarState | AnycoreError | None = None
            late = self._since >= 0 and now - max(request.since, self._since) > SECONDS
            if request.compiled.cancelled() or (late and not request.compiled.done()):
                request.compiled.cancel()
                self._compiled.pop(request.grammar, None)
                outcome = InvalidGrammar(f"the grammar was not compiled within {SECONDS:g} s: simplify it")
            elif request.compiled.done():
                outcome = outcome_of(request.compiled)
                if isinstance(outcome, GrammarState) and outcome.seconds > HEAVY:
                    self._compiled.pop(request.grammar, None)
            if outcome is not None:
                del self.awaited[name]
                yield name, outcome

    def compile(self, grammar: str) -> Future[GrammarState]:
        """Begin to compile, or return what was compiled before. Take a `copy` of its result.

        The future raises InvalidGrammar where the grammar is wrong or too complex.
        """
        found = self._compiled.get(grammar)
        if found is None:
            if self._tokens is None:
                self._tokens = self._threads.submit(self._vocabulary)
            found = self._compiled[grammar] = self._threads.submit(self._compile, grammar, self._tokens)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    @staticmethod
    def _compile(grammar: str, tokens: Future[LLTokenizer]) -> GrammarState:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, began = tokens.result(), time.monotonic()
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, max_lexer_states=LEXER_STATES)
        state = GrammarState(LLMatcher(vocabulary, unforced(grammar), log_level=0, limits=limits))
        if not state.error:
            state.matcher.compute_bitmask()  # what the first mask takes, later ones find done
            state.note(True)
        if state.error:
            raise InvalidGrammar(f"the grammar cannot be used: {state.error}")
        state.seconds = time.monotonic() - began
        return state


def outcome_of(compiled: Future[GrammarState]) -> GrammarState | AnycoreError:
    """What became of a grammar."""
    error = compiled.exception()
    if error is None:
        return compiled.result()
    return error if isinstance(error, AnycoreError) else AnycoreError(f"no grammar: {error}")


def unforced(grammar: str) -> str:
    """The same grammar, with the model choosing the tokens even of a text that has to come.

    Otherwise llguidance cuts such texts itself, by calling the tokenizer under Python's lock in the middle of a mask:
    most of what masks of ordinary schemas took, and no two threads could do it at a time.
    """
    option = '%llguidance {"no_forcing": true}\n'
    if not grammar.startswith("{"):
        return option + grammar
    whole = json.loads(grammar)
    first, *others = whole["grammars"]
    if first.get("lark_grammar") is not None:
        top = [first | {"lark_grammar": option + first["lark_grammar"]}]
    else:
        name = first.get("name") or "answer"
        top = [{"lark_grammar": f"{option}start: @{name}"}, first | {"name": name}]
    return json.dumps(whole | {"grammars": top + others})
