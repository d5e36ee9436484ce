"use strict";
// Draws the curves of a page and, where the page is live, puts into it what the server sends.
(() => {
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const drawn = new Map(); // key of a chart -> {chart, plot}
  let marks = [], lead = ""; // the key of the first chart, on which the marks are drawn

  const BAD = new Set(["non_finite", "skipped", "diverged", "failed"]);
  const SHADES = ["train", "eval", "third", "fourth", "fifth"]; // of lines side by side
  const DASHES = [undefined, [10, 4], [6, 4], [3, 4], [1, 4]]; // what lies below shows through the gaps
  const TALL = new Set(["diverged", "failed"]);
  const BREAKS = new Set(["resume", "stopped"]);
  const KEYS = { gap: "× not finite or skipped", break: "┆ stopped or resumed", saved: "╵ checkpoint", best: "◆ best evaluation" };

  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e6) return value.toExponential(2).replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  }

  function tick(value, step) {
    if (value === 0) return "0";
    if (Math.abs(value) < 1e-3) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
    if (Math.abs(value) >= 1000) return value.toLocaleString("en-US");
    return value.toFixed(digits(step));
  }

  // As many as tell one tick from the next: 1 for steps of 2.5, 2 for 0.25.
  function digits(step) {
    let found = 0;
    while (found < 6 && Math.abs(step * 10 ** found - Math.round(step * 10 ** found)) > 1e-6) found += 1;
    return found;
  }

  function series(line, index, lines) {
    const several = lines.filter((one) => one.style === "line").length > 2;
    const shade = { raw: "train-raw", smooth: "train", points: "eval" }[line.style] || SHADES[index % SHADES.length];
    const stroke = () => colour(shade);
    const diamonds = line.style === "points";
    return {
      label: line.name,
      stroke,
      width: line.style === "raw" ? 1 : 2,
      dash: diamonds ? [5, 4] : several ? DASHES[index % DASHES.length] : undefined,
      points: diamonds
        ? { show: line.x.length <= 120, size: 7, stroke, fill: () => colour("paper"), width: 2 }
        : { show: line.x.length <= 40 && line.style !== "smooth" ? true : undefined, size: 4, stroke, fill: stroke },
      value: (plot, value, place, at) => number(at === null ? last(plot.data[place]) : value),
    };
  }

  // What the legend shows where nobody points at a step.
  function last(values) {
    return values.findLast((value) => value !== null && value !== undefined);
  }

  // One point has no range of its own, and uPlot would draw an axis to twice its step.
  function ends(plot, least, most) {
    const steps = plot.data[0];
    return steps.length === 1 ? [Math.min(0, steps[0]), Math.max(1, steps[0])] : [least, most];
  }

  function gaps(chart) {
    const steps = new Set();
    for (const line of chart.lines) line.y.forEach((value, k) => value === null && steps.add(line.x[k]));
    return [...steps];
  }

  const leads = (chart) => chart.key === lead;

  function drawMarks(plot, chart) {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio;
    const bottom = bbox.top + bbox.height;
    const at = (step) => Math.round(plot.valToPos(step, "x", true));
    const seen = (step) => step >= plot.scales.x.min && step <= plot.scales.x.max;
    const vertical = (x, from, to) => { ctx.beginPath(); ctx.moveTo(x, from); ctx.lineTo(x, to); ctx.stroke(); };
    ctx.save();
    ctx.lineWidth = unit;
    if (leads(chart)) {
      for (const { kind, step } of marks.filter((mark) => seen(mark.step))) {
        ctx.strokeStyle = colour(BAD.has(kind) ? "bad" : "soft");
        ctx.setLineDash(BREAKS.has(kind) ? [2 * unit, 3 * unit] : []);
        if (TALL.has(kind) || (BREAKS.has(kind) && step > 0)) vertical(at(step), bbox.top, bottom);
        if (kind === "saved") vertical(at(step), bottom - 5 * unit, bottom);
      }
      const best = marks.filter((mark) => mark.kind === "best").at(-1);
      if (best && typeof best.value === "number" && seen(best.step)) {
        diamond(ctx, at(best.step), Math.round(plot.valToPos(best.value, "y", true)), 6 * unit);
      }
    }
    ctx.setLineDash([]);
    ctx.strokeStyle = colour("bad");
    ctx.lineWidth = 1.5 * unit;
    const skipped = leads(chart) ? marks.filter((mark) => mark.kind === "non_finite" || mark.kind === "skipped") : [];
    for (const step of new Set([...gaps(chart), ...skipped.map((mark) => mark.step)])) {
      if (seen(step)) cross(ctx, at(step), bottom - 8 * unit, 4 * unit);
    }
    ctx.restore();
  }

  function diamond(ctx, x, y, size) {
    ctx.fillStyle = colour("eval");
    ctx.beginPath();
    ctx.moveTo(x, y - size); ctx.lineTo(x + size, y); ctx.lineTo(x, y + size); ctx.lineTo(x - size, y);
    ctx.fill();
  }

  function cross(ctx, x, y, size) {
    ctx.beginPath();
    ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
    ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size);
    ctx.stroke();
  }

  const table = (chart) => uPlot.join(chart.lines.map((line) => [line.x, line.y]));
  const tall = (chart) => (leads(chart) ? 300 : 190);

  function options(chart, width) {
    const axis = { stroke: () => colour("soft"), font: "12px system-ui, sans-serif", grid: { stroke: () => colour("grid"), width: 1 }, ticks: { show: false } };
    return {
      width,
      height: tall(chart),
      cursor: { sync: { key: chart.x }, y: false, points: { size: 7 }, drag: { x: true, y: false } },
      legend: { live: true },
      scales: { x: { time: false, range: ends } },
      series: [{ label: chart.x, value: (plot, step, place, at) => ((at === null ? last(plot.data[0]) : step) ?? "–").toLocaleString("en-US") }, ...chart.lines.map(series)],
      axes: [
        { ...axis, incrs: [1, 2, 5].flatMap((base) => [...Array(8).keys()].map((power) => base * 10 ** power)).sort((a, b) => a - b), values: (plot, steps) => steps.map((step) => step.toLocaleString("en-US")), size: 30, space: 70 },
        { ...axis, values: (plot, values, axis, space, step) => values.map((value) => tick(value, step)), size: 62, space: 40 },
      ],
      hooks: { draw: [(plot) => drawMarks(plot, chart)], ready: [(plot) => plot.setLegend({ idx: null })] },
    };
  }

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function keys(chart) {
    const kinds = new Set(marks.map((mark) => mark.kind));
    const missing = gaps(chart).length || (leads(chart) && (kinds.has("non_finite") || kinds.has("skipped")));
    const shown = [];
    if (missing) shown.push(KEYS.gap);
    if (leads(chart)) {
      if (kinds.has("resume") || kinds.has("stopped")) shown.push(KEYS.break);
      if (kinds.has("saved")) shown.push(KEYS.saved);
      if (kinds.has("best")) shown.push(KEYS.best);
    }
    const line = element("p", "", "keys");
    for (const key of shown) {
      const span = element("span", key.slice(1), key === KEYS.gap ? "bad" : "");
      span.prepend(element("i", key[0], key === KEYS.best ? "best" : "")); // the mark in the colour that it is drawn in
      line.append(span);
    }
    return line;
  }

  function draw(charts) {
    const home = document.getElementById("charts");
    home.replaceChildren();
    for (const { plot } of drawn.values()) plot.destroy();
    drawn.clear();
    for (const chart of charts) {
      const figure = element("figure");
      const caption = element("figcaption", chart.title);
      if (chart.unit) caption.append(element("small", chart.unit));
      const place = element("div");
      place.setAttribute("role", "img");
      place.setAttribute("aria-label", chart.label);
      figure.append(caption, place, keys(chart));
      home.append(figure);
      const plot = new uPlot(options(chart, place.clientWidth), table(chart), place);
      drawn.set(chart.key, { chart, plot, place, figure });
      widths.observe(place);
    }
  }

  // What the reader has zoomed into stays where it is, as long as the lines are the same.
  function update(charts) {
    const lines = (all) => JSON.stringify(all.map((chart) => [chart.key, chart.lines.map((line) => [line.name, line.style])]));
    if (lines(charts) !== lines([...drawn.values()].map(({ chart }) => chart))) return draw(charts);
    for (const now of charts) {
      const { chart, plot, place, figure } = drawn.get(now.key);
      const steps = plot.data[0];
      const zoomed = plot.scales.x.min > steps[0] || plot.scales.x.max < steps[steps.length - 1];
      Object.assign(chart, now);
      place.setAttribute("aria-label", chart.label);
      figure.lastChild.replaceWith(keys(chart));
      plot.setData(table(chart), !zoomed);
      if (zoomed) plot.redraw();
    }
  }

  function show(curves, how) {
    marks = curves.marks;
    lead = curves.charts[0]?.key;
    how(curves.charts);
    const still = document.getElementById("still");
    if (still) still.textContent = curves.still;
  }

  const widths = new ResizeObserver((entries) => {
    for (const { plot, place, chart } of drawn.values()) {
      const width = place.clientWidth;
      if (width && width !== plot.width && entries.some((entry) => entry.target === place)) plot.setSize({ width, height: tall(chart) });
    }
  });
  const redraw = () => { for (const { plot } of drawn.values()) plot.redraw(false, true); };
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);

  const data = document.getElementById("chart-data");
  if (data) {
    const curves = JSON.parse(data.textContent);
    show(curves, draw);
  }

  // The pieces of HTML are made and escaped by the server, which is the one that made this page.
  function replaceParts(parts) {
    for (const [id, html] of Object.entries(parts)) {
      const place = document.getElementById(id);
      const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
      place.innerHTML = html;
      if (focused) document.getElementById(focused)?.focus();
    }
  }

  if (document.body.dataset.live) {
    const link = document.getElementById("link");
    const source = new EventSource(document.body.dataset.live);
    source.addEventListener("open", () => { link.textContent = "live"; });
    source.addEventListener("error", () => { link.textContent = "no connection; trying again"; });
    source.addEventListener("parts", (event) => replaceParts(JSON.parse(event.data)));
    source.addEventListener("curves", (event) => {
      const curves = JSON.parse(event.data);
      show(curves, update);
    });
  }
})();
