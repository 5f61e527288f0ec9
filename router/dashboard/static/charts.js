// One line chart: a caption whose key shows the values under the cursor, else the newest.
/* global uPlot */
import { clock } from "./format.js";
import { element, empty } from "./dom.js";

const HEIGHT_PX = 150;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Values with nothing beside them would be invisible as a line: they get a dot.
function lonely(u, seriesIndex) {
  const values = u.data[seriesIndex];
  const found = [];
  for (let i = 0; i < values.length; i++) {
    if (values[i] !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null) found.push(i);
  }
  return found;
}

export class Chart {
  // lines: {name, colour: a CSS variable, dashed}; text(value), axisText(value): how the key and the axis
  // write one; atLeast: how far the axis reaches, however small the values are.
  constructor(figure, { title, lines, text, axisText = text, atLeast, nothing }) {
    this.title = title;
    this.text = text;
    this.axisText = axisText;
    this.atLeast = atLeast;
    this.key = element("span", { class: "key" });
    this.box = element("div", { class: "plot", role: "img" });
    this.nothing = empty(nothing);
    figure.append(
      element("figcaption", {}, element("span", { class: "title" }, title), this.key),
      this.box,
    );
    this.setLines(lines);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.setLines(this.lines));
  }

  size() {
    return { width: Math.max(this.box.clientWidth, 100), height: HEIGHT_PX };
  }

  setLines(lines) {
    const shown = this.data?.length === lines.length + 1 ? [this.data, this.range] : null;
    this.data = null;
    this.plot?.destroy();
    this.lines = lines;
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    this.plot = new uPlot(
      {
        ...this.size(),
        legend: { show: false },
        cursor: { sync: { key: "dashboard" }, drag: { x: false, y: false }, points: { size: 7 }, y: false },
        scales: {
          x: { range: () => this.range ?? [0, 1] },
          y: { range: (u, low, high) => [0, this.top(high ?? 0)] },
        },
        axes: [
          { ...axis, size: 28, space: 72, values: (u, splits, axis, space, step) => splits.map((at) => clock(at, step < 60)) },
          { ...axis, size: 58, space: 34, values: (u, splits) => splits.map((value) => this.axisText(value)) },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            stroke: colour(line.colour),
            auto: !line.dashed,
            width: line.dashed ? 1 : 1.75,
            dash: line.dashed ? [5, 4] : undefined,
            points: line.dashed ? { show: false } : { show: true, filter: lonely, size: 4 },
          })),
        ],
        hooks: { setCursor: [() => this.writeKey()] },
      },
      [[], ...lines.map(() => [])],
      this.box,
    );
    if (shown) this.show(...shown);
  }

  // A limit is drawn when it is near; one far above would press the lines to the floor.
  top(highest) {
    const limit = this.lines.findIndex((line) => line.dashed);
    const value = limit < 0 ? 0 : (this.data?.[limit + 1][0] ?? 0);
    return Math.max(this.atLeast, highest * 1.1, value <= highest * 4 ? value * 1.05 : 0);
  }

  // columns: times (Unix seconds), then one for each line; range: [from, to] in Unix seconds.
  show(columns, range) {
    this.data = columns;
    this.range = range;
    this.plot.setData(columns);
    const visible = columns[0].length ? columns.slice(1).filter((_, at) => !this.lines[at].dashed) : [];
    const from = columns[0].findIndex((at) => at >= range[0]);
    const isEmpty = from < 0 || !visible.some((values) => values.slice(from).some((value) => value !== null));
    this.box.append(this.nothing);
    this.nothing.hidden = !isEmpty;
    this.writeKey();
  }

  writeKey() {
    if (!this.data) return;
    const under = this.plot.cursor.idx;
    const at = under ?? this.data[0].length - 1;
    const told = this.lines.map((line, index) => [line, this.data[index + 1][at] ?? null]);
    this.key.replaceChildren(
      ...told.map(([line, value]) => {
        const swatch = element("span", { class: line.dashed ? "swatch dashed" : "swatch" });
        swatch.style.color = colour(line.colour);
        return element("span", {}, swatch, `${line.name} `, element("b", {}, value === null ? "–" : this.text(value)));
      }),
    );
    if (under === null || under === undefined) {
      const now = told.map(([line, value]) => `${line.name} ${value === null ? "nothing" : this.text(value)}`);
      this.box.setAttribute("aria-label", `${this.title}, now: ${now.join(", ")}`);
    }
  }
}
