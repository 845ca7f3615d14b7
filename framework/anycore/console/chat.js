// A conversation with one model: streamed, stoppable, and gone when the page is closed.

import { call, events } from "./api.js";
import { byId, errorOf, make } from "./dom.js";

const talk = byId("talk");
const text = byId("chat-text");
let messages = [];
let running = null; // what stops the answer that is being written

function add(role, content) {
  const body = make("div", {}, content);
  talk.append(make("li", { class: role }, make("span", { class: "who" }, role === "user" ? "You" : byId("chat-model").value), body));
  byId("chat-empty").hidden = true;
  talk.scrollTop = talk.scrollHeight;
  return body;
}

// Paragraphs as they are, and blocks between ``` as code.
function layOut(content) {
  return content.split(/^```[^\n]*\n?/m).map((part, i) => (i % 2 ? make("div", { class: "pre" }, part.trimEnd()) : part.trim()));
}

function body() {
  const system = byId("chat-system").value.trim();
  const request = {
    model: byId("chat-model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("chat-temperature").value !== "") request.temperature = Number(byId("chat-temperature").value);
  if (byId("chat-max").value !== "") request.max_tokens = Number(byId("chat-max").value);
  return request;
}

function setRunning(controller) {
  running = controller;
  byId("chat-send").hidden = Boolean(controller);
  byId("chat-stop").hidden = !controller;
  talk.setAttribute("aria-busy", String(Boolean(controller)));
}

async function send() {
  const question = { role: "user", content: text.value };
  messages.push(question);
  add("user", question.content);
  text.value = "";
  const controller = new AbortController();
  setRunning(controller);
  const figures = { begun: performance.now(), first: null, chunks: 0, tokens: null, finish: null };
  const place = add("assistant", "…");
  let answer = "";
  try {
    const response = await call("v1/chat/completions", { body: body(), signal: controller.signal });
    for await (const event of events(response)) {
      if (event.usage) figures.tokens = event.usage.completion_tokens;
      const choice = event.choices[0];
      figures.finish = choice?.finish_reason ?? figures.finish;
      const piece = choice?.delta?.content;
      if (!piece) continue;
      figures.first ??= performance.now();
      figures.chunks += 1;
      answer += piece;
      const follow = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
      place.replaceChildren(...layOut(answer));
      if (follow) talk.scrollTop = talk.scrollHeight;
      tell(figures);
    }
  } catch (error) {
    if (error.name === "AbortError") figures.finish = "stopped";
    else talk.append(errorOf(error, "li"));
  }
  if (talk.contains(place)) {
    if (answer) messages.push({ role: "assistant", content: answer });
    else {
      place.parentElement.remove();
      messages = messages.filter((message) => message !== question);
      text.value ||= question.content; // to change and send again
    }
    tell(figures);
    talk.scrollTop = talk.scrollHeight;
  }
  if (running === controller) {
    setRunning(null);
    text.focus();
  }
}

function tell({ begun, first, chunks, tokens, finish }) {
  const parts = [];
  if (first !== null) {
    const count = tokens ?? chunks;
    const seconds = (performance.now() - first) / 1000;
    parts.push(`first token after ${Math.round(first - begun)} ms`, `${count} tokens`);
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
  }
  if (finish) parts.push({ stop: "complete", length: "cut at max tokens", stopped: "stopped" }[finish] ?? finish);
  byId("chat-figures").textContent = parts.join("  ·  ");
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && text.value.trim() && !byId("chat-send").disabled) send();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("chat-form").requestSubmit();
  }
});
byId("chat-stop").addEventListener("click", () => running?.abort());
byId("chat-clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  talk.replaceChildren();
  byId("chat-figures").textContent = "";
  byId("chat-empty").hidden = false;
  text.focus();
});
