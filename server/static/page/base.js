// Helpers that all parts of the page share.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const number = (value, digits = 0) => value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const stored = (store, name, value) => { try { if (value === undefined) return store.getItem(name); store.setItem(name, value); } catch { return null; } };
const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
const inNodes = (count) => `${number(count)} node${count === 1 ? "" : "s"}`;
const ago = (s) => s < 90 ? `${number(s)} s` : s < 5400 ? `${number(s / 60)} min` : `${number(s / 3600, 1)} h`;
const COLOURS = ["--a", "--b", "--c", "--d", "--e", "--f"];

// Text of users and of the model is only ever set as text, never as markup.
function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text != null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
function draw(parent, tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text != null) element.textContent = text;
  parent.append(element);
  return element;
}
function button(text, act, kind) {
  const made = make("button", text, { type: "button", ...(kind && { class: kind }) });
  made.addEventListener("click", act);
  return made;
}
async function copy(text, from) {
  const before = from.textContent;
  try { await navigator.clipboard.writeText(text); from.textContent = "copied"; } catch { from.textContent = "not allowed here"; }
  setTimeout(() => { from.textContent = before; }, 1200);
}
function legend(box, entries) {
  box.replaceChildren(...entries.map(([name, style]) => { const span = make("span"); span.append(make("i", null, { style }), name); return span; }));
}
function showTip(event, ...content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
}
const hideTip = () => { $("tip").hidden = true; };

let key = stored(sessionStorage, "ramet-key") || "", asker = { admin: true, name: "" };
async function call(path, options = {}) {
  const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...(options.body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(body.error?.message || `HTTP ${answer.status}`), { status: answer.status });
  }
  return answer;
}
const ask = async (path, body, method) => (await call(path, { method: method || (body ? "POST" : "GET"), body: body && JSON.stringify(body) })).json();
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) if (piece.startsWith("data: ") && piece !== "data: [DONE]") {
      const event = JSON.parse(piece.slice(6));
      if (event.error) throw Object.assign(new Error(event.error.message), { status: 0 });
      yield event;
    }
  }
}
