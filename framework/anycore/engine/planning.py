"""`anycore plan`: what a model takes on a device, here or not, how settings trade, and what to change. No torch.

Every number, setting and advice comes from `launch.fit`, which a start goes through too, so they hold at the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from anycore.config import ModelConfig, flag
from anycore.contract.declare import DTYPES, BackendSpec, Device, Probe
from anycore.contract.formats import KV_CACHES, KV_SCALE_BYTES, Format
from anycore.engine.launch import Prepared, find_model, fit
from anycore.engine.memory import MemoryPlan, Wish, largest, size, step_shape, weight_bytes, working_bytes
from anycore.errors import AnycoreError, ConfigError, DoesNotFit
from anycore.models.parameters import counted
from anycore.models.quantization import pieces
from anycore.models.source import Progress, Source
from anycore.models.spec import ModelSpec, read_spec
from anycore.plugins import Plugins

PROFILES = {"latency": (8, 0.25), "balanced": (None, 1.0), "throughput": (1024, 4.0)}
"""Sequences at once (None: the default), and the rows of a step as a multiple of the default."""

MOST_SEQS = 4096
FULL_SHARE = 0.97
"""More of a device is never advised: the runtime's own and rounding need the rest."""
LARGEST_CACHE = 2**40
"""Where the search for a cache that is large enough ends."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One model with its settings, read and ready to be planned again and again. `plugins` see the device alone."""

    config: ModelConfig
    plugins: Plugins
    source: Source
    whole: ModelSpec
    concurrency: int | None = None  # sequences of `config.max_model_len` tokens that must fit at once

    def fit(self, **changes: Any) -> Prepared:
        """Plan with some settings changed.

        Raises:
            DoesNotFit: need, have, and what is feasible.
            ConfigError, Unsupported, PluginError: the settings are wrong, whatever the memory.
        """
        concurrency = changes.pop("concurrency", self.concurrency)
        config = replace(self.config, **changes)
        if concurrency is not None:
            config = replace(config, max_num_seqs=config.max_num_seqs or concurrency)
        made = fit(config, self.plugins, self.source, self.whole)
        if made.plan is None:
            raise ConfigError(
                f"the memory of {made.choice.device.name} is not known before it is open: give --device-memory",
                param="device_memory",
            )
        if concurrency is not None and made.wish.paged:
            _check_concurrency(made, made.plan, concurrency)
        return made


def read(
    config: ModelConfig, plugins: Plugins, concurrency: int | None = None, progress: Progress | None = None
) -> Asked:
    """Read a model's small files; its weights are not fetched."""
    source = find_model(config, weights=False, progress=progress)
    whole = read_spec(source, plugins.architectures(), config.pooling)
    return Asked(config, plugins, source, whole, concurrency)


