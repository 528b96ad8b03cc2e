"use strict";
// Plotly figures of an experiment, with the colours of the page: "var(--x)" anywhere in one stands for a colour.
(() => {
  const probe = document.body.appendChild(document.createElement("span"));
  const css = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  const template = () => {
    const axis = {
      gridcolor: css("--grid"), linecolor: css("--line-strong"), zerolinecolor: css("--line-strong"),
      tickfont: { color: css("--muted"), size: 12 }, title: { font: { color: css("--muted"), size: 12.5 }, standoff: 10 },
      automargin: true, zeroline: false,
    };
    return { layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif', size: 12.5, color: css("--text") },
      margin: { l: 60, r: 24, t: 16, b: 58 }, xaxis: axis, yaxis: axis,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: css("--text"), size: 12.5 } },
      hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line-strong"), font: { color: css("--text") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--text") },
      hovermode: "closest", bargap: 0.28, bargroupgap: 0.08,
    } };
  };
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] };
  const resolved = (value) => {
    // Plotly reads HTML in labels; here they are text.
    if (typeof value === "string") return value.startsWith("var(") ? css(value.slice(4, -1)) : value.replaceAll("<", "&lt;");
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, k === "hovertemplate" ? v : resolved(v)]));
    }
    return value;
  };
  const charts = [...document.querySelectorAll(".experiment-plot")].map((box) => ({
    box, spec: JSON.parse(document.getElementById(box.dataset.spec).textContent),
  }));
  const draw = () => {
    for (const { box, spec } of charts) {
      const { data, layout } = resolved(spec);
      Plotly.react(box, data, { ...layout, template: template() }, config);
    }
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", draw);
  addEventListener("afterprint", draw);
})();
