"""Tensor parallelism within the process: what each rank holds, and that all together compute what one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import tiny
import torch
from parallel.inprocess import LOADED, Group, ready

from anycore.cli.main import main
from anycore.config import ModelConfig
from anycore.contract.declare import Probe
from anycore.contract.formats import Format
from anycore.contract.weights import QuantisedWeight
from anycore.engine.launch import prepare
from anycore.engine.sharing import Rank
from anycore.errors import ConfigError, Unsupported
from anycore.models import gathering
from anycore.models.checkpoint import Ordered
from anycore.models.cutting import cut_out
from anycore.models.parallel import Cut, check_formats, cuts, shard
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import Quantization
from anycore.models.source import locate
from anycore.models.spec import read_spec

MAKERS: dict[str, Any] = {
    **{family: lambda f, family=family: tiny.tiny_lm(f, family=family, layers=2, window=8) for family in tiny.DECODERS},
    "tied": lambda f: tiny.tiny_lm(f, family="llama", tied=True, layers=2, vocab=433),
    "embedder": tiny.tiny_embedder,
    "reranker": tiny.tiny_reranker,
    "reranker-tied": lambda f: tiny.tiny_reranker(f, tied=True),
    "bert": tiny.tiny_bert,
    "xlmr": tiny.tiny_xlmr,
    "cross-encoder": tiny.tiny_cross_encoder,
    "cross-encoder-xlmr": lambda f: tiny.tiny_cross_encoder(f, "xlmr", labels=2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name) for name, make in MAKERS.items()}


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocab, (length,), generator=generator).tolist() for length in (3, 17, 30, 9)]


def check_same(one: list[engines.Output], other: list[engines.Output]) -> None:
    """Equal ids; vectors and scores as near as float32 sums in another order are."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine.error is theirs.error is None
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish)
        if mine.vector is not None:
            np.testing.assert_allclose(theirs.vector, mine.vector, atol=2e-6)
        if mine.scores is not None:
            np.testing.assert_allclose(theirs.scores, mine.scores, atol=2e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_two_ranks_compute_what_one_does(folders: dict[str, Path], name: str) -> None:
    expected = engines.engine(folders[name])
    wanted = engines.run(expected, prompts(expected.spec.vocab_size))
    group = Group(folders[name], 2)
    for found in group.run(lambda engine: engines.run(engine, prompts(engine.spec.vocab_size))):
        check_same(wanted, found)
    assert group.engines[0].spec.heads == expected.spec.heads // 2
    assert group.room.sums > 0


def test_kv_heads_are_repeated_where_they_are_fewer_than_ranks(folders: dict[str, Path]) -> None:
    wanted = engines.run(engines.engine(folders["llama"]), prompts(400))
    group = Group(folders["llama"], 4)
    for found in group.run(lambda engine: engines.run(engine, prompts(400))):
        check_same(wanted, found)
    assert [(engine.spec.heads, engine.spec.kv_heads) for engine in group.engines] == [(1, 1)] * 4


def test_sampling_log_probabilities_chunks_and_preemption_agree(folders: dict[str, Path]) -> None:
    """Ranks that had another schedule, or drew other ids, would not meet in the next exchange."""
    params = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 40}
    small = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 96, "kv_cache_memory": 288 << 10}
    one = engines.engine(folders["qwen3"], **small)
    wanted = engines.run(one, prompts(400), **params)
    group = Group(folders["qwen3"], 2, **small | {"kv_cache_memory": 144 << 10})
    for found in group.run(lambda engine: engines.run(engine, prompts(400), **params)):
        check_same(wanted, found)
        for mine, theirs in zip(wanted, found, strict=True):
            assert [each.token_id for each in theirs.logprobs] == mine.tokens
            np.testing.assert_allclose(
                [each.logprob for each in theirs.logprobs], [each.logprob for each in mine.logprobs], atol=1e-4
            )
    assert one.stats().preemptions > 0
    assert {engine.stats().preemptions for engine in group.engines} == {one.stats().preemptions}


def test_each_layer_sums_twice_and_logits_are_gathered_once(folders: dict[str, Path]) -> None:
    group = Group(folders["llama"], 2)
    room = group.room
    room.sums = room.gathers = 0
    group.run(lambda engine: engines.run(engine, [[5, 6, 7]], max_tokens=1))
    assert (room.sums, room.gathers) == (1 + 2 * group.engines[0].spec.layers, 1)  # one for the embedding


