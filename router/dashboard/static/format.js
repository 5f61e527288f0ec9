// Numbers and names as people read them. Pure.

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value >= 100 || value === 0) return count(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// [number, unit], so that a tile can set the unit smaller.
export function duration(ms) {
  if (ms === null || ms === undefined) return ["–", ""];
  if (ms >= 60_000) return [(ms / 60_000).toFixed(1), "min"];
  if (ms >= 1_000) return [(ms / 1_000).toFixed(ms >= 10_000 ? 0 : 1), "s"];
  return [ms >= 10 || Number.isInteger(ms) ? ms.toFixed(0) : ms.toFixed(1), "ms"];
}

export function durationText(ms) {
  return duration(ms).join(" ").trim();
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}

export function clock(unixTimeS, withSeconds = true) {
  const date = new Date(unixTimeS * 1000);
  const parts = [date.getHours(), date.getMinutes(), date.getSeconds()].slice(0, withSeconds ? 3 : 2);
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5_400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3_600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

// "http://10.0.0.1:8000@1" is "10.0.0.1:8000@1" wherever all are engines.
export function engineName(id) {
  return id.replace(/^http:\/\//, "");
}

export function words(code) {
  const spaced = code.replaceAll("_", " ").replace(/^reject:/, "rejected: ");
  return spaced.replace(/\b(ttft|tbt|slo|kv)\b/g, (name) => name.toUpperCase());
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${Math.round(number) === 1 ? one : many}`;
}
