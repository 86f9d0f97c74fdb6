// The tree as an icicle: width is tokens, a row is a step down.
let tree = null, blocks = [], selected = null, zoom = null, cursor = null;
// A row is as high as the room allows, so that a flat tree shows more text.
// Blocks narrower than LEAST pixels are drawn together.
const LOW = 26, HIGH = 150, LINE = 15, LEAST = 1, TIERS = { host: "--a", disk: "--c", store: "--e" };
let rowHeight = LOW, firstHeight = LOW, hovered = null;
const topOf = (row) => row ? firstHeight + (row - 1) * rowHeight : 0, heightOf = (row) => row ? rowHeight : firstHeight;
const nameOf = (block) => block.name || `${block.id}@${block.start}`;
function nested() {
  const all = tree.blocks.map((block) => ({ ...block, below: [] }));
  all.forEach((block) => { if (block.parent != null) { block.above = all[block.parent]; block.above.below.push(block); } });
  return underOwners(all);
}
const ownerOf = (block) => [block.tenant, block.salt && `salt ${short(block.salt, 16)}`].filter(Boolean).join(", ");
// The tree has a root for each module and document, and for what each set of them is followed by; the page has one for a schema, one for documents, and one for a tenant and salt.
function underOwners(all) {
  const roots = new Map();
  for (const root of all.filter((block) => block.parent == null)) {
    const meta = root.below[0]?.meta, kind = meta?.module != null ? `schema ${meta.schema || "without a name"}` : root.kind === "document" ? "documents" : "";
    const owner = [ownerOf(root), kind].filter(Boolean).join(", "), whole = roots.get(owner);
    if (!whole) { roots.set(owner, { ...root, owner, name: `-1@${encodeURIComponent(owner)}` }); root.below.forEach((one) => { one.above = roots.get(owner); }); continue; }
    whole.below.push(...root.below);
    root.below.forEach((one) => { one.above = whole; });
    for (const sum of ["total", "nodes", "hits"]) whole[sum] += root[sum];
    whole.idle_s = Math.min(whole.idle_s, root.idle_s);
    whole.locked ||= root.locked;
  }
  return [...roots.values(), ...all.filter((block) => block.parent != null)];
}
// Labels say who speaks instead of the template's tokens.
const folded = (text) => text
  .replace(/<\|(?:im_start|start_header_id)\|>\s*(\w+)(?:<\|end_header_id\|>)?\s*/g, " $1: ").replace(/\[INST\]\s*/g, " user: ").replace(/\[\/INST\]/g, " assistant: ")
  .replace(/<\|[^|<>]*\|>|<\/?s>/g, " ").replace(/\s+/g, " ").trim();
