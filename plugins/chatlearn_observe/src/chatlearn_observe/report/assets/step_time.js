// Stacked bars: where the time of each step went. Many steps are drawn as means of equal stretches.

const MOST_BARS = 80;
const TIME_HEIGHT = 300;

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
}

function binned(times) {
  const size = Math.ceil(times.steps.length / MOST_BARS);
  const bars = [];
  for (let start = 0; start < times.steps.length; start += size) {
    const part = (values) => mean(values.slice(start, start + size));
    const last = Math.min(start + size, times.steps.length) - 1;
    bars.push({
      name: start === last ? `step ${times.steps[start]}` : `mean of steps ${times.steps[start]} to ${times.steps[last]}`,
      label: String(times.steps[start]),
      wall: part(times.step_s),
      overlap: part(times.overlap_s),
      seconds: times.parts.map((piece) => part(piece.seconds)),
    });
  }
  return bars;
}

function hatches(parts) {
  return svg("defs", {}, parts.map((part, i) => part.place !== "stacked" && svg("pattern", {
    id: `hatch-${i}`, class: `part-${i % 12}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
  }, svg("line", { class: "stripe", x1: 0, x2: 0, y1: 0, y2: 6 }))));
}

function setUpStepTime(times) {
  const place = byId("time-chart");
  if (!times || !place) return;
  const bars = binned(times);
  const evaluated = times.parts.findIndex((part) => part.place === "after");
  const withEvaluation = element("input", { type: "checkbox" });
  const longest = Math.max(...bars.map((bar) => bar.wall));
  withEvaluation.checked = evaluated >= 0 && Math.max(...bars.map((bar) => bar.seconds[evaluated])) <= 1.5 * longest;
  const readout = element("p", { class: "time-readout", "aria-live": "polite" });
  const resting = "Point at a bar to read it, or focus the picture and use the arrow keys. The line across a bar is the step's wall time.";

  function draw() {
    const width = Math.max(260, place.clientWidth - 34);
    const hidden = (place) => place === "ahead" || (place === "after" && !withEvaluation.checked);
    const height = (i, bar) => (hidden(times.parts[i].place) ? 0 : bar.seconds[i]);
    const sum = (bar) => times.parts.reduce((total, part, i) => (part.place === "overlaps" ? total : total + height(i, bar)), 0);
    const top = Math.max(...bars.map((bar) => Math.max(sum(bar), bar.wall))) * 1.04 || 1;
    const y = (value) => TIME_HEIGHT - MARGIN.bottom - (value / top) * (TIME_HEIGHT - MARGIN.top - MARGIN.bottom);
    const room = (width - MARGIN.left - MARGIN.right) / bars.length;
    const thick = Math.min(46, room * 0.82);
    const overlapping = times.parts.some((part) => part.place === "overlaps");
    const left = (i) => MARGIN.left + i * room + (room - thick) / 2;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${TIME_HEIGHT}`, height: TIME_HEIGHT, role: "img", tabindex: "0",
      "aria-label": `Time of ${times.steps.length} steps by part; the table beside it has the medians` }, hatches(times.parts));
    for (const tick of ticks(0, top, 5)) {
      picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, top < 1 ? `${show(tick * 1000)} ms` : `${show(tick)} s`));
    }
    const every = Math.ceil(bars.length / Math.max(2, width / 60));
    bars.forEach((bar, i) => {
      const group = svg("g", { class: "bar" });
      const stack = overlapping ? thick * 0.76 : thick;
      let level = 0;
      times.parts.forEach((part, index) => {
        const seconds = height(index, bar);
        if (!seconds) return;
        const aside = part.place === "overlaps";
        const from = aside ? 0 : level;
        if (!aside) level += seconds;
        group.append(svg("rect", {
          class: `${part.place} part-${index % 12}`, x: aside ? left(i) + stack + thick * 0.05 : left(i), width: aside ? thick * 0.19 : stack,
          y: y(from + seconds), height: Math.max(0.5, y(from) - y(from + seconds)), fill: part.place === "stacked" ? null : `url(#hatch-${index})`,
        }));
      });
      group.append(svg("path", { class: "wall", d: `M${left(i) - 2} ${y(bar.wall)}H${left(i) + stack + 2}` }));
      if (i % every === 0) group.append(svg("text", { x: left(i) + stack / 2, y: TIME_HEIGHT - 6, "text-anchor": "middle" }, bar.label));
      picture.append(group);
    });
    withCursor(picture, bars.length, (pixel) => {
      const scale = picture.getBoundingClientRect().width / width || 1;
      return clamp(Math.floor((pixel / scale - MARGIN.left) / room), 0, bars.length - 1);
    }, (i) => {
      [...picture.querySelectorAll(".bar")].forEach((bar, place) => bar.setAttribute("opacity", i === null || i === place ? 1 : 0.45));
      readout.textContent = i === null ? resting : describe(bars[i]);
    });
    const old = place.querySelector("svg");
    if (old) old.replaceWith(picture);
    else place.prepend(picture);
  }

  function describe(bar) {
    const named = times.parts.map((part, i) => [part, bar.seconds[i]]).filter(([, seconds]) => seconds > 0);
    const text = named.map(([part, seconds]) => `${part.name} ${showSeconds(seconds)}${{ overlaps: " (meanwhile)", ahead: " (ahead)" }[part.place] || ""}`);
    const overlap = bar.overlap > 0.001 * bar.wall ? `; parts ran at the same time for ${showSeconds(bar.overlap)}` : "";
    return `${bar.name}: ${showSeconds(bar.wall)} = ${text.join(", ")}${overlap}`;
  }

  readout.textContent = resting;
  place.append(readout);
  if (evaluated >= 0) place.append(element("label", { class: "hint" }, withEvaluation, " with evaluation"));
  withEvaluation.addEventListener("change", draw);
  onWidthChange(place, draw);
  draw();
}
