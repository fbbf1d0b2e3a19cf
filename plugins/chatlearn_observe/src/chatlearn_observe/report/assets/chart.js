// A line chart: axes, a curve with an optional band, and a cursor moved by pointer or arrow keys.

const HEIGHT = 190;
const MARGIN = { top: 10, right: 10, bottom: 22, left: 52 };

// Round numbers that cover low..high in about `count` intervals.
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.7) || rough;
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
    found.push(Math.abs(tick) < step * 1e-6 ? 0 : Number(tick.toPrecision(12)));
  }
  return found;
}

// Exponential moving average without the pull towards zero at its start; gaps stay gaps.
function smoothed(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// Indices to draw: all, or the lowest and highest of each of `buckets` stretches.
function thinned(values, buckets) {
  const known = values.map((_, i) => i).filter((i) => isNumber(values[i]));
  if (known.length <= 2 * buckets) return known;
  const size = known.length / buckets;
  const kept = new Set([known[0], known[known.length - 1]]);
  for (let bucket = 0; bucket < buckets; bucket += 1) {
    const part = known.slice(Math.floor(bucket * size), Math.floor((bucket + 1) * size));
    kept.add(part.reduce((best, i) => (values[i] < values[best] ? i : best), part[0]));
    kept.add(part.reduce((best, i) => (values[i] > values[best] ? i : best), part[0]));
  }
  return [...kept].sort((a, b) => a - b);
}

function axes(width, x, y, xRange, yRange) {
  const grid = svg("g", { "aria-hidden": "true" });
  for (const tick of ticks(yRange[0], yRange[1], 4)) {
    grid.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }));
    grid.append(svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, show(tick)));
  }
  const wholeSteps = ticks(xRange[0], xRange[1], Math.max(2, width / 90)).filter(Number.isInteger);
  for (const tick of wholeSteps) {
    grid.append(svg("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, show(tick)));
  }
  return grid;
}

// Lets pointer and arrow keys move over `count` places; calls back with one of them, or null when left.
function withCursor(node, count, nearest, moved) {
  let at = null;
  const move = (place) => moved((at = place));
  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    move(nearest(event.clientX - box.left));
  });
  node.addEventListener("pointerleave", () => move(null));
  node.addEventListener("blur", () => move(null));
  node.addEventListener("keydown", (event) => {
    const to = {
      ArrowRight: at === null ? 0 : at + 1, ArrowLeft: at === null ? count - 1 : at - 1, Home: 0, End: count - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(clamp(to, 0, count - 1));
  });
}

// `given`: {title, note, metric, points, values, low?, high?} with columns over `steps`.
function drawChart(figure, given, steps, weight) {
  const width = Math.max(240, figure.clientWidth - 2);
  const drawn = given.points || !weight ? given.values : smoothed(given.values, weight);
  const bound = (column) => given.values.map((value, i) => isNumber(value) && !isNumber(column[i]) ? value : column[i]);
  const banded = given.low && given.high;
  const low = banded ? bound(given.low) : null;
  const high = banded ? bound(given.high) : null;
  const places = given.values.map((_, i) => i).filter((i) => given.values[i] !== null);
  const numbers = [...given.values, ...(low || []), ...(high || [])].filter(isNumber);
  let bottom = numbers.reduce((a, b) => Math.min(a, b), Infinity);
  let top = numbers.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!numbers.length) [bottom, top] = [0, 1];
  const pad = top > bottom ? (top - bottom) * 0.06 : Math.abs(top) * 0.1 || 1;
  const yRange = [bottom >= 0 ? Math.max(0, bottom - pad) : bottom - pad, top + pad];
  const first = steps[places[0]];
  const last = steps[places[places.length - 1]];
  const xRange = first === last ? [first - 1, last + 1] : [first, last];
  const x = (step) => MARGIN.left + ((step - xRange[0]) / (xRange[1] - xRange[0])) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => HEIGHT - MARGIN.bottom - ((value - yRange[0]) / (yRange[1] - yRange[0])) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  const at = (i, column) => `${x(steps[i]).toFixed(1)} ${y(column[i]).toFixed(1)}`;
  const line = (column) => {
    const kept = thinned(column, width);
    return kept.length ? `M${kept.map((i) => at(i, column)).join("L")}` : "";
  };

  const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", tabindex: "0" });
  picture.append(axes(width, x, y, xRange, yRange));
  if (banded) {
    const up = thinned(high, width).map((i) => at(i, high));
    const down = thinned(low, width).map((i) => at(i, low)).reverse();
    if (up.length > 1) picture.append(svg("path", { class: "band", d: `M${[...up, ...down].join("L")}Z` }));
  }
  if (drawn !== given.values) picture.append(svg("path", { class: "curve faint", d: line(given.values) }));
  picture.append(svg("path", { class: "curve", d: line(drawn) }));
  for (const i of places) {
    if (!isNumber(given.values[i])) {
      picture.append(svg("line", { class: "not-finite", x1: x(steps[i]), x2: x(steps[i]), y1: HEIGHT - MARGIN.bottom - 8, y2: HEIGHT - MARGIN.bottom }));
    } else if (given.points || places.length === 1) {
      picture.append(svg("circle", { class: "dot", cx: x(steps[i]), cy: y(given.values[i]), r: 3.2 }));
    }
  }
  const cursor = svg("g", { visibility: "hidden" }, svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }), svg("circle", { class: "dot", r: 4 }));
  picture.append(cursor);

  const readout = figure.querySelector(".readout");
  const finite = places.filter((i) => isNumber(given.values[i]));
  const values = finite.map((i) => given.values[i]);
  const describe = (i) => {
    const smooth = drawn !== given.values && isNumber(drawn[i]) ? `, smoothed ${show(drawn[i])}` : "";
    const band = banded && isNumber(given.values[i]) ? ` (${show(low[i])} to ${show(high[i])})` : "";
    return `step ${steps[i]}: ${show(given.values[i])}${band}${smooth}`;
  };
  const resting = places.length ? `last ${show(given.values[places[places.length - 1]])}` : "";
  picture.setAttribute("aria-label", values.length
    ? `${given.title}, steps ${first} to ${last}: from ${show(values[0])} to ${show(values[values.length - 1])}, lowest ${show(Math.min(bottom, ...values.slice(0, 1)))}, highest ${show(top)}`
    : `${given.title}: no finite value`);
  readout.textContent = resting;
  withCursor(picture, places.length, (pixel) => {
    const scale = picture.getBoundingClientRect().width / width || 1;
    return places.reduce((best, i, place) => (Math.abs(x(steps[i]) - pixel / scale) < Math.abs(x(steps[places[best]]) - pixel / scale) ? place : best), 0);
  }, (place) => {
    cursor.setAttribute("visibility", place === null ? "hidden" : "visible");
    readout.textContent = place === null ? resting : describe(places[place]);
    if (place === null) return;
    const i = places[place];
    const [lineNode, dot] = cursor.children;
    lineNode.setAttribute("x1", x(steps[i]));
    lineNode.setAttribute("x2", x(steps[i]));
    dot.setAttribute("visibility", isNumber(drawn[i]) ? "inherit" : "hidden");
    dot.setAttribute("cx", x(steps[i]));
    dot.setAttribute("cy", isNumber(drawn[i]) ? y(drawn[i]) : 0);
  });
  const old = figure.querySelector("svg");
  if (old) old.replaceWith(picture);
  else figure.append(picture);
}
