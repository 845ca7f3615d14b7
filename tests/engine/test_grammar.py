"""Outputs that keep to a grammar: what they are, beside whom, and how they end."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from tiny import tiny_lm

from anycore import LLM, SamplingParams
from anycore.engine.grammar import SECONDS, Grammars, GrammarState, unforced
from anycore.engine.masks import Masks
from anycore.engine.request import NewRequest
from anycore.errors import AnycoreError
from anycore.text import grammar
from anycore.text.grammar import vocabulary

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(tiny_lm(tmp_path_factory.mktemp("lm"))), max_num_seqs=8, kv_cache_memory=2**22, threads=1)


def text_of(llm: LLM, form: str, **more: Any) -> tuple[str, str | None]:
    params = SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 200, "grammar": form, **more})
    output = llm.generate("Say", params)[0]
    return output.text, output.finish_reason


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_to(llm: LLM, seed: int) -> None:
    text, why = text_of(llm, grammar.json_schema(PERSON), seed=seed)
    assert why == "stop"
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("wanted", ["🫠щ龜e\u0301👩‍👩‍👧", {"a": [1, None, "x\n"]}, -3.5, ""])
def test_a01_any_constant_can_be_forced(llm: LLM, wanted: Any) -> None:
    text, why = text_of(llm, grammar.json_schema({"const": wanted}), temperature=0)
    assert json.loads(text) == wanted
    assert why == "stop"


def test_expressions_choices_and_free_grammars(llm: LLM) -> None:
    assert re.fullmatch(r"[a-c]{3}-\d+", text_of(llm, grammar.regex(r"[a-c]{3}-\d{1,9}"))[0])
    assert text_of(llm, grammar.choice(["yes", "no", 'may"be']))[0] in ("yes", "no", 'may"be')
    assert re.fullmatch(r"(ab)+", text_of(llm, grammar.free('root ::= "ab" | "ab" root'), max_tokens=40)[0])
    assert isinstance(json.loads(text_of(llm, grammar.json_schema({"type": "boolean"}))[0]), bool)


def test_company_chunks_and_preemption_change_nothing(llm: LLM, tmp_path: Path) -> None:
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=60, grammar=form)
        for seed, form in enumerate([grammar.json_schema(PERSON), None, grammar.regex("[xy]{20,40}"), None] * 2)
    ]
    prompts = [f"prompt {number} " * 5 for number in range(8)]
    alone = [llm.generate(prompt, one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in llm.generate(prompts, params)] == alone
    small = LLM(
        str(tiny_lm(tmp_path / "lm")), max_num_seqs=8, max_model_len=128, max_num_batched_tokens=16,
        block_size=16, kv_cache_memory=16 * 4096 * 20, threads=1,
    )  # fmt: skip
    small.engine.runner.backend.overlap = True
    outputs = small.generate(prompts, params)
    assert [output.token_ids for output in outputs] == alone
    assert small.engine.scheduler.preemptions > 0


def test_the_device_does_not_wait_for_masks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward pass is under way when the host learns what the last one brought; only sampling waits."""
    monkeypatch.setattr(llm.engine.runner.backend, "overlap", True)
    form = grammar.regex("[a-z]{12}")
    for end in (12, 40):  # by the limit, and by the grammar while one step too many is under way
        params = SamplingParams(temperature=1, seed=5, max_tokens=end, grammar=form)
        before = llm.engine.stats().steps
        text, _ = text_of(llm, form, temperature=1, seed=5, max_tokens=end)
        assert re.fullmatch("[a-z]{1,12}", text)
        taken = llm.engine.stats().steps - before
        tokens = len(llm.generate("Say", params)[0].token_ids)
        assert taken <= tokens + 2
    pool = llm.engine.pool
    assert pool is not None
    assert pool.free == pool.size


def state_of(llm: LLM, form: str) -> GrammarState:
    assert llm.engine.grammars is not None
    return llm.engine.grammars.compile(form).result().copy()


def test_masks_of_many_rows_are_those_of_each_alone(llm: LLM) -> None:
    """A row in error allows everything, and what ends a text does not pass for a token of it."""
    forms = [grammar.json_schema(PERSON), grammar.regex("[ab]{3}"), grammar.choice(["x", "yes"])]
    states = [state_of(llm, form) for form in forms * 3]
    stop = next(iter(llm.spec.eos_ids))
    masks = Masks(llm.spec.vocab_size, len(states), llm.engine.runner.backend.memory)
    for _ in range(2):
        masks.take([states[4]], lambda: [stop]).result()
        assert not states[4].allowed
        assert "grammar" in states[4].error
    there = masks.room(len(states))
    masks.start(states)
    masks.settle()
    for row, state in enumerate(states):
        alone = np.frombuffer(state_of(llm, forms[row % 3]).matcher.compute_bitmask(), dtype=np.int32)[: masks.words]
        assert np.array_equal(there[row], np.full_like(alone, -1) if state.error else alone), row


