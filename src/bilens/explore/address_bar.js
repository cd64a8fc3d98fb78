const said = element.querySelector("span");
element.querySelector("button").addEventListener("click", async () => {
  await navigator.clipboard.writeText(location.href);
  said.textContent = "Copied.";
  setTimeout(() => { said.textContent = ""; }, 2000);
});

let changed = 0;
watch("value", () => {
  // What hosts add, such as signatures, starts with two underscores and stays.
  const given = [...new URLSearchParams(location.search)];
  const others = new URLSearchParams(given.filter(([name]) => name.startsWith("__")));
  const all = [others.toString(), props.value].filter(Boolean).join("&");
  const address = location.pathname + (all ? "?" + all : "");
  if (address === location.pathname + location.search) return;
  // Each change of view is one to go back to; a drawing, a drag or a typed word is one change.
  const now = Date.now();
  const goes_on = now - changed < 1000;
  changed = now;
  const is_new = navigator.userActivation.hasBeenActive && !goes_on;
  history[is_new ? "pushState" : "replaceState"](null, "", address);
});
// Back and forward.
addEventListener("popstate", () => {
  props.value = location.search.slice(1);
  trigger("input");
});
