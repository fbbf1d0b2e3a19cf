// Asynchronous runs: a lane for the trainer and for each replica, weight syncs across all lanes, and staleness.

const LANE = { height: 14, gap: 5, left: 104, top: 26, bottom: 26 };
const SHOWN_STEPS = 12;

function setUpTimeline(given) {
  const place = byId("timeline-chart");
  if (!given || !place) return;
  const { lines, lanes } = given;
  const readout = element("p", { class: "time-readout", "aria-live": "polite" });
  const resting = "Point at a step to read it, or focus the picture and use the arrow keys.";
  const options = (values, chosenValue) => values.map(([value, text]) => element("option", { value, selected: value === chosenValue }, text));
  const first = element("select", { "aria-label": "First step" }, options(lines.map((line, i) => [i, String(line.step)]), 0));
  const counts = [6, SHOWN_STEPS, 24, 48].filter((count) => count < lines.length);
  const count = element("select", { "aria-label": "Number of steps" },
    options([...counts.map((value) => [value, String(value)]), [lines.length, "all"]], Math.min(SHOWN_STEPS, lines.length)));

  function draw() {
    const from = Number(first.value);
    const shown = lines.slice(from, from + Number(count.value));
    const width = Math.max(300, place.clientWidth - 34);
    const start = shown[0].start;
    const seconds = shown[shown.length - 1].stop - start;
    const height = LANE.top + (lanes.length + 1) * (LANE.height + LANE.gap) + LANE.bottom;
    const x = (at) => LANE.left + ((at - start) / seconds) * (width - LANE.left - MARGIN.right);
    const y = (lane) => LANE.top + lane * (LANE.height + LANE.gap);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0",
      "aria-label": `Time line of steps ${shown[0].step} to ${shown[shown.length - 1].step}: the trainer and ${lanes.length} replicas; the table has the shares` });
    const bar = (lane, kind, [from, to]) => svg("rect", { class: `lane ${kind}`, x: x(from), width: Math.max(0.5, x(to) - x(from)), y: y(lane), height: LANE.height });
    for (const tick of ticks(0, seconds, Math.max(2, width / 110))) {
      picture.append(svg("line", { class: "grid", x1: x(start + tick), x2: x(start + tick), y1: LANE.top - 4, y2: height - LANE.bottom + 4 }),
        svg("text", { x: x(start + tick), y: height - 8, "text-anchor": "middle" }, showTick(tick, seconds)));
    }
    ["trainer", ...lanes].forEach((name, lane) => {
      picture.append(svg("text", { x: LANE.left - 8, y: y(lane) + LANE.height - 3, "text-anchor": "end" }, shortened(name)),
        bar(lane, "idle", [start, start + seconds]));
    });
    let labelled = -Infinity;
    for (const line of shown) {
      const group = svg("g", { class: "step" });
      for (const kind of ["updating", "waiting", "syncing"]) group.append(...line[kind].map((interval) => bar(0, kind, interval)));
      line.lanes.forEach((intervals, lane) => group.append(...intervals.map((interval) => bar(lane + 1, "sampling", interval))));
      for (const [from, to] of line.syncing) {
        group.append(svg("rect", { class: "sync-band", x: x(from), width: Math.max(1.5, x(to) - x(from)), y: LANE.top - 4, height: height - LANE.top - LANE.bottom + 8 }));
      }
      const middle = (x(line.start) + x(line.stop)) / 2;
      if (middle - labelled > 52) {
        group.append(svg("text", { x: middle, y: 13, "text-anchor": "middle" }, `step ${line.step}`));
        labelled = middle;
      }
      picture.append(group);
    }
    withCursor(picture, shown.length, (pixel) => {
      const scale = picture.getBoundingClientRect().width / width || 1;
      const at = shown.findIndex((line) => x(line.stop) >= pixel / scale);
      return at < 0 ? shown.length - 1 : at;
    }, (i) => {
      picture.querySelectorAll(".step").forEach((group, at) => group.setAttribute("opacity", i === null || i === at ? 1 : 0.4));
      readout.textContent = i === null ? resting : describe(shown[i]);
    });
    const old = place.querySelector("svg");
    if (old) old.replaceWith(picture);
    else place.prepend(picture);
  }

  const length = (intervals) => intervals.reduce((sum, [from, to]) => sum + to - from, 0);

  function describe(line) {
    const wall = line.stop - line.start;
    const busy = line.lanes.map((intervals) => length(intervals) / wall);
    const sampled = busy.length ? `; replicas sampled ${percent(mean(busy))} of the time` : "";
    const range = busy.length > 1 ? ` (${percent(Math.min(...busy))} to ${percent(Math.max(...busy))})` : "";
    return `step ${line.step}: ${showSeconds(wall)}; trainer: updates ${showSeconds(length(line.updating))}, waiting ${showSeconds(length(line.waiting))}, weight sync ${showSeconds(length(line.syncing))}${sampled}${range}`;
  }

  readout.textContent = resting;
  place.append(readout);
  if (lines.length > 6) place.append(element("div", { class: "controls" }, element("label", {}, "From step ", first), element("label", {}, "Steps shown ", count)));
  first.addEventListener("change", draw);
  count.addEventListener("change", draw);
  onWidthChange(place, draw);
  draw();
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const showTick = (tick, range) => (range < 1 ? `${show(Math.round(tick * 1e4) / 10)} ms` : `${show(tick)} s`);
const shortened = (name) => (name.length > 15 ? `${name.slice(0, 6)}…${name.slice(-8)}` : name);

// Bars: the fraction of sampled tokens of each age.
function setUpStaleness(given) {
  const place = byId("staleness-chart");
  if (!given || !place) return;
  function draw() {
    const width = Math.max(220, place.clientWidth - 34);
    const height = 190;
    const top = Math.max(...given.shares) * 1.15 || 1;
    const room = (width - MARGIN.left - MARGIN.right) / given.ages.length;
    const thick = Math.min(56, room * 0.8);
    const y = (share) => height - 36 - (share / top) * (height - 36 - MARGIN.top);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `Staleness: ${given.ages.map((age, i) => `${percent(given.shares[i])} of the tokens ${age} versions old`).join(", ")}` });
    for (const tick of ticks(0, top, 4)) {
      picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        svg("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, percent(tick)));
    }
    given.ages.forEach((age, i) => {
      const middle = MARGIN.left + (i + 0.5) * room;
      picture.append(svg("rect", { class: "lane updating", x: middle - thick / 2, width: thick, y: y(given.shares[i]), height: y(0) - y(given.shares[i]) }),
        svg("text", { x: middle, y: height - 22, "text-anchor": "middle" }, String(age)),
        svg("text", { class: "value", x: middle, y: y(given.shares[i]) - 4, "text-anchor": "middle" }, percent(given.shares[i])));
    });
    picture.append(svg("text", { x: MARGIN.left + (width - MARGIN.left - MARGIN.right) / 2, y: height - 5, "text-anchor": "middle" }, "policy versions between sampling and training"));
    const old = place.querySelector("svg");
    if (old) old.replaceWith(picture);
    else place.append(picture);
  }
  onWidthChange(place, draw);
  draw();
}
