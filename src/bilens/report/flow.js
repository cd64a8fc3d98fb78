"use strict";
// The graph of a flow: positions across, layers up, nodes sized by flow, edges of the chosen node.
// With `remove`, nodes have a button that calls it with their name.
window.bilensFlow = (place, graph, remove) => {
  const SVG = "http://www.w3.org/2000/svg";
  const BIGGEST = 15, SMALLEST = 2.5, LISTED = 8;
  const shape = (tag, attributes, parent) => {
    const found = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
    if (parent) parent.append(found);
    return found;
  };
  const write = (tag, text, parent, name = "") => {
    const found = document.createElement(tag);
    found.textContent = text;
    found.className = name;
    parent.append(found);
    return found;
  };
  const signed = (value) => (value > 0 ? "+" : "") + value.toPrecision(3);
  const percent = (share) => `${Math.round(100 * share)} %`;
  const sign = (value) => (value < 0 ? "negative" : "positive");

  const slider = place.querySelector("input"), said = place.querySelector("output");
  const box = place.querySelector(".graph"), panel = place.querySelector(".panel");
  const largest = Math.max(...graph.nodes.slice(1).map((n) => Math.abs(n.flow)), 1e-30);
  let chosen = 0, pinned = false, at = [], lines = null, count = 1;

  const radius = (n) =>
    n.kind === "output" ? BIGGEST : Math.max(SMALLEST, BIGGEST * Math.sqrt(Math.abs(n.flow) / largest));
  const row = (n) => {
    if (n.kind === "output") return 2 * graph.layers + 1;
    if (n.layer === null) return 0;
    return 2 * n.layer + (n.part === "mlp" ? 2 : 1);
  };
  // Column 0 holds what belongs to no position.
  const column = (n) => (n.position === null ? 0 : n.position + 1);

  const arrange = (nodes) => {
    const columns = graph.tokens.length + 1, rows = 2 * graph.layers + 2;
    const widths = Array(columns).fill(0).map((_, c) => (c ? Math.max(40, 9 + 7 * graph.tokens[c - 1].length) : 0));
    const heights = Array(rows).fill(3), cells = new Map();
    nodes.forEach((n, i) => {
      const key = `${row(n)} ${column(n)}`, r = radius(n);
      const cell = cells.get(key) || { nodes: [], width: 0 };
      cell.nodes.push([i, cell.width + r + 1]);
      cell.width += 2 * r + 2;
      cells.set(key, cell);
      widths[column(n)] = Math.max(widths[column(n)], cell.width + 8);
      heights[row(n)] = Math.max(heights[row(n)], 2 * r + 3);
    });
    const left = 30, sum = widths.reduce((a, b) => a + b, 0);
    const spare = Math.max(0, box.clientWidth - left - sum - 2) / graph.tokens.length;
    const xs = [], ys = [];
    let x = left;
    widths.forEach((w, c) => { xs.push(x); x += w + (c ? spare : 0); });
    let y = heights.reduce((a, b) => a + b, 0) + 4;
    const height = y + 26;
    heights.forEach((h) => { ys.push(y - h / 2); y -= h; });
    const places = Array(nodes.length);
    for (const [key, cell] of cells) {
      const [r, c] = key.split(" ").map(Number);
      const middle = xs[c] + (widths[c] + (c ? spare : 0)) / 2;
      for (const [i, offset] of cell.nodes) places[i] = [middle - cell.width / 2 + offset, ys[r]];
    }
    return { places, width: x, height, xs, ys, heights, widths, spare };
  };

  const edgesOf = (i) =>
    graph.edges.filter(([a, b]) => (a === i || b === i) && a < count && b < count)
      .sort((e, f) => Math.abs(f[2]) - Math.abs(e[2]));

  const list = (title, edges, other, parent) => {
    if (!edges.length) return;
    const part = write("div", "", parent);
    write("h4", title, part);
    for (const edge of edges.slice(0, LISTED)) {
      const line = write("p", "", part);
      write("b", signed(edge[2]), line, sign(edge[2]));
      write("span", ` ${graph.nodes[other(edge)].name}`, line);
    }
  };

  const show = (i) => {
    chosen = i;
    const node = graph.nodes[i], edges = edgesOf(i);
    lines.replaceChildren();
    const most = Math.max(...edges.map((e) => Math.abs(e[2])), 1e-30);
    for (const [a, b, flow] of edges) {
      if (Math.abs(flow) < 0.01 * most) continue;
      const [[x1, y1], [x2, y2]] = [at[b], at[a]], bend = (y2 - y1) / 2;
      // Nodes above one another would hide an edge that goes straight up.
      const bow = Math.abs(x2 - x1) < 24 ? Math.min(36, Math.abs(bend) / 2) * (b % 2 ? 1 : -1) : 0;
      shape("path", {
        d: `M${x1} ${y1} C${x1 + bow} ${y1 + bend} ${x2 + bow} ${y2 - bend} ${x2} ${y2}`,
        class: sign(flow), "stroke-width": 0.5 + 4 * Math.sqrt(Math.abs(flow) / most),
      }, lines);
    }
    box.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    box.querySelector(`[data-node="${i}"]`).classList.add("chosen");
    panel.classList.toggle("pinned", pinned);
    panel.replaceChildren();
    const title = write("h3", "", panel);
    write("b", signed(node.flow), title, sign(node.flow));
    write("span", ` ${node.name}`, title);
    if (node.eigenvalue !== null) write("p", `eigenvalue ${signed(node.eigenvalue)}`, panel);
    if (remove && node.removable) {
      const button = write("button", "Remove it and run the model", panel);
      button.type = "button";
      button.onclick = () => remove(node.name);
    }
    const both = write("div", "", panel, "row");
    list("from", edges.filter((e) => e[0] === i), (e) => e[1], both);
    list("to", edges.filter((e) => e[1] === i), (e) => e[0], both);
  };

  const redraw = () => {
    const [n, flow, logit] = graph.shares[slider.value];
    count = n + 1;
    said.textContent = `${n} of ${graph.n_nodes} nodes: ${percent(flow)} of the absolute flow, ` +
      `${percent(logit)} of the logit starts and stays in them`;
    const nodes = graph.nodes.slice(0, count), map = arrange(nodes);
    at = map.places;
    const svg = shape("svg", { width: map.width, height: map.height, role: "group",
      "aria-label": "graph of the flow" });
    for (let l = 0; l < graph.layers; l++) {
      const [below, above] = [2 * l + 1, 2 * l + 2];
      if (map.heights[below] + map.heights[above] < 10) continue;
      const y = (map.ys[below] + map.ys[above]) / 2;
      shape("line", { x1: 28, x2: map.width, y1: map.ys[below] + map.heights[below] / 2,
        y2: map.ys[below] + map.heights[below] / 2, class: "rule" }, svg);
      shape("text", { x: 22, y: y + 4, "text-anchor": "end" }, svg).textContent = l;
    }
    graph.tokens.forEach((token, t) => {
      const x = map.xs[t + 1] + (map.widths[t + 1] + map.spare) / 2;
      shape("text", { x, y: map.height - 8, "text-anchor": "middle", class: "token" }, svg).textContent = token;
    });
    lines = shape("g", { class: "edges" }, svg);
    nodes.forEach((node, i) => {
      const [x, y] = at[i], r = radius(node);
      const mark = node.kind === "head"
        ? shape("rect", { x: x - 0.9 * r, y: y - 0.9 * r, width: 1.8 * r, height: 1.8 * r }, svg)
        : shape("circle", { cx: x, cy: y, r }, svg);
      mark.setAttribute("class", `node ${sign(node.flow)} ${node.kind}`);
      const name = `${node.name} ${signed(node.flow)}`;
      mark.setAttribute("tabindex", 0);
      mark.setAttribute("role", "button");
      mark.setAttribute("aria-label", name);
      mark.dataset.node = i;
      shape("title", {}, mark).textContent = name;
      mark.addEventListener("pointerenter", (event) => {
        if (event.pointerType === "mouse" && !pinned) show(i);
      });
      mark.addEventListener("focus", () => { pinned = i !== 0; show(i); });
      mark.addEventListener("click", () => { pinned = i !== 0; show(i); });
    });
    svg.addEventListener("click", (event) => { if (event.target === svg) { pinned = false; show(0); } });
    box.replaceChildren(svg);
    show(chosen < count ? chosen : 0);
    box.scrollLeft = at[chosen][0] - box.clientWidth / 2;
  };
  slider.max = graph.shares.length - 1;
  slider.value = graph.start;
  slider.oninput = redraw;
  // Another graph may be drawn in the same place.
  if (!place.redraw) addEventListener("resize", () => place.redraw());
  place.redraw = redraw;
  redraw();
};
