"""Writes the parts of the documentation that the program knows better: tables of flags, hooks, routes and the matrix.

A part stands between `<!-- begin NAME -->` and `<!-- end NAME -->` in a page that people write. `--check` writes
nothing and fails when a part is out of date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from anycore import hookspecs, plugins
from anycore.answers import Model, Question
from anycore.ask import check as ask
from anycore.cli import check
from anycore.cli import main as command
from anycore.config import ENVIRONMENT, ServerConfig
from anycore.contract.backend import Backend, Memory
from anycore.contract.declare import FEATURES, BackendSpec, Device, Need, Probe, Task, explain
from anycore.contract.ops import Ops
from anycore.engine.request import MAX_LOGIT_BIAS, MAX_N, MAX_STOP, MAX_STOP_TOKEN_IDS, RequestRecord
from anycore.models import companions, families
from anycore.models.source import Source
from anycore.models.spec import read_spec
from anycore.server import protocol, protocol_generate, protocol_pool
from anycore.server.app import create_app
from anycore.server.gate import MAX_DEPTH, MAX_HEADERS
from anycore.server.http import MAX_HEADER_BYTES
from anycore.server.protocol_messages import MAX_MESSAGES
from anycore.server.series import GROUPS, MODEL, PREFIX
from anycore.text.replies.formats import REASONING_FORMATS, TOOL_FORMATS
from anycore_ascend.versions import RELEASES

ROOT = Path(__file__).parent.parent
PART = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
SAMPLING = "sampling (default: the model's own)"
SHARED = ("model", "server", SAMPLING)
"""Groups of flags that several commands have, listed once."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is out of date")
    check = parser.parse_args().check
    stale = {path: text for path in pages() if (text := fresh(path)) != path.read_text(encoding="utf-8")}
    for path, text in stale.items():
        print(path.relative_to(ROOT), "is out of date" if check else "written")
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print("run ci/generate_docs.py")
    return int(check and bool(stale))


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fresh(path: Path) -> str:
    """Return a page's text with its generated parts made anew."""
    text = path.read_text(encoding="utf-8")
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


# --- the parts ---------------------------------------------------------------------------------------------------


def commands() -> str:
    """Every sub-command with its own flags; groups that several share are listed by `flags`."""
    out = []
    for name, summary in command.COMMANDS.items():
        out.append(f"## anycore {name}")
        if name == "version":  # the main module answers
            out.append(f"{summary[0].upper()}{summary[1:]}.")
            continue
        parser = command.parser_of(name)
        description = inspect.cleandoc(parser.description or "")
        groups = {group.title: group._group_actions for group in parser._action_groups}
        shared = [title for title in SHARED if groups.get(title)]
        own = [a for title, actions in groups.items() if title not in SHARED for a in actions if a.dest != "help"]
        out.append(f"{description}\n\n```\n{parser.usage}\n```")
        out += [flag_table(own)] if own else []
        links = [f"[{plain(title)}](#{plain(title)}-flags)" for title in shared]
        out += [f"Also takes the {' and '.join(links)} flags."] if links else []
    return "\n\n".join(out)


def flags(name: str, title: str) -> Callable[[], str]:
    """The flags of one shared group, from a command that has all of them."""

    def part() -> str:
        groups = {group.title: group._group_actions for group in command.parser_of(name)._action_groups}
        return flag_table(groups[title])

    return part


def hooks() -> str:
    """Every hook: its signature, what its docstring says, and the fields of what goes through it."""
    out = []
    for name, function in inspect.getmembers(hookspecs, inspect.isfunction):
        if function.__module__ == hookspecs.__name__ and hasattr(function, "anycore_spec"):
            signature = str(inspect.signature(function)).replace("'", "")
            out.append(f"## {name}\n\n```python\ndef {name}{signature}: ...\n```\n\n{inspect.getdoc(function)}")
    return "\n\n".join(out)


def reply_formats() -> str:
    """The formats of tool calls and reasoning: what their module says of them, or their marks."""
    rows = [(f"`{form.name}`", "calls", summary(sys.modules[type(form).__module__])) for form in TOOL_FORMATS]
    for form in REASONING_FORMATS:
        rows.append((f"`{form.name}`", "reasoning", f"`{form.start.strip()}` … `{form.end}`"))
    return table(("name", "of", "form"), rows)


