"use strict";
// On paper everything is open, in the width of paper.
addEventListener("DOMContentLoaded", () => {
  const sections = document.querySelectorAll("section > details"), opened = new Map();
  const lay = (printing) => {
    document.querySelector("main").classList.toggle("printing", printing);
    for (const section of sections) {
      if (printing) opened.set(section, section.open);
      section.open = printing || opened.get(section);
    }
    for (const place of document.querySelectorAll(".flow")) place.redraw?.();
  };
  addEventListener("beforeprint", () => lay(true));
  addEventListener("afterprint", () => lay(false));
});
// A graph of a closed section has no width either.
addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".flow")) {
    const draw = () => bilensFlow(place, JSON.parse(place.querySelector("script").textContent));
    const closed = place.closest("details:not([open])");
    if (closed) closed.addEventListener("toggle", draw, { once: true });
    else draw();
  }
});
