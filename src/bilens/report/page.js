"use strict";
// Figures are drawn once the page is laid out, so that each gets the width that it will keep.
addEventListener("DOMContentLoaded", () => {
  const config = JSON.parse(document.getElementById("config").textContent);
  // A figure of pictures keeps its proportions: on a narrow window it is lower, not emptier.
  const height = (place, layout) => {
    const aspect = layout.meta && layout.meta.aspect;
    const margins = layout.margin.t + layout.margin.b;
    return aspect ? Math.min(layout.height, Math.ceil(aspect * place.clientWidth) + margins) : layout.height;
  };
  for (const source of document.querySelectorAll("script.figure")) {
    const { data, layout } = JSON.parse(source.textContent);
    const place = source.parentElement;
    const drawn = { ...layout, height: height(place, layout) };
    Plotly.newPlot(place, data, drawn, config);
    addEventListener("resize", () => Plotly.relayout(place, { height: height(place, layout) }));
  }
});
