"use strict";
// Predicted speedups, from the parts of a step: `StepTimeParts` of specbench_ss/results/cost_model.py.
const WhatIf = (() => {
  const { make, named } = Page, holder = document.getElementById("what-if-data");
  if (!holder) return null;
  const methods = JSON.parse(holder.textContent), form = document.getElementById("what-if-form");
  const body = document.querySelector("#what-if-table tbody");
  const sliders = [...form.querySelectorAll("input")], factor = (input) => 2 ** Number(input.value);
  const change = () => Object.fromEntries(sliders.map((input) => [input.name, factor(input)]));
  const step = (m, c) => {
    const wider = (1 + c.nodes * m.nodes) / (1 + m.nodes);
    const products = c.size / c.products, launched = (m.overhead_s - m.rows_s) * c.launch;
    const computed = (m.fixed_s + (m.product_s - m.fixed_s) * wider) * products;
    return Math.max(m.read_s * c.size / c.bandwidth, computed) + launched + m.rows_s * c.nodes * products;
  };
  const kept = (m, c) => Math.min((m.tau - 1) * c.acceptance, Math.max(m.depth, m.tau - 1));
  const speedup = (m, c) => (1 + kept(m, c)) * step(m.baseline, c) / step(m, c);
  const even = (m, c) => {
    const needed = step(m, c) / step(m.baseline, c) - 1;
    return m.tau <= 1 ? null : needed > Math.max(m.depth, m.tau - 1) ? Infinity : Math.max(0, needed / (m.tau - 1));
  };
  const NEUTRAL = { size: 1, bandwidth: 1, products: 1, launch: 1, acceptance: 1, nodes: 1 };
  const shown = (value) => (value === null ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(2));
  const draw = () => {
    const c = change();
    sliders.forEach((input) => { input.nextElementSibling.textContent = `×${shown(factor(input))}`; });
    const rows = methods.map((m) => [m, speedup(m, c)]).sort((a, b) => b[1] - a[1]);
    body.replaceChildren(...rows.map(([m, value]) => make("tr", value < 1 ? { class: "loses" } : {},
      make("th", { scope: "row" }, ...named({ ...m, label: m.method })),
      make("td", { class: "num" }, make("strong", {}, `${shown(value)}×`)), make("td", { class: "num" }, `${shown(speedup(m, NEUTRAL))}×`),
      make("td", { class: "num" }, even(m, c) === null ? "–" : even(m, c) === Infinity ? "never" : `×${shown(even(m, c))}`))));
  };
  const keep = () => Page.address(Object.fromEntries(sliders.map((input) => [`if-${input.name}`, Number(input.value) ? input.value : ""])));
  const read = () => {
    const words = Page.parameters();
    sliders.forEach((input) => { input.value = words.get(`if-${input.name}`) ?? "0"; });
    if (sliders.some((input) => Number(input.value))) form.closest("details").open = true;
    draw();
  };
  form.addEventListener("input", draw);
  form.addEventListener("change", keep);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.back.addEventListener("click", () => { sliders.forEach((input) => { input.value = 0; }); draw(); keep(); });
  addEventListener("hashchange", read);
  read();
  return { speedup: (name, c) => speedup(methods.find((m) => m.method === name), { ...NEUTRAL, ...c }) };
})();
