// The figures of the page are drawn by Gradio, and drawn again with each new state.
const isDark = () => document.body.classList.contains("dark");
const { recoloured, watch } = bilensFigures(COLOURS, isDark);
const drawn = new WeakMap();
const recolour = (place) => {
  if (!isDark() || drawn.get(place) === place.layout.template) return;
  const { data, layout } = JSON.parse(recoloured(JSON.stringify({ data: place.data, layout: place.layout })));
  drawn.set(place, layout.template);
  window.Plotly.react(place, data, layout);
};
// The address of the page changes with each view, and colours that are found by it would get lost.
const anchor = (place) => {
  for (const bar of place.querySelectorAll(".cbfill"))
    bar.style.fill = bar.style.fill.replace(/^url\(["']?[^#]*/, 'url("');
};
const look = () => {
  for (const place of document.querySelectorAll(".js-plotly-plot")) {
    if (drawn.has(place)) continue;
    drawn.set(place, null);
    watch(place);
    place.on("plotly_afterplot", () => { recolour(place); anchor(place); });
    recolour(place);
    anchor(place);
  }
};
new MutationObserver(look).observe(document.body, { childList: true, subtree: true });
look();