def test_tokens_are_taken_before_masks_are_filled(llm: LLM) -> None:
    """However late they come, and each row is told of its own: allowed, the last one, the end of a text, or wrong."""
    came = threading.Event()
    one = {letter: llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abq"}
    stop = next(iter(llm.spec.eos_ids))
    states = [state_of(llm, grammar.regex(form)) for form in ("ab", "a", "a*", "a")]
    masks = Masks(llm.spec.vocab_size, len(states), llm.engine.runner.backend.memory)
    there = masks.room(len(states))

    def late() -> list[int]:
        came.wait(30)
        return [one["a"], one["a"], stop, one["q"]]

    taken = masks.take(states, late)
    masks.start(states)
    assert not taken.done()
    came.set()
    masks.settle()
    assert taken.done()
    assert [state.allowed for state in states] == [True, True, True, False]
    assert [state.ended for state in states] == [False, True, True, True]
    bits = np.unpackbits(there.numpy().view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits[0]).tolist() == [one["b"]]
    assert bits[3].all()


@pytest.mark.parametrize(
    "form",
    [
        grammar.json_schema({"const": "abcabc"}),
        grammar.choice(["abcabc"]),
        grammar.composed("start: @answer", grammar.json_schema({"const": "abcabc"})),
        grammar.composed('start: "abcabc"'),
    ],
)
def test_the_model_cuts_a_text_that_has_to_come(llm: LLM, form: str) -> None:
    """No tokenizer is asked while masks are made: every token that the text may begin with is allowed."""
    matcher = LLMatcher(vocabulary(llm.tokenizer, llm.spec.vocab_size, llm.spec.eos_ids), unforced(form), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for quote in llm.tokenizer.encode('"', add_special_tokens=False):
        if "const" in form:
            assert matcher.consume_token(quote)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    texts = {llm.tokenizer.token_bytes(int(token)) for token in np.flatnonzero(bits)}
    known = {llm.tokenizer.token_bytes(token) for token in range(llm.tokenizer.vocab_size)}
    assert b"a" in texts
    assert {text for text in texts if text.strip()} == {
        text for text in known if text and (b"abcabc" + (b'"' if "const" in form else b"")).startswith(text)
    }


def test_sequences_of_one_request_go_their_own_ways(llm: LLM) -> None:
    form = grammar.regex("[a-z]{12}")
    output = llm.generate("Say", SamplingParams(n=3, temperature=1, seed=5, max_tokens=50, grammar=form))[0]
    texts = {output.text, *(other.text for other in output.others)}
    assert len(texts) == 3
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)


def test_a06_log_probabilities_are_of_the_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, grammar=grammar.regex("q{4}"))
    output = llm.generate("Say", params)[0]
    assert output.text == "qqqq"
    assert output.logprobs is not None
    assert all(abs(item.logprob) < 1e4 for item in output.logprobs)


def test_the_limit_cuts(llm: LLM) -> None:
    text, why = text_of(llm, grammar.json_schema({"const": "x" * 50}), max_tokens=5)
    assert why == "length"
    assert '"xxxx'.startswith(text[:2])


def test_bans_that_leave_nothing_end_the_request_alone(llm: LLM) -> None:
    q = llm.tokenizer.encode("q", add_special_tokens=False)
    assert len(q) == 1
    banned = SamplingParams(temperature=0, max_tokens=8, grammar=grammar.regex("q"), allowed_token_ids=(q[0] + 1,))
    with pytest.raises(AnycoreError, match="the grammar and allowed_token_ids together leave no token") as caught:
        llm.generate("Say", banned)
    assert caught.value.code == "invalid_grammar"
    assert text_of(llm, grammar.regex("q"))[0] == "q"


def test_an_abort_while_compiling_leaves_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, grammar=grammar.regex("[a-f]{3}x{7}"))
    llm.engine.add(NewRequest(id="gone", task=llm.task, token_ids=[5, 6], sampling=params))
    llm.engine.abort("gone")
    assert not llm.engine.has_work()
    assert llm.engine.grammars is not None
    assert not llm.engine.grammars.awaited


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: grammar.json_schema({"type": "object", "not": {"type": "null"}}), "not"),
        (lambda: grammar.json_schema({"type": "nothing"}), "nothing"),
        (lambda: grammar.json_schema("{"), "no JSON"),
        (lambda: grammar.json_schema("[" * 100_000), "no JSON"),
        (lambda: grammar.regex("("), "regex"),
        (lambda: grammar.choice([]), "at least one"),
        (lambda: grammar.free("root ::= missing"), "missing"),
        (lambda: grammar.regex("a" * 300_000), "262144"),
    ],
)
def test_what_cannot_be_held_to_is_refused(make: Any, told: str) -> None:
    with pytest.raises(AnycoreError, match=told):
        make()


def test_the_time_for_a_grammar_begins_when_the_vocabulary_is_there() -> None:
    """A server's first grammar waits for the tokens' texts, however long these take; a slow grammar is not kept."""
    there = threading.Event()

    def vocabulary() -> Any:
        there.wait(30)
        raise AnycoreError("no tokens")

    grammars = Grammars(vocabulary)
    grammars.begin("first", grammar.regex("a"), now=0.0)
    assert not list(grammars.ready(now=100.0, idle=False))
    there.set()
    while not (found := list(grammars.ready(now=100.0, idle=True))):
        pass
    assert [name for name, _ in found] == ["first"]
    assert not grammars.awaited


def test_a_grammar_that_takes_too_long_is_given_up_and_not_kept() -> None:
    release = threading.Event()

    class Slow(Grammars):
        @staticmethod
        def _compile(text: str, tokens: Any) -> Any:
            release.wait(30)
            raise AnycoreError("too late")

    grammars = Slow(lambda: None)  # type: ignore[arg-type, return-value]
    grammars.begin("slow", "x", now=0.0)
    while grammars._since < 0:
        list(grammars.ready(now=1.0, idle=True))
    (given_up,) = grammars.ready(now=1.1 + SECONDS, idle=False)
    release.set()
    assert given_up[0] == "slow"
    assert "5 s" in str(given_up[1])
    assert not grammars._compiled
