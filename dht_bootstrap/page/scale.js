// Axes: from values to pixels, and the positions of ticks.

/** Map [from, to] linearly onto [low, high]. */
export function linear(from, to, low, high) {
  const factor = to > from ? (high - low) / (to - from) : 0;
  return (value) => low + (value - from) * factor;
}

/** About `most` round numbers between two values. */
export function ticks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((it) => it * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9 && found.length < 50; i++) found.push(i * step);
  return found;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** About `most` Unix seconds at round local times of day, and the step between two. */
export function timeTicks(from, to, most) {
  const rough = (to - from) / Math.max(1, most);
  const step = STEPS.find((it) => it >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const zone = -60 * new Date(1000 * to).getTimezoneOffset();
  const found = [];
  for (let i = Math.ceil((from + zone) / step); i * step - zone <= to && found.length < 50; i++) found.push(i * step - zone);
  return { found, step };
}

/** From 0 to the first of `tops` that is not below any value. */
export function upTo(values, tops) {
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  return [0, tops.find((it) => most <= it) ?? tops.at(-1)];
}

/**
 * The range of all values with a margin. Values far above the usual peak of a line are cut off, so that one peer that
 * diverges does not flatten the others.
 */
export function around(values, peaks) {
  if (!values.length) return [0, 1];
  const low = values.reduce((a, b) => Math.min(a, b));
  const usual = [...peaks].sort((a, b) => a - b)[(peaks.length - 1) >> 1];
  const high = Math.min(Math.max(...peaks), usual + 0.5 * Math.max(usual - low, 0.1 * Math.abs(usual)));
  const air = 0.06 * (high - low || Math.abs(high) || 1);
  return [low - air, high + air];
}
