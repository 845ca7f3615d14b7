"""Every kind of input against the tokens Hugging Face makes of it, and every length against its limit."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny_gguf import write_gguf
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from anycore.errors import BadRequest, ConfigError, ContextLengthExceeded, Unsupported
from anycore.models.source import Source, locate
from anycore.models.spec import ModelSpec, PoolingSpec, ScoreSpec, read_spec
from anycore.text.draft import Draft, Rendered
from anycore.text.render import Renderer
from anycore.text.rerank_profiles import PROFILES, RerankProfile, profile_of
from anycore.text.tokenizer import Tokenizer

QWEN3 = PROFILES[0]
USER = [{"role": "user", "content": "Hi there"}]


def renderer(folder: Path, length: int = 512, spec: dict[str, Any] | None = None, **options: Any) -> Renderer:
    source = Source(str(folder), folder)
    return Renderer(source, replace(read_spec(source), **(spec or {})), length, **options)


def one(ours: Renderer, draft: Callable[..., Draft | Rendered], *args: Any, **options: Any) -> Rendered:
    (rendered,) = ours.each(lambda inputs: draft(*inputs, **options), [args])
    return rendered


def embedding_of(ours: Renderer, *args: Any, **options: Any) -> Rendered:
    return one(ours, ours.pooled.embedding, *args, **options)


def pair_of(ours: Renderer, *args: Any, **options: Any) -> Rendered:
    return one(ours, ours.pooled.pair, *args, **options)


def query_of(ours: Renderer, *args: Any, **options: Any) -> Rendered:
    return one(ours, ours.pooled.query, *args, **options)


def document_of(ours: Renderer, *args: Any, **options: Any) -> Rendered:
    return one(ours, ours.pooled.document, *args, **options)


@pytest.fixture(scope="module")
def lm(t_lm: Path) -> Renderer:
    return renderer(t_lm)


@pytest.fixture(scope="module")
def qrr(t_qrr: Path) -> Renderer:
    return renderer(t_qrr)


# --- prompts and chats --------------------------------------------------------------------------------------------


def test_a13_completions_equal_hugging_face(lm: Renderer, t_lm: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(t_lm)
    for text in ("Hello, world", "<|begin|>Hello", "🫠 щ"):
        assert lm.text(text).token_ids == theirs(text)["input_ids"]
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert lm.text(text, add_special_tokens=False).token_ids == plain


def test_a13_a_doubled_bos_warns_once(t_lm: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh = renderer(t_lm)
    with caplog.at_level(logging.WARNING, "anycore"):
        fresh.text("plain")
        fresh.text("<|begin|>Hello", add_special_tokens=False)
        fresh.chat(USER)
        assert not caplog.records
        fresh.text("<|begin|>Hello")
        fresh.text("<|begin|>Hello again")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "two BOS" in caplog.text


@pytest.mark.parametrize("begins", [True, False])
def test_a13_chats_equal_hugging_face(begins: bool, tmp_path: Path) -> None:
    template = tiny.CHAT_TEMPLATE if begins else tiny.CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    folder = tiny.tiny_lm(tmp_path, layers=1, chat_template=template)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = renderer(folder)
    for chat in (USER, [*USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "<|begin|>"}]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert ours.chat(chat, add_generation_prompt=prompt).token_ids == expected
    ids = ours.chat(USER).token_ids
    assert ids.count(ours.tokenizer.bos_id) == begins
    assert ours.chat(USER, add_special_tokens=True).token_ids == [ours.tokenizer.bos_id, *ids]


def test_a08_forms_of_content_give_equal_tokens(lm: Renderer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi there"}]}]
    assert lm.chat(parts) == lm.chat(USER)
    with pytest.raises(BadRequest) as caught:
        lm.chat([{"role": "user", "content": None}])
    assert caught.value.param == "messages[0].content"


def test_continuing_the_last_message(lm: Renderer) -> None:
    chat = [*USER, {"role": "assistant", "content": "Well, "}]
    assert lm.chat(chat, continue_final_message=True).text.endswith("assistant\nWell, ")
    with pytest.raises(BadRequest, match="set one"):
        lm.chat(chat, continue_final_message=True, add_generation_prompt=True)


def test_o04_templates_of_requests(t_lm: Path, lm: Renderer) -> None:
    with pytest.raises(BadRequest, match="templates are programs") as caught:
        lm.chat(USER, chat_template="x")
    assert caught.value.param == "chat_template"
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.chat_template"):
        lm.chat(USER, chat_template_kwargs={"chat_template": "x"})
    assert lm.chat(USER, chat_template_kwargs={"enable_thinking": False}) == lm.chat(USER)
    open_to_them = renderer(t_lm, allow_request_template=True)
    assert open_to_them.chat(USER, chat_template="{{ messages[0].content }}!").text == "Hi there!"
    with pytest.raises(BadRequest, match=r"chat_template_kwargs\.chat_template"):
        open_to_them.chat(USER, chat_template_kwargs={"chat_template": "x"})


def test_the_template_file_of_the_flag(t_lm: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("<{{ messages[0].content }}>")
    assert renderer(t_lm, chat_template=str(file)).chat(USER).text == "<Hi there>"
    file.write_text(file.read_text(), encoding="utf-8-sig")  # the mark of Windows' tools is no part of a prompt
    assert renderer(t_lm, chat_template=str(file)).chat(USER).text == "<Hi there>"
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"mine\.jinja.*line 1"):
        renderer(t_lm, chat_template=str(file))
    with pytest.raises(ConfigError, match=r"--chat-template must name a file.*absent\.jinja"):
        renderer(t_lm, chat_template=str(tmp_path / "absent.jinja"))


def test_without_a_template_the_error_says_what_to_do(t_qemb: Path) -> None:
    with pytest.raises(BadRequest, match=r"no chat template: send text instead of messages, or .*--chat-template"):
        renderer(t_qemb).chat(USER)


def test_o02_tokens_that_the_model_has_no_row_for_are_named(
    t_lm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints with tokens added to the tokenizer alone: what holds none of them is answered, others name the
    input."""
    folder = tmp_path / "more"
    shutil.copytree(t_lm, folder)
    words = Backend.from_file(str(folder / "tokenizer.json"))
    words.add_tokens([AddedToken("<|extra|>", special=True)])
    words.save(str(folder / "tokenizer.json"))
    more = renderer(folder)
    assert "the tokenizer has tokens up to 448, the model rows for 448" in caplog.text
    assert more.text("plain").token_ids == renderer(t_lm).text("plain").token_ids
    for param, render in (
        ("prompt", lambda: more.text("a<|extra|>")),
        ("messages", lambda: more.chat([{"role": "user", "content": "a<|extra|>"}])),
        ("input[1]", lambda: embedding_of(more, "a<|extra|>", param="input[1]")),
        ("documents[3]", lambda: pair_of(more, "a", "<|extra|>", param="documents[3]")),
    ):
        with pytest.raises(BadRequest, match=r"has the token '<\|extra\|>' \(448\), for which") as caught:
            render()
        assert caught.value.param == param


