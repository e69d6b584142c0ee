// The lines of a run's charts, from the records of its peers.

import { list, median, number } from "./words.js";

const BINS = 80; // points of the median line

/** Checked points of a peer: {at, step, loss, idle}. */
function history(peer) {
  return list(peer.history)
    .filter((point) => number(point?.[0]) !== null && number(point?.[1]) !== null)
    .map(([at, step, loss, idle]) => ({ at, step, loss: number(loss), idle: number(idle) }));
}

const horizontal = (by) => (by === "step" ? (point) => point.step : (point) => point.at);

function lines(peers, points) {
  return peers.map((peer) => ({ id: String(peer.peer_id), state: peer.state, points: points(history(peer)) }));
}

/** Idle share against time. */
export const idle = (peers) => lines(peers, (past) => past.map((point) => [point.at, point.idle]));

/** Training loss against "time" or "step". A peer reports it once a round: repeated values are left out. */
export const losses = (peers, by) => {
  const x = horizontal(by);
  const fresh = (point, i, past) => i === 0 || point.loss !== past[i - 1].loss;
  return lines(peers, (past) => past.filter(fresh).map((point) => [x(point), point.loss]));
};

/** Inner steps per second, averaged over a window that smooths the boundaries of rounds. */
export function speeds(peers) {
  return lines(peers, (past) => {
    const stretch = Math.max(30, ((past.at(-1)?.at ?? 0) - (past[0]?.at ?? 0)) / 20);
    const found = [];
    let start = 0;
    past.forEach((point, i) => {
      while (start + 1 < i && point.at - past[start + 1].at >= stretch) start += 1;
      const took = point.at - past[start].at;
      if (took >= stretch / 2) found.push([point.at, Math.max(0, point.step - past[start].step) / took]);
    });
    return found;
  });
}

/** One line for all peers: in each bin of x the median over the peers' means. */
export function medianLine(all) {
  const points = all.flatMap((line) => line.points.filter((point) => point[1] !== null));
  if (!points.length) return [];
  const from = points.reduce((least, point) => Math.min(least, point[0]), Infinity);
  const to = points.reduce((most, point) => Math.max(most, point[0]), -Infinity);
  const width = (to - from) / BINS || 1;
  const bins = new Map();
  for (const line of all) {
    const mine = new Map();
    for (const [x, y] of line.points) {
      if (y === null) continue;
      const bin = Math.min(BINS - 1, Math.floor((x - from) / width));
      const sum = mine.get(bin) ?? [0, 0];
      mine.set(bin, [sum[0] + y, sum[1] + 1]);
    }
    for (const [bin, [sum, n]] of mine) bins.set(bin, [...(bins.get(bin) ?? []), sum / n]);
  }
  return [...bins].sort((a, b) => a[0] - b[0]).map(([bin, values]) => [from + (bin + 0.5) * width, median(values)]);
}
