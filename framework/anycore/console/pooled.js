// Two texts and their cosine; a query and its documents, ranked.

import { json } from "./api.js";
import { bar, byId, errorOf, make } from "./dom.js";

function onSubmit(name, answer) {
  const place = byId(`${name}-answer`);
  byId(`${name}-form`).addEventListener("submit", async (event) => {
    event.preventDefault();
    place.setAttribute("aria-busy", "true");
    try {
      place.replaceChildren(...(await answer()));
    } catch (error) {
      place.replaceChildren(errorOf(error));
    }
    place.removeAttribute("aria-busy");
  });
}

export function cosine(a, b) {
  let dot = 0, aa = 0, bb = 0;
  for (let i = 0; i < a.length; i++) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / Math.sqrt(aa * bb);
}

onSubmit("embed", async () => {
  const input = [byId("embed-first").value, byId("embed-second").value];
  const reply = await json("v1/embeddings", { body: { model: byId("embed-model").value, input } });
  const [a, b] = reply.data.map(({ embedding }) => embedding);
  const value = cosine(a, b);
  return [
    make("p", { class: "big" }, value.toFixed(4)),
    make("p", { class: "hint" }, `cosine of two vectors of ${a.length} numbers, ${reply.usage.total_tokens} tokens read`),
    bar(value),
  ];
});

onSubmit("rerank", async () => {
  const documents = byId("rerank-documents").value.split("\n").filter((line) => line.trim());
  const body = { model: byId("rerank-model").value, query: byId("rerank-query").value, documents };
  const { results } = await json("v1/rerank", { body });
  const rows = results.map(({ index, relevance_score: score }) =>
    make("li", {}, make("p", {}, make("span", {}, documents[index]), make("b", {}, score.toFixed(4))), bar(score)));
  return [make("ol", { class: "ranks", "aria-label": "Documents, best first" }, ...rows)];
});
