// A completion coloured token by token.

const dataOf = (sample, name, i) => (Array.isArray(sample[name]) ? sample[name][i] : sample[name]);
const difference = (sample, a, b, i) => {
  const [first, second] = [dataOf(sample, a, i), dataOf(sample, b, i)];
  return isNumber(first) && isNumber(second) ? first - second : null;
};

// How a token is coloured. `full`: the value at which the colour is strongest.
const COLOURINGS = [
  { name: "logprob", title: "logprob", kind: "rising", needs: ["generator_logprobs"], full: () => 6, ends: ["certain", "p < 0.3%"],
    value: (sample, i) => { const value = dataOf(sample, "generator_logprobs", i); return isNumber(value) ? -value : null; } },
  { name: "advantage", title: "advantage", kind: "diverging", needs: ["advantages"], full: (group) => Math.max(1e-9, ...group.map(largestAdvantage)), ends: ["negative", "positive"],
    value: (sample, i) => dataOf(sample, "advantages", i) },
  { name: "mismatch", title: "generator - trainer", kind: "diverging", needs: ["generator_logprobs", "trainer_logprobs"], full: () => 0.5, ends: ["-0.5", "+0.5"],
    value: (sample, i) => difference(sample, "generator_logprobs", "trainer_logprobs", i) },
  { name: "reference", title: "trainer - reference", kind: "diverging", needs: ["trainer_logprobs", "reference_logprobs"], full: () => 3, ends: ["-3", "+3"],
    value: (sample, i) => difference(sample, "trainer_logprobs", "reference_logprobs", i) },
];

function largestAdvantage(sample) {
  const values = [sample.advantages].flat().filter(isNumber).map(Math.abs);
  return values.reduce((a, b) => Math.max(a, b), 0);
}

const availableColourings = (sample) => COLOURINGS.filter((colouring) => colouring.needs.every((name) => sample[name] !== undefined));

function tokenText(piece) {
  if (piece === "") return [element("span", { class: "mark" }, "·")];
  const parts = piece.split(/(\n)/).filter((part) => part !== "");
  return parts.map((part) => (part === "\n" ? [element("span", { class: "mark", "aria-hidden": "true" }, "↵"), "\n"] : part)).flat();
}

function describeToken(sample, pieces, i) {
  const number = (name, label) => (sample[name] === undefined ? null : `${label} ${show(dataOf(sample, name, i))}`);
  const logprob = dataOf(sample, "generator_logprobs", i);
  const text = pieces ? JSON.stringify(pieces[sample.tokens[i]]) : `id ${sample.tokens[i]}`;
  return [`token ${i + 1} of ${sample.tokens.length}: ${text}`,
    isNumber(logprob) ? `p ${show(Math.exp(logprob))}` : null, number("generator_logprobs", "generator"),
    number("trainer_logprobs", "trainer"), number("reference_logprobs", "reference"), number("advantages", "advantage")]
    .filter(Boolean).join("  ");
}

// The tokens as one text block, with a line below that says everything about the one pointed at.
function tokenView(sample, group, pieces, colouring) {
  const full = colouring ? colouring.full(group) : 1;
  const tokens = sample.tokens.map((token, i) => {
    const value = colouring ? colouring.value(sample, i) : null;
    const strength = isNumber(value) ? clamp(Math.abs(value) / full, 0, 1) * 0.6 : 0;
    const warm = colouring && (colouring.kind === "rising" ? value > 0 : value < 0);
    const node = element("span", { class: `token${pieces ? "" : " id"}${strength < 0.01 ? "" : warm ? " warm" : " cool"}`, "data-i": i },
      pieces ? tokenText(pieces[token]) : String(token));
    if (strength >= 0.01) node.style.setProperty("--strength", strength.toFixed(3));
    return node;
  });
  const readout = element("p", { class: "token-readout", "aria-live": "polite" }, "Point at a token, or focus the text and use the arrow keys.");
  const block = element("pre", { class: "text tokens", tabindex: "0", "aria-label": "Completion, token by token" }, tokens);
  let selected = null;
  const select = (i) => {
    if (selected !== null) tokens[selected].classList.remove("selected");
    selected = i;
    if (i === null) return;
    tokens[i].classList.add("selected");
    readout.textContent = describeToken(sample, pieces, i);
  };
  block.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) select(Number(token.dataset.i));
  });
  block.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !tokens.length) return;
    event.preventDefault();
    select(clamp(selected === null ? 0 : selected + by, 0, tokens.length - 1));
    tokens[selected].scrollIntoView({ block: "nearest" });
  });
  return [block, readout];
}

function colouringControl(sample, current, changed) {
  const options = availableColourings(sample);
  if (!options.length) return null;
  const radio = (name, title) => element("label", {}, element("input", {
    type: "radio", name: "colour", value: name, checked: name === (current ? current.name : "none"), onchange: () => changed(name),
  }), title);
  return element("fieldset", { class: "colours" }, element("legend", {}, "Colour tokens by"),
    options.map((option) => radio(option.name, option.title)), radio("none", "nothing"),
    current && element("span", { class: "scale" }, current.ends[0], element("i", { class: current.kind }), current.ends[1]));
}
