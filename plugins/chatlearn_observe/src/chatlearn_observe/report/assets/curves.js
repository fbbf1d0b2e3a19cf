// The section of curves: charts of the usual metrics, and any other that is chosen.

function setUpCurves(data) {
  const charts = byId("charts");
  if (!charts) return;
  const slider = byId("smooth");
  const more = byId("more");
  const usual = new Set(data.charts.map((chart) => chart.metric));
  const others = Object.keys(data.metrics).filter((name) => !usual.has(name) && data.metrics[name].some((value) => value !== null));
  const figures = new Map();

  const extra = () => chosen("metrics").split(",").filter((name) => others.includes(name));

  function figureOf(chart, removable) {
    const remove = removable && element("button", {
      class: "remove", type: "button", "aria-label": `Remove ${chart.title}`,
      onclick: () => choose({ metrics: extra().filter((name) => name !== chart.metric).join(",") }, "curves"),
    }, "×");
    const figure = element("figure", { class: "card chart", "data-metric": chart.metric },
      element("figcaption", {}, element("span", { class: "title", title: chart.metric }, chart.title),
        element("span", { class: "readout", "aria-live": "polite" }), remove),
      element("span", { class: "note" }, chart.note || ""));
    const column = (name) => name && data.metrics[name];
    return { figure, given: { ...chart, values: column(chart.metric) } };
  }

  function redraw() {
    for (const { figure, given } of figures.values()) drawChart(figure, given, data.steps, Number(slider.value));
  }

  function update() {
    const weight = clamp(Number(chosen("smooth")) || 0, 0, 0.98);
    slider.value = weight;
    byId("smooth-value").textContent = slider.value;
    const wanted = [...data.charts.map((chart) => [chart, false]),
      ...extra().map((name) => [{ title: name, metric: name, points: name.startsWith("eval/") }, true])];
    for (const [name, { figure }] of figures) {
      if (!wanted.some(([chart]) => chart.metric === name)) {
        figure.remove();
        figures.delete(name);
      }
    }
    for (const [chart, removable] of wanted) {
      if (!figures.has(chart.metric)) {
        figures.set(chart.metric, figureOf(chart, removable));
        charts.append(figures.get(chart.metric).figure);
      }
    }
    const shown = new Set(extra());
    more.replaceChildren(element("option", { value: "" }, "add a curve …"), ...others.filter((name) => !shown.has(name)).map((name) => element("option", { value: name }, name)));
    byId("more-label").hidden = !others.length;
    redraw();
  }

  slider.addEventListener("input", () => choose({ smooth: Number(slider.value) ? slider.value : "" }, "curves"));
  more.addEventListener("change", () => more.value && choose({ metrics: [...extra(), more.value].join(",") }, "curves"));
  stateListeners.push((names) => (names === null || names.includes("smooth") || names.includes("metrics")) && update());
  onWidthChange(charts, redraw);
  update();
}
