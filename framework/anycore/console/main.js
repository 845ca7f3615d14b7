// The pages: which one is shown, and the list of models that several of them offer.

import { json } from "./api.js";
import { byId, errorOf, make } from "./dom.js";
import * as chat from "./chat.js";
import * as matrix from "./matrix.js";
import * as memory from "./memory.js";
import * as pooled from "./pooled.js";
import * as status from "./status.js";

const pages = { chat, pooled, status, matrix, memory };
const links = document.querySelectorAll("nav a");
let shown = null;
let again = null;

function show(focus) {
  const name = location.hash.slice(1) in pages ? location.hash.slice(1) : shown ?? "chat";
  for (const other of Object.keys(pages)) byId(other).hidden = other !== name;
  for (const link of links) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = byId(`${name}-title`);
  document.title = `${title.textContent} · anycore`;
  if (shown !== name) pages[shown]?.leave?.();
  const changed = shown !== name;
  shown = name;
  if (focus && changed) title.focus();
  refresh();
}

// Reads the models anew; what the page shows beyond them is its own to read.
async function refresh() {
  clearTimeout(again);
  try {
    const models = (await json("v1/models")).data;
    byId("alert").replaceChildren();
    offer("chat-model", models, "generate");
    offer("embed-model", models, "embed");
    offer("rerank-model", models, "rerank");
    if (models.some((model) => !model.tasks)) again = setTimeout(refresh, 2000); // it is still being planned
    await pages[shown].enter?.(models);
  } catch (error) {
    byId("alert").replaceChildren(errorOf(error));
    if (error.status === 401) byId("key").focus();
  }
}

function offer(id, models, task) {
  const select = byId(id);
  const before = select.value;
  const fitting = models.filter((model) => model.tasks?.includes(task));
  const options = fitting.map(({ id }) => make("option", { value: id }, id));
  select.replaceChildren(...(options.length ? options : [make("option", { value: "" }, `no model serves ${task}`)]));
  if (fitting.some(({ id }) => id === before)) select.value = before;
  select.disabled = !fitting.length;
  for (const button of select.form?.querySelectorAll("button.primary") ?? []) button.disabled = !fitting.length;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  refresh();
});
byId("key").addEventListener("change", refresh);
addEventListener("hashchange", () => show(true));
show(false);
