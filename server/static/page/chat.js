// The chat: its turns, the reused part of each prompt, and why the rest was computed.
let messages = [];
try { messages = JSON.parse(stored(sessionStorage, "ramet-chat")) || []; } catch { messages = []; }
const EXAMPLES = ["What is a radix tree?", "Name three things that are red.", "Write a short poem about a root and its stems."];
const DIFFUSION_EXAMPLES = ["What is the capital of France?", "Lily runs 12 km an hour for 4 hours. How far does she run?", "Write one sentence about the sea."];
// The small diffusion model has learned a few tasks, each in one form: a question, and the system prompt that it is about.
const TASKS = [
  ["Remove: whale silver", "Items: plane whale lake baker friend road onion water silver wire guitar river corner map dog table"],
  ["Values of: whale plane water lake river onion friend baker corner map dog table silver wire", "Pairs: plane coat, whale hill, lake drum, baker dance, friend square, road box, onion queen, water bean, silver hat, wire fish, guitar gold, river child, corner owl, map radio, dog moon, table iron"],
];
const examples = () => !served?.diffusion ? EXAMPLES : served.served_model_name.includes("smollm2-135m") ? TASKS : DIFFUSION_EXAMPLES;
function takeExample(text, about) {
  $("prompt").value = text;
  if (about) { $("system").value = about; $("systembox").open = true; $("tokens").value = 16; }
  keepDraft();
  $("prompt").focus();
}
const system = () => $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
// A message with pictures has them before its text, as data URLs.
const contentOf = (text, images) => images?.length ? [...images.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])] : text;
const conversation = (text) => [...system(), ...messages.map(({ role, content, images, reasoning_content }) => ({ role, content: contentOf(content, images), ...(reasoning_content && { reasoning_content }) })), ...(text || pictures.length ? [{ role: "user", content: contentOf(text, pictures) }] : [])];
function chatBody(text) {
  const body = { model: served?.served_model_name, messages: conversation(text), max_tokens: +$("tokens").value, temperature: +$("temperature").value };
  if (+$("topp").value !== 1) body.top_p = +$("topp").value;
  if ($("seed").value) body.seed = +$("seed").value;
  if ($("stream").checked) body.stream = true;
  return body;
}
function showChat() {
  $("turns").replaceChildren(...messages.map(showTurn));
  if (!messages.length) $("turns").append(make("p", "Under each answer, a bar shows how much of its prompt came from the tree.", { class: "soft" }));
  $("examples").replaceChildren(...(messages.length ? [] : examples().map((one) => [one].flat()).map(([text, about]) => button(text, () => takeExample(text, about)))));
  stored(sessionStorage, "ramet-chat", JSON.stringify(messages));
}
function showTurn(message) {
  const turn = make("div", null, { class: `turn ${message.role}` });
  if (message.images?.length) { const row = make("div", null, { class: "row" }); row.append(...message.images.map(thumbnail)); turn.append(row); }
  turn.append(make("span", message.reasoning_content, { class: "thought" }), make("span", message.content, { class: "said" }));
  if (message.role === "assistant") turn.append(under(message));
  return turn;
}
// Below an answer: a bar of the prompt's parts, the reason of a miss, the prompt as the model saw it.
function under(message) {
  const box = make("div", null, { class: "under" }), { meta } = message;
  if (message.error) box.append(make("div", message.error, { class: "bad" }));
  if (meta) {
    const bar = make("div", null, { class: "bar", role: "img", "aria-label": `${meta.cached} of ${meta.prompt} prompt tokens reused` });
    bar.append(make("i", null, { style: `width:${100 * meta.cached / Math.max(meta.prompt, 1)}%` }));
    box.append(bar, make("div", `${number(meta.cached)} of ${number(meta.prompt)} prompt tokens reused; ${number(meta.output)} generated${meta.steps ? ` after ${number(meta.steps)} steps` : ""} in ${number(meta.seconds, 2)} s${meta.first_s ? `, the first after ${number(1000 * meta.first_s)} ms` : ""}`, { class: "figures" }));
    if (meta.why) box.append(make("div", meta.why, { class: "whymissed" }));
    if (meta.ids?.length) {
      const details = make("details"), text = make("pre");
      details.append(make("summary", "the prompt as the model saw it"), text);
      details.addEventListener("toggle", () => { if (details.open && !text.firstChild) colour(text, meta.ids, meta.cached).catch((error) => { text.textContent = error.message; }); });
      box.append(details);
    }
  }
  if (playing && message === messages.at(-1)) return box;  // it is being written
  const row = make("div", null, { class: "row" });
  if (message.content) row.append(button("Copy", (event) => copy(message.content, event.currentTarget)));
  if (message === messages.at(-1)) row.append(button("Take back", () => { const asked = messages.splice(-2)[0]; $("prompt").value = asked.content; setPictures(asked.images || []); keepDraft(); showChat(); }));
  box.append(row);
  return box;
}
async function playChat(text, signal) {
  const body = served?.diffusion ? null : { ...chatBody(text), explain: true, return_token_ids: true, ...($("stream").checked && { stream_options: { include_usage: true } }) };
  messages.push({ role: "user", content: text, ...(pictures.length && { images: pictures }) }, { role: "assistant", content: "" });
  const answer = messages.at(-1), began = performance.now();
  $("prompt").value = ""; setPictures([]); keepDraft(); showChat();
  const [thought, said] = $("turns").lastChild.children, meta = { prompt: 0, cached: 0, output: 0, seconds: 0 };
  const grow = ({ reasoning_content, content }) => {
    if (reasoning_content) thought.textContent = answer.reasoning_content = (answer.reasoning_content || "") + reasoning_content;
    if (content) said.textContent = answer.content += content;
    if (reasoning_content || content) meta.first_s ??= (performance.now() - began) / 1000;
  };
  try {
    if (body) await causal(body, signal, meta, grow); else await denoise(answer, said, signal, meta);
  } catch (error) {
    answer.error = error.name === "AbortError" ? "stopped" : error.message;
  }
  meta.seconds = (performance.now() - began) / 1000;
  if (!$("stream").checked) delete meta.first_s;
  if (meta.prompt) answer.meta = meta;
}
async function causal(body, signal, meta, grow) {
  const answer = await call("/v1/chat/completions", { method: "POST", signal, body: JSON.stringify(body) });
  const take = (event) => {
    if (event.prompt_token_ids) meta.ids = event.prompt_token_ids;
    if (event.explain) meta.why = why(event.explain);
    if (event.usage) Object.assign(meta, { prompt: event.usage.prompt_tokens, output: event.usage.completion_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens || 0 });
    for (const choice of event.choices) grow(choice.delta || choice.message);
  };
  if (body.stream) { for await (const event of eventsOf(answer)) take(event); } else take(await answer.json());
}
async function denoise(answer, said, signal, meta) {
  const ids = (await ask("/tokenize", { messages: conversation("").slice(0, -1) })).tokens, canvas = new Canvas();
  const response = await call("/generate", { method: "POST", signal, body: JSON.stringify({ ...wanted(), input_ids: ids }) });
  const take = async (event) => {
    if (event.canvas) { await Canvas.learn(event.canvas); canvas.show(event.canvas, event.meta_info.denoise_steps); }
    answer.content = said.textContent = event.text;
    const { cached_tokens, prompt_tokens, completion_tokens, denoise_steps } = event.meta_info;
    Object.assign(meta, { ids, cached: cached_tokens, prompt: prompt_tokens, output: completion_tokens, steps: denoise_steps });
  };
  if ($("stream").checked) { for await (const event of eventsOf(response)) await take(event); } else await take(await response.json());
}
$("newchat").addEventListener("click", () => { playing?.abort(); messages = []; setPictures([]); $("canvas").hidden = true; showChat(); $("prompt").focus(); });

