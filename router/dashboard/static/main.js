// Asks the router what is new and shows it.
import { Chart } from "./charts.js";
import { ago, clock, durationText, rate, share, words } from "./format.js";
import {
  showAbout,
  showDecisions,
  showEngines,
  showPrefixes,
  showRejections,
  showTiles,
  showVerdict,
} from "./sections.js";

const KEPT_ROWS = 900;
const KEY = "mooncake-router-api-key";
const REASON_COLOURS = ["--accent-2", "--accent-3", "--accent-4", "--bad", "--accent", "--watch", "--good", "--muted"];

const history = { unix_time_s: [] };
let lastRow = 0;
let newest = null;
let paused = false;
let timer = 0;
let answeredAt = 0;

const place = (id) => document.getElementById(id);
const latencyLines = (sloMs) => [
  { name: "p50", colour: "--accent" },
  { name: "p95", colour: "--accent-2" },
  ...(sloMs ? [{ name: "SLO", colour: "--bad", dashed: true }] : []),
];
let charts = null;
let rejectedColumns = [];

function makeCharts() {
  const make = (id, options) => new Chart(place(id), options);
  const nothing = "No streamed answers in this time.";
  const perSecond = (value) => `${rate(value)} / s`;
  const shortRate = (value) => String(Number(value.toPrecision(3)));
  return {
    requests: make("chart-requests", {
      title: "Requests",
      lines: [{ name: "answered", colour: "--accent" }, { name: "failed", colour: "--bad" }],
      text: perSecond,
      axisText: shortRate,
      atLeast: 1,
      nothing: "No requests in this time.",
    }),
    ttft: make("chart-ttft", { title: "TTFT", lines: latencyLines(0), text: durationText, atLeast: 10, nothing }),
    tbt: make("chart-tbt", { title: "TBT", lines: latencyLines(0), text: durationText, atLeast: 10, nothing }),
    hits: make("chart-hits", {
      title: "Prefix hits",
      lines: [{ name: "of prompt tokens", colour: "--accent" }],
      text: share,
      atLeast: 1,
      nothing: "No prompts were read in this time.",
    }),
    queue: make("chart-queue", {
      title: "Queue",
      lines: [{ name: "longest predicted wait", colour: "--accent-2" }],
      text: durationText,
      atLeast: 10,
      nothing: "No waits were predicted in this time.",
    }),
    rejected: make("chart-rejected", {
      title: "Turned away",
      lines: [],
      text: perSecond,
      axisText: shortRate,
      atLeast: 1,
      nothing: "Nobody in this time.",
    }),
  };
}

function remember(data) {
  const fresh = data.history;
  const isRestart = data.last_row < lastRow;
  if (isRestart) for (const name of Object.keys(history)) history[name] = [];
  const known = history.unix_time_s.length;
  const added = fresh.unix_time_s.length;
  for (const name of new Set([...Object.keys(history), ...Object.keys(fresh)])) {
    const quiet = name.startsWith("rejected:") ? 0 : null;
    const before = history[name] ?? new Array(known).fill(quiet);
    history[name] = before.concat(fresh[name] ?? new Array(added).fill(quiet)).slice(-KEPT_ROWS);
  }
  lastRow = data.last_row;
}

function showCharts(data) {
  charts ??= makeCharts();
  const seconds = Number(document.querySelector("input[name=range]:checked").value);
  // A router that has only just begun has no half hour to show.
  const began = Math.min(data.started_unix_s, data.unix_time_s - 60);
  const range = [Math.max(data.unix_time_s - seconds, began), data.unix_time_s];
  const times = history.unix_time_s;
  const column = (name) => history[name] ?? new Array(times.length).fill(null);
  const constant = (value) => (value ? [new Array(times.length).fill(value)] : []);
  charts.requests.show([times, column("requests_per_s"), column("failed_per_s")], range);
  for (const name of ["ttft", "tbt"]) {
    const sloMs = data.slo[`${name}_ms`];
    const slo = constant(sloMs);
    // It may come and go: the router's configuration can be read anew while it runs.
    if (charts[name].lines.length !== 2 + slo.length) charts[name].setLines(latencyLines(sloMs));
    charts[name].show([times, column(`${name}_p50_ms`), column(`${name}_p95_ms`), ...slo], range);
  }
  charts.hits.show([times, column("hit_share")], range);
  charts.queue.show([times, column(data.reads_prompts ? "queue_ms" : "unknown")], range);
  const reasons = Object.keys(history).filter((name) => name.startsWith("rejected:")).sort();
  if (reasons.join() !== rejectedColumns.join()) {
    rejectedColumns = reasons;
    charts.rejected.setLines(
      reasons.map((name, at) => ({
        name: words(name.slice("rejected:".length)),
        colour: REASON_COLOURS[at % REASON_COLOURS.length],
      })),
    );
  }
  charts.rejected.show([times, ...reasons.map(column)], range);
}

function show(data) {
  place("live").hidden = false;
  showAbout(data);
  showVerdict(data);
  showTiles(data);
  showCharts(data);
  showEngines(data);
  showPrefixes(data);
  showRejections(data);
  showDecisions(data);
}

function askForKey(wasWrong) {
  place("live").hidden = true;
  place("key-form").hidden = false;
  place("key-wrong").textContent = wasWrong ? "The router does not know this key." : "";
  place("key").focus();
}

function tellLost(why) {
  const since = answeredAt ? ` What you see is ${ago((Date.now() - answeredAt) / 1000)} old (${clock(newest.unix_time_s)}).` : "";
  place("lost").hidden = false;
  place("lost").textContent = `The router does not answer: ${why}.${since} Still trying.`;
}

async function update() {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  let delayMs = 2_000;
  try {
    const answer = await fetch(`/dashboard/data?after=${lastRow}`, { headers, signal: AbortSignal.timeout(10_000) });
    if (answer.status === 401) {
      askForKey(Boolean(key));
      return;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const data = await answer.json();
    delayMs = data.sample_interval_s * 1_000;
    answeredAt = Date.now();
    place("lost").hidden = true;
    remember(data);
    newest = data;
    if (!paused) show(data);
  } catch (error) {
    tellLost(error.message);
  }
  timer = setTimeout(update, delayMs);
}

place("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, place("key").value);
  place("key").value = "";
  place("key-form").hidden = true;
  update();
});

place("pause").addEventListener("click", () => {
  paused = !paused;
  place("pause").setAttribute("aria-pressed", String(paused));
  place("pause").textContent = paused ? "Paused" : "Pause";
  if (!paused && newest) show(newest);
});

for (const input of document.querySelectorAll("input[name=range]")) {
  input.addEventListener("change", () => newest && showCharts(newest));
}

// Nobody looks: nothing is asked. What happened meanwhile comes with the next answer.
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden && place("key-form").hidden) update();
});

update();