@pytest.mark.parametrize("name", ["llama", "tied", "bert"])
def test_a_rank_reads_only_its_part(folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied out of the files is what the plan counts for a rank: less than the whole, and together no less."""
    copied: list[int] = []
    put = gathering.put

    def counting(*arguments: Any) -> int:
        copied.append(put(*arguments))
        return copied[-1]

    monkeypatch.setattr(gathering, "put", counting)
    engines.engine(folders[name])
    whole, copied[:] = sum(copied), []
    config = Group(folders[name], 2).config
    parts = [ready(config, rank).spec.weight_bytes("float32") for rank in (0, 1)]
    assert sum(copied) == sum(parts)
    assert whole <= sum(parts)
    assert max(parts) < 0.7 * whole


# --- what is cut ------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_rank_counts_its_part(folders: dict[str, Path]) -> None:
    one = ready(ModelConfig(model=str(folders["llama"]), backend="cpu", dtype="float32"))
    two = ready(ModelConfig(model=str(folders["llama"]), backend="cpu", dtype="float32", tensor_parallel_size=2))
    assert one.plan is not None
    assert two.plan is not None
    assert two.plan.kv_token_bytes * 2 == one.plan.kv_token_bytes
    assert 0.5 <= two.plan.weights / one.plan.weights < 0.51  # norms are whole
    assert two.plan.budget <= one.plan.budget  # ranks share the host's memory
    told = {decision.name: str(decision) for decision in two.decisions}
    assert "2 of 4 heads, 1 of 2 KV heads" in told["tensor_parallel_size"]
    assert two.card()["tensor_parallel_size"] == 2


def test_parts_of_all_ranks_make_up_the_checkpoint(folders: dict[str, Path]) -> None:
    spec = read_spec(locate(str(folders["tied"])))
    found: dict[str, list[Cut]] = {}
    for rank in range(2):
        for name, cut in cuts(shard(spec, rank, 2)).items():
            found.setdefault(name, []).append(cut)
    for name, (first, second) in found.items():
        assert (first.start, first.stop, second.stop) == (0, second.start, first.whole[first.dim]), name
    names = {name.rsplit(".", 2)[-2]: cut.dim for name, (cut, _) in found.items()}
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
    assert names == {**dict.fromkeys(rows, 0), "o_proj": 1, "down_proj": 1}
    assert found["embed_tokens.weight"][0].whole[0] % 2 == 1  # the last rank has a row less


@pytest.mark.parametrize(("size", "what"), [(3, "4 attention heads"), (8, "4 attention heads")])
def test_what_cannot_be_divided_is_refused_with_the_numbers(folders: dict[str, Path], size: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{size} does not divide the {what} of LlamaForCausalLM: it can be 1, 2, 4"):
        ready(ModelConfig(model=str(folders["llama"]), backend="cpu", tensor_parallel_size=size))


def test_kv_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, heads=12, kv_heads=6, head_dim=16, hidden=96, layers=1)
    with pytest.raises(ConfigError, match=r"6 KV heads .* it can be 1, 2"):
        ready(ModelConfig(model=str(folder), backend="cpu", tensor_parallel_size=4))


def test_a_backend_that_does_not_claim_it_refuses(folders: dict[str, Path]) -> None:
    cpu = LOADED.backend("cpu")
    rows = tuple(replace(row, features=tuple(f for f in row.features if f != "tensor_parallel")) for row in cpu.support)
    alone = replace(LOADED, backends=(replace(cpu, support=rows),))
    with pytest.raises(Unsupported, match="lacks tensor_parallel"):
        prepare(ModelConfig(model=str(folders["bert"]), tensor_parallel_size=2), alone)


def test_each_rank_takes_a_device_of_its_own(folders: dict[str, Path]) -> None:
    cpu = LOADED.backend("cpu")
    (device,) = cpu.probe().devices
    three = Probe(devices=tuple(replace(device, index=i) for i in range(3)))
    several = replace(LOADED, backends=(replace(cpu, shared_device=False, probe=lambda: three),))
    config = ModelConfig(model=str(folders["bert"]), tensor_parallel_size=2, device=1)
    assert [prepare(config, several, rank=Rank(rank)).choice.device.index for rank in (0, 1)] == [1, 2]
    with pytest.raises(ConfigError, match=r"needs devices 2 to 3 of backend cpu.*seen here: 0, 1, 2"):
        prepare(replace(config, device=2), several)


# --- quantised weights ------------------------------------------------------------------------------------------------

FORMATS = (Format("int8"), Format("int8", 32), Format("int4", 32), Format("fp8"))


def stored(kind: Format) -> tuple[QuantisedWeight, torch.Tensor]:
    weight = quantise(torch.randn(24, 128, generator=torch.Generator().manual_seed(0)), kind)
    return weight, weight.dense()


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_quantised_weights_stand_for_parts(kind: Format, dim: int) -> None:
    weight, dense = stored(kind)
    for start, stop in ((0, dense.shape[dim] // 2), (dense.shape[dim] // 2, dense.shape[dim])):
        part = cut_out(weight, Cut(tuple(dense.shape), dim, start, stop), True, "w")
        assert isinstance(part, QuantisedWeight)
        assert torch.equal(part.dense(), dense.narrow(dim, start, stop - start))


def test_columns_in_the_order_of_activations_are_not_divided_as_they_are() -> None:
    weight, dense = stored(Format("int4", 32))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    entry, meant = Ordered(weight, order), dense[:, order.argsort()]
    cut = Cut((24, 128), 1, 64, 128)
    with pytest.raises(Unsupported, match="order of activations"):
        cut_out(entry, cut, True, "w")
    made = cut_out(entry, cut, False, "w")
    assert isinstance(made, torch.Tensor)
    assert torch.equal(made, meant[:, 64:])
    rows = cut_out(entry, Cut((24, 128), 0, 12, 24), True, "w")
    assert isinstance(rows, Ordered)
    assert torch.equal(rows.weight.dense()[:, rows.order.argsort()], meant[12:])


def test_weights_rounded_in_groups_are_the_same_numbers_on_two_ranks(folders: dict[str, Path]) -> None:
    """w4a16 rounds a group at a time, so that two ranks hold what one does; products are made of bfloat16."""
    settings = {"quantization": "w4a16", "dtype": "bfloat16"}
    wanted = engines.run(engines.engine(folders["llama"], **settings), prompts(400), max_tokens=1, logprobs=3)
    group = Group(folders["llama"], 2, **settings)
    for found in group.run(lambda engine: engines.run(engine, prompts(400), max_tokens=1, logprobs=3)):
        for mine, theirs in zip(wanted, found, strict=True):
            assert theirs.logprobs[0].logprob == pytest.approx(mine.logprobs[0].logprob, abs=0.1)


def test_groups_that_would_come_apart_are_refused(folders: dict[str, Path]) -> None:
    spec = read_spec(locate(str(folders["llama"])))
    name = "layers.0.mlp.down_proj.weight"
    check_formats(shard(spec, 0, 2), Quantization("w4a16", {name: Format("int4", 128)}))
    with pytest.raises(Unsupported, match=r"groups of 128 .* 4 ranks: .*down_proj.* 256 inputs, .* would have 64"):
        check_formats(shard(spec, 0, 4), Quantization("w4a16", {name: Format("int4", 128)}))


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8"])
def test_quantised_checkpoints_are_divided(folders: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    """As they are, in bfloat16, and made dense: then ids are those of one rank."""
    folder = tmp_path / scheme
    assert main(["convert", str(folders["llama"]), str(folder), "--quantization", scheme]) == 0
    for settings in ({"quantization": "none"}, {"dtype": "bfloat16"}):
        wanted = engines.run(engines.engine(folder, **settings), prompts(400), logprobs=1)
        group = Group(folder, 2, **settings)
        assert group.engines[1].card["quantization"] == (None if "quantization" in settings else scheme)
        for found in group.run(lambda engine: engines.run(engine, prompts(400), logprobs=1)):
            for mine, theirs in zip(wanted, found, strict=True):
                assert theirs.logprobs[0].logprob == pytest.approx(mine.logprobs[0].logprob, abs=0.2)
                assert "quantization" not in settings or theirs.tokens == mine.tokens
