"""Generation on a tiny model: equal to Hugging Face, and equal to itself whatever the company, chunks or cache."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache
from pathlib import Path

import pytest
import tiny
import torch
from engines import Output, engine, finish, request, run

from anycore.errors import BadRequest, ContextLengthExceeded, Overloaded

VOCAB = 400


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


@lru_cache
def reference(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(folder: Path, tokens: list[int], new: int, **options: object) -> list[int]:
    ids = torch.tensor([tokens])
    out = reference(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=-1, **options
    )
    return out[0, len(tokens) :].tolist()


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


@pytest.fixture(scope="module")
def alone(t_lm: Path) -> list[list[int]]:
    """Twelve greedy tokens of twenty prompts, each computed by itself, without cache or chunks."""
    made = engine(t_lm, enable_prefix_caching=False)
    return [run(made, [tokens])[0].tokens for tokens in prompts(20)]


def test_s02_greedy_ids_equal_hugging_face(t_lm: Path, alone: list[list[int]]) -> None:
    for tokens, output in zip(prompts(20), alone, strict=True):
        assert output == greedy(t_lm, tokens, 12)


def test_s02_repetition_penalty_equals_hugging_face(t_lm: Path) -> None:
    made = engine(t_lm)
    for tokens in prompts(6):
        assert run(made, [tokens], repetition_penalty=1.2)[0].tokens == greedy(t_lm, tokens, 12, repetition_penalty=1.2)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"kv_cache_memory": 12 * 16 * 4096, "max_model_len": 96, "enable_prefix_caching": False},
        {"kv_cache_memory": 12 * 16 * 4096, "max_model_len": 96},
        {"block_size": 4},
        {"scheduling_policy": "short-first"},
        {"long_prompt_rows": 2, "max_num_batched_tokens": 16},
    ],
    ids=["company", "chunked", "tight", "preempted", "preempted-cached", "small-blocks", "short-first", "long-prompts"],
)
def test_s01_company_chunks_preemption_and_overlap_change_nothing(
    t_lm: Path, alone: list[list[int]], settings: dict[str, object], overlap: bool
) -> None:
    made = engine(t_lm, overlap=overlap, **settings)
    assert tokens_of(run(made, prompts(20))) == alone
    if settings.get("kv_cache_memory") and not settings.get("enable_prefix_caching", True):
        assert made.stats().preemptions > 0


@pytest.mark.parametrize("window", [None, 24])
def test_m04_the_prefix_cache_changes_nothing(tmp_path: Path, window: int | None) -> None:
    folder = tiny.tiny_lm(tmp_path, family="mistral" if window else "llama", window=window, layers=2)
    shared = prompts(1, seed=3, low=32, high=32)[0]
    texts = []
    for length in (15, 16, 17, 31, 32, 33, 160):
        for common in (0, 16, 32):
            own = prompts(1, seed=length * 100 + common, low=length, high=length)[0]
            texts.append((shared[:common] + own)[:length])
    cold = tokens_of(run(engine(folder, enable_prefix_caching=False), texts))
    warm = engine(folder)
    assert tokens_of(run(warm, texts)) == cold
    again = run(warm, texts)
    assert tokens_of(again) == cold
    assert all(
        o.cached == (len(t) - 1) // 16 * 16 for o, t in zip(again, texts, strict=True)
    )  # one token is always computed
    assert warm.pool is not None
    warm.pool.release(warm.pool.take(warm.pool.size // 2))  # evict half
    assert tokens_of(run(warm, texts)) == cold


def test_cache_salt_keeps_prefixes_apart(t_lm: Path) -> None:
    made = engine(t_lm)
    tokens = prompts(1, low=40, high=40)[0]
    assert run(made, [tokens], cache_salt="a")[0].cached == 0
    assert run(made, [tokens], cache_salt="b")[0].cached == 0
    assert run(made, [tokens])[0].cached == 0
    assert run(made, [tokens], cache_salt="a")[0].cached == 32


def test_m07_preempted_requests_lose_and_repeat_nothing(t_lm: Path) -> None:
    texts = prompts(8, seed=9, low=32, high=32)
    alone = [run(engine(t_lm), [tokens], max_tokens=128)[0].tokens for tokens in texts[:2]]
    made = engine(t_lm, kv_cache_memory=40 * 16 * 4096, max_model_len=512, enable_prefix_caching=False)
    outputs = run(made, texts, max_tokens=128)
    assert made.stats().preemptions > 0
    assert all(len(o.tokens) == 128 and o.finish == "length" for o in outputs)
    assert tokens_of(outputs)[:2] == alone
    assert made.stats().output_tokens == 8 * 128
    with pytest.raises(ContextLengthExceeded, match="650"):
        made.add(request("too long", [5] * 450, max_tokens=200))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_sampling_depends_on_seed_and_sequence_alone(t_lm: Path, overlap: bool) -> None:
    tokens = prompts(1, low=30, high=30)[0]
    params = {"temperature": 1.0, "seed": 7, "top_p": 0.95, "frequency_penalty": 0.5}

    def draws(**settings: object) -> dict[int, list[int]]:
        made = engine(t_lm, overlap=overlap, **settings)
        made.add(request("n", tokens, n=3, **params))
        for i, other in enumerate(prompts(4, seed=5)):
            made.add(request(f"other-{i}", other, temperature=1.0))
        outputs = finish(made)
        return {index: outputs["n", index].tokens for index in range(3)}

    whole = draws()
    assert len({tuple(t) for t in whole.values()}) == 3
    assert draws(max_num_batched_tokens=8, max_num_seqs=4) == whole
    assert draws(enable_prefix_caching=False, kv_cache_memory=12 * 16 * 4096, max_model_len=96) == whole
    single = engine(t_lm)
    assert run(single, [tokens], **params)[0].tokens == whole[0]


def test_sequences_of_one_prompt_share_its_blocks(t_lm: Path) -> None:
    made = engine(t_lm, enable_prefix_caching=False)
    made.add(request("n", prompts(1, low=64, high=64)[0], n=8, max_tokens=4))
    made.step()
    made.step()
    assert made.pool is not None
    shared = [count for count in made.pool.references if count > 1]
    assert shared == [8] * 3  # the fourth block holds the last token, which each computes for itself
    finish(made)


def test_logprobs_equal_hugging_face_and_survive_chunks_and_cache(t_lm: Path) -> None:
    tokens = prompts(1, low=50, high=50)[0]
    with torch.inference_mode():
        raw = torch.log_softmax(reference(t_lm)(torch.tensor([tokens])).logits[0], -1)
    for settings in ({}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}):
        made = engine(t_lm, **settings)
        for _ in range(2):
            output = run(made, [tokens], prompt_logprobs=3, logprobs=5, top_k=1, max_tokens=2)[0]
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(tokens)
            for i, scored in enumerate(output.prompt_logprobs[1:]):
                assert scored.token_id == tokens[i + 1]
                assert scored.logprob == pytest.approx(raw[i, tokens[i + 1]].item(), abs=1e-4)
                assert [j for j, _ in scored.top] == raw[i].topk(3).indices.tolist()
            first = output.logprobs[0]
            assert first.token_id == output.tokens[0] == int(raw[-1].argmax())
            assert first.rank == 1
            assert [p for _, p in first.top] == pytest.approx(raw[-1].topk(5).values.tolist(), abs=1e-4)


def test_the_backend_reports_on_prompts_and_named_ids(t_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(t_lm)
    ops, asked = made.runner.backend.ops, []
    for name in ("report", "logprobs"):
        own = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *given, own=own, name=name: asked.append(name) or own(*given))
    run(made, [[5, 6, 7]], max_tokens=2, prompt_logprobs=1, logprobs=0, logprob_token_ids=(3, 9))
    assert asked.count("report") == 1
    assert asked.count("logprobs") == 2


def test_prompt_logprobs_without_generating(t_lm: Path) -> None:
    output = run(engine(t_lm), [[5, 6, 7]], max_tokens=0, prompt_logprobs=0)[0]
    assert output.tokens == []
    assert output.finish == "length"
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3


def test_s08_stop_ids_and_minimum(t_lm: Path) -> None:
    made = engine(t_lm)
    free = run(made, [[5, 6, 7]])[0].tokens
    stop = free[3]
    cut = run(made, [[5, 6, 7]], stop_token_ids=(stop,))[0]
    assert cut.tokens == free[: free.index(stop) + 1]
    assert (cut.finish, cut.stop_reason) == ("stop", stop)
    later = run(made, [[5, 6, 7]], stop_token_ids=(stop,), min_tokens=8)[0]
    assert stop not in later.tokens[:8]
    assert len(later.tokens) >= 8


def test_eos_ends_unless_ignored_or_too_early(t_lm: Path) -> None:
    made = engine(t_lm)
    eos = made.spec.eos_ids[0]
    force = {"logit_bias": {eos: 100.0}}
    ended = run(made, [[5, 6]], ignore_eos=False, **force)[0]
    assert (ended.tokens, ended.finish, ended.stop_reason) == ([eos], "stop", None)
    ignored = run(made, [[5, 6]], ignore_eos=True, max_tokens=3, **force)[0]
    assert (ignored.tokens, ignored.finish) == ([eos] * 3, "length")
    late = run(made, [[5, 6]], ignore_eos=False, min_tokens=5, **force)[0]
    assert late.tokens.index(eos) == 5


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_bad_words_are_never_completed(t_lm: Path, overlap: bool) -> None:
    made = engine(t_lm, overlap=overlap)
    free = run(made, [[5, 6, 7]])[0].tokens
    word = tuple(free[4:6])
    kept = run(made, [[5, 6, 7]], bad_words_ids=(word,))[0].tokens
    assert kept[:5] == free[:5]
    assert word not in list(itertools.pairwise(kept))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "overlap"])
def test_m10_abort_frees_everything_at_any_moment(t_lm: Path, overlap: bool) -> None:
    made = engine(t_lm, overlap=overlap, max_num_batched_tokens=16, max_num_seqs=4)
    neighbour = prompts(1, seed=4)[0]
    expected = run(made, [neighbour])[0].tokens
    for steps in range(8):
        made.add(request("neighbour", neighbour))
        for name in ("a", "b", "queued"):
            made.add(request(name, prompts(1, seed=steps, low=50, high=50)[0], n=3, max_tokens=400))
        outputs: dict[tuple[str, int], Output] = {}

        def take(deltas: list) -> None:
            for delta in deltas:
                outputs.setdefault((delta.id, delta.index), Output()).take(delta)  # noqa: B023

        for _ in range(steps):
            take(made.step())
        for name in ("a", "b", "queued", "never seen"):
            made.abort(name)
        before = {key: list(o.tokens) for key, o in outputs.items() if key[0] != "neighbour"}
        while made.has_work():
            take(made.step())
        assert {key: o.tokens for key, o in outputs.items() if key[0] != "neighbour"} == before
        assert outputs["neighbour", 0].tokens == expected
        stats = made.stats()
        assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks)
    assert made.stats().aborted == 8 * 9


def test_m09_the_queue_is_bounded_and_counts_sequences(t_lm: Path) -> None:
    made = engine(t_lm, max_num_seqs=1, max_queued=4)
    made.add(request("running", [5, 6]))
    for i in range(4):
        made.add(request(str(i), [5, 6]))
    with pytest.raises(Overloaded, match="--max-queued"):
        made.add(request("one more", [5, 6]))
    finish(made)
    with pytest.raises(Overloaded):
        made.add(request("six at once", [5, 6], n=6))
    made.add(request("five at once", [5, 6], n=5))
    finish(made)


def test_deadlines_end_waiting_and_running_requests(t_lm: Path) -> None:
    made = engine(t_lm, max_num_seqs=1)
    now = [1.0]  # 0 means not reached
    made._clock = lambda: now[0]
    made.add(request("running", [5, 6], deadline=5.0, max_tokens=100))
    made.add(request("waiting", [5, 6], deadline=3.0, max_tokens=100))
    made.add(request("patient", [5, 6]))
    made.step()
    outputs: dict[tuple[str, int], Output] = {}
    now[0] = 4.0
    for _ in range(2):
        for delta in made.step():
            outputs.setdefault((delta.id, delta.index), Output()).take(delta)
    assert outputs["waiting", 0].error_code == "deadline_exceeded"
    assert "in the queue" in (outputs["waiting", 0].error or "")
    now[0] = 6.0
    outputs |= finish(made)
    assert outputs["running", 0].error_code == "deadline_exceeded"
    assert "while running" in (outputs["running", 0].error or "")
    assert outputs["patient", 0].finish == "length"


@pytest.mark.parametrize(
    ("tokens", "params", "param"),
    [
        ([], {}, "prompt"),
        ([5, 10**9], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([5], {"logit_bias": {100000: 1.0}}, "logit_bias"),
        ([5] * 600, {}, None),
        ([5], {"max_tokens": 600}, "max_tokens"),
    ],
)
def test_bad_input_is_refused_and_disturbs_nobody(
    t_lm: Path, tokens: list[int], params: dict[str, object], param: str | None
) -> None:
    made = engine(t_lm)
    made.add(request("good", [5, 6, 7]))
    with pytest.raises(BadRequest) as caught:
        made.add(request("bad", tokens, **params))
    assert caught.value.param == param
    assert made.stats().waiting == 1
    assert len(finish(made)["good", 0].tokens) == 12


def test_a_non_finite_sequence_fails_alone(t_lm: Path) -> None:
    made = engine(t_lm)
    inner = made.runner.model.logits

    def poisoned(rows: torch.Tensor) -> torch.Tensor:
        logits = inner(rows)
        logits[0, 3] = float("nan")
        return logits

    made.runner.model.logits = poisoned  # type: ignore[method-assign]
    outputs = run(made, [[5, 6], [7, 8]], max_tokens=1)
    assert (outputs[0].finish, outputs[0].error_code) == ("error", "non_finite_output")
    assert outputs[1].finish == "length"


def test_m12_state_returns_to_its_baseline(t_lm: Path) -> None:
    made = engine(t_lm)
    for round_ in range(30):
        made.add(request("kept", prompts(1, seed=round_)[0], repetition_penalty=1.1, max_tokens=2))
        made.add(request("dropped", prompts(1, seed=round_ + 50)[0], n=2))
        made.step()
        made.abort("dropped")
        finish(made)
    assert not made._live.requests
    assert not made.scheduler.waiting
    assert not made.scheduler.running
    assert made.pool is not None
    assert not made.pool._coming


def test_one_sequence_can_be_ended_and_waiting_requests_dropped(t_lm: Path) -> None:
    made = engine(t_lm, max_num_seqs=1)
    made.add(request("three", [5, 6, 7], n=3, temperature=1.0, seed=1))
    made.add(request("waiting", [5, 6, 7]))
    made.step()
    assert made.drain() == ["waiting"]
    made.abort("three", 1)
    outputs = finish(made)
    assert sorted(index for _, index in outputs) == [0, 2]
    assert made.stats().aborted == 2


def test_the_smallest_queue_warms_up(t_lm: Path) -> None:
    made = engine(t_lm, max_num_seqs=1, max_queued=0)
    assert len(run(made, [[5, 6]])[0].tokens) == 12
