"use strict";
(() => {
  const data = JSON.parse(document.getElementById("curves-data").textContent);
  const W = 440, H = 220, LEFT = 52, RIGHT = 18, TOP = 10, BOTTOM = 28, NS = "http://www.w3.org/2000/svg";
  const MARKS = ["circle", "square", "triangle", "diamond", "cross", "plus", "ring", "bar"];
  const state = { smooth: 0.6, log: false, off: new Set() };
  const node = (name, given = {}, parent = null, text = null) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const shown = value => Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  const color = run => `var(--c${run % 8})`;

  // Exponential moving average, with its start corrected, as trackers draw it.
  const smoothed = points => {
    let last = 0, weight = 1;
    return points.map(([x, y]) => {
      last = last * state.smooth + (1 - state.smooth) * y;
      weight *= state.smooth;
      return [x, last / (1 - weight)];
    });
  };

  const mark = (run, x, y, parent) => {
    const paint = { stroke: color(run), fill: color(run), "stroke-width": 1.5 }, r = 3.2;
    const line = d => node("path", { d, ...paint }, parent);
    switch (MARKS[run % 8]) {
      case "circle": return node("circle", { cx: x, cy: y, r, ...paint }, parent);
      case "ring": return node("circle", { cx: x, cy: y, r, ...paint, fill: "var(--back)" }, parent);
      case "square": return node("rect", { x: x - r, y: y - r, width: 2 * r, height: 2 * r, ...paint }, parent);
      case "triangle": return line(`M${x} ${y - r}L${x + r} ${y + r}L${x - r} ${y + r}Z`);
      case "diamond": return line(`M${x} ${y - r - 1}L${x + r + 1} ${y}L${x} ${y + r + 1}L${x - r - 1} ${y}Z`);
      case "cross": return line(`M${x - r} ${y - r}L${x + r} ${y + r}M${x + r} ${y - r}L${x - r} ${y + r}`);
      case "plus": return line(`M${x - r} ${y}H${x + r}M${x} ${y - r}V${y + r}`);
      default: return line(`M${x} ${y - r - 1}V${y + r + 1}`);
    }
  };

  const ticks = (low, high, number) => {
    const rough = (high - low || 1) / number, unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * unit).find(m => m >= rough * 0.999);
    const found = [];
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    for (let at = 0; at <= Math.min(last - first, 2 * number); at++) found.push((first + at) * step);
    return found;
  };

  const draw = chart => {
    const { name, svg, output } = chart;
    svg.replaceChildren();
    const raw = data.points[name].map((points, run) => state.off.has(run) ? [] : points);
    const log = state.log && raw.every(points => points.every(([, y]) => y > 0));
    const kept = raw.map(points => points.length > 6 && name.startsWith("train/") && !name.endsWith("learning_rate") ? smoothed(points) : points);
    const all = raw.flat().concat(kept.flat());
    if (!all.length) { output.textContent = "no points"; return; }
    const up = y => log ? Math.log10(y) : y;
    let [x0, x1] = [Infinity, -Infinity], [y0, y1] = [Infinity, -Infinity];
    for (const [x, y] of all) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, up(y)); y1 = Math.max(y1, up(y)); }
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    if (y1 - y0 <= 1e-9 * Math.abs(y0)) { // equal but for rounding: nothing to be seen between them
      const by = Math.abs(y0) * 0.1 || 1;
      y0 -= by; y1 += by;
    }
    const X = x => LEFT + (x - x0) / (x1 - x0) * (W - LEFT - RIGHT);
    const Y = y => H - BOTTOM - (up(y) - y0) / (y1 - y0) * (H - TOP - BOTTOM);
    for (const at of ticks(y0, y1, 4)) {
      const y = Y(log ? 10 ** at : at);
      node("path", { d: `M${LEFT} ${y}H${W - RIGHT}`, class: "axis" }, svg);
      node("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, svg, shown(log ? 10 ** at : at));
    }
    for (const at of ticks(x0, x1, 4).filter(Number.isInteger)) node("text", { x: X(at), y: H - 10, "text-anchor": "middle" }, svg, shown(at));
    const path = points => points.map(([x, y], at) => `${at ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
    kept.forEach((points, run) => {
      if (!points.length) return;
      if (points !== raw[run]) node("path", { d: path(raw[run]), fill: "none", stroke: color(run), class: "raw" }, svg);
      node("path", { d: path(points), fill: "none", stroke: color(run), "stroke-width": 1.8, "stroke-dasharray": data.dashes[run % 8] }, svg);
      const every = Math.max(1, Math.floor(points.length / 6));
      if (data.runs.length > 1 || points.length < 12)
        points.forEach(([x, y], at) => { if (at % every === 0 || at === points.length - 1) mark(run, X(x), Y(y), svg); });
    });
    const told = step => data.runs.map((run, at) => {
      const points = kept[at];
      if (!points.length) return null;
      const near = points.reduce((best, one) => Math.abs(one[0] - step) < Math.abs(best[0] - step) ? one : best);
      return `${data.runs.length > 1 ? `${run}: ` : ""}${shown(near[1])} at step ${near[0]}`;
    }).filter(Boolean).join("; ");
    output.textContent = told(x1);
    const line = node("path", { d: "", class: "axis" }, svg);
    svg.onpointermove = event => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * W;
      const step = x0 + (Math.min(Math.max(x, LEFT), W - RIGHT) - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
      line.setAttribute("d", `M${X(step)} ${TOP}V${H - BOTTOM}`);
      output.textContent = told(step);
    };
    svg.onpointerleave = () => { line.setAttribute("d", ""); output.textContent = told(x1); };
  };

  const charts = [];
  for (const host of document.querySelectorAll("[data-charts]")) {
    for (const name of data[host.dataset.charts]) {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption");
      caption.textContent = name;
      const svg = node("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `curve of ${name}` });
      const output = document.createElement("output");
      figure.append(caption, svg, output);
      host.append(figure);
      charts.push({ name, svg, output });
    }
  }
  const all = () => charts.forEach(draw);
  for (const [id, change] of [
    ["smooth", input => { state.smooth = Number(input.value); document.getElementById("smooth-value").textContent = input.value; }],
    ["log", input => { state.log = input.checked; }],
  ]) {
    const input = document.getElementById(id);
    input.addEventListener("input", () => { change(input); all(); });
    change(input);
  }
  document.querySelectorAll("[data-run]").forEach(input => {
    const run = Number(input.dataset.run);
    const sample = input.parentElement.querySelector("svg");
    node("path", { d: "M1 7H41", fill: "none", stroke: color(run), "stroke-width": 2, "stroke-dasharray": data.dashes[run % 8] }, sample);
    mark(run, 21, 7, sample);
    input.addEventListener("input", () => { state.off[input.checked ? "delete" : "add"](run); all(); });
  });
  all();
})();
