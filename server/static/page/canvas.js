// A diffusion model's output, one cell a position. A mask is a blank; what has been decided changes only where the model edits.
// For models without a mask token (-1), every cell shows the likeliest token, and the canvas grows at its end.
class Canvas {
  static pieces = new Map();
  static async learn(ids) {
    const unknown = [...new Set(ids)].filter((id) => !Canvas.pieces.has(id));
    if (!unknown.length) return;
    const texts = (await ask("/detokenize", { tokens: unknown.map((id) => [id]), skip_special_tokens: false })).text;
    unknown.forEach((id, i) => Canvas.pieces.set(id, texts[i].replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5")));
  }
  cells = []; ids = [];
  show(ids, step) {
    const mask = served.diffusion.mask_token_id, box = $("canvas");
    if (!this.cells.length) { box.replaceChildren(); box.hidden = false; }
    while (this.cells.length < ids.length) this.cells.push(box.appendChild(make("span", "", { class: "cell mask" })));
    this.cells.forEach((cell, i) => {
      cell.classList.remove("fresh");
      if (ids[i] === (this.ids[i] ?? mask)) return;
      cell.textContent = Canvas.pieces.get(ids[i]);
      cell.className = "cell fresh";
      cell.title = `position ${i + 1}, ${mask < 0 ? "changed" : "decided"} at step ${step}`;
    });
    this.ids = ids;
    const end = ids.findIndex((id) => served.eos_token_ids.includes(id));
    this.cells.forEach((cell, i) => cell.classList.toggle("beyond", end >= 0 && i > end));
    const decided = ids.filter((id) => id !== mask).length;
    box.setAttribute("aria-label", mask < 0 ? `${ids.length} positions at step ${step}` : `${decided} of ${ids.length} positions decided`);
  }
}
