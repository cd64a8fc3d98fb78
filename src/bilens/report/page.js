"use strict";
// Figures are drawn once the page is laid out, so that each gets the width that it will keep.
addEventListener("DOMContentLoaded", () => {
  const { config, colours } = JSON.parse(document.getElementById("config").textContent);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;
  const { recoloured, watch } = bilensFigures(colours, () => scheme.matches && !printing);
  const figures = [...document.querySelectorAll("script.figure")].map((source) => [source.parentElement, source.textContent]);
  const draw = () => Promise.all(figures.map(([place, text]) => {
    const { data, layout } = JSON.parse(recoloured(text));
    return Plotly.react(place, data, layout, config);
  }));
  draw().then(() => figures.forEach(([place]) => watch(place)));
  scheme.addEventListener("change", draw);
  addEventListener("beforeprint", () => { printing = true; draw(); });
  addEventListener("afterprint", () => { printing = false; draw(); });
});
