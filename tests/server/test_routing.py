"""Which replica a request goes to, as a function of loads, blocks and what went before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anycore.engine.chains import Chain, Chains
from anycore.server.routing import MOST_BLOCKS, Holders, chain, choose, slack_of

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def keys(tokens: list[int], size: int, salt: str | None) -> list[bytes]:
    engines = Chain(salt)
    Chains(size).extend(engines, tokens)
    return engines.keys


@given(TOKENS, st.sampled_from([1, 2, 4]), st.sampled_from([None, "", "salt"]))
def test_a_prompt_has_the_hashes_that_the_engine_gives_it(tokens: list[int], size: int, salt: str | None) -> None:
    assert chain(tokens, size, salt) == keys(tokens, size, salt)


def test_of_a_long_prompt_the_first_blocks_are_looked_at() -> None:
    tokens = list(range(3 * MOST_BLOCKS))
    assert chain(tokens, 2, None) == keys(tokens[: 2 * MOST_BLOCKS], 2, None)


@given(st.data())
def test_no_choice_is_better(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    loads = data.draw(st.lists(st.none() | st.integers(0, 12), min_size=count, max_size=count))
    if all(load is None for load in loads):
        loads[0] = 0
    matches = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    slack, most = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 14))
    chosen = choose(loads, matches, slack, most, data.draw(st.integers(0, count - 1)))
    known = {i: load for i, load in enumerate(loads) if load is not None}
    least = min(known.values())
    assert least <= known[chosen] <= least + slack
    assert known[chosen] < most or known[chosen] == least
    for i, load in known.items():
        if load <= least + slack and load < most:
            assert (matches[chosen], -known[chosen]) >= (matches[i], -load) or known[chosen] == load == least


def test_equal_replicas_take_turns_and_a_busy_one_loses_its_prefix() -> None:
    assert [choose([0, 0, 0], [0, 0, 0], 1, 9, first) for first in range(3)] == [0, 1, 2]
    assert choose([2, 0], [5, 1], 2, 9) == 0
    assert choose([3, 0], [5, 1], 2, 9) == 1
    assert choose([2, 0], [5, 1], 2, 2) == 1  # it would be refused there
    assert choose([None, 9], [5, 0], 2, 9) == 1
    assert [slack_of(n) for n in (1, 4, 8, 256)] == [1, 1, 2, 64]


@given(st.lists(st.tuples(TOKENS, st.integers(0, 2), st.booleans()), max_size=30), TOKENS)
def test_holders_count_as_a_plain_record_of_all_that_was_sent_does(
    sent: list[tuple[list[int], int, bool]], asked: list[int]
) -> None:
    holders = Holders(3)
    record: list[set[bytes]] = [set(), set(), set()]
    for tokens, replica, restarted in sent:
        if restarted:
            holders.forget(replica)
            record[replica].clear()
        holders.add(chain(tokens, 2, None), replica)
        record[replica] |= set(chain(tokens, 2, None))
    hashes = chain(asked, 2, None)
    leading = [next((i for i, key in enumerate(hashes) if key not in has), len(hashes)) for has in record]
    assert holders.matches(hashes) == leading


@given(st.lists(TOKENS, max_size=30), st.integers(1, 6))
def test_holders_are_bounded_and_forget_the_ends_of_old_prompts_first(sent: list[list[int]], capacity: int) -> None:
    holders = Holders(1, capacity)
    for tokens in sent:
        hashes = chain(tokens, 2, None)
        holders.add(hashes, 0)
        assert len(holders) <= capacity
        assert holders.matches(hashes) == [min(len(hashes), capacity)]
