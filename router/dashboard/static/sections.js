// What is not a chart: the verdict, the tiles, the tables. Each takes the data document and fills its place.
import { bar, element, empty, mark, table } from "./dom.js";
import { ago, clock, count, duration, durationText, engineName, plural, rate, share, words } from "./format.js";

const LEVEL_TEXT = { good: "Good", watch: "To watch", bad: "Bad" };
const STATES = {
  up: ["good", "up"],
  down: ["bad", "down"],
  breaker_open: ["bad", "kept out"],
  unknown: ["watch", "not seen yet"],
};

function fill(id, ...children) {
  document.getElementById(id).replaceChildren(...children);
}

export function showVerdict(data) {
  const items = data.verdict.map(({ level, text }) =>
    element(
      "li",
      { class: level },
      element("span", { class: "mark", "aria-hidden": "true" }),
      element("span", {}, element("span", { class: "hidden-text" }, `${LEVEL_TEXT[level]}: `), text),
    ),
  );
  const place = document.getElementById("verdict");
  // A live region: touched only when there is something to say.
  const said = (elements) => [...elements].map((item) => item.textContent).join();
  if (said(place.children) !== said(items)) place.replaceChildren(...items);
  const worst = data.verdict[0].level;
  document.title = `${worst === "good" ? "" : worst === "watch" ? "△ " : "■ "}mooncake-router`;
}

export function showAbout(data) {
  const parts = [
    data.version,
    data.policies.join(" / "),
    data.admission === "none" ? "no admission" : `admission ${data.admission}`,
    `running for ${ago(data.unix_time_s - data.started_unix_s)}`,
  ];
  fill("about", parts.join(" · "));
}

function tile(name, [value, unit], note, level = "") {
  return element(
    "div",
    {},
    element("dt", {}, name),
    element("dd", { class: `value ${level}` }, value, unit ? element("span", { class: "unit" }, unit) : null),
    element("dd", { class: "muted" }, note),
  );
}

function latencyTile(name, recent, which, sloMs) {
  const met = recent?.[`${which}_met_share`] ?? null;
  const level = met !== null && met < 0.95 ? "watch" : "";
  const p50 = recent?.[`${which}_p50_ms`] ?? null;
  const notes = [p50 === null ? "no streams in the last minute" : `p50 ${durationText(p50)}`];
  if (sloMs) notes.push(`SLO ${durationText(sloMs)}`);
  if (met !== null) notes.push(`${share(met)} met it`);
  return tile(`${name}, p95`, duration(recent?.[`${which}_p95_ms`]), notes.join(" · "), level);
}

export function showTiles(data) {
  const recent = data.recent;
  const rejected = Object.values(recent?.rejected ?? {}).reduce((sum, number) => sum + number, 0);
  const failed = recent?.failed ?? 0;
  const hits = recent?.hit_share ?? null;
  fill(
    "tiles",
    tile(
      "Requests",
      recent ? [rate(recent.finished / recent.seconds), "/ s"] : ["–", ""],
      `${count(data.active_requests)} under way`,
    ),
    latencyTile("TTFT", recent, "ttft", data.slo.ttft_ms),
    latencyTile("TBT", recent, "tbt", data.slo.tbt_ms),
    tile(
      "Prefix hits",
      hits === null ? ["–", ""] : [String(Math.round(hits * 100)), "%"],
      data.reads_prompts ? "of prompt tokens" : "this policy reads no prompts",
    ),
    data.reads_prompts
      ? tile("Queue", duration(data.queue_ms), "longest wait, predicted")
      : tile("Queue", ["–", ""], "this policy predicts no waits"),
    tile("Turned away", [count(rejected), ""], `in the last minute · ${count(failed)} failed`, rejected || failed ? "watch" : ""),
  );
}

export function showEngines(data) {
  const longest = Math.max(1, ...data.engines.map((engine) => engine.queue_ms));
  const rows = data.engines.map((engine) => {
    const [level, text] = STATES[engine.state];
    const state = mark(level);
    state.append(text);
    const since = `for ${ago(data.unix_time_s - engine.since_unix_s)}`;
    const foreign = engine.foreign ? ` + ${count(engine.foreign)} of others` : "";
    const used = engine.kv_capacity_tokens ? engine.kv_used_tokens / engine.kv_capacity_tokens : null;
    const isPredicted = data.reads_prompts;
    return [
      element("span", {}, engineName(engine.id), element("span", { class: "tag" }, engine.role)),
      state,
      element("span", { class: "muted" }, engine.state !== "up" && engine.detail ? `${since}: ${engine.detail}` : since),
      `${count(engine.in_flight)}${foreign}`,
      isPredicted ? bar([[engine.queue_ms / longest, "queue"]], durationText(engine.queue_ms)) : "–",
      used === null ? "–" : bar([[used, used > 0.9 ? "queue" : "strong"]], share(used)),
      isPredicted ? `${engine.prefill_scale.toFixed(2)} · ${engine.tbt_scale.toFixed(2)}` : "–",
    ];
  });
  const columns = [
    ["Engine", ""],
    ["State", ""],
    ["Since", "wide"],
    ["Under way", "number"],
    ["Queue", ""],
    ["KV in use", ""],
    ["Measured / predicted TTFT · TBT", "number wide"],
  ];
  fill("engines", rows.length ? table("Engines", columns, rows) : empty("No engines."));
}

