// The node under the pointer, or the selected one: its facts, its whole text, and what an admin may do with it.
let reading = 0;
const wholeText = async (block) => { const [end, start] = block.end || [block.id, block.start]; return (await ask(`/cache/nodes/${end}?start=${start}&from=${block.start}`)).text; };
// A text longer than its preview is read once the pointer has rested.
function readWhole(block, text) {
  const mine = ++reading;
  if (asker.admin && block.preview && block.tokens > 48) setTimeout(async () => { if (mine === reading) try { text.textContent = await wholeText(block); } catch { /* the node is gone */ } }, 250);
}
function showNode(block) {
  const box = $("node");
  if (!block) { box.classList.remove("shown"); box.replaceChildren("This node is gone, or too small to be shown."); box.dataset.shown = ""; return; }
  const name = nameOf(block), same = box.dataset.shown === name;
  if (same && box.contains(document.activeElement) && document.activeElement.matches("pre")) return;
  const isPoint = block.meta?.point != null;
  const entries = [isPoint ? ["memory", `that of ${number(block.tokens)} tokens`] : ["tokens", `${number(block.tokens)}, after ${number(block.start)}`], ["resume points", block.attached && `${number(block.attached)}, at its end`],
    ["from here on", !isPoint && block.total && `${number(block.total)} tokens in ${inNodes(block.nodes)}`], ["hits", number(block.hits)],
    ["last used", block.idle_s != null && `${ago(block.idle_s)} ago`], ["computed in", block.cost_s && `${number(block.cost_s, 2)} s`], ["owner", ownerOf(block)], ["kind", kindOf(block)], ["also in", (block.tiers || []).join(", ")],
    ["kept by", [block.pinned && "pins", block.held_s && `a hold for ${ago(block.held_s)}`, block.locked && "live requests"].filter(Boolean).join(" and ")], ["foreseen", foreseenOf(block)]];
  const list = make("dl");
  for (const [what, value] of entries) if (value) list.append(make("dt", what), make("dd", value));
  const focused = same && box.contains(document.activeElement) ? document.activeElement.textContent : null;
  const text = same ? box.querySelector("pre") : make("pre", block.preview + (block.tokens > 48 ? " …" : ""), { id: "nodetext" });
  const buttons = nodeButtons(block);
  box.classList.remove("soft"); box.classList.add("shown");
  const side = make("div");
  side.append(list, make("div", same ? box.dataset.said || "" : "", { id: "said", role: "status", class: "soft" }));
  box.replaceChildren(side, buttons, ...(block.preview ? [text] : []));
  if (!same) { box.dataset.said = ""; box.dataset.shown = name; readWhole(block, text); }
  if (focused) [...buttons.children].find((one) => one.textContent === focused)?.focus();
}
function nodeButtons(block) {
  const row = make("div", null, { class: "row" });
  if (block.below?.length) row.append(button("Zoom in", () => zoomTo(block)));
  if (!asker.admin) return row;
  const [end, start] = block.end || [block.id, block.start];
  row.prepend(button("Pin", () => change(() => ask(`/cache/nodes/${end}/pin?start=${start}`, null, "POST"), "pinned")));
  if (block.pinned) row.append(button("Unpin", () => change(() => ask(`/cache/nodes/${end}/pin?start=${start}`, null, "DELETE"), "unpinned")));
  row.append(button("Evict", () => change(() => ask(`/cache/nodes/${block.id}?start=${block.start}`, null, "DELETE"), "evicted"), "danger"));
  row.append(button("Copy text", async (event) => { const from = event.currentTarget; await change(async () => copy(await wholeText(block), from), ""); }));
  return row;
}
async function change(act, done) {
  const box = $("node");
  let told = done;
  try { const answer = await act(); if (answer?.evicted_tokens != null) told = answer.evicted_tokens ? `${number(answer.evicted_tokens)} tokens evicted` : "0 tokens evicted: pins or live requests keep it."; }
  catch (error) { told = error.message; }
  box.dataset.said = told;
  if ($("said")) $("said").textContent = told;
}
