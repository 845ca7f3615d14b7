"""S11: beam searches give the sequences and scores of transformers, whatever the company, and leave nothing behind."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny
import torch
from engines import engine, finish, request

from anycore.contract.declare import Task
from anycore.engine.beams import BeamSearch, Branch, Ends
from anycore.engine.engine import Engine
from anycore.engine.request import Beams, Delta, FinishReason, NewRequest, SamplingParams
from anycore.engine.searches import Texts
from anycore.errors import BadRequest
from anycore.llm import LLM
from anycore.text.tokenizer import from_folder

PROMPT = [11, 50, 60, 70, 80, 90, 100, 17]
NEW = 10
FEW = (7, 30, 31, 32, 33, 34, 35)
MANY = tuple(range(5, 440, 9))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    families = ("llama", "gemma3")
    return {name: tiny.tiny_lm(tmp_path_factory.mktemp(name), family=name, layers=2) for name in families}


@lru_cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def theirs(
    folder: Path, ends: tuple[int, ...] = (), prompt: list[int] = PROMPT, **options: Any
) -> list[tuple[list[int], float]]:
    """The two best of four beams: tokens up to and with the end, and score."""
    ids = torch.tensor([prompt])
    found = reference(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": NEW, **options},
        do_sample=False,
        eos_token_id=list(ends) or [10**6],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = []
    for row, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append((row[:length], score))
    return rows


def search(name: str = "search", prompt: list[int] = PROMPT, **options: Any) -> NewRequest:
    beams = {key: options.pop(key) for key in ("length_penalty", "early_stopping") if key in options}
    width = options.pop("width", 4)
    return request(name, prompt, **{"max_tokens": NEW, "n": 2, **options}, beams=Beams(width=width, **beams))


def run(made: Engine, *wanted: NewRequest) -> dict[str, list[Delta]]:
    """Run searches together; the deltas of each, one a sequence."""
    for new in wanted:
        made.add(new)
    found: dict[str, list[Delta]] = {new.id: [] for new in wanted}
    while made.has_work():
        for delta in made.step():
            assert delta.error is None, delta.error
            found[delta.id].append(delta)
    assert made.pool is not None
    made.pool.check()
    assert made.pool.free == made.pool.size
    return found


def assert_same(ours: list[Delta], expected: list[tuple[list[int], float]]) -> None:
    assert [delta.token_ids for delta in ours] == [tokens for tokens, _ in expected]
    assert [delta.score for delta in ours] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-4)
    assert [delta.index for delta in ours] == list(range(len(expected)))


@pytest.mark.parametrize(
    ("family", "ends"),
    [("llama", ()), ("llama", FEW), ("gemma3", ()), ("gemma3", MANY)],
    ids=["llama-endless", "llama-few-ends", "gemma3-endless", "gemma3-many-ends"],
)
def test_s11_ids_and_scores_equal_hugging_face(folders: dict[str, Path], family: str, ends: tuple[int, ...]) -> None:
    folder = folders[family]
    made = engine(folder)
    reasons = set()
    for penalty in (0.5, 1.0, 2.0):
        for early in (False, True, "never") if ends else (False,):
            options = {"length_penalty": penalty, "early_stopping": early}
            found = run(made, search(**options, stop_token_ids=ends))["search"]
            assert_same(found, theirs(folder, ends, **options))
            for delta in found:
                ended = delta.token_ids[-1] in ends
                assert delta.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
                assert delta.stop_reason == (delta.token_ids[-1] if ended else None)
                assert not set(delta.token_ids[:-1]) & set(ends)
                assert len(delta.token_ids) <= NEW
                reasons.add(delta.finish)
    assert (FinishReason.STOP in reasons) == bool(ends)


def test_s11_eos_of_the_model_ends_and_min_tokens_holds_it_back(t_lm: Path) -> None:
    made = engine(t_lm)
    eos = next(iter(made.spec.eos_ids))
    bias = {eos: 20.0}
    found = run(made, search(ignore_eos=False, logit_bias=bias))["search"]
    assert found[0].token_ids == [eos]
    assert (found[0].finish, found[0].stop_reason) == (FinishReason.STOP, None)
    held = run(made, search(ignore_eos=False, logit_bias=bias, min_tokens=4))["search"]
    assert_same(held, theirs(t_lm, (eos,), min_new_tokens=4, sequence_bias=[[[eos], 20.0]]))
    assert all(len(delta.token_ids) == 5 for delta in held)
    free = run(made, search(ignore_eos=True, logit_bias=bias))["search"]
    assert all(len(delta.token_ids) == NEW and eos in delta.token_ids for delta in free)


def test_s11_penalties_and_bans_act_as_in_hugging_face(t_lm: Path) -> None:
    made = engine(t_lm)
    plain = theirs(t_lm)
    word = plain[0][0][2:4]
    assert_same(
        run(made, search(repetition_penalty=1.3, bad_words_ids=(tuple(word),)))["search"],
        theirs(t_lm, repetition_penalty=1.3, bad_words_ids=[word]),
    )
    # These two are not in transformers: they see what the beams have generated, and only that.
    for penalty in ("frequency_penalty", "presence_penalty"):
        ours = run(made, search(**{penalty: 2.0}, allowed_token_ids=(5, 6), max_tokens=4))["search"]
        assert {tuple(sorted(delta.token_ids)) for delta in ours} <= {(5, 5, 6, 6), (5, 5, 5, 6), (5, 6, 6, 6)}


@pytest.mark.parametrize(
    ("overlap", "settings"),
    [
        (False, {}),
        (True, {}),
        (True, {"max_num_batched_tokens": 7, "max_num_seqs": 2}),
        (False, {"kv_cache_memory": 12 * 16 * 4096, "max_model_len": 96}),
        (False, {"enable_prefix_caching": False}),
        (True, {"block_size": 4, "max_queued": 4}),
        (False, {"scheduling_policy": "priority"}),
    ],
    ids=["company", "overlap", "two-seats", "few-blocks", "uncached", "short-queue", "priority"],
)
def test_company_seats_blocks_and_cache_change_nothing(t_lm: Path, settings: dict[str, Any], overlap: bool) -> None:
    made = engine(t_lm, overlap=overlap, **settings)
    prompts = [[*PROMPT, extra] for extra in range(20, 23)]
    alone = engine(t_lm)
    expected = [run(alone, search(prompt=prompt))["search"] for prompt in prompts]
    if "max_queued" not in settings:
        made.add(request("other", list(range(10, 60)), max_tokens=20))
    outputs: dict[tuple[str, int], list[int]] = {}
    waiting = [search(str(i), prompt) for i, prompt in enumerate(prompts)]
    while waiting or made.has_work():
        if waiting and made.has_room(waiting[0]):
            made.add(waiting.pop(0))
        for delta in made.step():
            assert delta.error is None
            outputs.setdefault((delta.id, delta.index), []).extend(delta.token_ids)
    for i, deltas in enumerate(expected):
        assert [outputs[str(i), j] for j in range(2)] == [delta.token_ids for delta in deltas]
    assert made.pool is not None
    made.pool.check()
    assert made.pool.free == made.pool.size


def test_s11_stop_strings_end_beams_where_they_are_complete(t_lm: Path) -> None:
    made = engine(t_lm)
    tokenizer = from_folder(t_lm)
    made.texts = Texts(lambda: tokenizer)
    best = theirs(t_lm)[0][0]
    stop = next(text for text in map(tokenizer.token, best[2:]) if text.isascii())
    from transformers import AutoTokenizer

    expected = theirs(t_lm, stop_strings=[stop], tokenizer=AutoTokenizer.from_pretrained(t_lm))
    found = run(made, search(stop=(stop,)))["search"]
    stopped = [delta for delta in found if delta.stop_reason == stop]
    assert stopped
    for delta in stopped:
        assert delta.all_text
        assert stop in tokenizer.decode(delta.token_ids)
        assert stop not in tokenizer.decode(delta.token_ids[:-1])
    padded = [(tokens[: len(delta.token_ids)], score) for (tokens, score), delta in zip(expected, found, strict=True)]
    assert_same(found, padded)


def test_a_search_without_the_texts_it_needs_is_refused(t_lm: Path) -> None:
    with pytest.raises(BadRequest, match="stop"):
        engine(t_lm).add(search(stop=("x",)))


def test_a_tokenizer_that_cannot_be_read_ends_the_search_alone(t_lm: Path) -> None:
    made = engine(t_lm)

    def fail() -> Any:
        raise OSError("gone")

    made.texts = Texts(fail)
    made.add(search(stop=("x",)))
    made.add(request("other", PROMPT))
    outputs = finish(made)
    assert "gone" in (outputs["search", 0].error or "")
    assert len(outputs["other", 0].tokens) == 12


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("overlap", [False, True])
def test_an_abandoned_search_leaves_nothing(t_lm: Path, steps: int, overlap: bool) -> None:
    made = engine(t_lm, overlap=overlap)
    made.add(search())
    for _ in range(steps):
        assert made.step() == []
    made.abort("search")
    assert finish(made) == {}
    assert made.stats().running == made.stats().waiting == 0


def test_a_search_that_is_late_ends_with_one_error(t_lm: Path) -> None:
    clock = [0.0]
    made = engine(t_lm)
    made._clock = lambda: clock[0]
    made.add(msgspec.structs.replace(search(), deadline=5.0))
    for _ in range(3):
        made.step()
    clock[0] = 6.0
    outputs = finish(made)
    assert list(outputs) == [("search", 0)]
    assert outputs["search", 0].error_code == "deadline_exceeded" or "given up" in (outputs["search", 0].error or "")


def test_draining_lets_a_search_finish(t_lm: Path) -> None:
    made = engine(t_lm)
    made.add(search())
    made.step()
    made.add(search("late"))
    assert made.drain() == ["late"]
    outputs = finish(made)
    assert sorted(outputs) == [("search", 0), ("search", 1)]


def test_counts_are_those_of_one_request(t_lm: Path) -> None:
    made = engine(t_lm, block_size=4)
    found = run(made, search(prompt_logprobs=1, logprobs=2))["search"]
    stats = made.stats()
    assert (stats.prompt_tokens, stats.finished) == (len(PROMPT), 2)
    assert stats.output_tokens == 1 + 4 * (NEW - 1)
    first = found[0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(PROMPT)
    assert first.logprobs is not None
    assert [entry.token_id for entry in first.logprobs] == first.token_ids
    assert sum(entry.logprob for entry in first.logprobs) / NEW == pytest.approx(first.score, abs=1e-5)
    assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.logprob - 1e-5 for entry in first.logprobs)
    again = run(made, search())["search"]
    assert again[0].cached_tokens == 4
    assert again[0].token_ids == first.token_ids


def test_beams_count_as_running_between_two_steps(t_lm: Path) -> None:
    made = engine(t_lm)
    made.add(search())
    assert (made.stats().running, made.stats().waiting) == (0, 1)
    for _ in range(3):
        made.step()
        assert (made.stats().running, made.stats().waiting) == (4, 0)
    finish(made)
    assert (made.stats().running, made.stats().waiting) == (0, 0)


def test_a_width_of_one_is_greedy(t_lm: Path) -> None:
    made = engine(t_lm)
    made.add(request("greedy", PROMPT, max_tokens=NEW))
    greedy = finish(made)["greedy", 0].tokens
    assert run(made, search(width=1, n=1))["search"][0].token_ids == greedy


def test_fewer_sequences_than_asked_for_are_an_error_with_the_numbers(t_lm: Path) -> None:
    made = engine(t_lm)
    made.add(search(allowed_token_ids=(9,), max_tokens=3))
    assert "leave 1 sequences" in (finish(made)["search", 0].error or "")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"width": 0}, "best_of"),
        ({"width": 21}, "best_of"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"n": 5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 1, "logprob_token_ids": (5,)}, "logprob_token_ids"),
        ({"grammar": "x"}, "structured_outputs"),
    ],
)
def test_o02_wrong_searches_are_refused(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        search(**wrong)
    assert caught.value.param == param


# --- the search by itself -------------------------------------------------------------------------------------------


def test_what_ends_below_the_best_is_dropped_and_others_go_on() -> None:
    made = BeamSearch(Beams(width=2), Ends(5, eos_ids=frozenset({0})))
    assert made.branches == 3
    made.advance([[Branch(1, -1.0, -1.0), Branch(2, -1.5, -1.5), Branch(0, -2.0, -2.0)]])
    assert [beam.token_ids for beam in made.live] == [[1], [2]]
    assert made.ended == []  # the third: not among the two best
    made.advance([[Branch(0, -0.1, -0.1), Branch(3, -1.0, -1.0)], [Branch(4, -0.2, -0.2), Branch(3, -1.0, -1.0)]])
    assert [ended.beam.token_ids for ended in made.ended] == [[1, 0]]
    assert made.ended[0].score == pytest.approx(-1.1 / 2)
    assert [beam.token_ids for beam in made.live] == [[2, 4], [1, 3]]
    assert not made.done


def test_a_stop_string_may_span_tokens_and_counts_only_after_min_tokens() -> None:
    texts = {1: b"a", 2: b"bc", 3: b"c"}
    ends = Ends(9, 2, stops=["abc", "bc"], bytes_of=texts.__getitem__)
    made = BeamSearch(Beams(width=1), ends)
    for token in (2, 1):
        made.advance([[Branch(token, -1.0, -1.0)]])
        assert not made.ended
    made.advance([[Branch(2, -1.0, -1.0)]])
    assert (made.ended[0].finish, made.ended[0].stop_reason) == (FinishReason.STOP, "abc")
    assert made.done


# --- logprob_token_ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_named_ids_are_reported_beside_what_was_sampled(t_lm: Path, overlap: bool) -> None:
    made = engine(t_lm, overlap=overlap)
    wanted = (9, 400, 7)
    made.add(request("named", PROMPT, logprobs=0, logprob_token_ids=wanted, logit_bias={9: -5.0}, temperature=1.0))
    made.add(request("fewer", PROMPT, logprobs=0, logprob_token_ids=(8,)))
    made.add(request("plain", PROMPT, logprobs=2))
    made.add(request("none", PROMPT))
    outputs = finish(made)
    named = outputs["named", 0]
    with torch.inference_mode():
        raw = reference(t_lm)(torch.tensor([PROMPT + named.tokens])).logits[0, len(PROMPT) - 1 : -1]
    table = raw.log_softmax(-1)
    assert len(named.logprobs) == 12
    for row, token, entry in zip(table, named.tokens, named.logprobs, strict=True):
        assert [i for i, _ in entry.top] == [token, *(i for i in wanted if i != token)]
        assert entry.top[0][1] == entry.logprob
        assert [value for _, value in entry.top] == pytest.approx([row[i].item() for i, _ in entry.top], abs=1e-4)
    assert [[i for i, _ in e.top][1:] for e in outputs["fewer", 0].logprobs] == [[8]] * 12
    assert all(len(entry.top) == 2 for entry in outputs["plain", 0].logprobs)
    assert outputs["none", 0].logprobs == []


def test_o02_ids_that_cannot_be_named(t_lm: Path) -> None:
    for wrong in ({"logprob_token_ids": (1,)}, {"logprobs": 1, "logprob_token_ids": tuple(range(129))}):
        with pytest.raises(BadRequest, match="logprob_token_ids"):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    new = NewRequest(
        id="a", task=Task.GENERATE, token_ids=PROMPT, sampling=SamplingParams(logprobs=0, logprob_token_ids=(10**6,))
    )
    with pytest.raises(BadRequest, match="logprob_token_ids"):
        engine(t_lm).add(new)


# --- LLM ------------------------------------------------------------------------------------------------------------


def test_llm_beam_search(t_lm: Path) -> None:
    llm = LLM(str(t_lm), backend="cpu", dtype="float32", kv_cache_memory=16 << 20, threads=1)
    first, second = llm.beam_search([PROMPT, [9, *PROMPT]], width=4, n=2, max_tokens=NEW, ignore_eos=True)
    for output, prompt in ((first, PROMPT), (second, [9, *PROMPT])):
        both = [output, *output.others]
        expected = theirs(t_lm, prompt=prompt)
        assert [one.token_ids for one in both] == [tokens for tokens, _ in expected]
        assert [one.score for one in both] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert output.text == llm.tokenizer.decode(output.token_ids)
    stop = first.text[4:6]
    stopped = llm.beam_search(PROMPT, width=4, max_tokens=NEW, stop=(stop,), ignore_eos=True)[0]
    everything = [stopped, *stopped.others]
    assert len(everything) == 4
    assert any(one.stop_reason == stop and stop not in one.text for one in everything)
