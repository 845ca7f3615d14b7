// Elements without markup in strings: what a model or a server says is text, never HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const badge = (text, kind = "") => make("span", { class: `badge ${kind}` }, text);

export function bar(share) {
  const inner = make("div");
  inner.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return make("div", { class: "bar", "aria-hidden": "true" }, inner);
}

export function errorOf(error, tag = "p") {
  const text = error instanceof TypeError ? `The server cannot be reached (${error.message}).` : error.message;
  return make(tag, { class: "error" }, text, error.details ? make("small", {}, error.details) : null);
}

export function scrolled(label, table) {
  return make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": label }, table);
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; Math.abs(bytes) >= 1024 && unit < 4; unit++) bytes /= 1024;
  return `${unit ? bytes.toFixed(bytes < 10 ? 2 : bytes < 100 ? 1 : 0) : bytes} ${units[unit]}`;
}