def summary(thing: Any) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def methods(owner: type[Any]) -> Callable[[], str]:
    """What a backend author may override: each public method of a contract class and the first sentence on it."""

    def part() -> str:
        rows = []
        for name, function in vars(owner).items():
            if inspect.isfunction(function) and not name.startswith("_"):
                names = list(inspect.signature(function).parameters)[1:]
                text = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
                rows.append((f"`{name}({', '.join(names)})`", text))
        return table(("method", "meaning"), rows)

    return part


def record_fields() -> str:
    hints = inspect.get_annotations(RequestRecord)
    rows = [(f"`{item.name}`", f"`{hints[item.name]}`") for item in msgspec.structs.fields(RequestRecord)]
    return table(("field", "type"), rows)


def spec_fields() -> str:
    return table(("field", "type"), [(f"`{item.name}`", f"`{item.type}`") for item in fields(BackendSpec)])


def environment() -> str:
    return table(("variable", "meaning"), [(f"`{name}`", text) for name, text in ENVIRONMENT.items()])


def features() -> str:
    return table(("word", "meaning"), [(f"`{name}`", text) for name, text in FEATURES.items()])


def metrics() -> str:
    """Every series, by what it is about; labels beside the four that all series of a model have."""
    out = []
    for title, group in GROUPS.items():
        rows = []
        for series in group:
            own = series.labels[len(MODEL) :] if series.labels[: len(MODEL)] == MODEL else series.labels
            labels = ", ".join(f"`{label}`" for label in own)
            rows.append((f"`{series.exposed}`", series.kind, labels, "yes" if series.vllm else "", series.text))
        out += [f"## {title}", table(("series", "type", "further labels", "vLLM's", "meaning"), rows)]
    return "\n\n".join(out)


def buckets() -> str:
    """The bounds of each kind of histogram, once."""
    found: dict[tuple[float, ...], list[str]] = {}
    for series in (series for group in GROUPS.values() for series in group if series.buckets):
        found.setdefault(series.buckets, []).append(f"`{series.name.removeprefix(PREFIX)}`")
    return table(("bounds", "histograms"), [(", ".join(f"{b:g}" for b in k), ", ".join(v)) for k, v in found.items()])


def old_names() -> str:
    series = [series for group in GROUPS.values() for series in group]
    return table(("vLLM's earlier name", "series"),
                 [(f"`vllm:{name}`", f"`{each.name}`") for each in series for name in each.older])  # fmt: skip


def routes() -> str:
    """Every route of the server, its aliases on one line."""
    found: dict[str, list[str]] = {}
    for path, methods in create_app(ServerConfig(), []).openapi()["paths"].items():
        for method, operation in methods.items():
            if method != "head":
                text = operation.get("description") or operation["summary"]
                found.setdefault(f"{method.upper()}|{operation.get('tags')}|{text}", []).append(path)
    rows = []
    for key, paths in found.items():
        method, _, text = key.split("|", 2)
        rows.append((method, ", ".join(f"`{path}`" for path in paths), " ".join(text.split())))
    return table(("", "route", ""), rows)


def limits() -> str:
    """What one HTTP request may hold, and what it is answered with beyond that."""
    body = f"{ServerConfig().max_body_size:,} bytes (`--max-body-size`)"
    rows = [
        ("headers", f"{MAX_HEADERS}", "431 `headers_too_large`"),
        ("headers, with the request line", f"{MAX_HEADER_BYTES:,} bytes", "400 `invalid_http`"),
        ("body", body, "413 `request_too_large`"),
        ("nesting of the body", f"{MAX_DEPTH} levels", "400 `nested_too_deeply`"),
        (
            "time for headers, then for each 16 KiB of body",
            f"{ServerConfig().read_timeout:g} s",
            "408 `request_timeout`",
        ),
    ]
    arrays = {
        "`prompt`, `input`, `documents`": f"{protocol.MAX_INPUTS:,} entries",
        "`messages`": f"{MAX_MESSAGES:,} entries",
        "`tokens` to detokenize": f"{protocol_pool.MAX_IDS:,} ids",
        "`stop`": f"{MAX_STOP} strings of {protocol_generate.MAX_TEXT:,} characters",
        "`stop_token_ids`": f"{MAX_STOP_TOKEN_IDS} ids",
        "`bad_words`": f"{protocol_generate.MAX_BAD_WORDS} strings of {protocol_generate.MAX_TEXT:,} characters",
        "`logit_bias`": f"{MAX_LOGIT_BIAS} ids",
        "`n`": f"{MAX_N}",
        "`prompt` × `n`": f"{ServerConfig().max_request_sequences:,} sequences (`--max-request-sequences`)",
    }
    rows += [(what, limit, "400, naming the field") for what, limit in arrays.items()]
    return table(("of a request", "at most", "beyond it"), rows)


