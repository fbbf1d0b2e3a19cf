// The browser of rollouts: filters, a list, and one sample with the rest of its group.

const PAGE = 100;
const FILTERS = ["kind", "step", "min", "max", "source", "text", "order", "excluded"];
const KINDS = { step: "training", eval: "evaluation" };

function setUpRollouts({ groups, samples, pieces }) {
  const form = byId("filters");
  if (!form) return;
  samples.forEach((sample) => {
    sample.of = groups[sample.group];
    sample.key = `${sample.of.kind}:${sample.of.step}:${sample.id}`;
  });
  const members = new Map();
  for (const sample of samples) members.set(sample.group, [...(members.get(sample.group) || []), sample]);
  const distinct = (name) => [...new Set(groups.map((group) => group[name]))].filter((value) => value !== null && value !== undefined);
  for (const step of distinct("step").sort((a, b) => a - b)) form.elements.step.append(element("option", { value: step }, String(step)));
  const sources = distinct("source").map(String).sort();
  for (const source of sources) form.elements.source.append(element("option", { value: source }, source));
  byId("source-label").hidden = sources.length < 2;
  let limit = PAGE;
  let matching = [];

  function matches(sample) {
    const group = sample.of;
    const limits = [chosen("min"), chosen("max")].map((text) => (text === "" ? null : Number(text)));
    if (chosen("kind") && group.kind !== chosen("kind")) return false;
    if (chosen("step") && String(group.step) !== chosen("step")) return false;
    if (chosen("source") && String(group.source) !== chosen("source")) return false;
    if (chosen("excluded") && !sample.excluded) return false;
    if (limits[0] !== null && !(isNumber(sample.reward) && sample.reward >= limits[0])) return false;
    if (limits[1] !== null && !(isNumber(sample.reward) && sample.reward <= limits[1])) return false;
    const text = chosen("text").toLowerCase();
    return !text || [group.prompt, sample.text, plain(group.truth), sample.id].some((part) => part && String(part).toLowerCase().includes(text));
  }

  function ordered(found) {
    const reward = (sample, otherwise) => (isNumber(sample.reward) ? sample.reward : otherwise);
    const by = {
      high: (a, b) => reward(b, -Infinity) - reward(a, -Infinity) || 0,
      low: (a, b) => reward(a, Infinity) - reward(b, Infinity) || 0,
      long: (a, b) => b.tokens.length - a.tokens.length,
    }[chosen("order")];
    return by ? [...found].sort(by) : found;
  }

  function drawList() {
    const current = selected();
    const items = matching.slice(0, limit).map((sample) => element("button", {
      type: "button", "data-key": sample.key, "aria-current": sample === current ? "true" : "false", onclick: () => choose({ sample: sample.key }, "rollouts"),
    }, element("span", { class: "top" }, element("span", { class: "reward" }, rewardText(sample)),
      element("span", {}, sample.of.kind === "eval" ? `evaluation, step ${sample.of.step}` : `step ${sample.of.step}`),
      sample.excluded && element("span", { class: "flag" }, "excluded"), sample.error && element("span", { class: "flag" }, "reward failed")),
    element("span", { class: "snippet" }, (sample.text || "(no completion)").slice(0, 200))));
    if (matching.length > limit) {
      items.push(element("button", { type: "button", class: "more", onclick: () => { limit += PAGE; drawList(); } }, `show ${Math.min(PAGE, matching.length - limit)} more`));
    }
    byId("list").replaceChildren(...items);
    byId("matches").textContent = matching.length ? `${matching.length.toLocaleString("en")} of ${samples.length.toLocaleString("en")} rollouts` : "No rollout matches; widen or reset the filters.";
  }

  const selected = () => samples.find((sample) => sample.key === chosen("sample")) || matching[0] || null;

  function drawDetail() {
    const sample = selected();
    byId("detail").replaceChildren(...(sample ? detail(sample) : [element("p", { class: "empty" }, "Nothing to show.")]));
  }

  function detail(sample) {
    const group = sample.of;
    const rest = members.get(sample.group);
    const wanted = chosen("colour") || "logprob";
    const colouring = wanted === "none" ? null : availableColourings(sample).find((one) => one.name === wanted) || null;
    const parts = Object.entries(sample.parts);
    const badge = (text, flag) => element("span", { class: flag ? "badge flag" : "badge" }, text);
    return [
      element("div", { class: "badges" }, badge(`${KINDS[group.kind]}, step ${group.step}`), element("strong", { class: "badge" }, rewardText(sample)),
        badge(`${sample.tokens.length} tokens`), sample.finish && badge(`ended by ${sample.finish}`), group.source && badge(String(group.source)),
        sample.excluded && badge(`excluded: ${sample.excluded}`, true)),
      sample.error && element("p", { class: "problem" }, `The reward failed: ${sample.error}`),
      parts.length ? element("table", { class: "parts" }, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Part of the reward"), element("th", { scope: "col", class: "number" }, "Value"))),
        element("tbody", {}, parts.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number" }, show(value)))))) : null,
      element("h3", {}, "Prompt"), element("pre", { class: "text prompt", tabindex: "0" }, group.prompt === null ? "(not recorded)" : String(group.prompt)),
      group.truth !== null && group.truth !== undefined && element("h3", {}, "Ground truth"),
      group.truth !== null && group.truth !== undefined && element("pre", { class: "text truth" }, plain(group.truth)),
      element("h3", {}, "Completion"),
      sample.tokens.length ? colouringControl(sample, colouring, (name) => choose({ colour: name }, "rollouts")) : null,
      ...(sample.tokens.length ? tokenView(sample, rest, pieces, colouring) : [element("pre", { class: "text" }, sample.text === null ? "(none)" : sample.text)]),
      !pieces && sample.tokens.length ? element("pre", { class: "text" }, sample.text || "") : null,
      ...(rest.length > 1 ? comparison(sample, rest) : []),
      element("p", { class: "hint" }, sample.key),
    ].filter(Boolean);
  }

  function comparison(sample, rest) {
    const rewards = [...rest].sort((a, b) => (isNumber(b.reward) ? b.reward : -Infinity) - (isNumber(a.reward) ? a.reward : -Infinity) || 0);
    return [element("h3", {}, `Its group: ${rest.length} completions of this prompt, best first`),
      element("div", { class: "group" }, rewards.map((other) => element("div", { class: other === sample ? "member current" : "member" },
        element("div", { class: "top" }, element("span", { class: "reward" }, rewardText(other)),
          other.advantages !== undefined && !Array.isArray(other.advantages) && element("span", {}, `advantage ${show(other.advantages)}`),
          other.excluded && element("span", { class: "flag" }, "excluded"),
          other === sample ? element("span", {}, "shown above") : element("button", { type: "button", "aria-label": `Show the completion ${other.id}`, onclick: () => choose({ sample: other.key }, "rollouts") }, "show")),
        element("pre", { tabindex: "0" }, other.text || "(none)"))))];
  }

  function refilter() {
    for (const name of FILTERS) {
      const input = form.elements[name];
      if (input.type === "checkbox") input.checked = Boolean(chosen(name));
      else if (input.value !== chosen(name)) {
        const known = input.tagName !== "SELECT" || [...input.options].some((option) => option.value === chosen(name));
        if (!known) input.append(element("option", { value: chosen(name) }, `${chosen(name)} (not in this report)`));
        input.value = chosen(name);
      }
    }
    matching = ordered(samples.filter(matches));
    limit = PAGE;
    drawList();
    drawDetail();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    const values = FILTERS.map((name) => [name, form.elements[name].type === "checkbox" ? (form.elements[name].checked ? "1" : "") : form.elements[name].value]);
    choose({ ...Object.fromEntries(values), sample: "" }, "rollouts");
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    choose({ ...Object.fromEntries(FILTERS.map((name) => [name, ""])), sample: "" }, "rollouts");
  });
  byId("list").addEventListener("keydown", (event) => {
    const by = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!by || !event.target[by]) return;
    event.preventDefault();
    event.target[by].focus();
  });
  stateListeners.push((names) => {
    if (names === null || names.some((name) => FILTERS.includes(name))) return refilter();
    if (names.includes("sample")) {
      for (const item of byId("list").children) item.setAttribute("aria-current", String(item.dataset.key === chosen("sample")));
    }
    if (names.includes("sample") || names.includes("colour")) drawDetail();
    return undefined;
  });
  refilter();
}

function rewardText(sample) {
  return sample.reward === null ? "no reward" : `reward ${show(sample.reward)}`;
}

function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
