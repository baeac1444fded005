// Draws the curves of a round, with other rounds over them, and draws on as steps come. Without it the page shows the
// last figures and a table of all steps.
"use strict";
(() => {
  const box = document.getElementById("charts");
  if (!box || !window.uPlot) return;
  const own = box.dataset.round;
  const POINTS_UP_TO = 40; // steps that are marked by points
  const HEIGHT = 166;
  const drawn = new Map(); // id of a figure: what draws it
  let known = {}, others = []; // figures by round, and the rounds that are drawn over this one

  const compact = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  };

  function load() {
    known = JSON.parse(box.dataset.curves);
    others = Object.keys(known).filter((name) => name !== own);
    for (const figure of box.querySelectorAll("figure[data-series]")) draw(figure);
    box.dataset.steps = known[own].steps.length;
  }

  // The lines of a chart: label, colour, dash, and the values by step.
  function linesOf(figure) {
    const series = JSON.parse(figure.dataset.series);
    const isOverlaid = others.length > 0;
    const isSum = isOverlaid && "sum" in figure.dataset;
    const kinds = isOverlaid ? series.slice(0, 1) : series;
    const rounds = isOverlaid ? [own, ...others] : [own];
    return rounds.flatMap((round, nth) => {
      const { figures } = known[round];
      return kinds.map(([key, label], place) => ({
        round,
        label: isSum ? `${round}, all parts` : isOverlaid ? round : label,
        stroke: colour(`--c${(isOverlaid ? nth : place) + 1}`),
        dash: nth ? [6, 2 + 2 * nth] : [],
        values: isSum ? sum(series.map(([each]) => figures[each] || [])) : figures[key] || [],
      }));
    });
  }

  const sum = (lists) => Array.from({ length: Math.max(...lists.map((each) => each.length)) }, (_, place) =>
    lists.every((each) => each[place] == null) ? null : lists.reduce((all, each) => all + (each[place] ?? 0), 0));

  function draw(figure) {
    const lines = linesOf(figure);
    const steps = [...new Set([own, ...others].flatMap((name) => known[name].steps))].sort((a, b) => a - b);
    const places = new Map(steps.map((step, place) => [step, place]));
    const aligned = (line, list) => {
      const values = Array(steps.length).fill(null);
      known[line.round].steps.forEach((step, at) => { values[places.get(step)] = list[at] ?? null; });
      return values;
    };
    const data = [steps, ...lines.map((line) => aligned(line, line.values))];
    const band = figure.dataset.spread && !others.length ? known[own].figures[figure.dataset.spread] : null;
    if (band && lines.length) {
      const at = (sign) => lines[0].values.map((value, place) => (value == null || band[place] == null ? null : value + sign * band[place]));
      data.push(aligned(lines[0], at(1)), aligned(lines[0], at(-1)));
    }
    const shape = lines.map((line) => line.label + line.stroke).join() + Boolean(band);
    const old = drawn.get(figure.id);
    if (old && old.shape === shape && old.figure === figure) {
      old.lines = lines;
      old.data = data;
      old.plot.setData(data);
      tell(old);
      return;
    }
    old?.plot.remove();
    drawn.set(figure.id, make(figure, lines, data, Boolean(band), shape));
  }

  function make(figure, lines, data, hasBand, shape) {
    const plot = figure.querySelector(".plot");
    const isShare = "share" in figure.dataset;
    const made = { figure, lines, data, shape };
    const series = [{}, ...lines.map((line) => ({
      label: line.label, stroke: line.stroke, dash: line.dash, width: 1.75,
      points: { show: data[0].length <= POINTS_UP_TO, size: 5, fill: line.stroke },
    }))];
    const bands = [];
    if (hasBand) {
      series.push({ label: "above", points: { show: false } }, { label: "below", points: { show: false } });
      bands.push({ series: [series.length - 2, series.length - 1], fill: colour("--band") });
    }
    made.plot = makePlot(plot, HEIGHT, {
      series, bands,
      scales: {
        x: { time: false, range: (_, first, last) => [first ?? 1, Math.max(last ?? 1, Number(box.dataset.planned) || 0, (first ?? 1) + 1)] },
        y: { range: (_, least, most) => {
          if (isShare) return [0, 1];
          const [bottom, top] = [Math.min(0, least ?? 0), Math.max(0, most ?? 1)];
          const margin = (top - bottom) * 0.08 || 0.5;
          return [bottom && bottom - margin, top && top + margin];
        } },
      },
      axes: [
        { label: "step", size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], space: 40 },
        { label: figure.dataset.unit, size: 50, space: 32, values: (_, ticks) => ticks.map(compact) },
      ],
      hooks: { setCursor: [() => tell(made)] },
    }, data);
    made.plot.over.addEventListener("click", () => {
      const place = made.plot.cursor.idx;
      if (place != null && known[own].steps.includes(made.data[0][place])) location.href = box.dataset.rollouts + made.data[0][place];
    });
    tell(made);
    return made;
  }

  // The values below a chart: of the step under the pointer, else of the last one.
  function tell(made) {
    const readout = made.figure.querySelector(".readout");
    const pointed = made.plot?.cursor.idx;
    const last = (values) => values.findLastIndex((value) => value != null);
    const parts = made.lines.map((line, nth) => {
      const values = made.data[nth + 1];
      const place = pointed ?? last(values);
      const part = document.createElement("span");
      const key = document.createElement("span");
      key.className = `key k${nth + 1}${others.length && nth ? " other" : ""}`;
      let text = `${line.label} ${compact(values[place])}`;
      if (made.data.length > made.lines.length + 1 && values[place] != null) {
        text += ` ± ${compact(made.data[made.lines.length + 1][place] - values[place])}`;
      }
      part.append(key, text);
      return part;
    });
    const step = document.createElement("span");
    step.className = "at";
    step.textContent = pointed == null ? (made.data[0].length ? "last step" : "") : `step ${made.data[0][pointed]}`;
    readout.replaceChildren(...parts, step);
  }

  document.addEventListener("live:updated", load);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", load);
  box.classList.add("drawn");
  load();
})();
