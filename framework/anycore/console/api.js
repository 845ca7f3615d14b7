// Calls of the API: the key, errors as the server words them, server-sent events, and Prometheus text.

const key = document.getElementById("key"); // its only place: memory of this page

export class ApiError extends Error {
  constructor(status, error = {}) {
    super(error.message ?? `the server answered ${status}`);
    this.details = [`HTTP ${status}`, error.code, error.param && `field ${error.param}`].filter(Boolean).join(" · ");
    this.status = status;
  }
}

export async function call(path, { body, signal, accept = [] } = {}) {
  const headers = key.value ? { Authorization: `Bearer ${key.value.trim()}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  if (response.ok || accept.includes(response.status)) return response;
  throw new ApiError(response.status, (await response.json().catch(() => ({}))).error);
}

export const json = async (path, options) => (await call(path, options)).json();

// The `data` of each event, parsed, until [DONE]. An event that holds an error is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, event.error);
      yield event;
    }
  }
}

// Samples of Prometheus text: [{name, labels, value}]. The prefix before the colon, which a switch changes, is dropped.
export function samples(text) {
  const found = [];
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    found.push({ name: match[1].replace(/^\w+:/, ""), labels, value: Number(match[3].replace("Inf", "Infinity")) });
  }
  return found;
}