// -- the same request elsewhere
function requestOf() {
  const text = $("prompt").value;
  if (form() === "chat") {  // without a draft, the request that was sent last
    const body = chatBody(text || (messages.length || pictures.length ? "" : EXAMPLES[0]));
    if (!text && !pictures.length) body.messages = body.messages.slice(0, body.messages.findLastIndex((message) => message.role === "user") + 1);
    return ["/v1/chat/completions", body];
  }
  const { explain, ...body } = wanted(text);
  return ["/generate", body];
}
function showCode(kind) {
  const [path, body] = requestOf(), indented = JSON.stringify(body, null, 2);
  const quoted = `'${indented.replaceAll("'", `'\\''`)}'`;
  const curl = [`curl -sN ${location.origin}${path} -H 'Content-Type: application/json'`, ...(key ? ["-H \"Authorization: Bearer $RAMET_KEY\""] : []), `-d ${quoted}`].join(" \\\n  ");
  const names = { true: "True", false: "False", null: "None" };
  const python = (value) => JSON.stringify(value, null, 4).replace(/"(?:[^"\\]|\\.)*"|true|false|null/g, (part) => names[part] || part);
  const own = key ? "os.environ[\"RAMET_KEY\"]" : "\"none\"", os = key ? "import os\n" : "";
  const openai = `${os && `${os}\n`}from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=${own})\nanswer = client.chat.completions.create(**${python({ ...body, stream: undefined })})\nprint(answer.choices[0].message.content)`;
  const headers = `{"Content-Type": "application/json"${key ? `, "X-API-Key": ${own}` : ""}}`;
  const plain = `import json\n${os}from urllib.request import Request, urlopen\n\nbody = ${python({ ...body, stream: undefined })}\nrequest = Request("${location.origin}${path}", json.dumps(body).encode(), ${headers})\nprint(json.load(urlopen(request))["text"])`;
  $("code").textContent = kind === "curl" ? curl : form() === "chat" ? openai : plain;
  $("codebox").hidden = false;
}
$("ascurl").addEventListener("click", () => showCode("curl"));
$("aspython").addEventListener("click", () => showCode("python"));
$("copycode").addEventListener("click", (event) => copy($("code").textContent, event.currentTarget));
