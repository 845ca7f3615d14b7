"""Hash chains: what is taken from a prompt that began alike is what hashing would have given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anycore.engine import chains
from anycore.engine.chains import KEPT, Chain, Chains

PROMPTS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.sampled_from([None, "", "a"])), max_size=8)


@given(PROMPTS, st.sampled_from([1, 2, 3]))
def test_a_chain_is_the_same_whatever_came_before(prompts: list[tuple[list[int], str | None]], size: int) -> None:
    shared = Chains(size)
    for tokens, salt in prompts:
        alone, chain = Chain(salt), Chain(salt)
        Chains(size).extend(alone, tokens)
        shared.extend(chain, tokens)
        assert (chain.keys, chain.blocks) == (alone.keys, alone.blocks)
        assert len(chain.keys) == len(tokens) // size


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_a_chain_grows_as_if_it_had_been_made_at_once(tokens: list[int], more: list[int]) -> None:
    grown, whole, chains_ = Chain(), Chain(), Chains(2)
    chains_.extend(grown, tokens)
    chains_.extend(grown, tokens + more)
    chains_.extend(whole, tokens + more)
    assert grown.keys == whole.keys


def test_what_prompts_share_is_hashed_once(monkeypatch) -> None:
    hashed: list[bytes] = []
    hash_of = chains.hash_of
    monkeypatch.setattr(chains, "hash_of", lambda block: hashed.append(block) or hash_of(block))
    known, system = Chains(4), list(range(100))
    for i in range(5):
        known.extend(Chain(), [*system, *([200 + i] * 8)])
    assert len(hashed) == 25 + 5 * 2


def test_few_beginnings_are_kept() -> None:
    known = Chains(2)
    for i in range(3 * KEPT):
        known.extend(Chain(), [i, i])
    assert len(known._last) == KEPT