NONE_IF_EMPTY = ("schemes", "kv_caches", "features")
"""Fields of Support that mean "none" where others mean "any"."""


def matrix(*columns: str) -> Callable[[], str]:
    """The capability matrix of the backends of the house; `columns` are fields of Support."""

    def part() -> str:
        rows = []
        for spec in house().backends:
            for row in spec.support:
                cells = [cell(getattr(row, column)) for column in columns]
                nothing = [column in NONE_IF_EMPTY and not getattr(row, column) for column in columns]
                rows.append([spec.name, *("-" if none else text for none, text in zip(nothing, cells, strict=True))])
        return table(("backend", *(column.replace("_", " ").replace("kv", "KV") for column in columns)), rows)

    return part


def ascend_versions() -> str:
    rows = [(row.cann, f"{row.driver} or newer", row.pythons, ", ".join(row.torch_npu)) for row in RELEASES]
    return table(("CANN", "driver (Ascend HDK)", "Python", "torch_npu built for it"), rows)


def refusal() -> str:
    """What a need that no row covers is answered with."""
    need = Need(Task.GENERATE, "causal", "LlamaForCausalLM", "float16", head_dim=64)
    return f"```text\n{explain(house().backend('cpu').support[:4], need)}\n```"


def bge_m3(chip: str) -> Callable[[], str]:
    """What `anycore check` says of BAAI/bge-m3 as a reranker on an Ascend chip, from a machine without one."""

    def part() -> str:
        source = BgeM3("BAAI/bge-m3", ROOT)
        question = Question(source.name, task="rerank", backend="ascend", chip=chip)
        with tempfile.TemporaryDirectory() as empty, patch.dict(os.environ, {"ANYCORE_CACHE": empty}):
            report = ask(question, no_devices(), Model(source, read_spec(source)))
        command = f"anycore check {source.name} --task rerank --backend ascend --chip {chip}"
        output = "\n".join(check.text(report))
        return f"```sh\n{command}\n```\n\n```text\n{output}\n```"

    return part


class BgeM3(Source):
    """The small files of BAAI/bge-m3, as far as they are read."""

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["XLMRobertaModel"],
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "max_position_embeddings": 8194,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "pad_token_id": 1,
            "torch_dtype": "float32",
            "type_vocab_size": 1,
            "vocab_size": 250002,
        }

    def read_json(self, name: str) -> Any | None:
        kind = "sentence_transformers.models"
        return {
            "modules.json": [
                {"type": f"{kind}.Transformer", "path": ""},
                {"type": f"{kind}.Pooling", "path": "1_Pooling"},
                {"type": f"{kind}.Normalize", "path": "2_Normalize"},
            ],
            "1_Pooling/config.json": {"word_embedding_dimension": 1024, "pooling_mode_cls_token": True},
            "sentence_bert_config.json": {"max_seq_length": 8192},
        }.get(name)


def no_devices() -> plugins.Plugins:
    """The house's backends on a laptop: a processor, nothing else, and no reports, which every change outdates."""
    laptop = Probe(devices=(Device(0, "a processor", "x86"),))
    absent = Probe(reason="no device on this machine")
    found = house()

    def seen(probe: Probe) -> Callable[[], Probe]:
        return lambda: probe

    backends = [
        replace(spec, evidence=None, probe=seen(laptop if spec.name == "cpu" else absent)) for spec in found.backends
    ]
    return replace(found, backends=tuple(backends))


def architectures() -> str:
    """Every architecture: what `config.json` must name, and what a checkpoint without further files is served for."""
    rows = []
    for name in families.ARCHITECTURES:
        source = Sample(name)
        spec = companions.apply(families.read(source.config()), source, source.config())
        pooling = spec.pooling.kind if spec.pooling else ""
        score = spec.score.kind if spec.score else ""
        tasks = cell(spec.tasks)
        rows.append((f"`{name}`", spec.family, spec.attention, tasks, pooling, score))
    heads = ("architecture", "class", "attention", "tasks, the first by default", "pooling without files", "score")
    return table(heads, rows)


