// What is chosen lives in the address (`#rollouts?step=3&text=foo`), so a view can be sent to somebody.

const state = new Map();
const stateListeners = [];
let section = "";

function readAddress() {
  const [anchor, query] = location.hash.slice(1).split(/\?(.*)/s);
  section = anchor;
  if (query !== undefined) {
    state.clear();
    for (const [name, value] of new URLSearchParams(query)) if (value) state.set(name, value);
  }
}

// Read a setting; "" if it is not set.
const chosen = (name) => state.get(name) || "";

function choose(changes, anchor) {
  for (const [name, value] of Object.entries(changes)) {
    if (value) state.set(name, String(value));
    else state.delete(name);
  }
  section = anchor || section;
  const query = new URLSearchParams([...state]).toString();
  history.replaceState(null, "", `#${section}${query ? `?${query}` : ""}`);
  for (const listener of stateListeners) listener(Object.keys(changes));
}

function onAddressChange() {
  readAddress();
  for (const listener of stateListeners) listener(null);
  const target = section && byId(section);
  if (target) target.scrollIntoView();
}
