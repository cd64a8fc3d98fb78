"use strict";
// Plotly is unpacked first; the page can be read meanwhile.
const unpacked = async () => {
  const packed = document.getElementById("plotly");
  if (!packed || window.Plotly) return;
  const bytes = new Blob([Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0))]);
  const script = document.createElement("script");
  script.text = await new Response(bytes.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
};
// Figures are drawn once the page is laid out, so that each gets the width that it will keep.
addEventListener("DOMContentLoaded", async () => {
  const { config, colours } = JSON.parse(document.getElementById("config").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const { recoloured, watch, fit } = bilensFigures(colours, () => scheme.matches && !printing);
  const sources = [...document.querySelectorAll("script.figure")];
  const figures = sources.map((source) => [source.parentElement, source.textContent]);
  if (!figures.length) return;
  try {
    await unpacked();
  } catch (error) {
    for (const [place] of figures) place.append("The figure cannot be drawn: this browser does not unpack gzip.");
    return;
  }
  const draw = (chosen = figures) => Promise.all(chosen.map(([place, text]) => {
    const { data, layout } = JSON.parse(recoloured(text));
    return Plotly.react(place, data, layout, config);
  }));
  await draw();
  figures.forEach(([place]) => watch(place));
  scheme.addEventListener("change", () => draw());
  // A closed section has no width: its figures are drawn when it opens.
  const sections = document.querySelectorAll("section > details");
  for (const section of sections)
    section.addEventListener("toggle", () => draw(figures.filter(([place]) => section.contains(place))));
  addEventListener("beforeprint", () => {
    printing = true;
    draw();
    figures.forEach(([place]) => fit(place, true));
  });
  addEventListener("afterprint", () => {
    printing = false;
    draw();
    figures.forEach(([place]) => fit(place));
  });
});
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