export function showPrefixes(data) {
  if (!data.prefixes.length) {
    const why = data.reads_prompts
      ? "No two prompts of the last minutes began alike."
      : "Nothing is known of prompts: this policy does not read them (see --policy).";
    fill("prefixes", empty(why));
    return;
  }
  const most = Math.max(...data.prefixes.map((prefix) => prefix.requests_per_min));
  const rows = data.prefixes.map((prefix) => [
    element("span", { class: "mono", title: prefix.id }, prefix.id.slice(0, 8)),
    `≥ ${count(prefix.tokens)}`,
    bar([[prefix.requests_per_min / most, "strong"]], `${rate(prefix.requests_per_min)} / min`),
    share(prefix.hit_share),
    prefix.held_by.length ? prefix.held_by.map(engineName).join(", ") : "nobody",
  ]);
  const columns = [["Prefix", "wide"], ["Tokens", "number"], ["Asked for", ""], ["Hits", "number"], ["Held by", "wide"]];
  fill("prefixes", table("Hot prefixes", columns, rows));
}

export function showRejections(data) {
  const recent = data.recent?.rejected ?? {};
  const rows = Object.entries(data.rejected_total).map(([reason, total]) => [words(reason), recent[reason] ?? 0, total]);
  for (const [status, total] of Object.entries(data.refused_total)) rows.push([`status ${status}, before routing`, null, total]);
  if (!rows.length) {
    fill("rejections", empty("Nobody since the start."));
    return;
  }
  const most = Math.max(1, ...rows.map(([, now]) => now ?? 0));
  const cells = rows.map(([reason, now, total]) => [
    reason,
    now === null ? "" : bar([[now / most, "queue"]], count(now)),
    count(total),
  ]);
  const columns = [["Reason", ""], ["Last minute", ""], ["Since the start", "number"]];
  fill("rejections", table("Requests turned away, by reason", columns, cells));
}

function candidateTable(name, candidates, chosen) {
  const whole = (one) => one.queue_ms + one.transfer_ms + one.compute_ms;
  const most = Math.max(1e-9, ...candidates.map(whole));
  const rows = candidates.map((one) => [
    element("span", {}, engineName(one.instance_id), one.instance_id === chosen ? element("span", { class: "tag" }, "chosen") : null),
    whole(one)
      ? bar(
          [[one.queue_ms / most, "queue"], [one.transfer_ms / most, "transfer"], [one.compute_ms / most, "compute"]],
          durationText(whole(one)),
        )
      : "–",
    one.prefix_blocks ? plural(one.prefix_blocks, "block") : "none",
    rate(one.cost),
  ]);
  return table(name, [[name, ""], ["Predicted", ""], ["Cached", "number"], ["Cost", "number"]], rows);
}

function decisionDetails(one) {
  const reasons = [...one.reasons.map(words)];
  if (one.rejected) {
    reasons.push(one.rejected.detail || `predicted ${rate(one.rejected.predicted)}, allowed ${rate(one.rejected.limit)}`);
  }
  if (one.transfer) {
    const { source, target, num_blocks: blocks } = one.transfer;
    reasons.push(`${plural(blocks, "block")} to be copied from ${engineName(source)} to ${engineName(target)}`);
  }
  const { prefill, decode } = one.candidates;
  const shown = prefill.length + decode.length;
  const body = element("div", { class: "why" }, element("p", {}, reasons.join("; "), "."));
  if (prefill.length) body.append(candidateTable(one.prefill ? "Prefill" : "Engine", prefill, one.prefill ?? one.decode));
  if (decode.length) body.append(candidateTable(one.prefill ? "Decode" : "Engine", decode, one.decode));
  if (one.num_candidates > shown) body.append(empty(`The best ${shown} of ${one.num_candidates}; /decisions has all.`));
  if (shown) {
    const key = (kind, text) => element("span", {}, element("span", { class: `fill ${kind}` }), text);
    body.append(element("p", { class: "legend" }, key("queue", "queue"), key("transfer", "transfer"), key("compute", "compute")));
  }
  return body;
}

function decisionSummary(one) {
  const from = one.prefill ? `${engineName(one.prefill)} → ` : "";
  const where = one.rejected
    ? element("span", { class: "bad" }, `rejected: ${words(one.rejected.reason)}`)
    : element("span", {}, `${from}${one.decode ? engineName(one.decode) : "nowhere"}`);
  const about = [];
  if (one.prompt_tokens) about.push(plural(one.prompt_tokens, "token"));
  if (one.prefix_blocks) about.push(`${plural(one.prefix_blocks, "block")} cached`);
  if (one.ttft_ms) about.push(`TTFT ${durationText(one.ttft_ms)}`);
  return element(
    "summary",
    {},
    element("span", {}, clock(one.unix_time_s)),
    where,
    element("span", { class: "muted" }, about.join(" · ") || one.reasons.map(words).join("; ")),
    element("span", { class: "mono" }, one.request_id),
  );
}

// What somebody reads stays where it is: while one is open the list waits.
export function showDecisions(data) {
  const place = document.getElementById("decisions");
  if (place.querySelector("details[open]")) return;
  if (!data.decisions.length) {
    place.replaceChildren(empty("None yet."));
    return;
  }
  const hadFocus = place.contains(document.activeElement);
  place.replaceChildren(
    ...data.decisions.map((one) => element("details", {}, decisionSummary(one), decisionDetails(one))),
  );
  if (hadFocus) place.querySelector("summary").focus();
}
