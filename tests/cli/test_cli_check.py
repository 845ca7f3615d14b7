"""`anycore check`: what it says is what `serve` does, reasons are complete, and every alternative holds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from anycore_echo import Script
from anycore_echo import spec as echo
from tiny_gguf import write_gguf

from anycore import plugins
from anycore.answers import Alternative, Question, read
from anycore.ask import Report, check
from anycore.cli.main import main
from anycore.config import ModelConfig
from anycore.contract.declare import DTYPES, FEATURES, BackendSpec, Level, Probe, Support, Task
from anycore.engine.launch import prepare
from anycore.errors import AnycoreError, ConfigError
from anycore.plugins import Plugins

BERT = {
    "architectures": ["XLMRobertaModel"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 514, "vocab_size": 99, "pad_token_id": 1,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 512, "vocab_size": 99, "torch_dtype": "bfloat16",
}  # fmt: skip


def folder(path: Path, config: dict[str, Any]) -> str:
    """A model without weights."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def bert(tmp_path: Path) -> str:
    return folder(tmp_path / "bert", BERT)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder(tmp_path / "llama", LLAMA)


def ask(question: Question, loaded: Plugins | None = None) -> Report:
    loaded = loaded or plugins.load(environ={"ANYCORE_PLUGINS": ""})
    return check(question, loaded, read(question, loaded))


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *words, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def installed(*specs: BackendSpec) -> Plugins:
    loaded = plugins.load(environ={"ANYCORE_PLUGINS": ""})
    return replace(loaded, backends=tuple(specs))


