"""Embedding and reranking through the engine: equal to Hugging Face, whatever the company, chunks or cache."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from pathlib import Path

import garbage
import numpy as np
import pytest
import tiny
import torch
from engines import engine, run

from anycore.engine.pooling import finish_scores, finish_vector
from anycore.engine.request import PoolingParams
from anycore.errors import AnycoreError, BadRequest, ConfigError, NonFiniteOutput
from anycore.llm import LLM
from anycore.models.source import locate
from anycore.models.spec import ScoreSpec, read_spec


def texts(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 170) for _ in range(rng.randint(low, high))] for _ in range(count)]


def hidden(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last"])
def test_e01_pooling_follows_the_files(tmp_path: Path, pooling: str, layout: str) -> None:
    folder = tiny.tiny_bert(tmp_path, pooling=pooling, layout=layout)
    made = engine(folder)
    for tokens in texts(3):
        rows = hidden(folder, tokens)
        right = {"cls": rows[0], "mean": rows.mean(0), "max": rows.amax(0), "last": rows[-1]}[pooling]
        vector = run(made, [tokens])[0].vector
        assert np.abs(vector - torch.nn.functional.normalize(right, dim=0).numpy()).max() <= 1e-5


def test_e01_the_pooling_flag_beats_the_files_and_is_said(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path, pooling="mean")
    tokens = texts(1)[0]
    vector = run(engine(folder, pooling="cls"), [tokens])[0].vector
    assert np.abs(vector - torch.nn.functional.normalize(hidden(folder, tokens)[0], dim=0).numpy()).max() <= 1e-5


def test_e02_a_causal_embedder_takes_its_last_token(t_qemb: Path) -> None:
    made = engine(t_qemb)
    batch = [texts(1, seed=n, low=n, high=n)[0] for n in (1, 5, 17, 64)]
    first = [o.vector for o in run(made, batch)]
    for tokens, vector in zip(batch, first, strict=True):
        right = torch.nn.functional.normalize(hidden(t_qemb, tokens)[-1], dim=0).numpy()
        assert np.abs(vector - right).max() <= 1e-5
        assert abs(np.linalg.norm(vector) - 1) <= 1e-5
    for _ in range(5):
        again = [o.vector for o in run(made, batch[::-1])][::-1]
        assert all(np.abs(a - b).max() <= 1e-6 for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", ["bert", "qemb"])
def test_e04_company_and_order_change_nothing(t_bert: Path, t_qemb: Path, kind: str) -> None:
    made = engine({"bert": t_bert, "qemb": t_qemb}[kind])
    target = texts(1, seed=99, low=23, high=23)[0]
    alone = run(made, [target])[0].vector
    for place in (0, 7, 31):
        batch = texts(32, seed=place)
        batch[place] = target
        outputs = run(made, batch)
        assert np.abs(outputs[place].vector - alone).max() <= 1e-6
    twins = run(made, [target] * 5)
    assert all(np.abs(o.vector - alone).max() <= 1e-6 for o in twins)


def test_m05_repeats_and_shared_prefixes_do_not_change_vectors(t_qemb: Path) -> None:
    made = engine(t_qemb, max_num_batched_tokens=32, max_num_seqs=8)
    whole = engine(t_qemb, enable_prefix_caching=False)
    tokens = texts(1, low=100, high=100)[0]
    sharing = tokens[:64] + texts(1, seed=1, low=20, high=20)[0]
    right = run(whole, [tokens])[0].vector
    outputs = [run(made, [tokens])[0] for _ in range(3)]
    assert [o.cached for o in outputs] == [0, 96, 96]
    assert all(np.abs(o.vector - right).max() <= 1e-6 for o in outputs)
    other = run(made, [sharing])[0]
    assert other.cached == 64
    assert np.abs(other.vector - run(whole, [sharing])[0].vector).max() <= 1e-6


def test_m05_mean_pooling_is_neither_split_nor_cached(t_qemb: Path) -> None:
    made = engine(t_qemb, pooling="mean", max_model_len=128)
    assert made.pool is None
    tokens = texts(1, low=100, high=100)[0]
    right = torch.nn.functional.normalize(hidden(t_qemb, tokens).mean(0), dim=0).numpy()
    for _ in range(2):
        output = run(made, [tokens])[0]
        assert output.cached == 0
        assert np.abs(output.vector - right).max() <= 1e-5


@pytest.mark.parametrize("kind", ["ce", "ce_xlmr", "qrr"])
def test_scores_do_not_depend_on_company(t_ce: Path, t_ce_xlmr: Path, t_qrr: Path, kind: str) -> None:
    made = engine({"ce": t_ce, "ce_xlmr": t_ce_xlmr, "qrr": t_qrr}[kind], task="rerank")
    batch = texts(12, seed=5)
    together = [o.scores for o in run(made, batch)]
    alone = [run(made, [tokens])[0].scores for tokens in batch]
    assert np.abs(np.array(together) - np.array(alone)).max() <= 1e-6
    raw = [run(made, [tokens], raw_scores=True)[0].scores for tokens in batch]
    assert np.abs(1 / (1 + np.exp(-np.array(raw))) - np.array(alone)).max() <= 1e-6


def test_scores_survive_chunks_and_cache(t_qrr: Path) -> None:
    batch = texts(6, seed=5, low=30, high=60)
    whole = [o.scores for o in run(engine(t_qrr, task="rerank", enable_prefix_caching=False), batch)]
    made = engine(t_qrr, task="rerank", max_num_batched_tokens=16, max_num_seqs=4)
    for _ in range(2):
        assert np.abs(np.array([o.scores for o in run(made, batch)]) - np.array(whole)).max() <= 1e-6


def test_e03_two_class_softmax() -> None:
    spec = type("Spec", (), {"score": ScoreSpec("yes_no", yes_no_ids=(0, 1))})()
    assert finish_scores(np.array([1.5, 3.5], dtype=np.float32), spec, PoolingParams()) == [
        pytest.approx(0.880797, abs=1e-6)
    ]


def test_e03_equal_yes_and_no_rows_fail_at_start(tmp_path: Path) -> None:
    folder = tiny.tiny_reranker(tmp_path)
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    spec = read_spec(locate(str(folder)))
    assert spec.score is not None
    assert spec.score.yes_no_ids is not None
    yes, no = spec.score.yes_no_ids
    head = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in weights)
    weights[head][yes] = weights[head][no]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(AnycoreError, match="same score"):
        engine(folder, task="rerank")


def test_dimensions_are_cut_before_normalising(t_bert: Path) -> None:
    made = engine(t_bert)
    whole = run(made, [texts(1)[0]], normalize=False)[0].vector
    cut = run(made, [texts(1)[0]], dimensions=16)[0].vector
    assert np.abs(cut - whole[:16] / np.linalg.norm(whole[:16])).max() <= 1e-6
    for wrong in (0, 65):
        with pytest.raises(BadRequest) as caught:
            run(made, [texts(1)[0]], dimensions=wrong)
        assert caught.value.param == "dimensions"


def test_a_zero_vector_stays_finite(t_bert: Path) -> None:
    spec = read_spec(locate(str(t_bert)))
    assert np.isfinite(finish_vector(np.zeros(8, dtype=np.float32), spec, PoolingParams())).all()


def scaled(folder: Path, factor: float) -> Path:
    """Scale one layer's output so that activations reach about `factor`."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    name = next(n for n in weights if n.endswith("layer.0.output.dense.weight"))
    weights[name] *= factor
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def test_e07_h10_float16_is_never_chosen_silently(tmp_path: Path) -> None:
    folder = scaled(tiny.tiny_bert(tmp_path), 1e5)
    for dtype in ("bfloat16", "float32"):
        assert np.isfinite(run(engine(folder, dtype=dtype), [texts(1)[0]])[0].vector).all()
    with pytest.raises(AnycoreError, match="float16"):
        engine(folder, dtype="float16")


