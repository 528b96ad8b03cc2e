"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // One template for every chart, from the colours of the page.
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
  // "var(--x)" anywhere in a figure stands for a colour of the page.
  const resolved = (value) => {
    if (typeof value === "string") return value.startsWith("var(") ? css(value.slice(4, -1)) : value;
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v)]));
    return value;
  };
  const charts = [...document.querySelectorAll(".plot")].map((box) => ({
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
  addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((d) => { d.dataset.was = d.open; d.open = true; }); draw(); });
  addEventListener("afterprint", () => { document.querySelectorAll("details").forEach((d) => { d.open = d.dataset.was === "true"; }); draw(); });

  // Tables sort by the raw values; a row that sums up the others stays on top.
  const value = (row, i) => {
    const raw = row.cells[i].dataset.sort;
    return raw === undefined || raw === "" ? null : Number.isNaN(Number(raw)) ? raw : Number(raw);
  };
  const sort = (button) => {
    const th = button.closest("th"), table = th.closest("table"), i = th.cellIndex, body = table.tBodies[0];
    const down = th.getAttribute("aria-sort") ? th.getAttribute("aria-sort") === "ascending" : th.classList.contains("num");
    table.querySelectorAll("th[aria-sort]").forEach((h) => h.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].filter((row) => !row.classList.contains("total")).map((row) => ({ row, v: value(row, i) }));
    rows.sort((a, b) => {
      if (a.v === null || b.v === null) return (a.v === null) - (b.v === null);
      const order = typeof a.v === "string" || typeof b.v === "string" ? String(a.v).localeCompare(String(b.v)) : a.v - b.v;
      return down ? -order : order;
    });
    body.append(...rows.map(({ row }) => row));
  };

  const save = (button) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([button.dataset.content], { type: "text/csv" }));
    link.download = `${button.dataset.csv}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  };
  const copy = async (button) => {
    const text = document.getElementById(button.dataset.copy).innerText;
    try { await navigator.clipboard.writeText(text); } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    }
    const was = button.textContent; button.textContent = "Copied"; setTimeout(() => { button.textContent = was; }, 1200);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.closest("th")) sort(button);
    else if (button.dataset.csv) save(button);
    else if (button.dataset.copy) copy(button);
  });

  const links = new Map([...document.querySelectorAll(".bar a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => entries.forEach((e) => {
    if (!e.isIntersecting) return;
    links.forEach((a) => a.classList.remove("current"));
    links.get(e.target.id)?.classList.add("current");
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("section[id]").forEach((s) => seen.observe(s));
})();
