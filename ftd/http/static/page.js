"use strict";
// Draws /status once a second, and talks through /v1/chat/completions. Text is only ever set as text.

const LOOK_MS = 1000, SAMPLES = 120;
const rates = [], messages = [];
const at = (id) => document.getElementById(id);
const say = (id, value) => { at(id).textContent = value; };
const count = (n) => Math.round(n).toLocaleString("en");
const headers = () => (at("key").value ? { Authorization: `Bearer ${at("key").value}` } : {});

async function look() {
  try {
    const reply = await fetch("status", { headers: headers() });
    if (reply.status === 401) at("key-row").hidden = false;
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    draw(await reply.json());
  } catch (error) {
    state("unreachable", "failed", error.message);
  }
  setTimeout(look, LOOK_MS);
}

function state(name, kind, cause) {
  say("state", name);
  at("state").className = `pill ${kind}`;
  say("cause", cause || "");
  at("cause").hidden = !cause;
}

function draw({ health, version, engine, limits }) {
  state(health.status, health.ready ? "ready" : health.status, health.cause);
  say("model", health.model ? `${health.model}, context ${limits ? count(limits.context_tokens) : "?"}` : "");
  document.title = `ftd ${version}: ${health.model || health.status}`;
  const loading = health.progress;
  at("progress").hidden = !loading;
  if (loading && loading.total_bytes) {
    at("progress").max = loading.total_bytes;
    at("progress").value = loading.done_bytes;
  } else at("progress").removeAttribute("value");
  if (!engine) return;

  rates.push(engine.decode_tokens_per_s);
  if (rates.length > SAMPLES) rates.shift();
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, i) => `${(i * 240) / (SAMPLES - 1)},${47 - (46 * rate) / most}`);
  at("rate").firstElementChild.setAttribute("points", points.join(" "));
  say("decode", engine.decode_tokens_per_s.toFixed(1));
  say("prefill", count(engine.prefill_tokens_per_s));
  for (const name of ["running", "waiting", "finished", "cancelled", "failed"]) say(name, count(engine[name]));

  const used = engine.pages_held - engine.pages_cached;
  say("kv-words", `${count(engine.pages_total * engine.page_tokens)} tokens`);
  bar("kv", [used, engine.pages_cached], engine.pages_total);
  say("reused", count(engine.reused_tokens));
  say("slots-words", engine.slots_total ? `${count(engine.slots_total)} slots` : "computed in place");
  bar("slots", [engine.slots_used], engine.slots_total);
  const asked = engine.expert_hits + engine.expert_misses;
  say("hits", asked ? `${((100 * engine.expert_hits) / asked).toFixed(1)} % found in a slot` : "");

  at("requests").hidden = !engine.requests.length;
  at("requests").tBodies[0].replaceChildren(...engine.requests.map((r) => row([
    r.request_id, r.state, count(r.prompt_tokens), count(r.reused_tokens), count(r.output_tokens),
    `${r.age_s.toFixed(1)} s`,
  ])));
}

function bar(id, parts, whole) {
  parts.forEach((part, i) => {
    at(id).children[i].style.width = whole ? `${(100 * part) / whole}%` : "0";
  });
}

function row(cells) {
  const line = document.createElement("tr");
  for (const cell of cells) line.insertCell().textContent = cell;
  return line;
}

function bubble(kind) {
  const element = document.createElement("div");
  element.className = `said ${kind}`;
  at("talk").append(element);
  return element;
}

function part(element, kind) {
  const span = document.createElement("span");
  span.className = kind;
  element.append(span);
  return span;
}

let leaving = null; // of the answer that is being read

async function ask(text) {
  bubble("user").textContent = text;
  messages.push({ role: "user", content: text });
  const answer = bubble("assistant"), thought = part(answer, "thought"), body = part(answer, "text");
  leaving = new AbortController();
  busy(true);
  const began = performance.now();
  let first = 0, usage = null;
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({ messages, stream: true, stream_options: { include_usage: true } }),
      signal: leaving.signal,
    });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const delta = event.choices.length ? event.choices[0].delta : {};
      if (!first && (delta.content || delta.reasoning_content)) first = performance.now();
      thought.textContent += delta.reasoning_content || "";
      body.textContent += delta.content || "";
      answer.scrollIntoView({ block: "nearest" });
    }
    if (usage && first) facts(answer, usage, first - began, performance.now() - first);
  } catch (error) {
    if (error.name !== "AbortError") bubble("error").textContent = error.message;
  }
  if (body.textContent) messages.push({ role: "assistant", content: body.textContent });
  else { messages.pop(); if (!thought.textContent) answer.remove(); }
  busy(false);
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function facts(answer, usage, firstMs, restMs) {
  const rate = restMs > 0 ? (1000 * (usage.completion_tokens - 1)) / restMs : 0;
  const line = document.createElement("div");
  line.className = "facts";
  line.textContent = `${usage.prompt_tokens} tokens in (${usage.prompt_tokens_details.cached_tokens} reused), `
    + `${usage.completion_tokens} out, first after ${Math.round(firstMs)} ms, ${rate.toFixed(1)} tok/s`;
  answer.append(line);
}

function busy(yes) {
  at("send").hidden = yes;
  at("stop").hidden = !yes;
  at("text").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || !at("stop").hidden) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => leaving.abort());
at("clear").addEventListener("click", () => { messages.length = 0; at("talk").replaceChildren(); });
look();
