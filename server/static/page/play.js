// The playground: its form, plain text, and prompt modules.
const ALGORITHMS = ["low_confidence", "entropy", "maskgit_plus", "topk_margin", "origin"];
let playing = null, served = null;
const form = () => document.querySelector("[name=form]:checked").value;
async function learn() {
  try { served = await ask("/model_info"); } catch { return; }
  const diffusion = served.diffusion;
  document.querySelectorAll("[data-diffusion]").forEach((element) => { element.hidden = !diffusion; });
  if (!diffusion) await listSchemas().catch(() => {});
  const isNoise = diffusion?.algorithm === "entropy_bound";
  $("tokensname").textContent = diffusion && !isNoise ? "masks" : "new tokens";
  // Prefixes of models that attend by blocks are shared as they are.
  if (diffusion?.attended) $("shared").parentElement.hidden = true;
  if (isNoise) {
    $("block").parentElement.hidden = $("masked").hidden = true;
    $("steps").placeholder = diffusion.defaults.steps;
  }
  if (diffusion) $("algorithm").replaceChildren(...(isNoise ? [diffusion.algorithm] : ALGORITHMS.concat(diffusion.edits ? ["joint_threshold"] : [])).map((name) => {
    const option = make("option", name, { value: name });
    option.selected = name === diffusion.algorithm;
    return option;
  }));
  showForm();
}
function showForm() {
  const chat = form() === "chat";
  document.querySelectorAll("[data-chat]").forEach((element) => { element.hidden = !chat; });
  document.querySelectorAll("[data-text]").forEach((element) => { element.hidden = chat || ("causal" in element.dataset && !!served?.diffusion); });
  $("prompt").placeholder = chat ? "Ask something. Ctrl + Enter sends." : "A text to continue. Ctrl + Enter sends.";
  $("told").textContent = $("why").textContent = "";
  $("canvas").hidden = true; $("codebox").hidden = true;
  if (chat) showChat();
}
// The draft stays in this browser.
const KEPT = ["system", "prompt", "tokens", "temperature", "topp", "seed"];
const keepDraft = () => stored(localStorage, "ramet-draft", JSON.stringify({ form: form(), ...Object.fromEntries(KEPT.map((id) => [id, $(id).value])) }));
function readDraft() {
  let draft;
  try { draft = JSON.parse(stored(localStorage, "ramet-draft")); } catch { return; }
  if (!draft) return;
  for (const id of KEPT) if (typeof draft[id] === "string") $(id).value = draft[id];
  $("systembox").open = !!draft.system;
  const chosen = document.querySelector(`[name=form][value="${draft.form === "text" ? "text" : "chat"}"]`);
  chosen.checked = true;
}
KEPT.forEach((id) => $(id).addEventListener("input", keepDraft));
document.querySelectorAll("[name=form]").forEach((one) => one.addEventListener("change", () => { keepDraft(); showForm(); }));
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("play").requestSubmit(); } });

// -- prompt modules: a schema is chosen, then its modules, each within its parent and alone in its union
let modules = [];
async function listSchemas() {
  const names = (await ask("/v1/schemas")).data.map((schema) => schema.id), chosen = $("schema").value;
  $("schema").replaceChildren(make("option", "none", { value: "" }), ...names.map((name) => make("option", name, { value: name })));
  $("schema").value = names.includes(chosen) ? chosen : "";
  if ($("schema").value !== chosen) showModules();
}
async function showModules() {
  const schema = $("schema").value;
  modules = []; $("imports").replaceChildren();
  if (!schema) return;
  try { modules = (await ask(`/v1/schemas/${schema}`)).modules; } catch (error) { $("told").textContent = error.message; }
  for (const module of modules.slice(1)) {
    module.box = make("input", null, { type: "checkbox", "aria-label": module.path });
    module.box.addEventListener("change", () => takeModule(module));
    const label = make("label", null);
    label.append(module.box, ` ${module.path}`);
    module.fields = module.parameters.map(({ name, length }) => make("input", null, { "data-name": name, size: 12, placeholder: `${name}: ${length} tokens`, "aria-label": `${module.path} ${name}` }));
    $("imports").append(label, ...module.fields);
  }
}
const parentOf = (module) => modules.slice(1).find((other) => other.path === module.path.slice(0, module.path.lastIndexOf("/")));
function takeModule(module) {
  const { path, union, box } = module, parent = parentOf(module);
  const away = (other) => { other.box.checked = false; modules.filter((one) => one.path.startsWith(other.path + "/")).forEach((one) => { one.box.checked = false; }); };
  if (!box.checked) { away(module); return; }
  modules.slice(1).filter((other) => union && other !== module && other.union?.start === union.start && other.union.stop === union.stop && parentOf(other) === parent).forEach(away);
  if (parent) { parent.box.checked = true; takeModule(parent); }
}
function pmlOf(text) {
  const page = document.implementation.createDocument(null, "prompt"), nodes = new Map();
  page.documentElement.setAttribute("schema", $("schema").value);
  for (const module of modules.slice(1)) if (module.box.checked) {
    const node = page.createElement(module.path.slice(module.path.lastIndexOf("/") + 1));
    module.fields.forEach((field) => field.value && node.setAttribute(field.dataset.name, field.value));
    (nodes.get(parentOf(module)) || page.documentElement).append(node);
    nodes.set(module, node);
  }
  page.documentElement.append(text);
  return new XMLSerializer().serializeToString(page);
}
// A chip for each module, in the colour of what became of it, and for the prompt's own tokens: arguments and text.
function chips(reuse) {
  const sizes = new Map(modules.map((module) => [module.path, module.tokens])), made = [];
  const chip = (kind, text, tokens) => made.push(make("span", `${text} ${number(tokens)}`, { class: `chip ${kind}`, title: `${number(tokens)} tokens ${kind}` }), " ");
  let own = reuse.reused_tokens, rest = reuse.computed_tokens;
  for (const name of reuse.modules) {
    const tokens = name.split(" + ").reduce((sum, path) => sum + (sizes.get(path) || 0), 0), computed = reuse.computed_modules.includes(name);
    if (computed) rest -= tokens; else own -= tokens;
    chip(computed ? "computed" : "reused", name, tokens);
  }
  if (own > 0) chip("reused", "own text", own);
  if (rest > 0) chip("computed", "own text", rest);
  return made;
}
$("schema").addEventListener("focus", () => listSchemas().catch(() => {}));
$("schema").addEventListener("change", showModules);