def test_ids_are_used_as_they_are(lm: Renderer) -> None:
    assert lm.text([5, 6, 7]).token_ids == [5, 6, 7]
    assert embedding_of(lm, [1, 1, 5]).token_ids == [1, 1, 5]
    for bad in ([10**9], [-1], [5, 448], [True], ["5"], [1.0], []):
        with pytest.raises(BadRequest, match=r"input\[1\]") as caught:
            embedding_of(lm, bad, param="input[1]")
        assert caught.value.param == "input[1]"


def test_a_prompt_without_tokens_is_refused(t_qrr: Path, qrr: Renderer) -> None:
    assert AutoTokenizer.from_pretrained(t_qrr)("")["input_ids"] == []
    with pytest.raises(BadRequest, match="prompt gives no tokens"):
        qrr.text("")


def test_prompts_leave_room_for_the_output(t_lm: Path) -> None:
    short = renderer(t_lm, 10)
    ids = list(range(10, 20))
    assert short.text(ids, room=0).token_ids == ids
    assert short.text(ids).token_ids == ids
    with pytest.raises(
        ContextLengthExceeded, match=r"has 10 tokens, the model takes at most 7, 10 with the output's 3"
    ):
        short.text(ids, room=3)
    cut = short.text(ids, room=3, truncate=True)
    assert (cut.token_ids, cut.truncated) == (ids[3:], True)
    assert short.text(ids, room=3, truncate=4, side="right").token_ids == ids[:4]
    with pytest.raises(ContextLengthExceeded, match="10 tokens of output leave no room for prompt") as caught:
        short.text(ids, room=10, truncate=True)
    assert caught.value.param == "max_tokens"
    text = "the quick brown fox jumps over the lazy dog"
    whole = short.text(text).token_ids
    assert short.text(text, truncate=5).token_ids == [whole[0], *whole[-4:]]
    with pytest.raises(BadRequest, match="left or right, not 'top'"):
        short.text(ids, side="top")
    for bad in (0, 11, -2):
        with pytest.raises(BadRequest, match="between 1 and the model's length of 10") as caught:
            short.text(ids, truncate=bad)
        assert caught.value.param == "truncate_prompt_tokens"


