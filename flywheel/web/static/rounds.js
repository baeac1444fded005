// Draws the curves of a round, with other rounds over them, and draws on as steps come. Without it the page shows the
// last figures and a table of all steps.
"use strict";
(() => {
  const box = document.getElementById("charts");
  if (!box || !window.uPlot) return;
  const own = box.dataset.round;
  const others = JSON.parse(box.dataset.others);
  const NOTHING = { file: "", steps: [], figures: {} };
  const POINTS_UP_TO = 40; // steps that are marked by points
  const HEIGHT = 166;
  const known = new Map(); // round: its figures
  const drawn = new Map(); // id of a figure: what draws it
  let isLoading = false, isStale = false;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const compact = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  };

  async function read(name) {
    const old = known.get(name) || NOTHING;
    const answer = await fetch(`/rounds/${encodeURIComponent(name)}/curves?begin=${old.steps.length}&file=${old.file}`);
    if (!answer.ok) return;
    const fresh = await answer.json();
    const figures = {};
    for (const key of new Set([...Object.keys(old.figures), ...Object.keys(fresh.figures)])) {
      const before = fresh.begin ? (old.figures[key] || Array(fresh.begin).fill(null)) : [];
      const after = fresh.figures[key] || Array(fresh.steps.length).fill(null);
      figures[key] = before.slice(0, fresh.begin).concat(after);
    }
    known.set(name, { file: fresh.file, steps: old.steps.slice(0, fresh.begin).concat(fresh.steps), figures });
  }

  async function load() {
    isStale = true;
    if (isLoading) return;
    isLoading = true;
    try {
      while (isStale) {
        isStale = false;
        // Others are complete, or are read again with the page.
        await Promise.all([own, ...others].filter((name) => name === own || !known.has(name)).map(read));
        for (const figure of box.querySelectorAll("figure[data-series]")) draw(figure);
      }
      box.dataset.steps = known.get(own)?.steps.length ?? 0;
    } catch {
      // The server is gone or restarts; the next change loads again.
    } finally {
      isLoading = false;
    }
  }

  // The lines of a chart: label, colour, dash, and the values by step.
  function linesOf(figure) {
    const series = JSON.parse(figure.dataset.series);
    const isOverlaid = others.length > 0;
    const isSum = isOverlaid && "sum" in figure.dataset;
    const kinds = isOverlaid ? series.slice(0, 1) : series;
    const rounds = isOverlaid ? [own, ...others] : [own];
    return rounds.flatMap((round, nth) => {
      const { figures } = known.get(round) || NOTHING;
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
    const steps = [...new Set([own, ...others].flatMap((name) => (known.get(name) || NOTHING).steps))].sort((a, b) => a - b);
    const places = new Map(steps.map((step, place) => [step, place]));
    const spread = (name) => {
      const values = Array(steps.length).fill(null);
      return [values, (list) => { (known.get(name) || NOTHING).steps.forEach((step, at) => { values[places.get(step)] = list[at] ?? null; }); return values; }];
    };
    const aligned = (line, list) => spread(line.round)[1](list);
    const data = [steps, ...lines.map((line) => aligned(line, line.values))];
    const band = figure.dataset.spread && !others.length ? known.get(own)?.figures[figure.dataset.spread] : null;
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
    if (old) { old.watch.disconnect(); old.plot.destroy(); }
    drawn.set(figure.id, make(figure, lines, data, Boolean(band), shape));
  }

  function make(figure, lines, data, hasBand, shape) {
    const plot = figure.querySelector(".plot");
    const number = (name) => (figure.dataset[name] === undefined ? null : Number(figure.dataset[name]));
    const [low, high] = [number("low"), number("high")];
    const made = { figure, lines, data, shape };
    const axis = { stroke: colour("--dim"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const series = [{}, ...lines.map((line) => ({
      label: line.label, stroke: line.stroke, dash: line.dash, width: 1.75,
      points: { show: data[0].length <= POINTS_UP_TO, size: 5, fill: line.stroke },
    }))];
    const bands = [];
    if (hasBand) {
      series.push({ label: "above", points: { show: false } }, { label: "below", points: { show: false } });
      bands.push({ series: [series.length - 2, series.length - 1], fill: colour("--band") });
    }
    plot.replaceChildren();
    made.plot = new window.uPlot({
      width: Math.max(120, plot.clientWidth), height: HEIGHT, padding: [8, 10, 0, 0], series, bands,
      legend: { show: false },
      // Without a function of its own, uPlot takes every click for the end of a drag.
      cursor: { drag: { x: false, y: false, click: () => {} }, y: false, sync: { key: "round" } },
      scales: {
        x: { time: false, range: (_, first, last) => [first ?? 1, Math.max(last ?? 1, Number(box.dataset.planned) || 0, (first ?? 1) + 1)] },
        y: { range: (_, least, most) => {
          const [bottom, top] = [low ?? least ?? 0, high ?? most ?? 1];
          const margin = top > bottom ? (top - bottom) * 0.08 : Math.abs(top) * 0.1 || 0.5;
          return [low === null ? bottom - margin : low, high === null ? top + margin : high];
        } },
      },
      axes: [
        { ...axis, label: "step", labelSize: 16, labelFont: axis.font, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], space: 40 },
        { ...axis, label: figure.dataset.unit, labelSize: 16, labelFont: axis.font, size: 50, space: 32, values: (_, ticks) => ticks.map(compact) },
      ],
      hooks: { setCursor: [() => tell(made)] },
    }, data, plot);
    made.plot.over.addEventListener("click", () => {
      const place = made.plot.cursor.idx;
      const steps = (known.get(own) || NOTHING).steps;
      if (place != null && steps.includes(data[0][place])) location.href = box.dataset.rollouts + made.data[0][place];
    });
    made.watch = new ResizeObserver(() => made.plot.setSize({ width: Math.max(120, plot.clientWidth), height: HEIGHT }));
    made.watch.observe(plot);
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