class Sample(Source):
    """A checkpoint that is nothing but a small config.json."""

    def __init__(self, architecture: str) -> None:
        super().__init__(architecture, ROOT)

    def config(self) -> dict[str, Any]:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
        return {
            "architectures": [self.name],
            "vocab_size": 99,
            "max_position_embeddings": 512,
            "num_labels": 1,
            **sizes,
        }

    def read_json(self, name: str) -> Any | None:
        return None


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
BGE_M3 = {
    "architectures": ["XLMRobertaModel"], "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "vocab_size": 250002, "max_position_embeddings": 8194, "layer_norm_eps": 1e-5,
    "hidden_act": "gelu", "type_vocab_size": 1, "pad_token_id": 1, "torch_dtype": "float32",
}  # fmt: skip
SHOWN = {"Llama-3.1-8B": LLAMA_8B, "bge-m3": BGE_M3}
"""What plans are shown for: the numbers that these models' config.json files carry."""


def planned(words: str) -> Callable[[], str]:
    """What `anycore plan` prints, for models of which there is nothing but a config.json."""

    def part() -> str:
        with tempfile.TemporaryDirectory() as folder:
            for name, config in SHOWN.items():
                (Path(folder) / name).mkdir()
                (Path(folder) / name / "config.json").write_text(json.dumps(config))
            line = [str(Path(folder) / word) if word in SHOWN else word for word in words.split()]
            with redirect_stdout(StringIO()) as printed:
                code = command.main(["plan", *line])
            text = printed.getvalue().replace(f"{folder}/", "").rstrip()
        return f"```console\n$ anycore plan {words}\n{text}\n$ echo $?\n{code}\n```"

    return part


def known_devices() -> str:
    rows = [
        (f"`{device.name}`", spec.name, f"`{device.chip}`", f"{(device.memory or 0) / 2**30:.1f} GiB")
        for spec in house().backends
        for device in spec.known
    ]
    return table(("device", "backend", "chip", "memory"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "model-flags": flags("serve", "model"),
    "server-flags": flags("serve", "server"),
    "sampling-flags": flags("chat", SAMPLING),
    "hooks": hooks,
    "record-fields": record_fields,
    "reply-formats": reply_formats,
    "spec-fields": spec_fields,
    "operations": methods(Ops),
    "memory": methods(Memory),
    "backend": methods(Backend),
    "environment": environment,
    "features": features,
    "metrics": metrics,
    "buckets": buckets,
    "old-names": old_names,
    "routes": routes,
    "limits": limits,
    "matrix": matrix(
        "tasks", "attention", "weights", "schemes", "kv_caches", "block_sizes", "features", "chips", "level", "note"
    ),
    "matrix-short": matrix("tasks", "attention", "weights", "schemes", "kv_caches", "chips", "level", "note"),
    "refusal": refusal,
    "bge-m3-910b": bge_m3("910B"),
    "bge-m3-310p": bge_m3("310P"),
    "ascend-versions": ascend_versions,
    "architectures": architectures,
    "known-devices": known_devices,
    "plan-users": planned("Llama-3.1-8B --device 4090 --context 8192"),
    "plan-too-many": planned("Llama-3.1-8B --device 4090 --context 8192 --concurrency 16"),
    "plan-encoder": planned("bge-m3 --device 910b --dtype float16"),
    "plan-shared": planned("Llama-3.1-8B bge-m3 --device a100-80gb --dtype bfloat16"),
}

# --- Markdown ----------------------------------------------------------------------------------------------------


def flag_table(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        value = str(action.metavar) if action.metavar and action.nargs != 0 else ""
        if action.option_strings:
            value = f" `{value}`" if value else ""
            name = ", ".join(f"`{spelling}`" for spelling in action.option_strings) + value
        else:
            name = f"`{value or action.dest}`"
        rows.append((name, (action.help or "").replace("%%", "%")))
    return table(("", ""), rows)


def house() -> plugins.Plugins:
    """The plugins of anycore itself, whatever else is installed."""
    return plugins.load(environ={"ANYCORE_PLUGINS": ""})


def cell(value: Any) -> str:
    """Write a field of a support row."""
    if isinstance(value, Enum):
        return str(value.value)
    return ", ".join(map(cell, value)) or "any" if isinstance(value, tuple) else str(value)


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def plain(title: str) -> str:
    """A group's title without its remark."""
    return title.split(" (")[0]


if __name__ == "__main__":
    sys.exit(main())
