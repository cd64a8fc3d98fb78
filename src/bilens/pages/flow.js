"use strict";
// The graph of a flow: positions across, layers up. A head is a line from the position that it
// attends to, with a square where it writes. `graph` is a bilens.flows.reading.FlowPage.
// With `remove`, a button calls it with the names of the pinned nodes, or of the selected one.
window.bilensFlow = (place, graph, remove) => {
  const SVG = "http://www.w3.org/2000/svg";
  const BIGGEST = 13, SMALLEST = 2.5, LISTED = 8, LABELLED = 20, DRAWN = 40, LONGEST = 44;
  const LEFT = 34, LETTER = 6.7, LINE = 14, TOKEN = 3.65, LONGEST_TOKEN = 22;
  const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font"];
  const KEY = ["square: head, with a line from the token it attends to", "circle: MLP or token",
    "blue raises the logit, red lowers it; area: how much",
    ...(graph.nodes.some((n) => n.effect) ? ["raises, lowers: next tokens that the part makes more or less likely"] : [])];
  const LEAVES = ["token", "choice"];

  const shape = (tag, attributes, parent, text = "") => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== "") element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };
  const write = (tag, text, parent, name = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    element.className = name;
    parent.append(element);
    return element;
  };
  const signed = (value) => (value > 0 ? "+" : "") + value.toPrecision(3);
  const percent = (share) => `${Math.round(100 * share)}%`;
  const sign = (value) => (value < 0 ? "negative" : "positive");
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  const $ = (selector) => place.querySelector(selector);
  const slider = $("input[type=range]"), find = $("input[type=search]");
  const box = $(".graph"), panel = $(".panel"), table = $(".list");
  const largest = Math.max(...graph.nodes.slice(1).map((n) => Math.abs(n.flow)), 1e-30);
  const radius = (u) =>
    u.kind === "output" ? BIGGEST : Math.max(SMALLEST, BIGGEST * Math.sqrt(Math.abs(u.flow) / largest));

  let count = 1, chosen = 0, only = false, held = false;
  let order = graph.nodes.some((n) => n.measured !== null) ? "measured" : "flow";
  let view = null, zoom = null;

  // Pins outlast a reload: the session keeps them for each graph, where the browser has storage.
  const key = ["bilens", graph.metric, graph.nodes.length, ...graph.tokens].join(" ");
  const recalled = () => { try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; } };
  const remember = () => {
    try { sessionStorage.setItem(key, JSON.stringify({ pins: [...pinned], groups, shown: slider.value })); } catch { /* none */ }
  };
  let { pins = [], groups = [], shown: position = graph.start } = recalled(), pinned = new Set(pins);

  // What is drawn: nodes, and groups of them, each with the flow that leaves it.
  const gather = () => {
    const owner = new Map(), units = [];
    const shown = (i) => i < count && (!only || i === 0 || pinned.has(i));
    const add = (node, members) => {
      members.forEach((i) => owner.set(i, units.length));
      units.push({ ...node, members, number: units.length });
    };
    groups.forEach(({ name, nodes }) => {
      const members = nodes.filter(shown);
      if (members.length < 2) return;
      add({ ...graph.nodes[members[0]], name, label: name, kind: "group", source: null }, members);
    });
    graph.nodes.forEach((node, i) => { if (shown(i) && !owner.has(i)) add(node, [i]); });
    const inside = units.map(() => 0), flows = new Map(), weights = new Map();
    const among = graph.edges.filter(([a, b]) => owner.has(a) && owner.has(b));
    const weigh = pathWeights(among, [...owner.keys()]);
    among.forEach(([a, b, flow], e) => {
      const [above, below] = [owner.get(a), owner.get(b)], key = `${above} ${below}`;
      if (above === below) { inside[above] += flow; return; }
      flows.set(key, (flows.get(key) || 0) + flow);
      weights.set(key, (weights.get(key) || 0) + weigh.edges[e]);
    });
    units.forEach((u, n) => {
      const of = (nodes) => sum(nodes.map((i) => graph.nodes[i].flow)) - inside[n];
      u.out = of(u.members);
      u.into = of(u.members.filter((i) => !LEAVES.includes(graph.nodes[i].kind)));
      u.flow = u.kind === "group" ? u.out : u.flow;
      u.sink = u.members.every((i) => graph.nodes[i].sink);
    });
    const edges = [...flows].map(([key, flow]) => [...key.split(" ").map(Number), flow, weights.get(key)]);
    units.forEach((u) => { u.carried = u.kind === "output" ? Infinity : 0; });
    edges.forEach(([, below, , weight]) => { units[below].carried += weight; });
    return { units, edges, owner, carried: weigh.carried };
  };

  // The weight of an edge is that of all paths through it up to the logit, among these nodes.
  const pathWeights = (among, shown) => {
    const reached = new Map([[0, 1]]), edges = among.map(() => 0), below = new Map();
    among.forEach(([a, b], e) => below.set(b, [...(below.get(b) || []), e]));
    let carried = 0;
    // Ranks go from above to below.
    shown.sort((i, j) => graph.nodes[i].rank - graph.nodes[j].rank);
    for (const b of shown.filter((i) => i)) {
      const into = below.get(b) || [], node = graph.nodes[b];
      into.forEach((e) => { edges[e] = (reached.get(among[e][0]) || 0) * among[e][2]; });
      const arriving = sum(into.map((e) => edges[e]));
      if (LEAVES.includes(node.kind)) carried += arriving;
      else reached.set(b, node.flow ? arriving / node.flow : 0);
    }
    return { edges, carried };
  };

  const row = (u) =>
    u.kind === "output" ? 2 * graph.layers + 1 : u.layer === null ? 0 : 2 * u.layer + (u.part === "mlp" ? 2 : 1);
  const moves = (u) => u.kind === "head" && u.source !== null && u.source !== u.position;
  const short = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);
  const labelOf = (u) => short(u.kind === "output" ? `logit ${signed(graph.value)}` : u.label);

  // A token, and that of the second text where it differs.
  const tokenAt = (t) => {
    const [token, other] = [graph.tokens[t], graph.second[t]].map((name) => (name === undefined ? name : `"${name}"`));
    const text = other === undefined || other === token ? token : `${token} / ${other}`;
    return text.length > LONGEST_TOKEN ? `${text.slice(0, LONGEST_TOKEN - 1)}…` : text;
  };

  // Places of units, columns and rows. Empty rows vanish, and empty columns shrink to a mark. If
  // labels beside each other have no room, each gets a line of its own.
  const arrange = (units) => {
    const room = box.clientWidth - LEFT - 12, wide = place_(units, false, room);
    return wide.needed <= room ? wide : place_(units, true, room);
  };

  const place_ = (units, narrow, room) => {
    // Parts of early layers have large flows that cancel, so that labels go by what reaches the logit.
    const named = new Set([...units].sort((u, v) => Math.abs(v.carried) - Math.abs(u.carried))
      .filter((u, n) => n < LABELLED + 1 || u.members.some((i) => pinned.has(i))));
    const used = new Set(units.flatMap((u) => [u.position, moves(u) ? u.source : null]));
    const columns = used.has(null) && units.some((u) => u.position === null) ? [{ at: [null], left: 15, right: 15, text: "" }] : [];
    graph.tokens.forEach((_, t) => {
      const last = columns[columns.length - 1];
      const text = tokenAt(t), half = Math.max(20, 8 + TOKEN * text.length);
      if (used.has(t)) columns.push({ at: [t], left: half, right: half, text });
      else if (last && last.empty) last.at.push(t);
      else columns.push({ at: [t], left: 15, right: 15, text: "⋯", empty: true });
    });
    const column = new Map(columns.flatMap((c) => c.at.map((t) => [t, c])));
    const rows = new Map(), lanes = new Map();
    for (const u of [...units].sort((u, v) => row(u) - row(v))) {
      // Heads that move something get a lane each, so that their lines do not cover each other.
      const lane = `${row(u)} ${moves(u) || (narrow && named.has(u)) ? u.number : ""}`, r = radius(u);
      const cell = { lane, width: 0, labels: 0, ...(lanes.get(lane) || {}).cells?.get(column.get(u.position)) };
      if (!lanes.has(lane)) lanes.set(lane, { name: lane, row: row(u), height: 0, cells: new Map() });
      u.offset = cell.width + r + 1;
      cell.width += 2 * r + 2;
      // Labels of one cell are below each other, and none is on the line of another lane's head.
      if (named.has(u)) u.line = cell.labels++;
      lanes.get(lane).cells.set(column.get(u.position), cell);
      lanes.get(lane).height = Math.max(lanes.get(lane).height, 2 * r + 3, LINE * cell.labels);
      u.lane = lane;
    }
    const bow = narrow ? 14 : 30;
    for (const u of narrow ? [] : units) {
      const c = column.get(u.position), cell = lanes.get(u.lane).cells.get(c);
      // Labels are to the right of nodes, and edges between nodes of one column bow to the left.
      c.left = Math.max(c.left, cell.width / 2 + 6, named.has(u) ? bow + 4 : 0);
      c.right = Math.max(c.right, cell.width / 2 + (named.has(u) ? LETTER * labelOf(u).length + 14 : 6));
    }
    const needed = sum(columns.map((c) => c.left + c.right));
    let x = 0, y = 0;
    if (narrow) {
      // Columns are near each other, so that the labels of the last one have room.
      const longest = LETTER * Math.max(...[...named].map((u) => labelOf(u).length)) + 20;
      let steps = 0;
      columns.forEach((c, i) => {
        steps += i ? (c.empty || columns[i - 1].empty ? 0.8 : 1) : 0;
        Object.assign(c, { steps, left: 24 });
      });
      const edge = room > 500 ? Math.max(24, TOKEN * columns[0].text.length + 4) : 24;
      const step = Math.max(20, Math.min(room - edge - longest, room - edge - 24) / (steps || 1));
      columns.forEach((c) => { c.x = edge + step * c.steps; });
      x = Math.max(room, edge + 24 + step * steps);
    }
    const spare = Math.max(0, room - needed) / columns.filter((c) => !c.empty).length;
    for (const c of narrow ? [] : columns) {
      const more = c.empty ? 0 : spare;
      c.x = x + c.left + 0.3 * more;
      x += c.left + c.right + more;
    }
    for (const u of units) {
      const c = column.get(u.position), cell = lanes.get(u.lane).cells.get(c), r = radius(u);
      u.x = c.x - cell.width / 2 + u.offset;
      u.start = moves(u) ? column.get(u.source).x : u.x;
      if (!named.has(u)) continue;
      const right = narrow ? u.x + r + 5 : c.x + cell.width / 2 + 5, whole = labelOf(u);
      u.written = { text: whole, x: right, anchor: "start", above: 0 };
      if (!narrow) continue;
      // The longest name that has room on a side; at the left of a head it is above its line.
      const names = u.kind === "output" ? [whole] : [whole, whole.split(", ")[0], whole.split(" ")[0]];
      for (const text of names) {
        const length = LETTER * text.length;
        if (right + length <= x) { u.written = { text, x: right, anchor: "start", above: 0 }; break; }
        u.written = { text, x: Math.max(u.x - r - 5, length), anchor: "end", above: moves(u) || u.x - r - 5 < length ? LINE : 0 };
        if (u.x - r - 5 >= length) break;
      }
      lanes.get(u.lane).height += u.written.above;
    }
    // Tokens that would touch each other stand upright.
    const upright = narrow && columns.some((c, i) => (i ? c.x - columns[i - 1].x : c.x) <
      TOKEN * (c.text.length + (i ? columns[i - 1].text.length + 1 : 0)));
    const bottom = upright ? 14 + 2 * TOKEN * Math.max(...columns.map((c) => c.text.length)) : 26;
    const all = [...lanes.values()].sort((a, b) => b.row - a.row);
    for (const lane of all) {
      const above = Math.max(0, ...units.filter((u) => u.lane === lane.name && u.written).map((u) => u.written.above));
      lane.y = y + (lane.height + above) / 2;
      const known = rows.get(lane.row) || { top: y };
      y += lane.height;
      rows.set(lane.row, { ...known, bottom: y });
    }
    for (const u of units) {
      const c = column.get(u.position), lane = lanes.get(u.lane);
      u.y = lane.y;
      if (named.has(u)) u.written.y = lane.y - u.written.above + LINE * (u.line - (lane.cells.get(c).labels - 1) / 2);
    }
    return { units, columns, rows, named, width: x, height: y, needed, bow, upright, bottom };
  };

  const curve = (above, below) => {
    // What a head moves enters it at its source.
    const end = above.start, bend = (above.y - below.y) / 2;
    // Nodes above one another would hide an edge that goes straight up.
    const bow = Math.abs(end - below.x) < 16 ? -Math.min(below.number % 2 ? view.bow : 0.6 * view.bow, Math.abs(bend) / 2) : 0;
    return `M${below.x} ${below.y} C${below.x + bow} ${below.y + bend} ${end + bow} ${above.y - bend} ${end} ${above.y}`;
  };

  const draw = () => {
    const { units, columns, rows, named, width, height, upright, bottom } = view;
    const high = height + bottom + 12;
    const svg = shape("svg", { role: "group", "aria-label": "graph of the flow" });
    const main = shape("g", {}, svg), back = shape("g", { class: "back" }, main);
    view.ways = shape("g", { class: "edges ways" }, main);
    view.lines = shape("g", { class: "edges" }, main);
    const heads = shape("g", { class: "moves" }, main), marks = shape("g", {}, main), labels = shape("g", {}, main);
    for (const c of columns.filter((c) => !c.empty)) shape("line", { x1: c.x, x2: c.x, y1: 0, y2: height, class: "rule" }, back);
    const strongest = [...view.edges].sort((e, f) => Math.abs(f[3]) - Math.abs(e[3])).slice(0, DRAWN);
    const most = Math.max(...strongest.map((e) => Math.abs(e[3])), 1e-30);
    for (const [a, b, , weight] of strongest) {
      if (Math.abs(weight) < 0.01 * most) continue;
      shape("path", { d: curve(units[a], units[b]), class: sign(weight), "stroke-width": 0.5 + 4 * Math.sqrt(Math.abs(weight) / most) }, view.ways);
    }
    for (const u of units.filter(moves)) {
      const r = radius(u), class_ = sign(u.flow);
      shape("line", { x1: u.start, x2: u.x, y1: u.y, y2: u.y, class: class_, "stroke-width": Math.max(1, r / 3) }, heads);
      shape("circle", { cx: u.start, cy: u.y, r: Math.max(1.5, r / 4), class: class_ }, heads);
    }
    for (const u of [...units].sort((u, v) => u.y - v.y)) {
      const r = radius(u), square = u.kind === "head", name = `${u.name} ${signed(u.flow)}`;
      const mark = square || u.kind === "group"
        ? shape("rect", { x: u.x - 0.9 * r, y: u.y - 0.9 * r, width: 1.8 * r, height: 1.8 * r, rx: square ? 0 : r / 2 }, marks)
        : shape("circle", { cx: u.x, cy: u.y, r }, marks);
      const states = [u.sink && "sink", u.members.some((i) => pinned.has(i)) && "pinned"].filter(Boolean);
      mark.setAttribute("class", ["node", sign(u.flow), u.kind, ...states].join(" "));
      mark.setAttribute("tabindex", 0);
      mark.setAttribute("role", "button");
      mark.setAttribute("aria-label", name);
      mark.dataset.node = u.number;
      const notes = [name, u.measured !== null && `measured ${signed(u.measured)}`, u.effect,
        u.sources.length && `from ${u.sources.join(", ")}`, u.sink && "at an attention sink"];
      shape("title", {}, mark, notes.filter(Boolean).join("\n"));
      mark.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse" && !held) show(u.number); });
      mark.addEventListener("focus", () => { held = u.kind !== "output"; show(u.number); });
      mark.addEventListener("click", (event) => {
        held = u.kind !== "output";
        show(u.number);
        if (event.shiftKey) pin(u);
      });
      if (!named.has(u)) continue;
      const { x, y, anchor, text } = u.written;
      shape("text", { x, y: y + 4, class: "label", "text-anchor": anchor }, labels, text);
    }
    // Layers and tokens stay in sight, however the graph is scrolled.
    const left = shape("g", { class: "axes" }, svg), below = shape("g", { class: "axes" }, svg);
    shape("rect", { x: 0, y: 0, width: LEFT, height: 10 * high }, left);
    const layers = [];
    for (let l = 0; l < graph.layers; l++) {
      const parts = [rows.get(2 * l + 1), rows.get(2 * l + 2)].filter(Boolean);
      if (!parts.length) continue;
      const [top, bottom] = [parts[parts.length - 1].top, parts[0].bottom];
      shape("line", { x1: -LEFT, x2: width, y1: bottom, y2: bottom, class: "rule" }, back);
      layers.push([(top + bottom) / 2, shape("text", { x: 26, "text-anchor": "end" }, left, String(l))]);
    }
    const floor = shape("rect", { x: 0, y: 0, height: bottom }, below);
    const tokens = columns.map((c) => {
      const text = shape("text", { "text-anchor": upright ? "end" : "middle", class: "token" }, below, c.text);
      shape("title", {}, text, c.at.map((t) => `"${graph.tokens[t]}"`).join(" "));
      return [c.x, upright ? 7 : TOKEN * c.text.length, text];
    });
    const corner = shape("g", {}, below);
    shape("rect", { x: 0, y: 0, width: LEFT, height: bottom }, corner);
    shape("text", { x: 2, y: 18, class: "key" }, corner, "layer");
    const follow = () => {
      left.setAttribute("transform", `translate(${box.scrollLeft} 0)`);
      below.setAttribute("transform", `translate(0 ${Math.min(box.scrollTop + box.clientHeight, svg.clientHeight || Infinity) - bottom})`);
      corner.setAttribute("transform", `translate(${box.scrollLeft} 0)`);
      // A token that would touch another one, or be cut off by the corner, is not written.
      let end = box.scrollLeft;
      tokens.forEach(([at, half, text]) => {
        const fits = zoom * at - half >= end;
        text.style.display = fits ? "" : "none";
        if (fits) end = zoom * at + half;
      });
    };
    const apply = () => {
      const size = [LEFT + zoom * width, zoom * height + bottom + 12];
      svg.setAttribute("width", size[0]);
      svg.setAttribute("height", size[1]);
      floor.setAttribute("width", size[0]);
      main.setAttribute("transform", `translate(${LEFT} 4) scale(${zoom})`);
      let last = Infinity;
      layers.forEach(([at, text]) => {
        const fits = 4 + zoom * at < last - LINE;
        text.setAttribute("y", 8 + zoom * at);
        text.style.display = fits ? "" : "none";
        if (fits) last = 4 + zoom * at;
      });
      tokens.forEach(([at, , text]) => text.setAttribute("transform",
        `translate(${LEFT + zoom * at + (upright ? 4 : 0)} ${upright ? 6 : bottom - 8})${upright ? " rotate(-90)" : ""}`));
      follow();
    };
    const scaleBy = (factor) => { zoom = Math.min(4, Math.max(0.4, zoom * factor)); apply(); };
    svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      scaleBy(Math.exp(-event.deltaY / 300));
    }, { passive: false });
    svg.addEventListener("click", (event) => {
      if (event.target.dataset.node) return;
      held = false;
      show(logit());
    });
    box.onscroll = follow;
    view.scaleBy = scaleBy;
    // Labels keep at least 10 pixels; what does not fit is scrolled, from the token at which most
    // starts. Paper does not scroll.
    view.fit = () => {
      zoom = Math.min(1.3, Math.max(place.closest(".printing") ? 0 : 0.92, (box.clientWidth - LEFT - 4) / width));
      apply();
      const start = [...units].filter((u) => u.kind === "token").sort((u, v) => Math.abs(v.flow) - Math.abs(u.flow))[0];
      const column = start && columns.find((c) => c.at.includes(start.position));
      box.scrollLeft = column ? zoom * (column.x - column.left) : 0;
      box.parentElement.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
      follow();
    };
    box.replaceChildren(svg);
    if (zoom) apply(); else view.fit();
  };

  const logit = () => view.owner.get(0);
  const outputName = `${graph.values.length > 1 ? "change of the logit" : "logit"} after "${graph.tokens[graph.tokens.length - 1]}"`;

  // A list of edges ends with the sum of all others, and adds up to the flow.
  const list = (title, edges, end, total, parent) => {
    const part = write("div", "", parent), lines = write("table", "", part);
    write("caption", title, lines);
    const line = (value, text, name = "") => {
      const tr = write("tr", "", lines, name);
      write("td", signed(value), tr, sign(value));
      write("td", text, tr);
      return tr;
    };
    const listed = edges.slice(0, LISTED);
    for (const edge of listed) {
      const other = view.units[edge[end]], tr = line(edge[2], other.name, "edge");
      tr.onclick = () => { held = true; show(other.number); };
    }
    line(total - sum(listed.map((e) => e[2])), "all other nodes", "sum");
    line(total, "sum", "sum");
  };

  const show = (number) => {
    chosen = number;
    const { units, lines, ways } = view, u = units[number];
    const edges = view.edges.filter(([a, b]) => a === number || b === number)
      .sort((e, f) => Math.abs(f[2]) - Math.abs(e[2]));
    const most = Math.max(...edges.map((e) => Math.abs(e[2])), 1e-30);
    lines.replaceChildren();
    ways.classList.toggle("behind", u.kind !== "output");
    for (const [a, b, flow] of u.kind === "output" ? [] : edges) {
      if (Math.abs(flow) < 0.02 * most) continue;
      shape("path", { d: curve(units[a], units[b]), class: sign(flow), "stroke-width": 0.5 + 4 * Math.sqrt(Math.abs(flow) / most) }, lines);
    }
    place.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    place.querySelectorAll(`[data-node="${number}"]`).forEach((mark) => mark.classList.add("chosen"));
    panel.replaceChildren();
    const title = write("h3", "", panel);
    write("b", signed(u.flow), title, sign(u.flow));
    write("span", ` ${u.kind === "output" ? outputName : u.name}`, title);
    const facts = [
      u.effect,
      u.sources.length && `from ${u.sources.join(", ")}`,
      u.kind === "group" && `group of ${u.members.map((i) => graph.nodes[i].name).join("; ")}`,
      u.measured !== null && u.kind !== "group" && `measured effect ${signed(u.measured)}`,
      u.sink && "at an attention sink: compare its flow with the measured effect",
    ];
    facts.filter(Boolean).forEach((fact) => write("p", fact, panel));
    if (u.kind === "output") panel.append(carries());
    const both = write("div", "", panel, "lists");
    if (u.into || edges.some((e) => e[0] === number)) {
      list("comes from", edges.filter((e) => e[0] === number), 1, u.into, both);
    }
    if (u.kind !== "output") list("goes to", edges.filter((e) => e[1] === number), 0, u.out, both);
    buttons(u);
  };

  const carries = () => {
    const nodes = view.owner.size - 1, all = graph.shares.find(([n]) => n === nodes);
    const value = all && !only ? all[1] * graph.value : view.carried;
    $("output").textContent = `${nodes} of ${graph.n_nodes.toLocaleString("en")}`;
    const line = document.createElement("p");
    line.textContent = `${graph.metric}. Paths through these ${nodes} nodes alone carry ${percent(value / graph.value)} of it. ` +
      `The other paths, ${signed(graph.value - value)}, also run through further nodes: exchanging these nodes changes many of them too.`;
    return line;
  };

  const button = (name) => $(`[data-do=${name}]`);
  const pinnedUnits = () => view.units.filter((u) => u.members.every((i) => pinned.has(i)));
  const targets = () => {
    const names = [...pinned].filter((i) => graph.nodes[i].removable);
    return names.length ? names : (view.units[chosen].members.filter((i) => graph.nodes[i].removable));
  };
  const buttons = (u) => {
    const isPinned = u.members.every((i) => pinned.has(i));
    button("pin").textContent = isPinned ? "unpin" : "pin";
    button("pin").disabled = u.kind === "output";
    button("group").disabled = pinnedUnits().length < 2;
    button("group").textContent = u.kind === "group" ? "ungroup" : "group pinned";
    if (u.kind === "group") button("group").disabled = false;
    button("only").disabled = button("clear").disabled = !pinned.size;
    button("only").setAttribute("aria-pressed", only);
    button("remove").hidden = !remove;
    button("remove").disabled = !targets().length;
    button("remove").textContent = pinned.size > 1 ? "remove pinned and run the model" : "remove and run the model";
  };

  const pin = (u) => {
    const isPinned = u.members.every((i) => pinned.has(i));
    u.members.forEach((i) => (isPinned ? pinned.delete(i) : pinned.add(i)));
    if (!pinned.size) only = false;
    redraw();
  };

  const act = {
    in: () => view.scaleBy(1.3),
    out: () => view.scaleBy(1 / 1.3),
    fit: () => view.fit(),
    pin: () => pin(view.units[chosen]),
    group: () => {
      const u = view.units[chosen];
      if (u.kind === "group") groups = groups.filter((g) => !g.nodes.includes(u.members[0]));
      else {
        const nodes = [...pinned].sort((i, j) => i - j), name = window.prompt("name of the group", "group");
        if (!name) return;
        groups = [...groups.filter((g) => !g.nodes.some((i) => pinned.has(i))), { name, nodes }];
      }
      redraw();
    },
    only: () => { only = !only; zoom = null; redraw(); },
    clear: () => { pinned = new Set(); groups = []; only = false; redraw(); },
    remove: () => remove(targets().map((i) => graph.nodes[i].name)),
    svg: () => save("svg"),
    png: () => save("png"),
  };

  // The drawing as a file, with the styles that the page's sheet sets.
  const save = (kind) => {
    const svg = box.querySelector("svg"), copy = svg.cloneNode(true);
    const originals = [...svg.querySelectorAll("*")], copies = [...copy.querySelectorAll("*")];
    originals.forEach((element, i) => {
      const style = getComputedStyle(element);
      STYLES.forEach((name) => copies[i].style.setProperty(name, style.getPropertyValue(name)));
    });
    copy.setAttribute("xmlns", SVG);
    // A saved picture has no paragraph below it.
    const { width, height } = svg.getBoundingClientRect();
    copy.setAttribute("height", height + 8 + 14 * KEY.length);
    KEY.forEach((line, i) => shape("text", { x: 6, y: height + 14 * (i + 1), "font-size": 11, fill: "#59636e" }, copy, line));
    copy.style.background = getComputedStyle(document.body).backgroundColor;
    const source = new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
    const download = (blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = `flow.${kind}`;
      link.click();
    };
    if (kind === "svg") { download(source); return; }
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [2 * width, 2 * (height + 8 + 14 * KEY.length)];
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(download);
    };
    image.src = URL.createObjectURL(source);
  };

  const search = () => {
    const words = find.value.trim().toLowerCase();
    place.querySelectorAll("[data-node]").forEach((mark) => {
      const u = view.units[mark.dataset.node];
      const text = [u.name, u.effect, ...u.sources].join(" ").toLowerCase();
      mark.classList.toggle("missed", words !== "" && !text.includes(words));
    });
  };

  const COLUMNS = [["node", "name"], ["flow", "flow"], ["measured effect", "measured"],
    ["effect", "effect"], ["from", "sources"]];
  const isNumber = (key) => ["flow", "measured"].includes(key);

  // All nodes that are shown, by any column; the sums of the others are below.
  const nodeList = () => {
    const units = view.units.filter((u) => u.kind !== "output");
    const columns = COLUMNS.filter(([, key]) => units.some((u) => (isNumber(key) ? u[key] !== null : u[key].length)));
    const title = columns.find(([, key]) => key === order)?.[0] || "flow";
    const value = (u) => (isNumber(order) ? u[order] === null ? -1 : Math.abs(u[order]) : 0);
    units.sort((u, v) => (isNumber(order) ? value(v) - value(u) : String(u[order]).localeCompare(String(v[order]))));
    const lines = document.createElement("table");
    write("caption", `Nodes, sorted by ${isNumber(order) ? `|${title}|` : title}. Select a heading to sort by it.`, lines);
    const head = write("tr", "", write("thead", "", lines)), body = write("tbody", "", lines);
    for (const [name, key] of columns) {
      const cell = write("th", "", head, isNumber(key) ? "" : "word");
      cell.setAttribute("aria-sort", key === order ? (isNumber(key) ? "descending" : "ascending") : "none");
      write("button", name, cell).onclick = () => { order = key; nodeList(); search(); };
    }
    const line = (cells, name = "") => {
      const tr = write("tr", "", body, name);
      cells.forEach((cell, c) => {
        const number = isNumber(columns[c][1]);
        const td = write("td", number && cell !== "" && cell !== null ? signed(cell) : cell ?? "", tr, number ? "" : "word");
        if (number && cell) td.classList.add(sign(cell));
      });
      return tr;
    };
    for (const u of units) {
      const tr = line(columns.map(([, key]) => (Array.isArray(u[key]) ? u[key].join(", ") : u[key])));
      tr.dataset.node = u.number;
      tr.onclick = () => { held = true; show(u.number); };
    }
    const hidden = graph.n_nodes - (view.owner.size - 1);
    const shown = sum([...view.owner.keys()].filter((i) => i).map((i) => graph.nodes[i].flow));
    const others = { name: `${hidden} other nodes`, flow: graph.sum - shown };
    line(columns.map(([, key]) => others[key] ?? ""), "sum");
    table.replaceChildren(lines);
  };

  const redraw = () => {
    count = graph.shares[slider.value][0] + 1;
    const before = view && view.units[chosen] ? view.units[chosen].members[0] : 0;
    view = gather();
    Object.assign(view, arrange(view.units));
    draw();
    carries();
    nodeList();
    show(view.owner.get(before) ?? logit());
    search();
    remember();
  };

  slider.max = graph.shares.length - 1;
  slider.value = position;
  slider.oninput = () => { zoom = null; redraw(); };
  find.oninput = search;
  find.onkeydown = (event) => {
    const hit = event.key === "Enter" && box.querySelector(".node:not(.missed)");
    if (hit) hit.focus();
  };
  $(".legend").textContent = KEY.join(" · ");
  place.querySelectorAll("[data-do]").forEach((element) => { element.onclick = act[element.dataset.do]; });
  // Another graph may be drawn in the same place.
  if (!place.redraw) addEventListener("resize", () => place.redraw());
  place.redraw = () => { zoom = null; redraw(); };
  redraw();
};
