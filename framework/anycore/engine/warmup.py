"""The first requests an engine ever sees are its own: they run every kind of step this model needs, and are checked."""

from __future__ import annotations

import logging

from anycore.contract.declare import Task
from anycore.engine.engine import Engine
from anycore.engine.request import Delta, FinishReason, NewRequest, PoolingParams, SamplingParams
from anycore.errors import AnycoreError, NonFiniteOutput, PluginError

ROWS = 16

log = logging.getLogger(__name__)


def warm_up(engine: Engine) -> None:
    """Run two short requests together, one of which asks for all that sampling can do, then forget them.

    Raises:
        NonFiniteOutput: an output held NaN or infinity.
        PluginError: an operation failed on the device.
        AnycoreError: a reranker gave two different inputs exactly the same score.
    """
    vocab = engine.spec.vocab_size
    length = min(ROWS, engine.limits.max_model_len - 2)
    texts = [[(7 + 3 * i + i * i) % vocab for i in range(length)], [(11 + 5 * i) % vocab for i in range(length)]]
    requests = [_request(engine.task, f"warm-up-{i}", tokens, extras=i > 0) for i, tokens in enumerate(texts)]
    deltas: list[Delta] = []
    try:
        for request in requests:
            while not engine.has_room(request):
                deltas += engine.step()
            engine.add(request)
        while engine.has_work():
            deltas += engine.step()
    except Exception as error:
        backend = engine.runner.backend
        raise PluginError(
            f"backend {backend.name} failed in the warm-up of {engine.spec.architecture} on "
            f"{engine.card.get('device')}: {type(error).__name__}: {error}. This chip, driver or kernel pack does not "
            "run what the model needs; another backend may: --backend cpu",
            param="backend",
        ) from error
    for delta in deltas:
        if delta.finish is FinishReason.ERROR:
            raise NonFiniteOutput(
                f"the warm-up failed: {delta.error}. Another --dtype (float32 has the widest range) or another "
                "backend may help"
            )
    scores = [delta.scores for delta in deltas if delta.scores is not None]
    if engine.spec.score is not None and engine.spec.score.kind == "yes_no" and scores[0] == scores[1]:
        raise AnycoreError(
            f"the reranker gives two different inputs the same score {scores[0]}: its yes and no rows are equal, "
            "so the head was read from the wrong matrix or never trained"
        )
    for operation in engine.runner.backend.fallbacks:
        log.warning("the device lacks %s: a slower stand-in computes it (op_fallback_total counts it)", operation)
    engine.reset_prefix_cache()
    engine.forget_stats()


EXTRAS = SamplingParams(
    max_tokens=2, ignore_eos=True, temperature=1, top_k=2, top_p=0.9, min_p=0.01, seed=0, repetition_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1, logit_bias={0: 0.5}, bad_words_ids=((1,),), logprobs=1,
)  # fmt: skip


def _request(task: Task, name: str, tokens: list[int], extras: bool) -> NewRequest:
    if task is Task.GENERATE:
        sampling = EXTRAS if extras else SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        return NewRequest(id=name, task=task, token_ids=tokens, sampling=sampling)
    return NewRequest(id=name, task=task, token_ids=tokens, pooling=PoolingParams())
