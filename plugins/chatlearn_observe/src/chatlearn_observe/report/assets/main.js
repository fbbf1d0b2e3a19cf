// Draw everything once, and again where the width changes.

function onWidthChange(node, redraw) {
  let width = node.clientWidth;
  new ResizeObserver(() => {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    redraw();
  }).observe(node);
}

const data = JSON.parse(byId("run-data").textContent);
readAddress();
setUpCurves(data);
setUpStepTime(data.times);
setUpTimeline(data.timeline);
setUpStaleness(data.staleness);
setUpRollouts(data.rollouts);
addEventListener("hashchange", onAddressChange);
if (section && byId(section)) byId(section).scrollIntoView();
document.documentElement.dataset.ready = "true";
