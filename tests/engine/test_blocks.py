"""The block pool by itself: ownership, eviction order and prefix hits."""

from __future__ import annotations

from anycore.engine import chains
from anycore.engine.blocks import BlockPool
from anycore.engine.chains import Chain


def chain(pool: BlockPool, tokens: list[int], salt: str | None = None) -> Chain:
    made = Chain(salt)
    pool.extend(made, tokens)
    return made


def match(pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[int]:
    """The blocks of the tokens that are found, be there as many as there may."""
    return pool.match(chain(pool, tokens, salt), len(tokens))


def publish(pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[int]:
    """Take blocks for `tokens`, make the full ones findable, and return them still owned."""
    taken = pool.take(pool.blocks_for(len(tokens)))
    made = chain(pool, tokens, salt)
    for i in range(len(made.keys)):
        pool.publish(taken[i], made, i)
    return taken


def test_a_prefix_is_found_after_its_owner_left() -> None:
    pool = BlockPool(9, 4)
    owned = publish(pool, list(range(10)))
    pool.release(owned)
    assert match(pool, [0, 1, 2, 3, 4, 5, 6, 7, 99]) == owned[:2]
    pool.check()


def test_salt_separates_equal_prefixes() -> None:
    pool = BlockPool(9, 4)
    tokens = list(range(8))
    pool.release(publish(pool, tokens, salt="a"))
    assert match(pool, tokens, "b") == []
    assert match(pool, tokens) == []
    assert len(match(pool, tokens, "a")) == 2


def test_empty_salt_is_a_salt() -> None:
    assert Chain("").root != Chain(None).root


def test_a_hash_collision_does_not_hit(monkeypatch) -> None:
    monkeypatch.setattr(chains, "hash_of", lambda block: b"same")
    pool = BlockPool(9, 4)
    pool.release(publish(pool, [1, 2, 3, 4]))
    assert match(pool, [5, 6, 7, 8]) == []
    assert len(match(pool, [1, 2, 3, 4])) == 1


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    pool = BlockPool(7, 2)
    old, new = [1, 2, 3, 4], [5, 6, 7, 8]
    pool.release(publish(pool, old))
    pool.release(publish(pool, new))
    pool.take(3)  # two were empty; the third comes from the tail of `old`
    assert len(match(pool, old)) == 1
    assert len(match(pool, new)) == 2
    pool.check()


def test_sharing_takes_a_cached_block_off_the_free_list() -> None:
    pool = BlockPool(5, 2)
    owned = publish(pool, [1, 2])
    pool.release(owned)
    assert pool.free == 4
    pool.share(owned)
    assert pool.free == 3
    pool.share(owned)
    pool.release(owned)
    assert pool.free == 3
    pool.release(owned)
    assert pool.free == 4
    pool.check()


def test_expectations_count_their_requests() -> None:
    pool = BlockPool(5, 2)
    keys = chain(pool, [1, 2]).keys
    pool.expect(keys)
    pool.expect(keys)
    pool.settle(keys)
    assert pool.is_coming(keys[0])
    pool.settle(keys)
    assert not pool.is_coming(keys[0])


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(5, 2, caching=False)
    pool.release(publish(pool, [1, 2]))
    assert match(pool, [1, 2]) == []
