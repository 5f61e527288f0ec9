// Elements without markup in strings: whatever a client put into an id stays text.

export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function mark(level) {
  return element("span", { class: `state ${level}` }, element("span", { class: "mark", "aria-hidden": "true" }));
}

// parts: [share of the whole track, class]; text says the same to who cannot see it.
export function bar(parts, text) {
  const track = element("span", { class: "track", "aria-hidden": "true" });
  for (const [part, kind] of parts) {
    const fill = element("span", { class: `fill ${kind}` });
    fill.style.width = `${Math.min(100, Math.max(0, part * 100))}%`;
    track.append(fill);
  }
  return element("span", { class: "bar" }, track, element("span", { class: "amount" }, text));
}

// columns: [heading, class of its cells]; rows: lists of strings or elements.
export function table(caption, columns, rows) {
  const heads = columns.map(([text, kind]) => element("th", { scope: "col", class: kind }, text));
  const body = element("tbody");
  for (const row of rows) {
    const cells = row.map((cell, at) => element("td", { class: columns[at][1] }, cell));
    body.append(element("tr", {}, ...cells));
  }
  return element(
    "table",
    {},
    element("caption", { class: "hidden-text" }, caption),
    element("thead", {}, element("tr", {}, ...heads)),
    body,
  );
}

export function empty(text) {
  return element("p", { class: "empty" }, text);
}
