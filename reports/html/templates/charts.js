"use strict";
// Plotly charts: drawn when they come near the screen, in the colours of a light or dark page.
const Charts = (() => {
  const style = JSON.parse(document.getElementById("chart-style").textContent), shown = new Map(), widths = new Map();
  const hovers = matchMedia("(hover: hover)").matches; // without it Plotly's buttons would always cover the legend
  const config = { displaylogo: false, displayModeBar: hovers && "hover", modeBarButtons: [["toImage", "resetScale2d"]] };
  const PAPER = 640; // pixels of a chart on A4
  const night = matchMedia("(prefers-color-scheme: dark)"), paper = matchMedia("print");
  let printing = false;
  const onPaper = () => printing || paper.matches;
  const dark = () => !onPaper() && (document.documentElement.dataset.theme ?? (night.matches ? "dark" : "light")) === "dark";
  // Plotly reads HTML in texts; here they are text. hovertemplates are the page's own, with names escaped already.
  const toned = (value, map) => {
    if (typeof value === "string") return map[value] ?? value.replaceAll("<", "&lt;");
    if (Array.isArray(value)) return value.map((one) => toned(one, map));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, k === "hovertemplate" ? v : toned(v, map)]));
  };
  const draw = (box) => {
    const { data, layout } = shown.get(box), map = dark() ? style.dark : {};
    const size = onPaper() ? { width: PAPER, autosize: false } : { width: undefined, autosize: true };
    widths.set(box, box.clientWidth);
    Plotly.react(box, toned(data, map), { ...toned(layout, map), ...size, template: { layout: toned(style.layout, map) } }, config);
  };
  // Plotly would follow the window, 100 ms late; this follows the box, in the same frame.
  const fit = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (!onPaper() && target.clientWidth && target.clientWidth !== widths.get(target)) draw(target);
  }));
  const show = (box, spec) => { shown.set(box, spec); draw(box); fit.observe(box); };
  const load = (box) => { if (!shown.has(box)) show(box, JSON.parse(document.getElementById(box.dataset.spec).textContent)); };
  const near = new Map();
  const watch = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
    if (!isIntersecting) return;
    watch.unobserve(target);
    near.get(target)(target);
  }), { rootMargin: "300px" });
  const whenNear = (box, then) => { near.set(box, then); watch.observe(box); };
  const boxes = [...document.querySelectorAll(".chart[data-spec]")];
  boxes.forEach((box) => whenNear(box, load));
  const again = () => shown.forEach((_, box) => draw(box));
  night.addEventListener("change", again);
  new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  addEventListener("beforeprint", () => { printing = true; boxes.filter((box) => box.offsetParent).forEach(load); again(); });
  addEventListener("afterprint", () => { printing = false; again(); });

  const choice = document.querySelector(".chart.choice"), select = document.getElementById("waterfall-of");
  if (choice) {
    const all = JSON.parse(document.getElementById("waterfall-data").textContent), text = document.getElementById("waterfall-text");
    const choose = () => { show(choice, all[select.value]); text.textContent = all[select.value].text; };
    whenNear(choice, choose);
    select.addEventListener("change", choose);
  }
  return { show, whenNear };
})();
