"""Chat templates against transformers, and hostile ones against their limits."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from anycore.errors import BadRequest
from anycore.text import sandbox
from anycore.text.template import ChatTemplate, Sandbox, TemplateFailed

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Is "1 < 2" & true? 🫠\n'},
    {"role": "assistant", "content": "Yes, "},
]
TOOLS = [{"type": "function", "function": {"name": "añadir", "parameters": {"a": ["<int>", 1.5, None, True]}}}]

TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}",
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  {{ m['content'] }}\n  {% endif %}\n{% endfor %}",
    "loop": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "tools": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ documents | tojson }}",
    "no tools": "{% if not tools and documents is none %}none{% endif %}{{ messages[0] | tojson }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}",
    "prompt": "{{ bos_token }}{{ messages | length }}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "arguments": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ other }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro say(m) %}[{{ m.content | trim }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "strings": "{{ messages[0].content.upper().split() | join('-') }}{{ messages[1:] | map(attribute='role') | list }}",
    "date": "{{ strftime_now('%Y') }}",
    "html": "{{ '<b>' }}{{ messages[1].content | e }}",
}


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return Sandbox()


@pytest.fixture(scope="module")
def hugging_face(t_lm: Path):  # type: ignore[no-untyped-def]
    return AutoTokenizer.from_pretrained(t_lm)


def template(text: str, box: Sandbox) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}, box)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("full", [False, True])
def test_rendering_equals_transformers(name: str, full: bool, box: Sandbox, hugging_face) -> None:  # type: ignore[no-untyped-def]
    options: dict[str, Any] = {"add_generation_prompt": full}
    if full:
        options |= {"tools": TOOLS, "documents": [{"title": "t", "text": "é"}]}
    arguments = {"enable_thinking": False, "other": [1, "x"]} if full else {}
    expected = hugging_face.apply_chat_template(
        copy.deepcopy(CHAT), chat_template=TEMPLATES[name], tokenize=False, **options, **arguments
    )
    assert template(TEMPLATES[name], box).render(CHAT, arguments=arguments, **options) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}",
    ],
)
@pytest.mark.parametrize("content", ["Yes, ", "Yes,", "  no\n", "Yes, the <end>"])
def test_continuing_the_final_message_equals_transformers(text: str, content: str, box: Sandbox, hugging_face) -> None:  # type: ignore[no-untyped-def]
    chat = [*CHAT[:-1], {"role": "assistant", "content": content}]
    expected = hugging_face.apply_chat_template(
        copy.deepcopy(chat), chat_template=text, tokenize=False, continue_final_message=True
    )
    given = copy.deepcopy(chat)
    assert template(text, box).render(given, continue_final_message=True, add_generation_prompt=False) == expected
    assert given == chat


def test_a_template_that_hides_the_final_message_cannot_continue_it(box: Sandbox) -> None:
    with pytest.raises(TemplateFailed, match="leaves out the last message"):
        template("{{ messages[0].content }}", box).render(CHAT, continue_final_message=True)


def test_what_a_template_refuses_is_a_bad_request(box: Sandbox) -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}", box).render(CHAT)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''['__class__'] }}{{ (''|attr('__class__')).x }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__base__}'.format(1).x }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ messages.x.y }}",
        "{{ nothing() }}",
        "{% if %}",
    ],
)
def test_o04_sandbox(text: str, box: Sandbox) -> None:
    with pytest.raises(BadRequest, match="chat template cannot be rendered"):
        template(text, box).render(copy.deepcopy(CHAT))
    assert template("{{ messages[0].content }}", box).render(CHAT) == "Be brief."


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_o04_endless_work_is_ended(text: str) -> None:
    box = Sandbox()
    begin = time.perf_counter()
    with pytest.raises(BadRequest, match="chat template"):
        template(text, box).render(CHAT)
    assert time.perf_counter() - begin < 20 * sandbox.CPU_SECONDS
    assert template("{{ messages[0].content }}", box).render(CHAT) == "Be brief."


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ ('a' * 1000000000) | length }}",
        "{{ 'a' | center(2000000000) }}",
        "{% set ns = namespace(s='abcdefgh') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}x",
        "{% set ns = namespace(l=[1]) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}x",
        "{% for i in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}",
        "{{ '%2000000000d' | format(1) }}",
    ],
)
def test_o04_huge_output_is_refused(text: str, box: Sandbox) -> None:
    with pytest.raises(BadRequest, match=r"exceeds the limit|was ended|OverflowError|MemoryError"):
        template(text, box).render(CHAT)
    assert template("{{ messages[0].content }}", box).render(CHAT) == "Be brief."


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "tools", "tokenize", "documents", "bos_token", "__class__"]
)
def test_o04_arguments_may_not_override(name: str, box: Sandbox) -> None:
    with pytest.raises(BadRequest, match=f"chat_template_kwargs.{name} must not be set") as caught:
        template("x", box).render(CHAT, arguments={name: "{{ 1 }}"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_what_is_not_json_is_refused(box: Sandbox) -> None:
    for value in (float("nan"), object()):
        with pytest.raises(BadRequest, match="must be JSON"):
            template("x", box).render(CHAT, arguments={"other": value})


def test_syntax_errors_name_the_line(box: Sandbox) -> None:
    with pytest.raises(TemplateFailed, match="line 2: "):
        template("ok\n{% for %}", box).check()
    template("{% for m in messages %}{% endfor %}", box).check()


def test_the_process_ends_with_its_sandbox() -> None:
    box = Sandbox()
    template("x", box).render(CHAT)
    process = box._process
    assert process is not None
    assert process.poll() is None
    del box
    assert process.poll() is not None


class Interrupted:
    """A pipe whose writer gets Ctrl-C when a job has gone through."""

    def __init__(self, pipe: Any) -> None:
        self.write, self.close, self._flush = pipe.write, pipe.close, pipe.flush

    def flush(self) -> None:
        self._flush()
        raise KeyboardInterrupt


def test_a_job_that_is_broken_off_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next conversation was given its prompt."""
    box = Sandbox()
    assert template("first", box).render([]) == "first"
    with monkeypatch.context() as patch:
        patch.setattr(box._process, "stdin", Interrupted(box._process.stdin))  # type: ignore[union-attr]
        with pytest.raises(KeyboardInterrupt):
            template("second", box).render([])
    assert template("third", box).render([]) == "third"