def test_yes_with_the_row_in_force(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    code, report = asked(capsys, bert, "--task", "rerank", "--backend", "cpu")
    assert code == 0
    assert report["supported"] is True
    (answer,) = report["answers"]
    assert answer["task"] == "rerank"
    assert answer["dtype"] == "float32"
    assert answer["row"]["attention"] == "bidirectional"
    assert answer["device"]
    assert answer["reasons"] == answer["alternatives"] == []


def test_h08_a_chip_that_is_not_here_is_answered_for(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    code, report = asked(capsys, bert, "--task", "rerank", "--backend", "ascend", "--chip", "910B")
    assert code == 0
    assert report["answers"][0]["level"] == "native"
    code, report = asked(capsys, bert, "--task", "rerank", "--backend", "ascend", "--chip", "310P")
    assert code == 3
    assert "310P" in report["answers"][0]["reasons"][0][1]
    assert {"chip 910B or 910C", "--backend cuda"} <= {
        c for a in report["answers"][0]["alternatives"] for c in a["changes"]
    }


def test_h08_a_chip_is_answered_for_by_those_who_drive_it(capsys: pytest.CaptureFixture[str], bert: str) -> None:
    """The CPU's rows for any chip made every answer a yes, of a chip that is refused and of one that is misspelt."""
    code, report = asked(capsys, bert, "--task", "rerank", "--chip", "310P")
    assert (code, [answer["backend"] for answer in report["answers"]]) == (3, ["ascend"])
    assert "--backend cuda" in {c for a in report["answers"][0]["alternatives"] for c in a["changes"]}
    code, report = asked(capsys, bert, "--chip", "sm90")
    assert (code, [answer["backend"] for answer in report["answers"]]) == (0, ["cuda"])
    assert main(["check", bert, "--chip", "sm9O"]) == 2
    assert "there is no chip 'sm9O' in any backend's table; there are sm89, sm90" in capsys.readouterr().err
    assert main(["check", bert, "--chip", "riscv", "--backend", "cpu"]) == 0


QUESTIONS = [
    {"dtype": "float16"},
    {"task": "generate"},
    {"task": "embed", "dtype": "bfloat16"},
    {"task": "embed", "max_model_len": 9000},
    {"task": "rerank", "max_model_len": 100},
    {"dtype": "bfloat16", "task": "rerank"},
]


@pytest.mark.parametrize("model", [BERT, LLAMA], ids=["encoder", "decoder"])
@pytest.mark.parametrize("given", QUESTIONS, ids=str)
def test_h08_serve_says_the_same(tmp_path: Path, model: dict[str, Any], given: dict[str, Any]) -> None:
    """Yes: it starts as far as weights. No: it is refused before, with a reason that check gives, too."""
    path = folder(tmp_path / "model", model)
    loaded = plugins.load(environ={"ANYCORE_PLUGINS": ""})
    (answer,) = ask(Question(path, backend="cpu", **given), loaded).answers
    config = ModelConfig(model=path, backend="cpu", **given)
    if answer.supported:
        prepared = prepare(config, loaded)
        assert prepared.task.value == answer.task
        assert prepared.wish.dtype == answer.dtype
        assert prepared.choice.support == answer.row
    else:
        with pytest.raises(AnycoreError) as caught:
            prepare(config, loaded)
        assert answer.reasons[0][1] in caught.value.message


def test_h08_every_task_and_type_of_every_kind_of_model(
    t_lm: Path, t_bert: Path, t_xlmr: Path, t_ce: Path, t_qrr: Path
) -> None:
    loaded = installed(plugins.load().backend("cpu"))
    verdicts = set()
    for path, task, dtype in product((t_lm, t_bert, t_xlmr, t_ce, t_qrr), Task, ("auto", *DTYPES)):
        (answer,) = ask(Question(str(path), task=task.value, dtype=dtype), loaded).answers
        config = ModelConfig(model=str(path), backend="cpu", task=task.value, dtype=dtype)
        try:
            prepare(config, loaded)
            refusal = None
        except AnycoreError as error:
            refusal = error.message
        assert answer.supported == (refusal is None)
        assert refusal is None or answer.reasons[0][1] in refusal
        verdicts.add(answer.supported)
    assert verdicts == {True, False}


def picky(**fields: Any) -> BackendSpec:
    """A backend of one row, whose device is here."""
    row = Support(
        tasks=tuple(Task),
        attention="causal",
        weights=("float32",),
        level=Level.NATIVE,
        features=("chunked_prefill", "prefix_caching"),
    )
    return replace(echo(Script(name="picky")), support=(replace(row, **fields),))


def changes(alternatives: tuple[Alternative, ...]) -> list[tuple[str, ...]]:
    return [alternative.changes for alternative in alternatives]


def test_every_row_that_refuses_says_why(llama: str) -> None:
    spec = replace(picky(), support=(*picky().support, *picky(weights=("bfloat16",), head_dims=(128,)).support))
    (answer,) = ask(Question(llama, dtype="bfloat16"), installed(spec)).answers
    assert [reason for _, reason in answer.reasons] == [
        "weights bfloat16 are not among float32",
        "head size 64 is not among 128",
    ]


@pytest.mark.parametrize(
    ("fields", "question", "first"),
    [
        ({}, {"dtype": "bfloat16"}, ("--dtype float32",)),
        ({}, {"quantization": "w8a8", "dtype": "float32"}, ("--quantization none",)),
        ({"schemes": ("w8a8",)}, {"quantization": "bits=4"}, ("--quantization w8a8",)),
        ({}, {"features": ("logprobs",)}, ("without logprobs",)),
        ({"features": ("chunked_prefill",)}, {}, ("--no-enable-prefix-caching",)),
        ({"tasks": (Task.EMBED,)}, {"task": "generate"}, ("--task embed",)),
        ({}, {"max_model_len": 513}, ("--max-model-len 512",)),
        ({}, {"dtype": "float16", "features": ("logprobs",)}, ("--dtype float32", "without logprobs")),
    ],
)
def test_the_nearest_alternative(llama: str, fields: dict[str, Any], question: dict[str, Any], first: Any) -> None:
    loaded = installed(picky(**fields))
    (answer,) = ask(Question(llama, backend="picky", **question), loaded).answers
    assert not answer.supported
    assert changes(answer.alternatives)[0] == first
    counts = [len(words) for words in changes(answer.alternatives)]
    assert counts == sorted(counts)


def test_other_backends_are_offered_only_where_one_was_named(llama: str) -> None:
    loaded = installed(picky(), plugins.load().backend("cpu"))
    named = ask(Question(llama, backend="picky", dtype="bfloat16"), loaded).answers[0]
    assert ("--backend cpu",) in changes(named.alternatives)
    every = ask(Question(llama, dtype="bfloat16"), loaded)
    assert every.supported
    assert changes(every.answers[0].alternatives) == [("--dtype float32",)]


def test_nothing_is_offered_where_nothing_helps(llama: str) -> None:
    (answer,) = ask(Question(llama), installed(picky(head_dims=(256,)))).answers
    assert answer.reasons
    assert answer.alternatives == ()


def test_a_backend_without_a_device_answers_by_its_table(llama: str) -> None:
    absent = replace(picky(chips=("c1",)), probe=lambda: Probe(reason="it is off", advice="Turn it on."))
    (answer,) = ask(Question(llama), installed(absent)).answers
    assert answer.supported
    assert answer.device is None
    assert answer.absent == "it is off"


def test_an_unknown_architecture_is_a_no_with_the_same_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, report = asked(capsys, folder(tmp_path / "odd", {**LLAMA, "architectures": ["MambaForCausalLM"]}))
    assert code == 3
    for answer in report["answers"]:
        assert "architecture MambaForCausalLM is not known" in answer["reasons"][0][1]
        assert answer["alternatives"] == []


def exit_code(words: list[str]) -> int:
    """Of a command that returns it, or ends the program with it as argparse does."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--features", "telepathy"], "there is no feature 'telepathy'"),
        (["--dtype", "float8"], "is not one of auto, float32"),
        (["--max-model-len", "many"], "must be a number"),
    ],
)
def test_wrong_usage_exits_with_2(
    bert: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert exit_code(["check", bert, *words]) == 2
    assert message in capsys.readouterr().err
    assert main(["check", "/no/such/model"]) == 2


def test_a_gguf_is_read_by_its_header(t_lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = asked(capsys, str(write_gguf(t_lm, tmp_path / "tiny.gguf")), "--backend", "cpu")
    assert code == 0
    assert report["architecture"] == "LlamaForCausalLM"


def test_weights_of_a_hub_id_are_not_fetched(monkeypatch: pytest.MonkeyPatch, bert: str) -> None:
    fetched = []

    def fetch(name: str, revision: str | None, weights: bool, progress: Any) -> Path:
        fetched.append((name, revision, weights))
        return Path(bert)

    monkeypatch.setattr("anycore.models.hub.fetch_hub", fetch)
    assert ask(Question("owner/name", backend="cpu", revision="v2")).supported
    assert fetched == [("owner/name", "v2", False)]


def test_matrix_of_a_model(bert: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--model", bert, "--format", "json", "--backend", "cpu", "--task", "embed"]) == 0
    (backend,) = json.loads(capsys.readouterr().out)["backends"]
    assert backend["support"]
    for row in backend["support"]:
        assert row["attention"] == "bidirectional"
        assert row["level"] != "unsupported"
    with pytest.raises(ConfigError):
        ask(Question(bert, features=("nothing",)))


def test_a_question_with_everything_wrong_probes_each_backend_once(llama: str) -> None:
    """Probes may take seconds, and run once; the search for alternatives asks some hundred questions."""
    loaded = plugins.load(environ={"ANYCORE_PLUGINS": ""})
    probes = []
    counted = [replace(spec, probe=lambda s=spec: probes.append(s.name) or s.probe()) for spec in loaded.backends]
    features = tuple(FEATURES) * 50
    question = Question(llama, task="embed", quantization="fp8", features=features, max_model_len=10**9)
    report = ask(question, replace(loaded, backends=tuple(counted)))
    assert not report.supported
    assert sorted(probes) == sorted(spec.name for spec in loaded.backends)