def _check_concurrency(made: Prepared, plan: MemoryPlan, concurrency: int) -> None:
    limits = plan.limits
    each = -(-limits.max_model_len // limits.block_size)
    if concurrency * each > limits.blocks - 1:
        raise DoesNotFit(
            f"{concurrency} sequences of {limits.max_model_len} tokens need "
            f"{size(concurrency * each * plan.block_bytes)} of KV cache, {size(plan.kv - plan.block_bytes)} are there "
            f"on {made.choice.device.name}: room for {(limits.blocks - 1) // each} of them",
            param="concurrency",
        )


# --- the device --------------------------------------------------------------------------------------------------


def on_device(plugins: Plugins, backend: str, name: str | None, memory: int | None, count: int = 1) -> Plugins:
    """The plugins as if there were `count` of the named device and no others; as they are where none is named.

    Raises:
        ConfigError: no device has this name, or several have it; or it has no memory.
        PluginError: there is no such backend.
    """
    if name is None and memory is None:
        return plugins
    chosen = plugins.backends if backend == "auto" else (plugins.backend(backend),)
    if memory is not None and memory < 1:
        raise ConfigError(f"--device-memory must be at least 1 byte, not {memory}", param="device_memory")
    if name is None and backend == "auto":
        raise ConfigError("--device-memory is of a device: give --device or --backend, too", param="device_memory")
    every = [(spec, device) for spec in chosen for device in known(spec)]
    wanted = _plain(name) if name is not None else chosen[0].name
    found = [pair for pair in every if _plain(pair[1].name) == wanted]
    found = found or [pair for pair in every if pair[0].name == wanted][:1]
    found = found or [pair for pair in every if wanted in _plain(pair[1].name)]
    if len({_plain(device.name) for _, device in found}) != 1:
        names = ", ".join(dict.fromkeys(device.name for _, device in found or every))
        problem = "may be one of" if found else "is not known; known are"
        raise ConfigError(f"--device {name} {problem}: {names}", param="device")
    spec, device = found[0]
    devices = tuple(replace(device, index=i, memory=device.memory if memory is None else memory) for i in range(count))
    return replace(plugins, backends=(replace(spec, probe=lambda: Probe(devices=devices)),))


def known(spec: BackendSpec) -> Iterator[Device]:
    """The devices of a backend that are here, then those it knows."""
    yield from spec.probe().devices
    yield from spec.known


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


# --- what is told about a plan --------------------------------------------------------------------------------------


def formulas(made: Prepared) -> dict[str, str]:
    """How each term comes about; those made of numbers alone can be computed as they stand."""
    assert made.plan is not None
    spec, plan, limits = made.spec, made.plan, made.plan.limits
    shape = step_shape(spec, made.wish, limits)
    own = (shape.element if shape.element < 4 else 0) + (8 if shape.ranks > 1 else 0)
    attention = f"2 * ({spec.heads} + {spec.kv_heads}) * {spec.head_dim}"
    if shape.gated:
        width = f"4 * {spec.hidden_size} + max({attention}, 3 * {spec.intermediate_size})"
    else:
        width = f"3 * {spec.hidden_size} + max({attention}, 2 * {spec.intermediate_size})"
    weights = weight_formula(spec, made.wish)
    number = f"{spec.head_dim} * {DTYPES[made.wish.dtype]}" if made.wish.kv_cache is None else None
    token = f"2 * {spec.layers} * {spec.kv_heads} * {number or f'({spec.head_dim} + {KV_SCALE_BYTES})'}"
    plain = plan.block_bytes == plan.kv_token_bytes * limits.block_size
    backend = made.choice.spec.name
    found = {
        "weights": weights,
        "kv_cache": f"{limits.blocks} * " + (f"{limits.block_size} * {token}" if plain else str(plan.block_bytes)),
        "activations": f"{limits.max_num_batched_tokens} * {shape.element} * ({width})",
        "logits": f"{shape.vocab} * ({12 + own} * {limits.max_num_seqs} + 48 * min({limits.max_num_seqs}, 64))",
        "workspace": f"{backend}: masks, copies and scratch memory of its operations, by its own formula",
        "graphs": f"{backend}: captured decode steps, by its own formula",
        "runtime": f"{backend}: the open device and its libraries",
        "margin": "for what no formula counts",
    }
    return {term: found[term] for term, number in plan.terms.items() if number}


def weight_formula(spec: ModelSpec, wish: Wish) -> str:
    """The bytes of weights: a term for what is dense, for what stays in float32, and for each format."""
    element = DTYPES[wish.dtype]
    counts = Counter[Format | None]()
    held = Counter[Format | None]()
    exact = 0
    for piece in (piece for parameter in counted(spec) for piece in pieces(parameter, wish.quantization)):
        counts[piece.format] += prod(piece.shape)
        held[piece.format] += piece.bytes(wish.dtype)
        exact += prod(piece.shape) if piece.parameter.exact else 0
    terms = [f"{counts.pop(None, 0)} * {element}"]
    terms += [f"{exact} * {4 - element}"] if element < 4 else []  # norms stay in float32
    for kind, count in counts.items():
        assert kind is not None
        whole = count // 2 if kind.kind == "int4" else count
        terms.append(f"{whole} + {held[kind] - whole}")  # numbers, and their scales and zero points
    if weight_bytes(spec, wish) > spec.weight_bytes(wish.dtype, wish.quantization):
        terms.append(f"{spec.vocab_rows} * {spec.hidden_size} * {element}")  # the head, packed
    return " + ".join(terms)


def knobs(made: Prepared) -> dict[str, dict[str, int]]:
    """What one step of each setting costs or gives, in bytes and in tokens of the cache."""
    assert made.plan is not None
    plan, limits = made.plan, made.plan.limits
    total = made.choice.device.memory or 0

    def more(**changes: int) -> int:
        other = replace(limits, **changes)
        return working_bytes(made.spec, made.wish, other).total - plan.working.total

    found = {
        "1024 more batched tokens": more(max_num_batched_tokens=limits.max_num_batched_tokens + 1024),
        "one more sequence": more(max_num_seqs=limits.max_num_seqs + 1),
    }
    if made.wish.paged:
        each = -(-limits.max_model_len // limits.block_size)
        found[f"one more sequence, with {limits.max_model_len} tokens"] = (
            found.pop("one more sequence") + each * plan.block_bytes
        )
        found["1024 more tokens of one sequence"] = 1024 * plan.block_bytes // limits.block_size
        found["1024 more tokens of length allowed"] = more(max_model_len=limits.max_model_len + 1024)
    found["0.01 more of the device"] = -total // 100
    per_token = plan.kv_token_bytes
    return {name: {"bytes": n, **({"tokens": n // per_token} if per_token else {})} for name, n in found.items()}


def most_at_once(asked: Asked) -> int | None:
    """The largest number of sequences of full length that fit together; None without a cache."""
    made = asked.fit(concurrency=None)
    assert made.plan is not None
    if not made.wish.paged:
        return None
    length = made.plan.limits.max_model_len
    return largest(MOST_SEQS, lambda count: _fits(asked, **_seats(asked, count, made, max_model_len=length)))


def _seats(asked: Asked, count: int, made: Prepared, **changes: Any) -> dict[str, Any]:
    """Settings for so many sequences at once: each needs a row of the step, too."""
    assert made.plan is not None
    rows = max(count, made.plan.limits.max_num_batched_tokens)
    return {"concurrency": count, "max_num_seqs": count, "max_num_batched_tokens": rows, **changes}


def _fits(asked: Asked, **changes: Any) -> bool:
    try:
        asked.fit(**changes)
    except DoesNotFit:
        return False
    return True


def profiles(asked: Asked) -> dict[str, tuple[dict[str, int], Prepared]]:
    """Three feasible settings: flags and the plan. What the user has set stays as it is."""
    base = asked.fit()
    assert base.plan is not None
    found = {}
    for name, (seqs, factor) in PROFILES.items():
        rows = max(1, int(base.plan.limits.max_num_batched_tokens * factor))
        if not base.wish.paged:
            rows = max(rows, base.plan.limits.max_model_len)
        wanted = {"max_num_seqs": seqs or base.plan.limits.max_num_seqs, "max_num_batched_tokens": rows}
        made = _shrunk(asked, wanted, roomy=name == "throughput") or _shrunk(asked, wanted, roomy=False)
        if made is not None:
            found[name] = made
    return found


def _shrunk(asked: Asked, wanted: dict[str, int], roomy: bool) -> tuple[dict[str, int], Prepared] | None:
    """The settings, halved until they fit; `roomy`: with a cache no smaller than the working memory, since large steps
    are worth nothing without sequences to fill them.
    """
    given = {name: getattr(asked.config, name) for name in wanted}
    floor = asked.concurrency or 1
    while True:
        flags = {name: given[name] or value for name, value in wanted.items()}
        flags["max_num_seqs"] = max(floor, min(flags["max_num_seqs"], flags["max_num_batched_tokens"]))
        flags["max_num_batched_tokens"] = max(flags.values())
        try:
            made = asked.fit(**flags)
            assert made.plan is not None
            if not (roomy and made.wish.paged and made.plan.kv < made.plan.working.total):
                return {name: value for name, value in flags.items() if given[name] is None}, made
        except ConfigError:  # DoesNotFit is one, and rows below what cannot be split
            pass
        smaller = {name: max(1, value // 2) for name, value in wanted.items()}
        if smaller == wanted:
            return None
        wanted = smaller


# --- what does not fit ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Advice:
    """A change that has been planned and fits."""

    text: str
    used: int
    budget: int


def advice(asked: Asked, everywhere: Plugins) -> list[Advice]:
    """Single changes that make it fit, those that lose least first; `everywhere` has the other devices."""
    found = []
    for text, changes in _changes(asked):
        try:
            made = asked.fit(**changes)
        except AnycoreError:
            continue
        assert made.plan is not None
        found.append(Advice(text, made.plan.used, made.plan.budget))
    return [*found, *_larger_device(asked, everywhere)]


def _changes(asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each setting, as far from what was asked for as it has to be and no farther."""
    config = asked.config
    if config.kv_cache_memory is None:
        hundredths = largest(int(100 * FULL_SHARE), lambda n: n > 0 and not _ok(asked, memory_utilization=n / 100)) + 1
        if hundredths <= 100 * FULL_SHARE:
            yield f"--memory-utilization {hundredths / 100:g}", {"memory_utilization": hundredths / 100}
    else:
        mib = largest(config.kv_cache_memory >> 20, lambda n: n == 0 or _ok(asked, kv_cache_memory=n << 20))
        if not mib:  # it is too small, not too large
            mib = largest(LARGEST_CACHE >> 20, lambda n: n == 0 or _too_small(asked, n << 20)) + 1
        if _ok(asked, kv_cache_memory=mib << 20):
            yield f"--kv-cache-memory {mib}MiB", {"kv_cache_memory": mib << 20}
    if config.max_model_len is not None:
        step = 256
        length = step * largest(config.max_model_len // step, lambda n: _ok(asked, max_model_len=n * step))
        if length:
            yield f"{_word(asked, 'context', 'max_model_len')} {length}", {"max_model_len": length}
    for name in ("concurrency", "max_num_seqs", "max_num_batched_tokens"):
        value = asked.concurrency if name == "concurrency" else getattr(config, name)
        if value is None and name == "max_num_batched_tokens":
            value = 4096
        count = largest((value or 1) - 1, lambda n, name=name: _ok(asked, **{name: n}))  # type: ignore[misc]
        if value is not None and count:
            yield f"{flag(name)} {count}", {name: count}
    if config.dtype in ("auto", "float32"):
        yield "--dtype bfloat16", {"dtype": "bfloat16"}
    if config.kv_cache_dtype == "auto":  # where there is no cache it changes nothing, and is not advised
        yield from ((f"--kv-cache-dtype {kind}", {"kv_cache_dtype": kind}) for kind in KV_CACHES)
    if config.quantization in ("auto", "none") and asked.whole.stored is None:
        yield from ((f"--quantization {scheme}", {"quantization": scheme}) for scheme in ("w8a8", "w4a16"))


def _ok(asked: Asked, **changes: Any) -> bool:
    try:
        asked.fit(**changes)
    except ConfigError:
        return False
    return True


def _too_small(asked: Asked, cache: int) -> bool:
    """Whether a cache of so many bytes does not hold what it should, rather than more than the device has."""
    try:
        asked.fit(kv_cache_memory=cache)
    except DoesNotFit as error:
        return error.param != "kv_cache_memory"
    return False


def _word(asked: Asked, short: str, name: str) -> str:
    return flag(short) if asked.concurrency is not None else flag(name)


def _larger_device(asked: Asked, everywhere: Plugins) -> Iterator[Advice]:
    """The smallest of the known devices that it fits on."""
    devices = [(device.memory or 0, spec, device) for spec in everywhere.backends for device in spec.known]
    for _, spec, device in sorted(devices, key=lambda entry: entry[0]):
        other = on_device(everywhere, spec.name, device.name, None, asked.config.tensor_parallel_size)
        try:
            made = replace(asked, plugins=other, config=replace(asked.config, backend="auto")).fit()
        except AnycoreError:
            continue
        assert made.plan is not None
        yield Advice(f"--device {device.name}", made.plan.used, made.plan.budget)
        return


# --- several models on one device -------------------------------------------------------------------------------------


def share(models: Sequence[Asked]) -> list[Asked]:
    """Give each model the least that it needs, and what is left over in equal parts to those that keep a cache.

    What the user has given a model, a share or a cache, it has: that is held against the whole device.

    Raises:
        DoesNotFit: all of it is more than the device, or what is to be divided more than is left for it.
    """
    firsts = [asked.fit(**({} if _is_given(asked) else {"memory_utilization": 1.0})) for asked in models]
    parts = [_part_given(asked, made) or _least_share(asked) for asked, made in zip(models, firsts, strict=True)]
    given = [_is_given(asked) for asked in models]
    fixed = sum(part for part, fix in zip(parts, given, strict=True) if fix)
    usual = min(made.choice.spec.memory_utilization for made in firsts)
    whole = 1.0 if all(given) else min(1.0, fixed + usual)
    if round(sum(parts), 3) > whole:
        each = ", ".join(f"{a.config.model} {part:.3f}" for a, part in zip(models, parts, strict=True))
        raise DoesNotFit(
            f"together these models need {sum(parts):.3f} of {firsts[0].choice.device.name}, {whole:g} is to be had: "
            f"{each}. Serve fewer of them, or lower --max-num-batched-tokens",
            param="memory_utilization",
        )
    grows = [made.wish.paged and not fix for made, fix in zip(firsts, given, strict=True)]
    extra = int(1000 * max(0.0, max(usual, fixed) - sum(parts)) / max(1, sum(grows))) / 1000
    shares = [round(part + extra * more, 3) for part, more in zip(parts, grows, strict=True)]
    return [
        a if fix else replace(a, config=replace(a.config, memory_utilization=part))
        for a, part, fix in zip(models, shares, given, strict=True)
    ]


def _is_given(asked: Asked) -> bool:
    """Whether the user has set what the model has of the device."""
    return asked.config.memory_utilization is not None or asked.config.kv_cache_memory is not None


def _part_given(asked: Asked, made: Prepared) -> float | None:
    """That as a part of the device, None if it is for us to set."""
    assert made.plan is not None
    if not _is_given(asked):
        return None
    if asked.config.kv_cache_memory is None:
        return asked.config.memory_utilization
    return -(-1000 * made.plan.used // (made.choice.device.memory or 1)) / 1000


def _least_share(asked: Asked) -> float:
    return (largest(1000, lambda n: n == 0 or not _ok(asked, memory_utilization=n / 1000)) + 1) / 1000
