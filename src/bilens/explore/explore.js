"use strict";
const form = document.querySelector("form"), message = form.querySelector(".message");
const home = `/${form.dataset.name}`, sheet = form.querySelector("canvas");
let main = document.querySelector("main"), asked = 0, pushed = 0;

// What is asked: all boxes that differ from what they began with, together.
const boxes = () => [...form.elements].filter((box) => box.name);
const textOf = (box) => (box.type === "checkbox" ? (box.checked ? "on" : "") : box.value);
const startOf = (box) => box.type === "checkbox" ? (box.defaultChecked ? "on" : "")
  : box.options ? [...box.options].find((option) => option.defaultSelected)?.value ?? box.options[0].value
  : box.dataset.start ?? box.defaultValue;
const query = () => {
  const changed = boxes().filter((box) => textOf(box) !== startOf(box));
  return new URLSearchParams(changed.map((box) => [box.name, textOf(box)])).toString();
};
// Fill the boxes from the page's address.
const restore = () => {
  const given = new URLSearchParams(location.search);
  for (const box of boxes()) {
    const text = given.has(box.name) ? given.get(box.name) : startOf(box);
    if (box.type === "checkbox") box.checked = text === "on";
    else box.value = text;
    // A folded box that is not as it was is in sight.
    if (text !== startOf(box)) box.closest("details")?.setAttribute("open", "");
  }
};

const answer = async (address, options) => {
  let reply;
  try {
    reply = await fetch(address, options);
  } catch {
    throw new Error("The explorer does not answer; is it still running?");
  }
  const text = await reply.text();
  if (!reply.ok) throw new Error(text);
  return text;
};
// An error names a box first, if one is at fault, and perhaps the word in it.
const say = (text) => {
  message.textContent = text;
  for (const box of boxes()) box.removeAttribute("aria-invalid");
  const [, name, word] = /^(\w+)(?:='([^']*)')?/.exec(text) ?? [];
  const holds = (box) => word && textOf(box).split(",").includes(word);
  const box = boxes().find((box) => box.name === name && holds(box)) ?? boxes().find(holds) ?? form.elements[name];
  box?.setAttribute?.("aria-invalid", "true");
};

// Texts and picture stay as they are until the answer is there, and the last request wins.
const show = async (push) => {
  const mine = ++asked, search = query();
  main.classList.add("busy");
  try {
    const text = await answer(`${home}/page?${search}`);
    if (mine !== asked) return;
    const page = new DOMParser().parseFromString(text, "text/html");
    const address = search ? `${home}?${search}` : home;
    if (push && address !== location.pathname + location.search) {
      // Each change of view is one to go back to; a drawing is one change.
      const now = Date.now();
      history[now - pushed < 1000 ? "replaceState" : "pushState"](null, "", address);
      pushed = now;
    }
    document.title = page.title;
    main.replaceWith(page.querySelector("main"));
    main = document.querySelector("main");
    main.querySelectorAll(".flow").forEach((place) => draw(place, search));
    say("");
  } catch (error) {
    if (mine === asked) say(error.message);
  } finally {
    if (mine === asked) main.classList.remove("busy");
  }
};

const draw = (place, search) => {
  const said = document.createElement("p");
  said.className = "removed";
  said.setAttribute("role", "status");
  place.append(said);
  const remove = async (names) => {
    const nodes = names.map((name) => `&node=${encodeURIComponent(name)}`).join("");
    said.textContent = "Running the model …";
    said.textContent = await answer(`${home}/removed?${search}${nodes}`).catch((error) => error.message);
  };
  const graph = JSON.parse(place.querySelector("script").textContent);
  const closed = place.closest("details:not([open])");
  const start = () => bilensFlow(place, graph, remove);
  if (closed) closed.addEventListener("toggle", start, { once: true });
  else start();
};

form.addEventListener("submit", (event) => { event.preventDefault(); show(true); });
form.addEventListener("change", (event) => {
  if (event.target.matches("select, [type=checkbox]")) show(true);
});
const open = () => { restore(); put_sheet(); if (location.search || !("waits" in form.dataset)) show(false); };
addEventListener("popstate", open);

// The sheet of an image: what is drawn is sent, and comes back as a text for the address.
let put_sheet = () => {};
if (sheet) {
  const pen = sheet.getContext("2d"), [file, number] = form.querySelectorAll(".sheet input");
  const image = form.elements.image;
  const wipe = () => { pen.fillStyle = "#fff"; pen.fillRect(0, 0, sheet.width, sheet.height); };
  const put = (picture) => {
    const scale = Math.min(sheet.width / picture.width, sheet.height / picture.height);
    const [width, height] = [picture.width * scale, picture.height * scale];
    // What the picture does not cover gets the colour of its corner.
    pen.drawImage(picture, 0, 0, 1, 1, 0, 0, sheet.width, sheet.height);
    pen.drawImage(picture, (sheet.width - width) / 2, (sheet.height - height) / 2, width, height);
  };
  let stroke = 0, last = null, waiting = null;
  const send = async () => {
    const mine = ++stroke;
    try {
      const text = await answer(`${home}/sheet`, { method: "POST", body: sheet.toDataURL("image/png") });
      if (mine !== stroke) return;
      image.value = text;
      number.value = "";
      show(true);
    } catch (error) { say(error.message); }
  };
  const at = (event) => {
    const area = sheet.getBoundingClientRect(), scale = sheet.width / area.width;
    return [(event.clientX - area.left) * scale, (event.clientY - area.top) * scale];
  };
  const line = (event) => {
    const here = at(event);
    pen.strokeStyle = "#000";
    pen.lineWidth = Math.max(sheet.width, sheet.height) / 11;
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(...last);
    pen.lineTo(...here);
    pen.stroke();
    last = here;
    // While the pen moves, a few times a second are enough to follow it.
    waiting ??= setTimeout(() => { waiting = null; send(); }, 250);
  };
  sheet.addEventListener("pointerdown", (event) => { sheet.setPointerCapture(event.pointerId); last = at(event); line(event); });
  sheet.addEventListener("pointermove", (event) => { if (last) line(event); });
  for (const name of ["pointerup", "pointercancel"]) sheet.addEventListener(name, () => { last = null; });
  form.querySelector(".clear").addEventListener("click", () => { wipe(); send(); });
  file.addEventListener("change", async () => {
    try {
      put(await createImageBitmap(file.files[0]));
      send();
    } catch { say("image is not a picture that the browser can read."); }
    file.value = "";
  });
  number.addEventListener("input", () => {
    image.value = `test-${Number(number.value)}`;
    put_sheet();
    show(true);
  });
  // What comes from the address or the box, and not from the pen.
  put_sheet = async () => {
    const mine = ++stroke, chosen = /^test-(\d+)$/.exec(image.value);
    if (chosen && document.activeElement !== number) number.value = chosen[1];
    const picture = new Image();
    picture.onload = () => { if (mine === stroke) { wipe(); pen.imageSmoothingEnabled = false; put(picture); } };
    const address = await answer(`${home}/sheet?image=${image.value}`).catch(() => "");
    if (address) picture.src = address;
  };
  wipe();
}
open();
