// What pages and the explorer do with the figures on them.
const bilensFigures = (colours, isDark) => {
  // A figure on a dark page has its colours changed, picture by picture they stay.
  const recoloured = (text) =>
    isDark() ? Object.entries(colours).reduce((t, [light, dark]) => t.replaceAll(light, dark), text) : text;

  // A figure of pictures keeps its proportions: on a narrow window it is lower, not emptier, and
  // its labels are a little smaller, at least 10 pixels. Below 0.62 of its size it scrolls.
  const sizes = new WeakMap();
  const fit = (place, printing = false) => {
    place.style.zoom = "";
    const room = place.clientWidth, layout = place.layout;
    const { aspect, height: full, least } = (layout && layout.meta) || {};
    if (!(aspect || least) || !room) return;
    // A figure with long labels scrolls on a narrow window.
    if (least) {
      const width = Math.max(room, least);
      place.classList.toggle("wide", width > room);
      // Paper does not scroll.
      if (printing) place.style.zoom = room / width;
      if (Math.abs(place.querySelector(".main-svg").clientWidth - width) > 1) window.Plotly.relayout(place, { width });
      return;
    }
    if (!sizes.has(layout)) sizes.set(layout, (layout.annotations || []).map((a) => a.font.size));
    const margins = layout.margin.t + layout.margin.b;
    const width = printing ? room : Math.max(room, Math.round((0.62 * (full - margins)) / aspect));
    place.classList.toggle("wide", width > room);
    const height = Math.min(full, Math.ceil(aspect * width) + margins);
    // Plotly's own resizing gives way to the height that is set here, so the width is set as well.
    const drawn = place.querySelector(".main-svg").clientWidth;
    if (Math.abs(layout.height - height) <= 1 && Math.abs(drawn - width) <= 1) return;
    const scale = Math.max(0.92, (height - margins) / (full - margins));
    const change = { width, height };
    sizes.get(layout).forEach((size, i) => { change[`annotations[${i}].font.size`] = size * scale; });
    window.Plotly.relayout(place, change);
  };

  // Screen readers say what the figure shows; its buttons are reached with the keyboard.
  const name = (place) => {
    const { meta, title } = place.layout;
    const picture = place.querySelector(".main-svg");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", (meta && meta.alt) || (title && title.text) || "figure");
    for (const button of place.querySelectorAll(".modebar-btn")) {
      button.setAttribute("role", "button");
      button.setAttribute("tabindex", "0");
      button.setAttribute("aria-label", button.dataset.title || "save the figure");
      button.onkeydown = (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); button.click(); }
      };
    }
  };

  const widths = new ResizeObserver((entries) => entries.forEach((entry) => fit(entry.target)));
  const watch = (place) => {
    widths.observe(place);
    place.on("plotly_afterplot", () => { fit(place); name(place); });
    fit(place);
    name(place);
  };
  return { recoloured, watch, fit };
};
