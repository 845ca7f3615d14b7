// Live status: phases from /ready, figures from /metrics, every two seconds while somebody looks.

import { call, json, samples } from "./api.js";
import { badge, byId, errorOf, make } from "./dom.js";
import { Plot } from "./plot.js";

const EVERY = 2000;
const kinds = { ready: "good", degraded: "warn", draining: "warn", dead: "bad" };
const panels = new Map(); // by model
let timer = null;
let looking = false;

const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const whole = (value) => String(Math.round(value));
const rate = (value) => value.toFixed(value < 100 ? 1 : 0);

class Panel {
  constructor(id) {
    this.phase = badge("");
    this.about = make("p");
    this.plots = {
      kv: new Plot("KV cache in use", percent, 1),
      running: new Plot("Running", whole),
      waiting: new Plot("Waiting", whole),
      tokens: new Plot("Tokens a second", rate),
    };
    this.figures = make("div", { class: "plots" }, ...Object.values(this.plots).map((plot) => plot.element));
    const head = make("div", { class: "head" }, make("h2", {}, id), this.phase, this.about);
    this.element = make("article", { class: "panel", "aria-label": id }, head, this.figures);
    this.before = null;
  }

  tell(model) {
    const kind = kinds[model.phase] ?? "";
    this.phase.className = `badge ${kind}`;
    this.phase.textContent = model.phase + (model.percent === undefined ? "" : ` ${model.percent} %`);
    this.about.textContent = [model.activity, model.reason].filter(Boolean).join(": ");
  }

  // All engines of the model together; the fullest cache counts.
  add(found, now) {
    const of = (name) => found.filter((sample) => sample.name === name).map(({ value }) => value);
    const sum = (name) => of(name).reduce((a, b) => a + b, 0);
    const kv = of("kv_cache_usage_perc");
    const blocks = found.some(({ name, labels }) => name === "cache_config_info" && Number(labels.num_blocks) > 0);
    this.plots.kv.element.hidden = !blocks; // what looks ahead or pools over all tokens keeps no cache
    if (blocks) this.plots.kv.add(now, Math.max(...kv));
    this.plots.running.add(now, sum("num_requests_running"));
    this.plots.waiting.add(now, sum("num_requests_waiting"));
    const tokens = sum("generation_tokens_total") + sum("prompt_tokens_total");
    const before = this.before;
    if (before && tokens >= before.tokens) this.plots.tokens.add(now, (1000 * (tokens - before.tokens)) / (now - before.now));
    this.before = { tokens, now };
  }
}

async function poll() {
  try {
    const ready = await json("ready", { accept: [503] });
    const names = ready.models.map(({ id }) => id);
    for (const [id, panel] of panels) if (!names.includes(id)) (panel.element.remove(), panels.delete(id));
    for (const model of ready.models) {
      if (!panels.has(model.id)) panels.set(model.id, new Panel(model.id));
      const panel = panels.get(model.id);
      panel.tell(model);
      if (!panel.element.isConnected) byId("status-models").append(panel.element);
    }
    const line = `The server is ${ready.status}, with ${names.length} ${names.length === 1 ? "model" : "models"}.`;
    if (byId("status-line").textContent !== line) byId("status-line").textContent = line;
    const found = samples(await (await call("metrics")).text());
    const now = performance.now();
    for (const [id, panel] of panels) panel.add(found.filter(({ labels }) => labels.model_name === id), now);
    byId("status-error").replaceChildren();
  } catch (error) {
    byId("status-error").replaceChildren(errorOf(error));
  }
  schedule();
}

function schedule() {
  clearTimeout(timer);
  timer = looking && !document.hidden ? setTimeout(poll, EVERY) : null;
}

export function enter() {
  if (looking) return;
  looking = true;
  poll();
}

export function leave() {
  looking = false;
  schedule();
}

document.addEventListener("visibilitychange", schedule);
