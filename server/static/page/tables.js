// Live and finished requests, pins, evictions, and a tenant's quota.
function rows(table, head, lines, none) {
  const empty = head.indexOf("tenant");
  if (empty >= 0 && lines.every((cells) => cells[empty] === "–")) { head = head.toSpliced(empty, 1); lines = lines.map((cells) => cells.toSpliced(empty, 1)); }
  const top = make("tr");
  head.forEach((text) => top.append(make("th", text)));
  const cell = (content, i) => { const td = content.tagName === "TD" ? content : make("td"); if (td !== content) td.append(content); td.dataset.name = head[i]; return td; };
  const body = lines.map((cells) => { const row = make("tr"); row.append(...cells.map(cell)); return row; });
  if (!body.length) { table.replaceChildren(make("caption", none, { class: "soft", style: "text-align:left" })); return; }
  table.replaceChildren(top, ...body);
}
const ENDS = { invalid_request_error: "refused: invalid", overloaded_error: "refused: too busy", rate_limit_error: "refused: key's limit", timeout_error: "timeout", engine_dead: "the engine died", internal_error: "failed" };
const whose = (entry) => entry.tenant || "–";
const milliseconds = (s) => s ? number(1000 * s, s < .01 ? 1 : 0) : "–";
function showRequests(live, finished) {
  rows($("requests"), ["request", "tenant", "state", "prompt", "reused", "computed", "output", "seconds"], live.map((r) => [
    short(r.rid, 16), whose(r), r.phase, number(r.prompt_tokens), number(r.cached_tokens),
    served?.diffusion ? "–" : number(r.computed_tokens), `${r.output_tokens}/${r.max_tokens}`, number(r.age_s, 1)]), "none");
  rows($("finished"), ["request", "tenant", "ended", "prompt", "reused", "output", "waited ms", "prefill ms", "tokens/s", "seconds", "end"], (finished || []).map((r) => {
    const decode = r.e2e_s - r.queue_s - r.prefill_s;
    return [short(r.rid, 16), whose(r), new Date(1000 * r.at_s).toLocaleTimeString(), number(r.prompt_tokens), number(r.cached_tokens), number(r.output_tokens),
      milliseconds(r.queue_s), milliseconds(r.prefill_s), r.output_tokens > 1 && decode > 0 ? number((r.output_tokens - 1) / decode, 1) : "–", number(r.e2e_s, 2), make("td", ENDS[r.finish] || r.finish, r.error ? { class: "bad", title: r.error } : {})];
  }), "none yet");
}
function showPins() {
  rows($("pins"), ["pin", "tenant", "tokens", "hits", "left", ""], (tree.pins || []).map((pin) => [
    short(pin.name || pin.id, 14), whose(pin), number(pin.tokens), number(pin.hits), pin.expires_in_s == null ? "no end" : ago(pin.expires_in_s),
    button("Unpin", () => change(() => ask(`/cache/pins/${encodeURIComponent(pin.id)}`, null, "DELETE"), "unpinned"))]).concat((tree.kept || []).map((kept) => [
    `${number(kept.prefixes)} kept prefixes`, whose(kept), number(kept.tokens), "", "", ""])), "none");
}
function showEvictions() {
  rows($("evictions"), ["tenant", "cause", "pages", "idle", "foreseen, when it went"], (tree.evictions || []).toReversed().map((e) => [
    whose(e), CAUSES[e.cause] || e.cause, e.kept_pages ? `${e.pages} of ${e.pages + e.kept_pages}` : e.pages, ago(e.idle_s), make("td", foreseen(e.outlook), { class: "long" })]), "none for room or a quota");
}
function showQuota(quota) {
  const box = $("quota"), has = quota.quota_tokens != null, meter = make("div", null, { class: "meter" });
  box.hidden = false;
  meter.append(make("i", null, { style: `width:${has ? Math.min(100, 100 * quota.used_tokens / quota.quota_tokens) : 0}%` }));
  const text = has ? `${number(quota.used_tokens)} of ${number(quota.quota_tokens)} tokens kept in the cache (${number(quota.used_pages)} of ${number(quota.quota_pages)} pages)` : "There is no quota: you may use all that the cache has room for.";
  box.replaceChildren(make("h2", `Cache of ${quota.tenant}`), make("div", text), ...(has ? [meter] : []));
}