def test_e07_one_overflowing_text_fails_alone(t_bert: Path) -> None:
    made = engine(t_bert)
    whole = made.runner._step.step  # as it is, before anything is recorded

    def overflowing(batch):
        rows = whole.forward(batch)
        rows[batch.input_ids == 42] = float("nan")
        return rows

    made.runner._step = replace(whole, forward=overflowing)
    outputs = run(made, [[5, 6], [7, 42], [8, 9]])
    assert [o.finish for o in outputs] == ["stop", "error", "stop"]
    assert outputs[1].error_code == "non_finite_output"
    assert outputs[1].vector is None


def test_h10_warm_up_refuses_a_model_that_overflows(tmp_path: Path) -> None:
    folder = tiny.tiny_bert(tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("layer.0.output.dense.weight"))
    weights[name][:] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteOutput, match="warm-up"):
        engine(folder)


def test_e11_a_budget_below_the_longest_input_is_refused(t_xlmr: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be split") as caught:
        engine(t_xlmr, max_num_batched_tokens=32, max_num_seqs=4)
    assert caught.value.param == "max_num_batched_tokens"


def test_llm_scores_and_embeds_many_as_one_by_one(t_ce: Path, t_bert: Path) -> None:
    rng = random.Random(0)
    words = " ".join(tiny.CORPUS).split()
    pairs = [(" ".join(rng.choices(words, k=3)), " ".join(rng.choices(words, k=rng.randint(1, 40)))) for _ in range(80)]
    settings = {"backend": "cpu", "dtype": "float32", "max_num_batched_tokens": 512, "threads": 1}
    reranker = LLM(str(t_ce), **settings)
    queries, documents = zip(*pairs, strict=True)
    alone = [score for pair in pairs for score in reranker.score(*map(list, zip(pair, strict=True)))]
    assert reranker.score(queries, documents) == pytest.approx(alone, abs=1e-6)
    embedder = LLM(str(t_bert), **settings)
    vectors = np.array([embedder.embed(document)[0] for document in documents])
    assert np.abs(np.array(embedder.embed(documents)) - vectors).max() <= 1e-6


def test_an_llm_that_was_dropped_goes_when_the_next_one_is_opened(t_ce: Path) -> None:
    settings = {"backend": "cpu", "dtype": "float32", "threads": 1}
    with garbage.as_elsewhere():
        dropped = weakref.ref(LLM(str(t_ce), **settings).engine)
        kept = LLM(str(t_ce), **settings)
        assert dropped() is None
    assert kept.score("the dog", ["the river"])
