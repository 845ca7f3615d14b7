// The memory plan of each model: planned beside measured, term by term.

import { bar, byId, make, scrolled, size } from "./dom.js";

const NO_TERMS = ["budget", "used", "kv_bytes_per_token", "kv_blocks"];
const HELD = ["weights", "kv_cache"]; // all other terms are working memory, which is measured as one

function row(term, planned, measured, whole) {
  const off = measured && planned ? `${(100 * (measured / planned - 1)).toFixed(1).replace(/^(?=\d)/, "+")} %` : "–";
  return make("tr", {},
    make("th", { scope: "row" }, term === "working" ? "all working memory" : term.replaceAll("_", " ")),
    make("td", { class: "number" }, planned === undefined ? "–" : size(planned)),
    make("td", { class: "number" }, measured === undefined ? "–" : size(measured)),
    make("td", { class: "number" }, off),
    make("td", { class: "meter" }, bar((measured ?? planned) / whole)));
}

function plan({ id, backend, device, memory, memory_measured: measured = {} }) {
  const terms = Object.keys({ ...memory, ...measured }).filter((term) => !NO_TERMS.includes(term));
  const kept = terms.filter((term) => memory[term] || measured[term]);
  const working = terms.filter((term) => !HELD.includes(term)).reduce((sum, term) => sum + (memory[term] ?? 0), 0);
  const rows = kept.map((term) => row(term, term === "working" ? working : memory[term], measured[term], memory.budget));
  const names = [["Term"], ["Planned", "number"], ["Measured", "number"], ["Off by", "number"], ["Share of the budget"]];
  const heads = names.map(([name, kind]) => make("th", { scope: "col", class: kind ?? "" }, name));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
  const sums = `${size(memory.used)} planned of a budget of ${size(memory.budget)}`;
  const cache = memory.kv_bytes_per_token ? `, ${size(memory.kv_bytes_per_token)} of cache a token` : "";
  return make("article", { class: "panel", "aria-label": id },
    make("div", { class: "head" }, make("h2", {}, id), make("p", {}, `${backend}, ${device}: ${sums}${cache}`)),
    scrolled(`Memory of ${id}`, table));
}

export function enter(models) {
  const planned = models.filter((model) => model.memory && model.id === model.root);
  const none = make("p", { class: "empty" }, "No model has a memory plan: the backend says nothing of its memory, or it still loads.");
  byId("memory-body").replaceChildren(...(planned.length ? planned.map(plan) : [none]));
}
