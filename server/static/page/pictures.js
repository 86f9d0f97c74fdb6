// Pictures of the next message: pasted, dropped or chosen.
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let pictures = [];
const thumbnail = (url, at) => make("img", null, { src: url, class: "thumb", alt: `picture ${at + 1}` });
function setPictures(urls) {
  pictures = urls;
  $("pictures").hidden = !urls.length;
  $("pictures").replaceChildren(...urls.map((url, at) => {
    const box = make("span", null, { class: "picture" }), away = button("×", () => setPictures(pictures.filter((_, other) => other !== at)));
    away.setAttribute("aria-label", `Remove picture ${at + 1}`);
    box.append(thumbnail(url, at), away);
    return box;
  }));
}
// Large pictures, as of phones, are sent smaller: a body has 8 MiB, and each turn sends all of them again.
const MOST_BYTES = 1 << 21, MOST_EDGE = 2048;
async function smaller(file) {
  const given = await createImageBitmap(file), scale = Math.min(1, MOST_EDGE / Math.max(given.width, given.height));
  const [width, height] = [given.width, given.height].map((edge) => Math.max(1, Math.round(edge * scale)));
  const canvas = make("canvas", null, { width, height }), pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, width, height);
  pen.drawImage(given, 0, 0, width, height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
const urlOf = (file) => file.size > MOST_BYTES ? smaller(file) : new Promise((found, failed) => {
  const reader = new FileReader();
  reader.onload = () => found(reader.result);
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(file);
});
async function takePictures(files) {
  const wrong = files.find((file) => !KINDS.includes(file.type));
  if (!served?.has_image_understanding) $("told").textContent = `${served?.served_model_name || "This model"} reads text alone: it does not see pictures.`;
  else if (wrong) $("told").textContent = `${wrong.name} is no picture that is served: PNG, JPEG, WebP or GIF.`;
  else {
    $("told").textContent = "";
    try {
      const urls = await Promise.all(files.map(urlOf));
      setPictures([...pictures, ...urls]);
    } catch (error) { $("told").textContent = `The picture cannot be read: ${error.message}`; }
  }
}
const filesOf = (transfer) => form() === "chat" ? [...transfer.files] : [];
$("prompt").addEventListener("paste", (event) => {
  const files = filesOf(event.clipboardData);
  if (files.length) { event.preventDefault(); takePictures(files); }
});
for (const kind of ["dragover", "dragleave", "drop"]) $("playground").addEventListener(kind, (event) => {
  if (form() !== "chat" || !event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  $("playground").classList.toggle("over", kind === "dragover");
  if (kind === "drop") takePictures(filesOf(event.dataTransfer));
});
$("addpicture").addEventListener("click", () => $("picturefile").click());
$("picturefile").addEventListener("change", (event) => { takePictures([...event.target.files]); event.target.value = ""; });