function labelOf(block) {
  if (block.id < 0) return block.owner || (asker.admin ? "all requests" : "your prompts");
  if (block.meta?.point != null) return "resume point";
  return [block.meta?.module, folded(block.preview) || block.preview.trim()].filter(Boolean).join(" ") || `${number(block.tokens)} tokens`;
}
const COLOURINGS = {
  recency: { key: [["used long ago, just now", "background:linear-gradient(90deg,var(--cold),var(--hot))"]], of: (block) => Math.exp(-block.idle_s / 120) },
  hits: { key: [["no hits, many", "background:linear-gradient(90deg,var(--cold),var(--hot))"]], of: (block, most) => Math.log1p(block.hits) / Math.log1p(Math.max(most.hits, 1)) },
  cost: { key: [["cheap to compute, costly", "background:linear-gradient(90deg,var(--cold),var(--hot))"]], of: (block, most) => Math.sqrt(block.cost_s / (most.cost || 1)) },
};
const classOf = { tenant: (block) => ownerOf(block) || "without a key or salt", tier: (block) => ["pool", ...(block.tiers || [])].join(" + ") };
function colouring() {
  const by = $("colourby").value, shown = blocks.filter((block) => block.id >= 0);
  if (classOf[by]) {
    const names = [...new Set(shown.map(classOf[by]))].sort(), colour = (name) => `color-mix(in srgb, var(${COLOURS[names.indexOf(name) % COLOURS.length]}) 45%, var(--panel))`;
    return { key: names.slice(0, 8).map((name) => [name, `background:${colour(name)}`]), fill: (block) => colour(classOf[by](block)) };
  }
  const most = { hits: Math.max(0, ...shown.map((b) => b.hits)), cost: Math.max(0, ...shown.map((b) => b.cost_s || 0)) };
  return { key: COLOURINGS[by].key, fill: (block) => `color-mix(in oklab, var(--hot) ${Math.round(100 * COLOURINGS[by].of(block, most))}%, var(--cold))` };
}
// The server searches the whole tree; what it finds stands in a list, and in the shown block that has it or is above it.
let sought = null, seeking = 0;
const shape = () => tree?.blocks.map((block) => `${nameOf(block)} ${block.total}`).join();
async function seek() {
  const mine = ++seeking, text = $("search").value.trim(), began = performance.now(), of = shape();
  if (!text) { sought = null; showTree(); return; }
  try { const answer = await ask("/cache/search", { text, limit: 50 }); if (mine === seeking) { sought = { ...answer, text, of, again: began + Math.max(5000, 10 * (performance.now() - began)) }; showTree(); } }
  catch (error) { if (mine === seeking) { sought = null; showTree(); $("treefigures").textContent = error.message; } }
}
// A tree that has changed is searched again, for at most a tenth of the time.
const seekAgain = () => { if (sought && performance.now() > sought.again && shape() !== sought.of) { sought.again = Infinity; seek(); } };
function markFound() {
  const places = new Map(blocks.filter((block) => block.id >= 0).map((block) => [block.id, block]));
  for (const node of sought?.nodes || []) {
    const place = [node.id, ...node.above.toReversed()].map((id) => places.get(id)).find(Boolean);
    if (place) place.found = true;
  }
}
function showFound() {
  $("found").hidden = !sought?.nodes.length;
  $("found").replaceChildren(...(sought?.nodes || []).slice(0, 8).map((node) => {
    const line = button("", () => choose(blocks.find((block) => nameOf(block) === nameOf(node)) || node)), text = folded(node.text);
    const at = text.toLowerCase().indexOf(sought.text.toLowerCase());
    line.append(...(at < 0 ? [text] : [text.slice(0, at), make("mark", text.slice(at, at + sought.text.length)), text.slice(at + sought.text.length)]));
    return line;
  }));
}
const found = (block) => !sought || !!block.found;
function showTree() {
  if (!tree) return;
  blocks = nested();
  const tenant = fillTenants(), roots = blocks.filter((block) => block.parent == null && block.total && (!tenant || block.tenant === tenant));
  const sum = (list, field) => list.reduce((all, one) => all + one[field], 0);
  markFound();
  showFound();
  $("treefigures").textContent = `${number(sum(roots, "total"))} tokens in ${inNodes(sum(roots, "nodes"))}` +
    (sought ? `; ${sought.nodes.length || "no"} node${sought.nodes.length === 1 ? " has" : "s have"} \u201c${short(sought.text, 30)}\u201d${sought.complete ? "" : ", and more were not read"}` : sum(roots, "nodes") ? (sum(blocks, "chained") < sum(roots, "nodes") ? `, ${number(sum(blocks, "chained"))} of them shown` : "") : ": empty. Send a prompt, and look again.");
  const from = zoom && blocks.find((block) => nameOf(block) === zoom);
  if (zoom && !from) zoom = null;
  showCrumbs(from);
  drawTree(from ? [from] : roots);
  showPointed();
}
// The node under the pointer is read below the tree; without one, the selected node.
function showPointed() {
  const name = hovered || selected;
  if (name) showNode([...blocks, ...(sought?.nodes || [])].find((block) => nameOf(block) === name));
}
function pointAt(block) {
  hovered = block && block.id >= 0 ? nameOf(block) : null;
  showPointed();
}
function fillTenants() {
  const names = [...new Set(blocks.filter((block) => block.parent == null).map((block) => block.tenant))].filter(Boolean).sort(), chosen = $("tenant").value;
  $("tenantbox").hidden = names.length < 2;
  if ([...$("tenant").options].map((o) => o.value).join() !== ["", ...names].join()) {
    $("tenant").replaceChildren(make("option", "all", { value: "" }), ...names.map((name) => make("option", name, { value: name })));
    $("tenant").value = names.includes(chosen) ? chosen : "";
  }
  return $("tenant").value;
}
function showCrumbs(from) {
  const path = [];
  for (let block = from; block; block = block.above) path.unshift(block);
  $("crumbs").hidden = !from;
  $("crumbs").replaceChildren(...[button("Whole tree", () => { zoom = null; showTree(); }), ...path.flatMap((block) => ["›", button(short(labelOf(block), 28), () => { zoom = nameOf(block); showTree(); })])]);
}
function drawTree(top) {
  const svg = $("icicle"), width = svg.clientWidth || 1000, focused = svg.contains(document.activeElement), paint = colouring();
  const sum = top.reduce((all, root) => all + root.total, 0) || 1, roots = top.every((root) => root.id < 0);
  const depth = Math.max(...top.map((root) => depthOf(root, width * root.total / sum)), 1), room = $("stage").clientHeight - 4;
  rowHeight = Math.min(Math.max(Math.floor(roots ? (room - LOW) / Math.max(depth - 1, 1) : room / depth), LOW), HIGH);
  firstHeight = roots ? LOW : rowHeight;
  const most = Math.max(Math.floor(room / rowHeight), 14);
  $("stage").classList.toggle("empty", !top.length);
  svg.replaceChildren();
  const tiers = Object.keys(TIERS).filter((tier) => blocks.some((block) => block.tiers?.includes(tier)));
  legend($("treekey"), [...paint.key, ...tiers.map((tier) => [`also in ${tier}`, `background:var(${TIERS[tier]});border-radius:50%;width:8px;height:8px`]),
    ...(blocks.some((block) => block.attached) ? [["resume point at its end, drawn below it as wide as its memory", "background:var(--panel);border:1px solid var(--ink);width:8px;height:8px;border-radius:0;transform:rotate(45deg)"]] : []), ["pinned", "border:2px solid var(--pin)"], ["held for a time", "border:2px dashed var(--pin)"], ["locked by a live request", "border-bottom:3px solid var(--lock);border-radius:0"], ["smaller nodes, together", "background:var(--line)"]]);
  let deepest = 0, x = 0;
  const place = (block, x, w, row) => {
    if (row >= most) return;
    deepest = Math.max(deepest, row);
    drawBlock(svg, block, x, w, row, paint);
    const { scale, wide, rest, nodes } = below(block, w);
    let at = x;
    for (const child of wide) { place(child, at, child.total * scale, row + 1); at += child.total * scale; }
    if (row + 1 < most && rest * scale >= 1) { deepest = Math.max(deepest, row + 1); drawRest(svg, at, rest * scale, row + 1, rest, nodes); }
  };
  for (const root of top) { place(root, x, width * root.total / sum, 0); x += width * root.total / sum; }
  const height = top.length ? topOf(deepest + 1) : 0;
  svg.setAttribute("height", height); svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(height, 1)}`);
  const place_ = svg.querySelector(`[data-name="${CSS.escape(cursor || "")}"]`) || svg.querySelector("[data-name]");
  if (place_) { place_.setAttribute("tabindex", "0"); if (focused) place_.focus(); }
}
// What is drawn below a block of this width: the blocks that are wide enough, and the tokens and nodes of the rest.
function below(block, width) {
  const scale = width / block.total, wide = block.below.filter((child) => child.total * scale >= LEAST);
  const without = (all, field) => wide.reduce((left, child) => left - child[field], all);
  return { scale, wide, rest: without(block.total - block.tokens, "total"), nodes: without(block.nodes - block.chained, "nodes") };
}
// Number of rows that a block of this width fills.
function depthOf(block, width) {
  const { scale, wide, rest } = below(block, width);
  return 1 + Math.max(rest * scale >= 1 ? 1 : 0, ...wide.map((child) => depthOf(child, child.total * scale)));
}
function drawRest(svg, x, w, row, tokens, nodes) {
  const rect = draw(svg, "rect", { x, y: topOf(row) + 1, width: Math.max(w - 1, 1), height: heightOf(row) - 4, rx: Math.min(3, w / 4), fill: "var(--line)", "data-rest": tokens });
  rect.addEventListener("mousemove", (event) => showTip(event, `${number(tokens)} tokens in ${number(nodes)} smaller nodes`));
  rect.addEventListener("mouseleave", hideTip);
  const label = `+${number(nodes)}`;
  if (label.length * 6.5 + 8 < w) draw(svg, "text", { x: x + 5, y: topOf(row) + 16 }, label);
}
function drawBlock(svg, block, x, w, row, paint) {
  const root = block.id < 0, name = nameOf(block);
  const rect = draw(svg, "rect", {
    x: x + .5, y: topOf(row) + 1, width: Math.max(w - 1.5, .5), height: heightOf(row) - 4, rx: Math.min(3, w / 4), tabindex: -1, "data-name": name, role: "treeitem",
    "aria-label": `${short(labelOf(block), 60)}, ${number(block.total)} tokens`, fill: root ? "var(--panel)" : paint.fill(block),
    stroke: name === selected ? "var(--ink)" : block.pinned || block.held_s ? "var(--pin)" : root ? "var(--soft)" : "none", "stroke-width": root && name !== selected ? 1 : 2, "stroke-dasharray": block.held_s && !block.pinned && name !== selected ? "3 2" : "none",
    class: found(block) || root ? "" : "faded",
  });
  if (block.pinned) rect.dataset.pinned = "1";
  if (block.held_s) rect.dataset.held = "1";
  if (block.locked && !root) { rect.dataset.locked = "1"; draw(svg, "line", { x1: x + 2, x2: x + Math.max(w - 2, 2.5), y1: topOf(row + 1) - 5, y2: topOf(row + 1) - 5, stroke: "var(--lock)", "stroke-width": 2, "pointer-events": "none" }); }
  if (w > 40) write(svg, block, x + 6, w - 10, row);
  if (w > 14) {
    const right = x + w - 8 - (block.attached ? 10 : 0), y = topOf(row + 1) - 10;
    if (block.attached) draw(svg, "path", { d: `M${x + w - 8} ${y - 4.5}l4.5 4.5-4.5 4.5-4.5-4.5z`, fill: "var(--panel)", stroke: "var(--ink)", "data-points": block.attached });
    Object.keys(TIERS).filter((tier) => block.tiers?.includes(tier)).forEach((tier, i) => draw(svg, "circle", { cx: right - 8 * i, cy: y, r: 3, fill: `var(${TIERS[tier]})` }));
  }
  rect.addEventListener("mousemove", (event) => showTip(event, make("div", facts(block), { class: "soft" })));
  rect.addEventListener("mouseenter", () => pointAt(block));
  rect.addEventListener("mouseleave", () => { hideTip(); pointAt(null); });
  rect.addEventListener("click", () => choose(block));
  rect.addEventListener("dblclick", () => zoomTo(block));
}
// A block's label, in as many lines as fit.
function write(svg, block, x, w, row) {
  const most = Math.max(Math.floor((heightOf(row) - 8) / LINE), 1), wide = Math.floor(w / 6.4), text = labelOf(block);
  for (let i = 0, at = 0; i < most && at < text.length; i++) {
    let end = at + wide;
    // A word that is too long is cut.
    if (end < text.length && i < most - 1) end = text.lastIndexOf(" ", end) > at ? text.lastIndexOf(" ", end) : (text.indexOf(" ", at) + 1 || text.length + 1) - 1;
    draw(svg, "text", { x, y: topOf(row) + 16 + LINE * i, class: found(block) || block.id < 0 ? "" : "faded" }, short(i === most - 1 ? text.slice(at) : text.slice(at, end), wide));
    at = text[end] === " " ? end + 1 : end;
  }
}
function zoomTo(block) { zoom = nameOf(block); cursor = zoom; showTree(); }
function choose(block) { cursor = nameOf(block); if (block.id >= 0) selected = cursor; showTree(); }
const depths = ({ depths, similarity }) => Object.entries(depths).sort((a, b) => a[0] - b[0]).map(([ratio, depth]) =>
  `${depth} layers from ${ratio} % of a request` + (similarity[ratio] == null ? "" : ` (similarity ${similarity[ratio]})`)).join(", ");
const measured = (found) => Object.entries(found || {}).flatMap(([share, { depth }]) => Object.entries(depth).map(([layers, nats]) => `; measured from ${share} %: ${nats} nats in ${layers} layers`)).join("");
const foreseen = (outlook) => outlook ? `${outlook.kind}; ${number(outlook.age)} uses ago; ${number(1000 * outlook.promise, outlook.promise < .01 ? 1 : 0)} hits a page in 1,000 uses` : "–";
// Only what nothing continues can go next; the age of a node above others is not that of their uses.
const foreseenOf = (block) => block.outlook && block.total === block.tokens ? foreseen(block.outlook) : "";
const kindOf = ({ meta, kind }) => meta?.point != null ? `resume point behind ${number(meta.point)} tokens${meta.behind && `, where ${meta.behind === "answer" ? "an answer" : "a prompt"} ended`}` :
  meta?.module != null ? `module ${meta.module} of the schema ${meta.schema}, ${number(meta.module_tokens)} tokens` :
  meta?.depths ? `encoded with ${number(meta.encoded_tokens)} tokens, reusable in ${depths(meta)} (depth table ${meta.depth_table})${measured(meta.measured)}` :
  meta?.document != null ? `document ${meta.document}, ${number(meta.document_tokens)} tokens` : { rows: "behind prompt modules", fused: "behind documents", bicache: "encoding" }[kind];
const pointsOf = ({ attached }) => `${number(attached)} resume point${attached === 1 ? "" : "s"} at its end`;
const sizeOf = (block) => block.meta?.point != null ? `memory of ${number(block.tokens)} tokens` : `${number(block.tokens)} tokens after ${number(block.start)}; ${number(block.total)} in ${inNodes(block.nodes)} from here on`;
function facts(block) {
  const root = block.id < 0, kind = kindOf(block);
  return [root ? `${number(block.total)} tokens in ${inNodes(block.nodes)}` : sizeOf(block),
    block.attached && pointsOf(block), `${number(block.hits)} hits`, `last used ${ago(block.idle_s)} ago`, ownerOf(block) && `of ${ownerOf(block)}`, block.pinned && "pinned", block.held_s && `held for ${ago(block.held_s)}`, block.locked && "locked by a live request",
    foreseenOf(block) && `foreseen: ${foreseenOf(block)}`, kind].filter(Boolean).join("; ");
}
// One stop for the tabulator; arrows go along the tree as it is drawn.
$("icicle").addEventListener("keydown", (event) => {
  const shown = [...$("icicle").querySelectorAll("[data-name]")], now = document.activeElement;
  const block = blocks.find((one) => nameOf(one) === now?.dataset?.name);
  if (!block) return;
  const centre = (rect) => +rect.getAttribute("x") + +rect.getAttribute("width") / 2, row = (rect) => +rect.getAttribute("y"), above = (y) => Math.max(...shown.map(row).filter((other) => other < y));
  const nearest = (y) => shown.filter((rect) => row(rect) === y).sort((a, b) => Math.abs(centre(a) - centre(now)) - Math.abs(centre(b) - centre(now)))[0];
  const beside = (step) => { const same = shown.filter((rect) => row(rect) === row(now)).sort((a, b) => centre(a) - centre(b)); return same[same.indexOf(now) + step]; };
  const moves = { ArrowDown: () => block.below.map((one) => shown.find((rect) => rect.dataset.name === nameOf(one))).find(Boolean), ArrowUp: () => nearest(above(row(now))), ArrowLeft: () => beside(-1), ArrowRight: () => beside(1) };
  const acts = { Enter: () => choose(block), z: () => zoomTo(block), Escape: () => { zoom = null; showTree(); } };
  if (!moves[event.key] && !acts[event.key]) return;
  event.preventDefault();
  if (acts[event.key]) { acts[event.key](); return; }
  const next = moves[event.key]();
  if (!next) return;
  now.setAttribute("tabindex", "-1"); next.setAttribute("tabindex", "0"); cursor = next.dataset.name; next.focus();
});
$("search").addEventListener("input", () => { const typed = ++seeking; setTimeout(() => { if (typed === seeking) seek(); }, 250); });
for (const [id, kind] of [["tenant", "change"], ["colourby", "change"]]) $(id).addEventListener(kind, () => { if (id === "tenant") zoom = null; showTree(); });
addEventListener("resize", () => { showTree(); for (const id of charts.keys()) drawChart(id); });
