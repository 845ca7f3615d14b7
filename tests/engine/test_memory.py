"""The memory plan: cases M01 and M02, and that what it says is what is allocated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine.example import GIB, QWEN, WISH
from engines import LOADED, engine

from anycore.cli.flags import parse_quantity
from anycore.config import ModelConfig
from anycore.engine.launch import prepare
from anycore.engine.memory import Room, plan, size
from anycore.engine.settle import wish_of
from anycore.errors import ConfigError, DoesNotFit


def test_m01_length_against_kv_memory() -> None:
    """2 * 28 * 8 * 128 * 2 = 114,688 bytes a token; 40,960 tokens are 4.375 GiB; 4 GiB hold 37,376 in whole blocks."""
    wish = replace(WISH, kv_cache_memory=4 * GIB)
    fitted = plan(QWEN, wish, Room("cpu", 64 * GIB, 64 * GIB))
    assert fitted.kv_token_bytes == 114_688
    assert fitted.limits.max_model_len == 37_376
    with pytest.raises(DoesNotFit) as caught:
        plan(QWEN, replace(wish, max_model_len=40_960), Room("cpu", 64 * GIB, 64 * GIB))
    for figure in ("4.375 GiB", "4 GiB", "37376"):
        assert figure in caught.value.message
    assert caught.value.param == "max_model_len"


def test_m01_a_small_model(t_lm: Path) -> None:
    """T-LM keeps 4,096 bytes a token: 64 MiB hold 16,384. The plan is what the engine then has."""
    made = engine(t_lm, kv_cache_memory=64 * 2**20)
    assert made.pool is not None
    assert made.pool.size * made.limits.block_size == 16_384
    assert made.limits.max_model_len == 512


def test_m01_refused_before_weights_are_touched(t_lm: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in t_lm.iterdir():
        (broken / file.name).write_bytes(b"" if file.suffix == ".safetensors" else file.read_bytes())
    with pytest.raises(DoesNotFit, match="feasible maximum is --max-model-len 256"):
        engine(broken, kv_cache_memory=256 * 4096, max_model_len=512)


def test_m01_no_length_is_feasible(t_lm: Path) -> None:
    """A maximum of 0 would be refused, too."""
    with pytest.raises(DoesNotFit, match=r"no length fits: raise --kv-cache-memory$"):
        engine(t_lm, kv_cache_memory=10)


@pytest.mark.parametrize(("share", "fits"), [(0.20, True), (0.40, False)])
def test_m02_the_share_is_this_process_own(share: float, fits: bool) -> None:
    """100 GiB, 75 held by another process: 0.20 starts, 0.40 is refused with total, free and requested."""
    room = Room("fake", 100 * GIB, 25 * GIB)
    wish = replace(WISH, utilization=share, utilization_asked=True)
    if fits:
        made = plan(QWEN, wish, room)
        assert made.used <= 20 * GIB
        assert made.kv <= 20 * GIB - made.weights
        assert made.limits.blocks == plan(QWEN, wish, Room("fake", 100 * GIB, 100 * GIB)).limits.blocks
    else:
        with pytest.raises(DoesNotFit) as caught:
            plan(QWEN, wish, room)
        for figure in ("40 GiB", "25 GiB", "100 GiB", "fake"):
            assert figure in caught.value.message


def test_m02_a_default_share_gives_way_to_what_is_free() -> None:
    made = plan(QWEN, WISH, Room("cpu", 100 * GIB, 25 * GIB))
    assert made.used <= 25 * GIB
    assert made.budget < 25 * GIB


@pytest.mark.parametrize("free", [25.9 * GIB, 85.6 * GIB])
def test_m02_the_share_that_a_refusal_names_starts(free: float) -> None:
    room = Room("fake", 100 * GIB, int(free))
    with pytest.raises(DoesNotFit, match="lower it to at most") as caught:
        plan(QWEN, replace(WISH, utilization_asked=True), room)
    named = re.search(r"at most ([\d.]+),", caught.value.message)
    assert named is not None
    plan(QWEN, replace(WISH, utilization=float(named[1]), utilization_asked=True), room)


@pytest.mark.parametrize("device", [10 * GIB, 6 * GIB + 12345, 5 * GIB + 678 * 2**20])
def test_m01_the_cache_that_a_refusal_names_starts(device: int) -> None:
    room = Room("fake", device)
    with pytest.raises(DoesNotFit, match="lower --kv-cache-memory") as caught:
        plan(QWEN, replace(WISH, kv_cache_memory=9 * GIB + 2**20), room)
    named = re.search(r"at most (\w+)$", caught.value.message)
    assert named is not None
    plan(QWEN, replace(WISH, kv_cache_memory=parse_quantity(named[1])), room)


def test_m01_no_cache_fits_beside_the_weights() -> None:
    """The second could start with a smaller cache, but that would not hold the length that is asked for."""
    for wish in (replace(WISH, kv_cache_memory=GIB), replace(WISH, kv_cache_memory=9 * GIB, max_model_len=40960)):
        with pytest.raises(DoesNotFit, match="no --kv-cache-memory fits: lower --max-num-batched-tokens"):
            plan(QWEN, wish, Room("fake", (3 if wish.max_model_len is None else 10) * GIB))


def test_a_model_without_a_cache_is_not_told_of_one(t_bert: Path) -> None:
    prepared = prepare(ModelConfig(model=str(t_bert), backend="cpu"), LOADED)
    with pytest.raises(DoesNotFit, match=r"needed without a cache .* lower .*-tokens or --max-model-len"):
        plan(prepared.spec, prepared.wish, Room("fake", 2**20))


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_m02_a_share_is_above_0_and_at_most_1(t_lm: Path, share: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        engine(t_lm, memory_utilization=share)


def test_m02_the_pool_never_exceeds_what_can_be_used() -> None:
    made = plan(QWEN, replace(WISH, max_num_seqs=2, max_model_len=1024), Room("fake", 100 * GIB, 100 * GIB))
    assert made.limits.blocks == 2 * 1024 // 128 + 1


def test_what_cannot_hold_the_weights_is_refused_with_the_terms() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan(QWEN, WISH, Room("fake", 2 * GIB, 2 * GIB))
    assert "weights" in caught.value.message
    assert size(QWEN.weight_bytes("bfloat16")) in caught.value.message


def test_a_tied_head_that_is_packed_counts_twice() -> None:
    room = Room("fake", 24 * GIB, 24 * GIB)
    twice = plan(QWEN, replace(WISH, head_copied=True), room).weights - plan(QWEN, WISH, room).weights
    assert twice == QWEN.vocab_size * QWEN.hidden_size * 2


def test_terms_add_up() -> None:
    made = plan(QWEN, WISH, Room("fake", 24 * GIB, 24 * GIB))
    assert made.used == sum(made.terms.values()) == made.weights + made.working.total + made.kv
    assert made.used <= made.budget


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_seqs"),
        ({"max_model_len": 50_000}, "max_model_len"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, int], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(QWEN, replace(WISH, **settings), Room("fake", 100 * GIB))  # type: ignore[arg-type]
    assert caught.value.param == param


def test_sizes_in_words() -> None:
    assert [size(n) for n in (12, 2048, 4 * GIB, 4 * GIB + 384 * 2**20)] == ["12 B", "2 KiB", "4 GiB", "4.375 GiB"]


def test_steps_of_pooled_tasks_are_larger(t_bert: Path, t_lm: Path) -> None:
    for folder, rows in ((t_bert, 128), (t_lm, 64)):
        made = prepare(ModelConfig(model=str(folder), backend="cpu"), LOADED)
        choice = replace(made.choice, spec=replace(made.choice.spec, batched_tokens=64))
        assert wish_of(made.config, made.spec, made.task, choice).batched_tokens == rows
