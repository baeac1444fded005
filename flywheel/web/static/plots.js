// Plots on canvases: `makePlot` for other scripts, and the shares over time of a page, with their intervals.
"use strict";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A plot in an element, as wide as that; `axes` have their titles in `label`.
function makePlot(element, height, { axes, ...options }, data) {
  const font = "11px system-ui, sans-serif";
  const line = { stroke: colour("--dim"), font, labelFont: font, labelSize: 16, grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const size = () => ({ width: Math.max(120, element.clientWidth), height });
  element.replaceChildren();
  const plot = new window.uPlot({
    ...size(), padding: [8, 10, 0, 0], legend: { show: false }, axes: axes.map((each) => ({ ...line, ...each })),
    // Without a function of its own, uPlot takes every click for the end of a drag.
    cursor: { drag: { x: false, y: false, click: () => {} }, y: false, sync: { key: "page" } }, ...options,
  }, data, element);
  const watch = new ResizeObserver(() => plot.setSize(size()));
  watch.observe(element);
  plot.remove = () => { watch.disconnect(); plot.destroy(); };
  return plot;
}

(() => {
  const COLOURS = 6; // further lines begin again
  let drawn = null; // what is drawn where, and its plot

  function draw(isForced) {
    const figure = document.querySelector("[data-shares]");
    if (!figure || (drawn?.figure === figure && drawn.text === figure.dataset.shares && isForced !== true)) return;
    drawn?.plot.remove();
    const { times, ends, series, marks } = JSON.parse(figure.dataset.shares);
    const lines = series.map(([values], place) => ({
      stroke: colour(`--s${place % COLOURS}`), width: 2, spanGaps: true, points: { show: true, size: 6, fill: colour(`--s${place % COLOURS}`) },
    }));
    const percent = (_, values) => values.map((each) => `${Math.round(each * 100)} %`);
    const isLong = ends[1] - ends[0] > 3 * 86400;
    const moments = (_, values) => values.map((at) => new Date(at * 1000).toISOString()).map((text) => (isLong ? text.slice(0, 10) : text.slice(5, 16).replace("T", " ")));
    const plot = makePlot(figure.querySelector(".plot"), 320, {
      padding: [8, 36, 0, 0], series: [{}, ...lines], tzDate: (at) => window.uPlot.tzDate(new Date(at * 1000), "Etc/UTC"),
      scales: { x: { range: () => ends }, y: { range: [0, 1] } }, hooks: { draw: [(made) => drawOver(made, times, series, marks)] },
      axes: [{ label: figure.dataset.when, size: 26, space: 90, values: moments }, { label: figure.dataset.what, size: 50, values: percent }],
    }, [times, ...series.map(([values]) => values)]);
    drawn = { figure, text: figure.dataset.shares, plot };
  }

  // The intervals as vertical lines, and dashed lines with their texts.
  function drawOver(plot, times, series, marks) {
    const { ctx, bbox } = plot, ratio = window.devicePixelRatio;
    const line = (x, from, to) => { ctx.beginPath(); ctx.moveTo(x, from); ctx.lineTo(x, to); ctx.stroke(); };
    ctx.save();
    ctx.lineWidth = 1.5 * ratio;
    ctx.globalAlpha = 0.55;
    series.forEach(([, low, high], nth) => {
      ctx.strokeStyle = colour(`--s${nth % COLOURS}`);
      times.forEach((at, place) => {
        if (low[place] != null) line(plot.valToPos(at, "x", true), plot.valToPos(low[place], "y", true), plot.valToPos(high[place], "y", true));
      });
    });
    ctx.globalAlpha = 1;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    [ctx.strokeStyle, ctx.fillStyle, ctx.font] = [colour("--dim"), colour("--ink"), `${11 * ratio}px system-ui, sans-serif`];
    for (const [at, text] of marks) {
      const x = plot.valToPos(Math.min(Math.max(at, plot.scales.x.min), plot.scales.x.max), "x", true);
      line(x, bbox.top, bbox.top + bbox.height);
      ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
      ctx.fillText(text, x + (ctx.textAlign === "left" ? 3 : -3) * ratio, bbox.top + 11 * ratio);
    }
    ctx.restore();
  }

  document.addEventListener("live:updated", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
  draw();
})();
