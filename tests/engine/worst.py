"""The load that takes most memory, for tests of what a plan says of it."""

from __future__ import annotations

from engines import finish, request

from anycore.engine.engine import Engine

EXTRAS = {
    "temperature": 1.0,
    "top_k": 5,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logprobs": 3,
}
"""All that sampling can do at once."""


def ids(engine: Engine, number: int, count: int) -> list[int]:
    """Tokens that no other request begins with."""
    vocab = engine.spec.vocab_size
    return [(number + 1) % vocab, *((7 + 3 * j + number * number) % vocab for j in range(count - 1))]


def fill(engine: Engine) -> None:
    """The largest steps there can be: a prompt as long as allowed, in chunks of all rows, then as many decoding
    requests as there are seats and blocks for; or packed inputs, full ones and as many short ones as may be.
    """
    limits = engine.limits
    if not limits.blocks:
        for length in (limits.max_model_len, max(1, limits.max_num_batched_tokens // limits.max_num_seqs)):
            for i in range(2 * max(1, limits.max_num_batched_tokens // length)):
                engine.add(request(f"{length} {i}", ids(engine, i, length), engine.task))
            finish(engine)
        return
    engine.add(request("long", ids(engine, 0, limits.max_model_len - 1), max_tokens=1))
    share = (limits.blocks - 1) * limits.block_size // limits.max_num_seqs
    for i in range(limits.max_num_seqs):
        engine.add(request(f"short {i}", ids(engine, i + 1, max(1, min(share, limits.max_model_len) - 12)), **EXTRAS))
    finish(engine)
