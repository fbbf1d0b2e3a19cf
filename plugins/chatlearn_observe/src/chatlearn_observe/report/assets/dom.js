// Making elements. Text is always set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// A number as people read it: four digits, no trailing zeros; text such as "nan" as it is.
function show(value) {
  if (value === null || value === undefined) return "–";
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function showSeconds(value) {
  return value >= 60 ? `${show(value / 60)} min` : value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(1)} ms`;
}
