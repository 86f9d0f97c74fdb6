// The API from its OpenAPI document: every route with its parameters, an example, and a form to try it.
let schema = null;
// Text whose parts between backticks are code.
function prose(tag, text, attributes) {
  const made = make(tag, "", attributes);
  made.append(...text.split("`").map((part, i) => i % 2 ? make("code", part) : part));
  return made;
}
const resolve = (it) => it?.$ref ? resolve(it.$ref.split("/").slice(1).reduce((at, name) => at[name], schema)) : it || {};
function typeOf(given) {
  const it = resolve(given), several = it.anyOf || it.oneOf;
  if (several) return [...new Set(several.map(typeOf))].join(" or ");
  if (it.enum) return it.enum.map((one) => JSON.stringify(one)).join(", ");
  if (it.const !== undefined) return JSON.stringify(it.const);
  return it.type === "array" ? `list of ${typeOf(it.items)}` : it.type || "any";
}
function table(head, lines) {
  const made = make("table"), top = make("tr");
  head.forEach((text) => top.append(make("th", text, { style: "text-align:left" })));
  made.append(top, ...lines.map((cells) => { const row = make("tr"); cells.forEach((cell) => row.append(prose("td", cell, { style: "text-align:left;white-space:normal" }))); return row; }));
  return made;
}
const exampleOf = (content) => { const it = content?.["application/json"]; return it?.example ?? resolve(it?.schema).example; };
function showRoute(path, method, operation) {
  const box = make("details", null, { class: "route" }), summary = make("summary");
  summary.append(make("b", `${method.toUpperCase()} ${path}`), " ", prose("span", operation.description || operation.summary || "", { class: "soft" }));
  box.append(summary);
  box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) fillRoute(box, path, method, operation); });
  return box;
}
function fillRoute(box, path, method, operation) {
  const parameters = operation.parameters || [], body = operation.requestBody?.content, fields = body && resolve(body["application/json"]?.schema);
  if (parameters.length) box.append(table(["parameter", "in", "type", ""], parameters.map((p) => [p.name, p.in, typeOf(p.schema), p.description || ""])));
  if (fields?.properties) box.append(table(["field", "type", "default", ""], Object.entries(fields.properties).map(([name, it]) => [name + (fields.required?.includes(name) ? " *" : ""), typeOf(it), it.default === undefined ? "" : JSON.stringify(it.default), resolve(it).description || it.description || ""])));
  const good = Object.entries(operation.responses || {}).find(([status]) => status.startsWith("2")), example = exampleOf(good?.[1]?.content);
  if (example !== undefined) box.append(make("div", `answer ${good[0]}`, { class: "soft" }), make("pre", JSON.stringify(example, null, 2)));
  const input = body && make("textarea", JSON.stringify(exampleOf(body) ?? {}, null, 2), { rows: 6, "aria-label": "Body" });
  const places = parameters.filter((p) => p.in !== "header").map((p) => [p, make("input", null, { placeholder: p.name, "aria-label": p.name })]);
  const row = make("div", null, { class: "row" }), answer = make("pre", "", { role: "status" });
  row.append(...places.map(([, field]) => field), button(`Send ${method.toUpperCase()}`, () => send(path, method, places, input, answer), method === "delete" ? "danger" : "main"));
  box.append(...(input ? [input] : []), row, answer);
}
async function send(path, method, places, input, answer) {
  const query = new URLSearchParams();
  let to = path;
  for (const [parameter, field] of places) {
    if (parameter.in === "path") to = to.replace(`{${parameter.name}}`, encodeURIComponent(field.value));
    else if (field.value) query.set(parameter.name, field.value);
  }
  answer.textContent = "…";
  try {
    const response = await call(to + (query.size ? `?${query}` : ""), { method: method.toUpperCase(), body: input?.value });
    const text = await response.text();
    try { answer.textContent = JSON.stringify(JSON.parse(text), null, 2); } catch { answer.textContent = text; }
  } catch (error) { answer.textContent = error.message; }
}
async function showApi() {
  try { schema = await ask("/openapi.json"); } catch (error) { $("status").textContent = error.status === 401 ? "an API key is needed" : error.message; return; }
  $("status").textContent = ""; $("about").textContent = `${schema.info.summary || ""} ${schema.info.version}`;
  const groups = new Map();
  for (const [path, methods] of Object.entries(schema.paths)) for (const [method, operation] of Object.entries(methods)) {
    const tag = operation.tags?.[0] || "other";
    groups.set(tag, [...(groups.get(tag) || []), showRoute(path, method, operation)]);
  }
  $("routes").replaceChildren(...[...groups].map(([tag, all]) => { const section = make("section", null, { style: "margin-bottom:1rem" }); section.append(make("h2", tag), ...all); return section; }));
}
$("find").addEventListener("input", () => { const text = $("find").value.toLowerCase(); document.querySelectorAll(".route").forEach((route) => { route.hidden = !route.textContent.toLowerCase().includes(text); }); });
$("keyform").addEventListener("submit", (event) => { event.preventDefault(); key = $("key").value.trim(); $("key").value = ""; stored(sessionStorage, "ramet-key", key); showApi(); });
if (stored(localStorage, "ramet-theme")) document.documentElement.dataset.theme = stored(localStorage, "ramet-theme");
showApi();
