// Curves by uPlot, in the colours of the page. A chart is drawn again when the colours or the width change.
import uPlot from "./vendor/uplot.js";
import { h } from "./dom.js";

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// short is a number of any size in a few digits.
export const short = (v) => {
  const size = Math.abs(v);
  return size !== 0 && size < 1e-3 ? v.toExponential(2) : v.toFixed(size >= 1000 ? 0 : 4);
};

// marks are the numbers of an axis: those that would all be rounded to 0 have an exponent.
const marks = (_, splits) => {
  const tiny = Math.max(...splits.map(Math.abs)) < 1e-2;
  return splits.map((v) => (v === null ? "" : tiny && v !== 0 ? v.toExponential(1) : uPlot.fmtNum(v)));
};

// chart returns an element with a chart. series: [{label, values, tone, width, dashed, points, gaps}], x: {label, values}.
export function chart({ x, series, bands = [], title, height = 240 }) {
  const box = h("div", { class: "chart", role: "img", "aria-label": title });
  let plot = null;
  const draw = () => {
    const width = Math.floor(box.clientWidth);
    if (width === 0 || !box.isConnected) return;
    if (plot) plot.destroy();
    const axis = (label, scale, side) => ({
      scale,
      side,
      label,
      labelSize: label ? 22 : 0,
      labelFont: "12px sans-serif",
      font: "12px sans-serif",
      stroke: token("--muted"),
      size: 56,
      grid: { stroke: token("--line"), width: 1 },
      ticks: { stroke: token("--line"), width: 1 },
    });
    const steps = [1, 2, 5].flatMap((n) => [n, 10 * n, 100 * n, 1000 * n, 10000 * n]).sort((a, b) => a - b); // no half groups or steps
    const axes = [{ ...axis(x.label, "x", 2), size: 36, incrs: steps }, { ...axis("", "y", 3), values: marks }];
    plot = new uPlot(
      {
        width,
        height,
        axes,
        bands: bands.map((b) => ({ series: b, fill: token("--accent-soft") })),
        cursor: { points: { size: 7 } },
        scales: { x: { time: false } },
        // Without a place that is pointed at (no index) the legend has names alone.
        series: [
          { label: x.label || "at", value: (_, v) => v ?? "" },
          ...series.map((s) => ({
            label: s.label,
            scale: "y",
            stroke: token(s.tone || "--accent"),
            width: s.width ?? 2,
            dash: s.dashed ? [5, 4] : undefined,
            points: { show: s.points ?? series[0].values.length < 40, size: 5 },
            spanGaps: !!s.gaps,
            value: (_, v, __, at) =>
              v === null || v === undefined ? (at === null ? "" : "–") : short(v),
          })),
        ],
      },
      [x.values, ...series.map((s) => s.values)],
      box,
    );
  };
  // A drawing changes the height of the box: in the next frame, not while the observer looks.
  const sized = new ResizeObserver(() =>
    requestAnimationFrame(() => {
      if (!plot || Math.floor(box.clientWidth) !== plot.width) draw();
    }),
  );
  sized.observe(box);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  box.stop = () => {
    sized.disconnect();
    dark.removeEventListener("change", draw);
    if (plot) plot.destroy();
    plot = null;
  };
  return box;
}
