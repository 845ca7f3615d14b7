"""`LLM` used by several at once: threads, and streams that are read in turn or left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import pytest

from anycore import LLM, SamplingParams
from anycore.engine.callers import Caller
from anycore.engine.request import Delta
from anycore.errors import AnycoreError, BadRequest, ContextLengthExceeded, Overloaded

GREEDY = SamplingParams(max_tokens=20, temperature=0)
SETTINGS = {"backend": "cpu", "dtype": "float32", "kv_cache_memory": 4 << 20, "threads": 1}
HI, BYE = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "zebra"}]


@pytest.fixture(scope="module")
def llm(t_lm: Path) -> Iterator[LLM]:
    with LLM(str(t_lm), task="generate", max_num_seqs=4, max_queued=8, **SETTINGS) as opened:  # type: ignore[arg-type]
        yield opened


def ids(llm: LLM, *prompts: str) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY)]


def test_streams_that_are_read_in_turn_keep_their_own_text(llm: LLM) -> None:
    alone = ["".join(llm.stream_chat(messages, GREEDY)) for messages in (HI, BYE)]
    both = list(zip_longest(llm.stream_chat(HI, GREEDY), llm.stream_chat(BYE, GREEDY), fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*both, strict=True)] == alone
    assert alone[0] != alone[1]


def test_a_call_amid_a_stream_takes_nothing_of_it(llm: LLM) -> None:
    whole, expected = "".join(llm.stream_chat(HI, GREEDY)), ids(llm, "The capital")
    stream = llm.stream_chat(HI, GREEDY)
    first = next(stream)
    assert ids(llm, "The capital") == expected
    assert first + "".join(stream) == whole
    assert not llm.engine.has_work()


def test_threads_get_what_each_asked_for(llm: LLM) -> None:
    """Before, two threads in one step corrupted memory. More is asked for than the queue takes: it waits."""
    prompts = [f"One {i}, two" for i in range(6)]
    alone = [ids(llm, prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(lambda i: ids(llm, *prompts[i:], *prompts[:i]), range(6))
    assert list(together) == [alone[i:] + alone[:i] for i in range(6)]
    assert not llm.engine.has_work()


def test_a_stream_that_is_dropped_within_a_step_ends_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector closes generators wherever a thread is just then."""
    streams = [llm.stream_chat(HI, GREEDY)]
    next(streams[0])
    step = llm.engine.step

    def dropping() -> list[Delta]:
        streams.clear()
        return step()

    monkeypatch.setattr(llm.engine, "step", dropping)
    expected = ids(llm, "The capital")
    monkeypatch.undo()
    assert not llm.engine.has_work()
    assert ids(llm, "The capital") == expected


def test_a_sequence_that_a_stop_string_ends_leaves_its_neighbours(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=24)
    free = llm.generate("Yes, no,", params)[0]
    stop = free.text[4:7]
    texts = [output.text.split(stop)[0] for output in (free, *free.others)]
    held = llm.generate("Yes, no,", SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=24, stop=(stop,)))[0]
    assert [output.text for output in (held, *held.others)] == texts


def test_what_the_queue_never_takes_is_refused(llm: LLM) -> None:
    with pytest.raises(Overloaded):
        llm.generate("Hi", SamplingParams(n=64, max_tokens=2))
    with Caller(llm._callers) as caller:
        assert not caller.open
        assert caller.step() == []


def test_one_wrong_prompt_is_named_before_others_are_computed(llm: LLM) -> None:
    steps = llm.engine.stats().steps
    prompts = ["Hi"] * 30
    with pytest.raises(ContextLengthExceeded, match=r"prompt\[30\]") as caught:
        llm.generate([*prompts, "long " * 600], GREEDY)
    assert caught.value.param == "prompt[30]"
    with pytest.raises(BadRequest, match="logit_bias"):
        llm.generate(prompts, [GREEDY] * 29 + [SamplingParams(logit_bias={10**6: 1.0})])
    wrong: list[str | list[int]] = ["Hi", [5, -1]]
    with pytest.raises(BadRequest, match=r"prompt\[1\]"):
        llm.generate(wrong, GREEDY)
    assert llm.engine.stats().steps == steps


def test_a_closed_model_is_gone(t_lm: Path) -> None:
    with LLM(t_lm, task="generate", **SETTINGS) as llm:  # type: ignore[arg-type]
        engine = weakref.ref(llm.engine)
        stream = llm.stream_chat(HI, GREEDY)
        assert next(stream)
        del stream
    gc.collect()
    assert engine() is None
    llm.close()
    with pytest.raises(AnycoreError, match="closed"):
        llm.generate("Hi")
