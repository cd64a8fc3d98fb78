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
new MutationObserver(list).observe(document.body, { childList: true, subtree: true });
list();