def test_lone_surrogates_name_the_field(lm: Renderer) -> None:
    with pytest.raises(BadRequest, match=r"input\[3\]: .*surrogate") as caught:
        embedding_of(lm, "\ud800", param="input[3]")
    assert caught.value.param == "input[3]"
    with pytest.raises(BadRequest, match="surrogate"):
        lm.chat([{"role": "user", "content": "\ud800"}])


# --- embeddings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [65, 10_000, 250_000])
def test_e11_too_long_is_refused_with_both_numbers(t_xlmr: Path, length: int) -> None:
    ours, theirs = renderer(t_xlmr, 64), AutoTokenizer.from_pretrained(t_xlmr)
    text = "the dog " * (length // 2)
    count = len(theirs(text)["input_ids"])
    assert count > 64
    with pytest.raises(ContextLengthExceeded, match=rf"input has {count} tokens, the model takes at most 64:"):
        embedding_of(ours, text)
    for side in ("right", "left")[: 1 if length > 10_000 else 2]:
        cut = embedding_of(ours, text, truncate=True, side=side)
        theirs.truncation_side = side
        assert cut.token_ids == theirs(text, truncation=True, max_length=64)["input_ids"]
        assert cut.truncated


def test_e11_what_fits_is_left_alone(t_xlmr: Path) -> None:
    ours = renderer(t_xlmr, 64)
    text = ("the dog " * 31).strip()
    exact = embedding_of(ours, text)
    assert len(exact.token_ids) == 64
    assert embedding_of(ours, text, truncate=True) == exact
    assert not exact.truncated
    assert len(embedding_of(ours, text, truncate=10).token_ids) == 10
    with pytest.raises(ContextLengthExceeded, match="2 of them must stay"):
        embedding_of(ours, text, truncate=2)


def test_e10_forms_of_input(t_bert: Path) -> None:
    ours = renderer(t_bert)
    with pytest.raises(BadRequest, match=r"input\[1\] must not be an empty string"):
        embedding_of(ours, "", param="input[1]")
    assert embedding_of(ours, " ").token_ids == [2, 3]
    assert embedding_of(ours, "the dog").token_types == [0, 0, 0, 0]


def test_e02_the_tokenizer_appends_eos(t_qemb: Path) -> None:
    ours = renderer(t_qemb, 16)
    for text in ("yes", "the quick brown fox jumps over the lazy dog and more and more"):
        assert embedding_of(ours, text, truncate=True).token_ids[-1] == ours.tokenizer.eos_id


def test_prompts_by_name(t_qemb: Path, tmp_path: Path) -> None:
    ours = renderer(t_qemb)
    query = dict(ours.spec.pooling.prompts)["query"] if ours.spec.pooling else ""
    assert query
    assert embedding_of(ours, "dog", "query").token_ids == ours.tokenizer.encode(query + "dog")
    assert embedding_of(ours, "dog").token_ids == ours.tokenizer.encode("dog")
    with pytest.raises(BadRequest, match="no prompt 'other'; it has: document, query") as caught:
        embedding_of(ours, "dog", "other")
    assert caught.value.param == "prompt_name"
    with pytest.raises(BadRequest, match="not before token ids"):
        embedding_of(ours, [5], "query")
    by_default = renderer(t_qemb, spec={"pooling": PoolingSpec("last", prompts=(("p", "P: "),), default_prompt="p")})
    assert embedding_of(by_default, "dog").text == "P: dog"


# --- pairs ----------------------------------------------------------------------------------------------------------

QUERY = "what is the capital?"
LONG = "paris is the capital of france, and london is the capital of england. " * 6


@pytest.mark.parametrize("kind", ["t_ce", "t_ce_xlmr"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_e06_pairs(kind: str, side: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    ours, theirs = renderer(folder, 64), AutoTokenizer.from_pretrained(folder)
    theirs.truncation_side = side
    for document in ("paris", "no dog. no france?", LONG):
        expected = theirs(QUERY, document, truncation="only_second", max_length=64)
        rendered = pair_of(ours, QUERY, document, truncate=True, side=side)
        assert rendered.token_ids == expected["input_ids"]
        assert rendered.token_types == expected.get("token_type_ids")
        assert rendered.truncated == (document == LONG)
    expected = theirs(QUERY, LONG, truncation="only_second", max_length=20)
    rendered = pair_of(ours, QUERY, LONG, truncate=20, side=side)
    assert (rendered.token_ids, rendered.token_types) == (expected["input_ids"], expected.get("token_type_ids"))


@pytest.mark.parametrize("kind", ["t_ce", "t_ce_xlmr"])
def test_e11_pairs_cut_the_document_never_the_query(kind: str, request: pytest.FixtureRequest) -> None:
    ours = renderer(request.getfixturevalue(kind), 64)
    with pytest.raises(
        ContextLengthExceeded, match=r"documents\[2\] has \d+ tokens, the model takes at most 64"
    ) as caught:
        pair_of(ours, QUERY, LONG, param="documents[2]")
    assert caught.value.param == "documents[2]"
    for truncate, document in ((True, "dog"), (True, LONG), (None, "dog"), (None, LONG), (None, "")):
        with pytest.raises(ContextLengthExceeded, match=r"query takes \d+ tokens .*of at most 64") as caught:
            pair_of(ours, LONG, document, truncate=truncate)
        assert caught.value.param == "query"
    with pytest.raises(BadRequest, match="takes no instruction") as refused:
        pair_of(ours, QUERY, "dog", "Find dogs")
    assert refused.value.param == "instruction"


def test_e12_an_empty_document_is_a_pair(t_ce: Path) -> None:
    assert pair_of(renderer(t_ce, 64), "dog", "").token_ids[-2:] == [3, 3]


def model_card(theirs: Any, query: str, document: str, instruction: str, length: int) -> list[int]:
    """The tokens as the model card of Qwen3-Reranker makes them: prefix, cut middle and suffix, joined as ids."""
    prefix = QWEN3.head.split("<Instruct>")[0]
    middle = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = [theirs(text, add_special_tokens=False)["input_ids"] for text in (prefix, middle, QWEN3.suffix)]
    return [*ids[0], *ids[1][: length - len(ids[0]) - len(ids[2])], *ids[2]]


@pytest.mark.parametrize("document", ["Paris is the capital of France.", "", " spaced ", "🫠\n", LONG * 5])
@pytest.mark.parametrize("instruction", [None, "Find the capital"])
def test_e03_the_prompt_is_the_model_cards(qrr: Renderer, t_qrr: Path, document: str, instruction: str | None) -> None:
    theirs = AutoTokenizer.from_pretrained(t_qrr)
    expected = model_card(theirs, "capital?", document, instruction or QWEN3.instruction, 512)
    rendered = pair_of(qrr, "capital?", document, instruction, truncate=True)
    assert rendered.token_ids == expected
    assert rendered.truncated == (document == LONG * 5)
    if not rendered.truncated:
        roles = [{"role": "query", "content": "capital?"}, {"role": "document", "content": document}]
        system = [{"role": "system", "content": instruction}] if instruction else []
        assert rendered.token_ids == theirs.apply_chat_template([*system, *roles], return_dict=False)


def test_e03_text_that_is_already_templated(qrr: Renderer) -> None:
    head = QWEN3.head.format(instruction=QWEN3.instruction, query="capital?")
    for document in ("Paris", LONG * 5):
        for side in ("right", "left"):
            templated = pair_of(qrr, head, document + QWEN3.suffix, truncate=True, side=side, apply_template=False)
            assert templated == pair_of(qrr, "capital?", document, truncate=True, side=side)
            assert len(templated.token_ids) <= 512
            text = qrr.tokenizer.decode(templated.token_ids, skip_special_tokens=False)
            assert text.startswith(head.rstrip())
            assert text.endswith(QWEN3.suffix)


def test_e03_braces_in_query_and_instruction_are_text(qrr: Renderer) -> None:
    assert "<Query>: {document} {0}\n" in pair_of(qrr, "{document} {0}", "{query}").text


def test_e03_profiles() -> None:
    spec = read_spec_of("Qwen3ForCausalLM", ScoreSpec("yes_no"))

    def found(spec: ModelSpec, template: str | None = None) -> RerankProfile | None:
        return profile_of(spec, template, lambda messages: "")

    assert found(spec) is QWEN3
    assert found(replace(spec, score=ScoreSpec("cosine"))) is None
    classifier = replace(spec, architecture="Qwen3ForSequenceClassification", score=ScoreSpec("classifier"))
    assert found(classifier) is None
    assert found(classifier, tiny.CHAT_TEMPLATE + "{# Judge whether the Document meets the requirements #}") is QWEN3
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM answers yes or no.*qwen3-reranker"):
        found(replace(spec, architecture="LlamaForCausalLM"))


def test_e03_the_template_of_a_reranker_is_read_as_a_profile(qrr: Renderer) -> None:
    """What the model's own template says is what is known of its kind."""
    profile = qrr.pooled.profile
    assert profile is not None
    assert (profile.head, profile.suffix, profile.instruction) == (QWEN3.head, QWEN3.suffix, QWEN3.instruction)


def read_spec_of(architecture: str, score: ScoreSpec) -> ModelSpec:
    return ModelSpec(
        architecture=architecture, family="decoder", attention="causal", tasks=(), hidden_size=1, intermediate_size=1,
        layers=1, heads=1, kv_heads=1, head_dim=1, vocab_size=1, max_positions=1, norm_eps=1e-6, activation="silu",
        score=score,
    )  # fmt: skip


def test_bi_encoders_render_query_and_document_apart(t_qemb: Path, t_bert: Path) -> None:
    ours = renderer(t_qemb, 64)
    assert ours.spec.pooling is not None
    prompt = dict(ours.spec.pooling.prompts)["query"]
    assert query_of(ours, "dog").text == prompt + "dog"
    assert query_of(ours, "dog", "Find dogs").text == "Instruct: Find dogs\nQuery:dog"
    assert document_of(ours, "dog").text == "dog"
    assert document_of(ours, LONG, truncate=True).truncated
    with pytest.raises(ContextLengthExceeded, match=r"query has .* at most 64"):
        query_of(ours, LONG)
    plain = renderer(t_bert)
    assert query_of(plain, "dog").text == "dog"
    with pytest.raises(BadRequest, match="takes no instruction"):
        query_of(plain, "dog", "Find dogs")


# --- GGUF -----------------------------------------------------------------------------------------------------------


def test_a_gguf_renders_as_the_folder_it_was_made_from(t_lm: Path, lm: Renderer, tmp_path: Path) -> None:
    source = locate(str(write_gguf(t_lm, tmp_path / "m.gguf")))
    ours = Renderer(source, read_spec(source), 512)
    assert ours.chat(USER) == lm.chat(USER)
    for text in (*tiny.CORPUS, "🫠 щ"):
        assert ours.text(text) == lm.text(text)
    assert (ours.tokenizer.bos_id, ours.tokenizer.eos_id) == (lm.tokenizer.bos_id, lm.tokenizer.eos_id)
    assert ours.tokenizer.special_ids == lm.tokenizer.special_ids


def test_a_gguf_bert_has_segments(t_bert: Path, tmp_path: Path) -> None:
    source = locate(str(write_gguf(t_bert, tmp_path / "m.gguf")))
    tokenizer = Tokenizer.from_source(source)
    theirs = AutoTokenizer.from_pretrained(t_bert)("the dog", "the river bank")
    (pair,) = tokenizer.encodings([("the dog", "the river bank")])
    assert (pair.ids, pair.type_ids, tokenizer.token_types) == (theirs["input_ids"], theirs["token_type_ids"], True)


def test_many_are_rendered_in_order_as_one_by_one(lm: Renderer) -> None:
    texts = [f"text number {i} " * (i % 7 + 1) for i in range(100)]
    one_by_one = [lm.text(text).token_ids for text in texts]
    assert [rendered.token_ids for rendered in lm.each(lm.text, texts)] == one_by_one


@pytest.mark.parametrize("kind", ["t_ce", "t_ce_xlmr", "t_qrr"])
def test_pairs_drafted_together_are_those_rendered_alone(kind: str, request: pytest.FixtureRequest) -> None:
    ours = renderer(request.getfixturevalue(kind), 256)
    rng = random.Random(0)
    words = [*" ".join(tiny.CORPUS).split(), "🫠", "щука", "e\u0301", "</s>", "[SEP]"]
    pairs = [
        (" ".join(rng.choices(words, k=3)), " ".join(rng.choices(words, k=rng.randint(1, 400)))) for _ in range(150)
    ]
    alone = [pair_of(ours, *pair, truncate=True) for pair in pairs]
    assert list(ours.each(lambda pair: ours.pooled.pair(*pair, truncate=True), pairs)) == alone
    assert 0 < sum(rendered.truncated for rendered in alone) < len(alone)
    theirs = AutoTokenizer.from_pretrained(request.getfixturevalue(kind))
    if kind != "t_qrr":
        assert [r.token_ids for r in alone] == [
            theirs(*pair, truncation="only_second", max_length=256)["input_ids"] for pair in pairs
        ]


def test_drafts_and_token_ids_keep_their_order(lm: Renderer) -> None:
    items: list[str | list[int]] = ["the dog", [5, 6], "the river", [7]]
    alone = [embedding_of(lm, item).token_ids for item in items]
    assert [rendered.token_ids for rendered in lm.each(lm.pooled.embedding, items)] == alone


def test_a_refusal_among_many_is_raised_at_its_place(lm: Renderer) -> None:
    found = lm.each(lm.text, ["fine"] * 64 + ["\ud800"] + ["fine"] * 60)
    assert len({tuple(next(found).token_ids) for _ in range(64)}) == 1
    with pytest.raises(BadRequest, match="Unicode"):
        next(found)