// -- plain text
function wanted(text) {
  const sampling = { max_new_tokens: +$("tokens").value, temperature: +$("temperature").value, top_p: +$("topp").value };
  if ($("seed").value) sampling.seed = +$("seed").value;
  const body = { ...(text == null ? {} : $("schema").value ? { pml: pmlOf(text) } : { text }), sampling_params: sampling, stream: $("stream").checked, explain: true };
  if (served?.diffusion) {
    body.diffusion = { algorithm: $("algorithm").value, stream_canvas: body.stream };
    for (const [name, id] of [["steps", "steps"], ["block_length", "block"], ["prefix_tokens", "shared"]]) if ($(id).value) body.diffusion[name] = +$(id).value;
  }
  return body;
}
$("stop").addEventListener("click", () => playing?.abort());
$("play").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("prompt").value, chat = form() === "chat";
  if (playing || (chat && !text.trim() && !pictures.length)) return;
  const mine = playing = new AbortController();
  $("send").disabled = true; $("stop").disabled = false; $("told").textContent = ""; $("why").textContent = ""; $("answer").replaceChildren(); $("canvas").hidden = true;
  try {
    if (chat) await playChat(text, mine.signal); else await playText(text, mine);
  } catch (error) {
    if (error.name !== "AbortError") $("told").textContent = error.message;
  } finally {
    playing = null; $("send").disabled = false; $("stop").disabled = true;
    if (chat) showChat();
  }
});
async function playText(text, mine) {
  const prompt = make("span", text), output = make("span", "", { id: "output" }), canvas = new Canvas();
  $("answer").append(prompt, output);
  const body = wanted(text), ids = body.pml ? [] : (await ask("/tokenize", { prompt: text })).tokens;
  const answer = await call("/generate", { method: "POST", signal: mine.signal, body: JSON.stringify(body) });
  let coloured = false;
  const take = async (event) => {
    const meta = event.meta_info;
    if (!coloured && (!body.pml || meta.reuse)) { coloured = true; if (body.pml) prompt.replaceChildren(...chips(meta.reuse), "\n"); else await colour(prompt, ids, meta.cached_tokens); }
    if (event.canvas) await Canvas.learn(event.canvas);
    if (mine.signal.aborted) return;
    output.textContent = event.text;
    if (event.canvas) canvas.show(event.canvas, meta.denoise_steps);
    $("told").textContent = tell(meta);
    if (meta.explain) $("why").textContent = why(meta.explain);
  };
  if (body.stream) { for await (const piece of eventsOf(answer)) await take(piece); } else await take(await answer.json());
}
// The reason why the rest of the prompt was computed, with the text on both sides where it parts from another prompt.
function why({ reason, message, parting }) {
  if (reason === "unavailable") return "";
  const sides = parting && `: this prompt goes on with \u201c${parting.here}\u201d` + (parting.there == null ? "" : `, that one with \u201c${parting.there}\u201d`);
  return message[0].toUpperCase() + message.slice(1) + (sides || "") + ".";
}
function tell(meta) {
  const layers = meta.shallow_depth == null ? "" : ` in ${meta.shallow_depth} of ${served.diffusion.num_layers} layers`;
  const refreshes = meta.refreshes == null ? "" : `, ${number(meta.refreshes)} of which refreshed the prefix`;
  const steps = meta.denoise_steps == null ? "" : ` after ${number(meta.denoise_steps)} steps${refreshes}`;
  return `${number(meta.cached_tokens)} of ${number(meta.prompt_tokens)} prompt tokens reused${meta.cached_tokens ? layers : ""}; ` +
    `${number(meta.completion_tokens)} generated${steps}${meta.e2e_latency ? ` in ${number(meta.e2e_latency, 2)} s` : ""}`;
}
async function colour(element, ids, cached) {
  const parts = (await ask("/detokenize", { tokens: [ids.slice(0, cached), ids.slice(cached)], skip_special_tokens: false })).text;
  element.replaceChildren(make("span", parts[0], { class: "reused" }), make("span", parts[1], { class: "computed" }));
}
readDraft();
showForm();
