// The capability matrix: backends by tasks in short, then every row that a backend declares.

import { json } from "./api.js";
import { badge, byId, make, scrolled } from "./dom.js";

const TASKS = ["generate", "embed", "rerank"];
const order = ["proven", "stale", "declared", "unsupported", "none"]; // best first
const kinds = { proven: "good", stale: "warn", unsupported: "bad" };

function standing(row) {
  if (row.level === "unsupported") return "unsupported";
  return order.find((word) => row.evidence.startsWith(word)) ?? "declared";
}

function best(backend, task) {
  const words = backend.support.filter((row) => row.tasks.includes(task)).map(standing);
  return order.find((word) => words.includes(word)) ?? "none";
}

const mark = (word) => badge(word, kinds[word]);
const head = (...names) => make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name))));
const cells = (...contents) => contents.map((content) => make("td", {}, ...[content].flat()));

function overview(backends) {
  const rows = backends.map((backend) => make("tr", {},
    make("th", { scope: "row" }, backend.name),
    ...cells(backend.available ? badge("device found", "good") : badge("no device here"), ...TASKS.map((task) => mark(best(backend, task))))));
  const table = make("table", {}, head("Backend", "Here", ...TASKS), make("tbody", {}, ...rows));
  return make("section", { class: "panel", "aria-label": "Backends by tasks" }, scrolled("Backends by tasks", table));
}

function where({ available, probe }) {
  if (available) return probe.devices.map(({ name, chip }) => `${name} (${chip})`).join(", ");
  return [probe.reason, probe.advice].filter(Boolean).join(". ");
}

const note = (text) => make("tr", { class: "note" }, make("td", { colspan: "8" }, make("small", {}, text)));

function details(backend) {
  const rows = backend.support.flatMap((row) => [make("tr", row.note ? { class: "noted" } : {}, ...cells(
    row.tasks.join(", "),
    row.attention,
    [mark(standing(row)), make("small", {}, row.evidence.replace(/^(proven|stale|declared)[:, ]*/, ""))],
    row.level,
    row.weights.join(", "),
    row.schemes.join(", ") || "–",
    row.kv_caches.join(", ") || "–",
    row.chips.join(", ") || "any",
  )), ...(row.note ? [note(row.note)] : [])]);
  const columns = ["Tasks", "Attention", "Evidence", "Level", "Weights", "Quantised", "KV caches", "Chips"];
  const table = make("table", {}, head(...columns), make("tbody", {}, ...rows));
  return make("section", { class: "panel", "aria-label": `Backend ${backend.name}` },
    make("div", { class: "head" }, make("h2", {}, backend.name), make("p", {}, where(backend))),
    scrolled(`Rows of ${backend.name}`, table));
}

export async function enter() {
  const { backends, failures } = await json("v1/capabilities");
  const failed = failures.map((failure) => make("p", { class: "error" }, Object.values(failure).join(": ")));
  byId("matrix-body").replaceChildren(overview(backends), ...backends.map(details), ...failed);
}
