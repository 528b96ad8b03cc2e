"use strict";
// Speedup against acceptance: a dot for each prompt of the list, linked to it; of the baseline milliseconds per token.
(() => {
  const { data } = Explorer, MOST = 2000;
  const box = document.getElementById("scatter"), note = document.getElementById("scatter-note");
  let dots = [], now = -1, ready = false;
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const describe = (p) => {
    const m = Explorer.method(), speed = Explorer.speedup(m, p), noise = Explorer.noisy(m, p) ? ", noisy" : "";
    return `${Explorer.name(p)}: τ ${m.tau[p].toFixed(2)}, ${m.ms[p].toFixed(2)} ms per token${speed === null ? "" : `, ${speed.toFixed(2)}×`}${noise}`;
  };
  const spec = () => {
    const m = Explorer.method(), baseline = data.methods[data.baseline];
    const compared = baseline && m !== baseline && Explorer.found().some((p) => Explorer.speedup(m, p) !== null);
    const value = (p) => (compared ? Explorer.speedup(m, p) : m.ms[p]);
    dots = Explorer.found().filter((p) => m.tau[p] !== null && value(p) !== null).sort((a, b) => m.tau[a] - m.tau[b] || value(a) - value(b));
    const every = Math.ceil(dots.length / MOST);
    dots = dots.filter((p, i) => i % every === 0 || p === Explorer.state.sample);
    const line = compared ? 1 : baseline ? median(dots.map((p) => baseline.ms[p]).filter((ms) => ms !== null)) : undefined;
    now = dots.indexOf(Explorer.state.sample);
    const opacity = Math.max(0.15, Math.min(0.7, 60 / dots.length));
    const marker = { symbol: m.symbol, color: m.colour, size: 9, opacity: dots.map((p) => (Explorer.noisy(m, p) ? opacity / 2 : opacity)) };
    const chosen = { x: [m.tau[dots[now]]], y: [now < 0 ? null : value(dots[now])], mode: "markers", hoverinfo: "skip", showlegend: false,
      marker: { symbol: `${m.symbol}-open`, color: "#1A1E24", size: 14, line: { width: 2.5 } } };
    return {
      data: [{ x: dots.map((p) => m.tau[p]), y: dots.map(value), text: dots.map(describe), hoverinfo: "text", mode: "markers", marker, showlegend: false }, chosen],
      layout: { height: box.clientHeight, xaxis: { type: "log", title: { text: "tokens per step, τ" } },
        yaxis: { rangemode: "tozero", title: { standoff: 14, text: compared ? `speedup over ${baseline.name}` : "ms per token, prefill included" } },
        shapes: line ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: line, y1: line, line: { color: "#7A8089", dash: "dash", width: 1.5 } }] : [] },
    };
  };
  const draw = () => {
    if (!ready) return;
    Charts.show(box, spec());
    note.textContent = now >= 0 ? describe(dots[now]) : dots.length ? `${dots.length} prompts of ${Explorer.method().name}.` : "No sample of this method has times.";
  };
  const point = (i) => { now = Math.min(Math.max(i, 0), dots.length - 1); note.textContent = describe(dots[now]); };
  const open = (p) => {
    Explorer.change({ sample: p });
    document.getElementById("detail").scrollIntoView({ block: "nearest" });
  };
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by && dots.length) { event.preventDefault(); point(now + by); }
    if (event.key === "Enter" && now >= 0) open(dots[now]);
  });
  if (!data.methods.length) return;
  Charts.whenNear(box, () => {
    ready = true;
    draw();
    box.on("plotly_click", ({ points }) => { if (points[0].curveNumber === 0) open(dots[points[0].pointIndex]); });
    box.on("plotly_hover", ({ points }) => { if (points[0].curveNumber === 0) point(points[0].pointIndex); });
  });
  Explorer.listen(draw);
})();
