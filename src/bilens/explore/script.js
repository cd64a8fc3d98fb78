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
// The list of the page's parts; a link with # would be a step back of its own.
const list = () => {
  const place = document.querySelector("#parts-of-page nav");
  const titles = [...document.querySelectorAll(".gradio-container h2")].filter((title) => title.checkVisibility());
  const names = titles.map((title) => title.textContent);
  if (!place || place.dataset.names === names.join()) return;
  place.dataset.names = names.join();
  place.replaceChildren(...titles.map((title) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title.textContent;
    button.addEventListener("click", () => title.scrollIntoView({ behavior: "smooth" }));
    return button;
  }));
};
const look = () => {
  list();
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
