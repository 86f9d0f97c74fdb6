// The live stream, the key, and the theme.
let connection = 0;
async function follow() {
  const mine = ++connection;
  for (let pause = 1; mine === connection; pause = Math.min(2 * pause, 15)) {
    try {
      const answer = await call("/dashboard/events");
      $("status").textContent = "live"; $("status").className = "soft"; $("keyform").hidden = !key; $("rooms").hidden = false; $("keywanted").hidden = true; pause = 1;
      for await (const event of eventsOf(answer)) {
        if (mine !== connection) return;
        take(event);
      }
      throw new Error("the stream ended");
    } catch (error) {
      if (mine !== connection) return;
      const refused = error.status === 401 || error.status === 403;
      $("status").textContent = refused ? (error.status !== 401 ? error.message : key ? "this API key is not known" : "an API key is needed") : `not connected: ${error.message}`;
      $("status").className = "bad";
      if (refused) { $("keyform").hidden = false; $("rooms").hidden = true; $("keywanted").hidden = false; clearLive(); return; }
    }
    await new Promise((wake) => setTimeout(wake, 1000 * pause));
  }
}
function take(event) {
  if (event.asker) showAsker(event.asker);
  if (event.model) showModel(event.model);
  if (event.history) samples = event.history;
  if (event.figures) {
    if (event.figures.quota) showQuota(event.figures.quota); else showFigures(event.figures);
    showRequests(event.figures.requests, event.figures.finished);
  }
  if (event.tree) { tree = event.tree; showTree(); seekAgain(); showPins(); showEvictions(); }
}
function showAsker(told) {
  asker = told;
  document.querySelectorAll("[data-admin]").forEach((element) => { if (element.id !== "tenantbox") element.hidden = !asker.admin; });
  $("quota").hidden = asker.admin;
}
function clearLive() {
  tree = null; samples = []; charts.clear();
  for (const id of ["icicle", "requests", "finished", "pins", "evictions", "charts"]) $(id).replaceChildren();
  $("treefigures").textContent = ""; $("quota").hidden = true;
}
function showModel(model) {
  $("model").textContent = [model.name, `${model.dtype} on ${model.device}`, `context ${number(model.context_length)}`, `pool ${number(model.pool_tokens)} tokens in pages of ${model.page_size}`].join(" · ");
  $("model").title = [model.architecture, model.attention_backend && `attention ${model.attention_backend}`, model.eviction_policy && `eviction ${model.eviction_policy}`].filter(Boolean).join(", ");
}
$("keyform").addEventListener("submit", (event) => { event.preventDefault(); key = $("key").value.trim(); $("key").value = ""; stored(sessionStorage, "ramet-key", key); clearLive(); follow(); learn(); });
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  stored(localStorage, "ramet-theme", document.documentElement.dataset.theme);
});
if (stored(localStorage, "ramet-theme")) document.documentElement.dataset.theme = stored(localStorage, "ramet-theme");
follow();
learn();
