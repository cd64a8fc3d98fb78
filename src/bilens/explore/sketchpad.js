const canvas = element.querySelector("canvas");
const pen = canvas.getContext("2d");
const [file, box, slider] = element.querySelectorAll("input");
const message = element.querySelector(".message");

// The value goes out with each event; the one on its way when another comes is sent again as it
// is by then, so the last state of the sheet is always the one that is explained.
const send = (value) => {
  props.message = "";
  props.value = value;
  trigger("input");
};
const send_sheet = () => send(canvas.toDataURL("image/png"));
const clear = () => {
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, canvas.width, canvas.height);
};
const put = (picture) => {
  const scale = Math.min(canvas.width / picture.width, canvas.height / picture.height);
  const [width, height] = [picture.width * scale, picture.height * scale];
  // What the picture does not cover gets the colour of its corner.
  pen.drawImage(picture, 0, 0, 1, 1, 0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
};

let last = null;
let waiting = null;
const at = (event) => {
  const area = canvas.getBoundingClientRect();
  const scale = canvas.width / area.width;
  return [(event.clientX - area.left) * scale, (event.clientY - area.top) * scale];
};
const draw = (event) => {
  const here = at(event);
  pen.strokeStyle = "#000";
  pen.lineWidth = Math.max(canvas.width, canvas.height) / 11;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...here);
  pen.stroke();
  last = here;
  // While the pen moves, a few times a second are enough to follow it.
  waiting ??= setTimeout(() => { waiting = null; send_sheet(); }, 250);
};
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  last = at(event);
  draw(event);
});
canvas.addEventListener("pointermove", (event) => { if (last) draw(event); });
for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { last = null; });
element.querySelector(".clear").addEventListener("click", () => { clear(); send_sheet(); });

file.addEventListener("change", async () => {
  try {
    put(await createImageBitmap(file.files[0]));
    send_sheet();
  } catch {
    props.message = "This file is not a picture that the browser can read.";
  }
  file.value = "";
});

const choose = (input) => {
  if (input.value === "" || !input.validity.valid) {
    props.message = `The test images are 0 to ${input.max}.`;
    if (input.value !== "") input.value = slider.value;
    return;
  }
  box.value = slider.value = input.value;
  send(`test-${Number(input.value)}`);
};
box.addEventListener("input", () => choose(box));
slider.addEventListener("input", () => choose(slider));

// What the page itself puts on the sheet: a test image, or a drawing that came with the address.
const show = () => {
  const picture = new Image();
  picture.onload = () => {
    if (last || waiting) return;
    clear();
    pen.imageSmoothingEnabled = false;
    put(picture);
  };
  picture.src = props.picture;
  const number = /^test-(\d+)$/.exec(props.value);
  if (number) box.value = slider.value = number[1];
};
// They come one after the other.
watch(["picture", "value"], show);
clear();
show();
