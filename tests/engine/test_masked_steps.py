"""Steps under grammars whose sampling is put off: no token changes, whoever joins, leaves, fails or is preempted."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine.test_desk import made
from engines import Output, request
from llguidance import LLTokenizer

from anycore.engine.engine import Engine
from anycore.engine.grammar import Grammars
from anycore.models.source import Source
from anycore.models.spec import read_spec
from anycore.text import grammar
from anycore.text.tokenizer import Tokenizer

LETTERS, DIGITS = grammar.regex("[a-z]{3,20}"), grammar.regex("[0-9]{1,12}")
KINDS: list[dict[str, Any]] = [
    {"grammar": LETTERS, "temperature": 0.9},
    {"grammar": LETTERS, "temperature": 0.0},
    {"grammar": DIGITS, "temperature": 0.8, "top_k": 9, "min_p": 0.01},
    {"grammar": DIGITS, "temperature": 0.8, "repetition_penalty": 1.4, "logprobs": 2},
    {"grammar": LETTERS, "temperature": 1.0, "n": 2},
    {"grammar": LETTERS, "temperature": 0.0, "bad_words_ids": ((7, 8),)},
    {"temperature": 0.8},
]


@pytest.fixture(scope="module")
def tokenizer(t_lm: Path) -> Tokenizer:
    return Tokenizer.from_source(Source(str(t_lm), t_lm))


@pytest.fixture(scope="module")
def vocabulary(t_lm: Path) -> LLTokenizer:
    source = Source(str(t_lm), t_lm)
    return grammar.vocabulary_of(source, read_spec(source))


def outputs(engine: Engine, vocabulary: LLTokenizer, stuck: int, seed: int) -> dict[tuple[str, int], Output]:
    """Requests of all kinds that come in the middle of others; every fifth is given up after some steps. One in ten may
    say only `stuck`, an "a", so that letters end in an error after two of them at the latest.
    """
    engine.grammars = Grammars(lambda: vocabulary)
    for form in (LETTERS, DIGITS):
        engine.grammars.compile(form).result()
    rng = random.Random(seed)
    found: dict[tuple[str, int], Output] = {}

    def step() -> None:
        for delta in engine.step():
            found.setdefault((delta.id, delta.index), Output()).take(delta)

    for i in range(40):
        prompt = [rng.randrange(5, 400) for _ in range(rng.randrange(1, 30))]
        kind = {**KINDS[rng.randrange(len(KINDS))], "ignore_eos": False}
        if i % 10 == 7:
            kind = {"grammar": grammar.regex("aab"), "temperature": 0.0, "allowed_token_ids": (stuck,)}
        engine.add(request(str(i), prompt, max_tokens=rng.randrange(1, 24), seed=i, **kind))
        for _ in range(rng.randrange(4)):
            step()
        if i % 5 == 4:
            engine.abort(str(i - 1))
            for index in range(2):
                found.pop((str(i - 1), index), None)
    while engine.has_work():
        step()
    assert engine.pool is not None
    engine.pool.check()
    return found


@pytest.mark.parametrize("desk", [False, True])
def test_who_comes_and_goes_changes_no_token(
    t_lm: Path, tokenizer: Tokenizer, vocabulary: LLTokenizer, desk: bool
) -> None:
    (stuck,) = tokenizer.encode("a", add_special_tokens=False)
    plain, _ = made(t_lm, overlap=False, desk=False)
    engine, _ = made(t_lm, overlap=True, desk=desk)
    wanted, found = outputs(plain, vocabulary, stuck, 1), outputs(engine, vocabulary, stuck, 1)
    both = wanted.keys() & found.keys()
    assert len(both) > 30
    for name in both:
        assert found[name].tokens == wanted[name].tokens, name
        assert found[name].finish == wanted[name].finish
        assert found[name].error == wanted[name].error
    assert engine.stats().preemptions > 0
    ends = Counter(output.finish for output in found.values())
    assert min(ends[end] for end in ("stop", "length", "error")) > 1
    failed = [output for output in found.values() if output.error is not None]
    assert all("cannot keep to its grammar" in str(output.error) for output in failed)


def test_the_next_forward_pass_waits_for_no_answer(
    t_lm: Path, vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a turn the next step is laid out, the one before sampled, the next launched; only then answers are taken."""
    engine, _ = made(t_lm, overlap=True, desk=False)
    engine.grammars = Grammars(lambda: vocabulary)
    engine.grammars.compile(LETTERS).result()
    told: list[str] = []

    def listen(owner: Any, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (told.append(name), method(*given))[1])

    for owner, name in (
        (engine.runner, "_step"), (engine.runner.builder, "next_tokens"), (engine.runner.sampler, "settle"),
        (engine.runner.backend.ops, "sample"), (engine, "_commit"),
    ):  # fmt: skip
        listen(owner, name)
    engine.add(request("held", [5, 6, 7], max_tokens=9, grammar=LETTERS, temperature=1.0, seed=2))
    while engine.has_work():
        engine.step()
    turns = " ".join(told)
    assert turns.startswith("_step" + 2 * " next_tokens settle sample _step _commit"), turns


def test_the_first_steps_error_is_heard(t_lm: Path, vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on the thread of the masks ends the step that needs them."""
    engine, _ = made(t_lm, overlap=True, desk=False)
    engine.grammars = Grammars(lambda: vocabulary)
    engine.grammars.compile(LETTERS).result()

    def lost(*given: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.runner.sampler._masks, "fill", lost)
    engine.add(request("held", [5, 6, 7], grammar=LETTERS))
    engine.step()
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.step()
