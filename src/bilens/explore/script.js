() => {
  "use strict";
  // A figure of pictures keeps its proportions: on a narrow window it is lower, not emptier, and
  // its labels are smaller.
  const sizes = new WeakMap();
  const fit = (place) => {
    const layout = place.layout;
    const meta = layout && layout.meta;
    if (!meta || !meta.aspect || !place.clientWidth || !window.Plotly) return;
    if (!sizes.has(layout)) sizes.set(layout, (layout.annotations || []).map((a) => a.font.size));
    const margins = layout.margin.t + layout.margin.b;
    const width = place.clientWidth;
    const height = Math.min(meta.height, Math.ceil(meta.aspect * width) + margins);
    // Plotly's own resizing gives way to the height that is set here, so the width is set as well.
    const drawn = place.querySelector(".main-svg").clientWidth;
    if (Math.abs(layout.height - height) <= 1 && Math.abs(drawn - width) <= 1) return;
    const scale = Math.min(1, Math.max(0.68, (1.5 * (height - margins)) / (meta.height - margins)));
    const change = { width, height };
    sizes.get(layout).forEach((size, i) => { change[`annotations[${i}].font.size`] = size * scale; });
    window.Plotly.relayout(place, change);
  };
  const seen = new WeakSet();
  const widths = new ResizeObserver((entries) => entries.forEach((entry) => fit(entry.target)));
  const watch = () => {
    for (const place of document.querySelectorAll(".js-plotly-plot")) {
      if (seen.has(place)) continue;
      seen.add(place);
      widths.observe(place);
      place.on("plotly_afterplot", () => fit(place));
      fit(place);
    }
  };
  new MutationObserver(watch).observe(document.body, { childList: true, subtree: true });
  watch();
}
