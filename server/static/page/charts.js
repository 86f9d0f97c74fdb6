// Figures over time. Gauges show the last sample of each piece of time, counters the difference to the piece before.
let samples = [];
const PIECES = 100, HIT_WINDOW_S = 30, HEIGHT = 112, LEFT = 52, RIGHT = 6, TOP = 6, BOTTOM = 18;
const charts = new Map();
function addSample(now) {
  if (samples.length && now.at_s < samples.at(-1).at_s) samples = [];
  samples.push(now);
  // Beyond five minutes, a sample every five seconds is enough.
  const old = now.at_s - 300;
  samples = samples.filter((s, i, all) => s.at_s > now.at_s - 3660 && (s.at_s > old || i === 0 || Math.floor(s.at_s / 5) !== Math.floor(all[i - 1].at_s / 5)));
}
function pieces() {
  const span = +$("window").value, end = samples.at(-1).at_s, width = span / PIECES, found = [];
  let at = 0, before = null;
  for (let i = 0; i <= PIECES; i++) {
    const stop = end - span + i * width;
    let last = null;
    while (at < samples.length && samples[at].at_s <= stop + 1e-6) last = samples[at++];
    if (i) found.push({ at_s: stop, last, before, width });
    before = last || before;
  }
  return found;
}
const growth = (read) => ({ last, before }) => last ? Math.max(read(last) - read(before || samples[0]), 0) : null;
const gauge = (read) => ({ last }) => last ? read(last) : null;
const share = (read) => gauge((s) => 100 * read(s) / s.pages_total);
function hitRatio({ last }) {
  if (!last) return null;
  const since = samples.findLast((s) => s.at_s <= last.at_s - HIT_WINDOW_S) || samples[0];
  const asked = last.queried_tokens - since.queried_tokens;
  return asked > 0 ? 100 * (last.cached_tokens - since.cached_tokens) / asked : null;
}
const CAUSES = { room: "room was needed", quota: "over the quota", flush: "flushed" };
const REASONS = { new: "new text", room: "evicted for room", quota: "evicted for the quota", flush: "flushed", expired: "pin ran out" };
function stacked(field, names, words = {}) {
  return names.map((name, i) => [words[name] || name || "without a key", COLOURS[i % COLOURS.length], growth((s) => s[field]?.[name] || 0)]);
}
const namesOf = (field) => [...new Set(samples.flatMap((s) => Object.keys(s[field] || {})))].sort();
function showFigures(now) {
  addSample(now);
  const field = `evicted_tokens_by_${$("evictedby").value}`, total = (s, name) => Object.values(s[name] || {}).reduce((sum, n) => sum + n, 0);
  const since = samples.find((s) => s.at_s >= now.at_s - $("window").value), over = (name) => number(Math.max(total(now, name) - total(since, name), 0));
  const part = (pages) => number(100 * pages / now.pages_total), hit = hitRatio({ last: now });
  chart("Pool", `${part(now.pages_tree - now.pages_locked)} % cached, ${part(now.pages_private + now.pages_locked)} % live` + (now.pages_held ? `, ${number(100 * now.pages_held / now.pages_total)} % held` : ""), "%", [
    ["live requests", "--b", share((s) => s.pages_private + s.pages_locked)], ["pinned", "--d", share((s) => s.pages_pinned)],
    ["cached", "--a", share((s) => s.pages_tree - s.pages_locked - s.pages_pinned)]], { stack: true, top: 100, rest: "free" });
  chart("Hit ratio", hit == null ? "–" : `${number(hit, 1)} %`, "%", [[`of prompt tokens, over ${HIT_WINDOW_S} s`, "--c", hitRatio]], { top: 100 });
  const asked = now.queried_tokens - since.queried_tokens, reused = growth((s) => s.cached_tokens), computed = growth((s) => s.queried_tokens - s.cached_tokens);
  chart("Prompt tokens", asked > 0 ? `${number(100 * (now.cached_tokens - since.cached_tokens) / asked)} % reused` : "–", "", [["reused", "--c", reused], ["computed", "--b", computed]], { stack: true, bars: true });
  chart("Requests", `${now.running} running, ${now.waiting} waiting`, "", [["running", "--a", gauge((s) => s.running)], ["waiting", "--bad", gauge((s) => s.waiting)]]);
  chart("Time to first token", now.ttft_p50_s == null ? "–" : `${number(1000 * now.ttft_p50_s)} ms`, "ms",
    [["median", "--a", gauge((s) => s.ttft_p50_s && 1000 * s.ttft_p50_s)], ["95 %", "--b", gauge((s) => s.ttft_p95_s && 1000 * s.ttft_p95_s)]]);
  chart("Generated", `${number(now.tokens_per_s, 1)} tokens/s`, "", [["tokens/s", "--c", gauge((s) => s.tokens_per_s)]]);
  chart("Evicted", `${over(field)} tokens`, "", stacked(field, namesOf(field), CAUSES), { stack: true, bars: true });
  chart("Missed", `${over("missed_tokens_by_reason")} prompt tokens`, "", stacked("missed_tokens_by_reason", namesOf("missed_tokens_by_reason"), REASONS), { stack: true, bars: true, none: "counted only while a dashboard is open" });
  if (namesOf("loaded_tokens_by_tier").length) chart("Loaded from tiers", `${over("loaded_tokens_by_tier")} tokens`, "", stacked("loaded_tokens_by_tier", namesOf("loaded_tokens_by_tier")), { stack: true, bars: true });
  showTiers(now.tiers || {});
  const live = (s) => s.pages_locked + s.pages_private + s.saved_pages;
  if (now.substituted_pages) chart("Reasoning steps", `${number(now.saved_pages)} pages saved`, "%", [["share of live pages", "--a", gauge((s) => live(s) ? 100 * s.saved_pages / live(s) : 0)]], { top: 100 });
}
const gib = (bytes) => bytes < 2 ** 30 ? `${number(bytes / 2 ** 20)} MiB` : `${number(bytes / 2 ** 30, 1)} GiB`;
function showTiers(tiers) {
  $("tiers").hidden = !Object.keys(tiers).length;
  $("tiers").replaceChildren(...Object.entries(tiers).map(([name, tier]) => make("span",
    `${name}: ${gib(tier.bytes)}${tier.capacity ? ` of ${gib(tier.capacity)}` : ""}, ${number(tier.blocks)} blocks, ${number(tier.counts.hits || 0)} of ${number(tier.counts.wanted ?? 0)} wanted were there${tier.open ? "" : "; it fails now"}`)));
}
function chart(title, value, unit, series, options = {}) {
  const id = "chart-" + title.toLowerCase().replaceAll(" ", "-");
  let box = $(id);
  if (!box) {
    box = make("div", null, { id, class: "chart" });
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("tabindex", "0"); svg.setAttribute("role", "img"); svg.setAttribute("aria-label", `${title} over time; arrow keys read values`);
    svg.addEventListener("pointermove", (event) => readChart(id, event, (event.clientX - svg.getBoundingClientRect().left)));
    svg.addEventListener("pointerleave", () => closeChart(id));
    svg.addEventListener("blur", () => closeChart(id));
    svg.addEventListener("keydown", (event) => stepChart(id, event));
    box.append(make("div", title, { class: "soft" }), make("div", "", { class: "value" }), svg, make("div", null, { class: "legend" }));
    $("charts").append(box);
  }
  box.children[1].textContent = value;
  const keys = series.map(([name, colour]) => [name, `background:var(${colour})`]);
  if (options.rest) keys.push([options.rest, "border:1px solid var(--line)"]);
  legend(box.children[3], keys.length ? keys : [[options.none || "none so far", "display:none"]]);
  charts.set(id, { title, unit, series, options, at: charts.get(id)?.at });
  drawChart(id);
}
function ticks(most, unit) {
  const step = 10 ** Math.floor(Math.log10(most / 2)), unitStep = Math.max(1, [1, 2, 5, 10].map((n) => n * step).find((n) => most / n <= 3));
  const found = [];
  for (let at = 0; at <= most * 1.001; at += unitStep) found.push([at, at >= 10000 ? `${number(at / 1000)}k` : number(at)]);
  return found.map(([at, text]) => [at, at && unit ? `${text} ${unit}` : text]);
}
function drawChart(id) {
  const { unit, series, options, at } = charts.get(id), svg = $(id).children[2], width = Math.max(svg.clientWidth, 120), all = pieces();
  const values = series.map(([, , read]) => all.map(read));
  if (options.stack) for (let i = 1; i < values.length; i++) values[i] = values[i].map((v, j) => v == null ? null : v + (values[i - 1][j] || 0));
  const most = options.top || Math.max(1, ...values.flat().filter((v) => v != null)) * 1.08;
  const x = (i) => LEFT + (width - LEFT - RIGHT) * (i + .5) / PIECES, y = (v) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * v / most;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren();
  const isEmpty = !options.top && !values.flat().some((v) => v);
  if (isEmpty) draw(svg, "text", { x: LEFT + (width - LEFT - RIGHT) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing in this time");
  for (const [value, text] of isEmpty ? [[0, ""]] : ticks(most, unit)) {
    draw(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), stroke: "var(--line)" });
    draw(svg, "text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, text);
  }
  const minutes = +$("window").value / 60;
  for (const part of width < 220 ? [0, 1] : [0, .5, 1]) draw(svg, "text", { x: LEFT + (width - LEFT - RIGHT) * part, y: HEIGHT - 5, "text-anchor": ["start", "middle", "end"][2 * part] }, part === 1 ? "now" : `−${number(minutes * (1 - part), minutes * (1 - part) % 1 ? 1 : 0)} min`);
  for (let i = series.length - 1; i >= 0; i--) drawSeries(svg, values[i], series[i][1], options, x, y, (width - LEFT - RIGHT) / PIECES, i ? values[i - 1] : null);
  if (at != null) draw(svg, "line", { x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM, stroke: "var(--soft)", "stroke-dasharray": "2 2" });
}
function drawSeries(svg, values, colour, options, x, y, step, under) {
  if (options.bars) {
    const bars = values.map((v, i) => v ? `M${(x(i) - step * .4).toFixed(1)} ${y(v).toFixed(1)}H${(x(i) + step * .4).toFixed(1)}V${y(under?.[i] || 0).toFixed(1)}H${(x(i) - step * .4).toFixed(1)}Z` : "").join("");
    draw(svg, "path", { d: bars, fill: `var(${colour})` });
    return;
  }
  let path = "", first = null, last = null;
  const fill = [];
  values.forEach((v, i) => {
    // Up to a few pieces without a sample are bridged; more are a gap.
    if (v == null) return;
    path += last == null || i - last > 6 ? `M${x(i).toFixed(1)} ${y(v).toFixed(1)}h.01` : `L${x(i).toFixed(1)} ${y(v).toFixed(1)}`;
    first ??= i; last = i; fill.push([x(i), y(v)]);
  });
  if (options.stack && fill.length > 1) draw(svg, "path", { d: `M${fill.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}L${x(last)} ${y(0)}L${x(first)} ${y(0)}Z`, fill: `color-mix(in srgb, var(${colour}) 55%, var(--panel))` });
  draw(svg, "path", { d: path, fill: "none", stroke: `var(${colour})`, "stroke-width": 1.6, "stroke-linejoin": "round", "stroke-linecap": "round" });
}
function readChart(id, event, at) {
  const it = charts.get(id), width = $(id).children[2].clientWidth;
  it.at = Math.max(0, Math.min(PIECES - 1, Math.floor((at - LEFT) / (width - LEFT - RIGHT) * PIECES)));
  drawChart(id);
  const all = pieces(), piece = all[it.at], from = all.slice(0, it.at + 1).findLast((one) => one.last) || piece;
  const lines = it.series.map(([name, colour, read]) => {
    const line = make("div"), value = read(it.options.bars ? piece : from);
    line.append(make("i", null, { style: `display:inline-block;width:9px;height:9px;margin-right:.4rem;background:var(${colour})` }), `${name}: ${value == null ? "–" : number(value, value < 10 && value % 1 ? 2 : 0)} ${it.unit}`);
    return line;
  });
  showTip(event, make("div", new Date(1000 * piece.at_s).toLocaleTimeString(), { class: "soft" }), ...lines);
}
function closeChart(id) { charts.get(id).at = null; hideTip(); drawChart(id); }
function stepChart(id, event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const box = $(id).children[2].getBoundingClientRect(), at = Math.max(0, Math.min(PIECES - 1, (charts.get(id).at ?? PIECES) + step));
  const x = LEFT + (box.width - LEFT - RIGHT) * (at + .5) / PIECES;
  readChart(id, { clientX: box.left + x, clientY: box.top + 10 }, x);
}
for (const id of ["window", "evictedby"]) $(id).addEventListener("change", () => { if (samples.length) { const now = samples.pop(); showFigures(now); } });
