"""The web console in a real browser: what it shows, how it streams and stops, and that everybody can use it."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.conftest import served
from server.fake_child import scripted
from server.harness import Live, patience, serve_here

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium is installed (ci/chromium does it where it can)", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
KEY = "console-key"
PAGES = ("chat", "pooled", "status", "matrix", "memory")
Page = Any  # playwright's, which need not be there


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def slow(t_lm: Path) -> Iterator[Live]:
    """A scripted engine that takes its time, behind a key."""
    with serve_here(served(t_lm, "lm"), keys=(KEY,), launch=scripted(str(t_lm), "step=0.02")) as live:
        yield live


@pytest.fixture(scope="module")
def real(t_lm: Path, t_bert: Path, t_ce: Path) -> Iterator[Live]:
    """Tiny models of each task."""
    with serve_here(served(t_lm, "lm"), served(t_bert, "bert"), served(t_ce, "ce")) as live:
        yield live


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    """Opens a page of a server; at the end nothing may have failed in it or gone elsewhere."""
    contexts, troubles, hosts = [], [], set()

    def open_page(live: Live, at: str = "", key: str = "", clock: bool = False, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000 * patience())
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if "olicy" in message.text else None)
        page.on("request", lambda request: hosts.add(httpx.URL(request.url).netloc))
        if clock:
            page.clock.install()  # timers run when the test says so
        page.goto(f"{live.url}/{at}")
        if key:
            page.get_by_label("API key").fill(key)
            page.get_by_label("API key").press("Enter")
        hosts.add(httpx.URL(live.url).netloc)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles
    assert len(hosts) <= 1


def ask(page: Page, text: str) -> None:
    playwright.expect(page.locator("#chat-model")).to_have_value("lm")
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def test_without_a_key_the_page_says_what_the_server_says(slow: Live, visit: Any) -> None:
    page = visit(slow)
    alert = page.get_by_role("alert")
    playwright.expect(alert).to_contain_text("send the header")
    playwright.expect(alert).to_contain_text("HTTP 401 · invalid_api_key")
    playwright.expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").press("Enter")
    playwright.expect(alert).to_be_empty()
    playwright.expect(page.locator("#chat-model")).to_have_value("lm")
    assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0


def test_chat_streams_and_stops(slow: Live, visit: Any) -> None:
    page = visit(slow, key=KEY)
    page.get_by_label("Max tokens").fill("900")
    ask(page, "count")
    answer = page.locator("#talk .assistant > div")
    page.wait_for_function("() => document.querySelector('#talk .assistant > div').textContent.length > 20")
    playwright.expect(page.locator("#talk")).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    figures = page.locator("#chat-figures")
    playwright.expect(figures).to_contain_text("stopped")
    playwright.expect(figures).to_contain_text("first token after")
    playwright.expect(figures).to_contain_text("tokens/s")
    playwright.expect(page.get_by_label("Message")).to_be_focused()
    text = answer.text_content()
    headers = {"authorization": f"Bearer {KEY}"}
    slow.wait(lambda: running(slow, headers).endswith(" 0.0"), 5)  # the server stopped, too
    assert answer.text_content() == text

    page.get_by_label("Max tokens").fill("5")
    ask(page, "again")
    playwright.expect(figures).to_contain_text("5 tokens")
    playwright.expect(figures).to_contain_text("cut at max tokens")
    assert page.locator("#talk .user").count() == page.locator("#talk .assistant").count() == 2
    page.get_by_role("button", name="New conversation").click()
    assert page.locator("#talk li").count() == 0


def running(live: Live, headers: dict[str, str]) -> str:
    lines = live.get("/metrics", headers=headers).text.splitlines()
    return "\n".join(line for line in lines if line.startswith("anycore:num_requests_running{"))


def test_a_refused_question_comes_back_with_the_reason(slow: Live, visit: Any) -> None:
    page = visit(slow, key=KEY)
    page.get_by_label("Max tokens").fill("100000")
    ask(page, "too much")
    error = page.locator("#talk .error")
    playwright.expect(error).to_contain_text("max_tokens")
    playwright.expect(error).to_contain_text("HTTP 400")
    playwright.expect(page.get_by_label("Message")).to_have_value("too much")


def test_embed_and_rerank_show_what_the_api_answers(real: Live, visit: Any) -> None:
    page = visit(real, "#pooled")
    page.get_by_role("button", name="Compare").click()
    cosine = float(page.locator("#embed-answer .big").text_content())
    texts = [page.get_by_label(name).input_value() for name in ("First text", "Second text")]
    data = real.post("/v1/embeddings", {"model": "bert", "input": texts}).json()["data"]
    a, b = (each["embedding"] for each in data)
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    assert cosine == pytest.approx(dot / math.hypot(*a) / math.hypot(*b), abs=1e-4)

    page.get_by_role("button", name="Rank").click()
    documents = page.get_by_label("Documents, one a line").input_value().split("\n")
    body = {"model": "ce", "query": page.get_by_label("Query").input_value(), "documents": documents}
    results = real.post("/v1/rerank", body).json()["results"]
    page.wait_for_function("() => document.querySelectorAll('.ranks li').length === 3")
    shown = page.locator(".ranks li").all_text_contents()
    assert shown == [f"{documents[r['index']]}{r['relevance_score']:.4f}" for r in results]


def test_plots_move_while_they_are_looked_at(slow: Live, visit: Any) -> None:
    page = visit(slow, "#status", key=KEY, clock=True)
    playwright.expect(page.locator("#status-models h2")).to_have_text("lm")
    playwright.expect(page.locator("#status-models .badge")).to_have_text("ready")
    path = page.locator("#status-models .line").nth(1)
    playwright.expect(path).to_have_attribute("d", re.compile("^M[^L]+$"))
    for points in (2, 3):
        page.clock.run_for(2000)
        playwright.expect(path).to_have_attribute("d", re.compile(f"^M[^L]+(L[^L]+){{{points - 1}}}$"))
    labels = [svg.get_attribute("aria-label") for svg in page.locator("#status-models svg").all()]
    assert [label.split(":")[0] for label in labels] == ["KV cache in use", "Running", "Waiting", "Tokens a second"]
    page.get_by_role("link", name="Memory").click()
    playwright.expect(page.get_by_role("heading", name="Memory")).to_be_focused()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(20_000)
    assert not [url for url in asked if url.endswith(("/metrics", "/ready"))]


def test_matrix_and_memory_show_what_the_api_says(real: Live, visit: Any) -> None:
    page = visit(real, "#matrix")
    backends = real.get("/v1/capabilities").json()["backends"]
    page.wait_for_selector("#matrix table")
    names = page.locator("#matrix section").first.locator("tbody th").all_text_contents()
    assert names == [backend["name"] for backend in backends]
    for backend in backends:
        rows = page.get_by_role("region", name=f"Rows of {backend['name']}").locator("tbody tr:not(.note)")
        assert rows.count() == len(backend["support"])
        for row, declared in zip(rows.all_text_contents(), backend["support"], strict=True):
            word = "unsupported" if declared["level"] == "unsupported" else re.split("[: ]", declared["evidence"])[0]
            assert word in row

    page.get_by_role("link", name="Memory").click()
    playwright.expect(page.get_by_role("heading", name="Memory")).to_be_focused()
    model = real.get("/v1/models/lm").json()
    rows = page.get_by_role("region", name="Memory of lm").locator("tbody tr")
    playwright.expect(rows.first).to_contain_text("weights")
    text = "\n".join(rows.all_text_contents())
    for term in model["memory_measured"]:
        assert term.replace("_", " ") in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(real: Live, visit: Any, scheme: str) -> None:
    page = visit(real, color_scheme=scheme)
    for name in PAGES:
        page.goto(f"{real.url}/#{name}")
        page.wait_for_load_state("networkidle")
        assert page.evaluate(CHECKS) == []
        if name == "status":
            playwright.expect(page.locator("#status-models .badge").first).to_be_visible()
    for role in ("navigation", "main", "banner"):
        assert page.get_by_role(role).count() == 1
    page.goto(f"{real.url}/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"


def test_a_narrow_screen_is_not_wider_than_it_is(real: Live, visit: Any) -> None:
    page = visit(real, viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    for name in PAGES:
        page.goto(f"{real.url}/#{name}")
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("getComputedStyle(document.querySelector('button')).transitionDuration") == "0s"


CHECKS = """() => {
  const wrong = [];
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const color = rgb(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const shown = [...document.body.querySelectorAll("*")].filter((e) => e.checkVisibility() && !e.closest("noscript"));
  for (const e of shown) {
    const style = getComputedStyle(e);
    const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const name = `${e.tagName}#${e.id}.${e.className}`;
    if ((own || e.matches("input, textarea, select")) && !e.disabled) {
      const found = ratio(rgb(style.color), ground(e));
      if (found < 4.5) wrong.push(`${name}: text contrast ${found.toFixed(2)}`);
    }
    if (e.matches("input, textarea, select")) {
      const found = ratio(rgb(style.borderColor), ground(e.parentElement));
      if (found < 3) wrong.push(`${name}: edge contrast ${found.toFixed(2)}`);
      if (!e.labels.length || !e.labels[0].textContent.trim()) wrong.push(`${name}: no label`);
    }
    if (e.matches("button, a") && !e.textContent.trim()) wrong.push(`${name}: no name`);
    if (e.matches("svg") && !e.getAttribute("aria-label")) wrong.push(`${name}: no name`);
    if (e.matches("img") && !e.hasAttribute("alt")) wrong.push(`${name}: no alt`);
    if (e.tabIndex > 0) wrong.push(`${name}: jumps the order of focus`);
    if (e.matches("th") && !e.scope) wrong.push(`${name}: no scope`);
  }
  if (shown.filter((e) => e.matches("h1")).length !== 1) wrong.push("not one h1");
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  if (new Set(ids).size !== ids.length) wrong.push("an id is there twice");
  if (!document.documentElement.lang) wrong.push("no language");
  return wrong;
}"""
