const canvas = element.querySelector("canvas");
const pen = canvas.getContext("2d");
const clear = () => {
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
};
const at = (event) => {
  const box = canvas.getBoundingClientRect();
  const scale = canvas.width / box.width;
  return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
};
const send = () => trigger("input", { drawing: canvas.toDataURL("image/png") });
let last = null;
let waiting = null;
const draw = (event) => {
  const here = at(event);
  pen.strokeStyle = "#000";
  pen.lineWidth = canvas.width / 11;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...here);
  pen.stroke();
  last = here;
  // While the pen moves, a few times a second are enough to follow it.
  waiting ??= setTimeout(() => { waiting = null; send(); }, 250);
};
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  last = at(event);
  draw(event);
});
canvas.addEventListener("pointermove", (event) => { if (last) draw(event); });
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { last = null; });
element.querySelector("button").addEventListener("click", clear);
clear();
