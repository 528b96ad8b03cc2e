"use strict";
// Speedup against acceptance: a dot for each prompt of the list, linked to it; of the reference milliseconds per token.
(() => {
  const { make } = Page, { data } = Explorer;
  const box = document.getElementById("scatter"), note = document.getElementById("scatter-note");
  const LEFT = 44, BOTTOM = 30, TOP = 12;
  let dots = [], now = -1;
  const svg = (tag, given, ...children) => make(tag, { svg: 1, ...given }, ...children);
  const step = (length) => {
    const power = 10 ** Math.floor(Math.log10(length / 5));
    return power * [1, 2, 5, 10].find((n) => length / (n * power) <= 6);
  };
  const ticks = (high) => { const by = step(high); return Array.from({ length: Math.floor(high / by) + 1 }, (_, i) => Number((i * by).toPrecision(6))); };
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

  const dotless = () => (Explorer.found().length ? "No sample of this method has times." : "No sample is like this.");
  const draw = () => {
    const m = Explorer.method(), reference = data.methods[data.reference];
    const compared = reference && m !== reference && Explorer.found().some((p) => Explorer.speedup(m, p) !== null), value = (p) => (compared ? Explorer.speedup(m, p) : m.ms[p]);
    dots = Explorer.found().filter((p) => m.tau[p] !== null && value(p) !== null).sort((a, b) => m.tau[a] - m.tau[b] || value(a) - value(b));
    const plain = compared ? 1 : reference ? median(dots.map((p) => reference.ms[p]).filter((ms) => ms !== null)) : undefined;
    const wide = box.clientWidth - 32, high = box.clientHeight;
    if (!dots.length) { box.replaceChildren(make("p", { class: "nothing", role: "option" }, dotless())); note.textContent = ""; return; }
    const leastX = Math.min(1, ...dots.map((p) => m.tau[p])), mostX = Math.max(1.5, ...dots.map((p) => m.tau[p])) * 1.05, mostY = Math.max(...dots.map(value), plain ?? 0) * 1.08;
    const x = (tau) => LEFT + ((tau - leastX) / (mostX - leastX)) * (wide - LEFT), y = (ms) => TOP + (1 - ms / mostY) * (high - TOP - BOTTOM);
    const across = (at, kind) => svg("line", { class: kind, x1: LEFT, x2: wide, y1: y(at), y2: y(at) });
    const texts = [
      ...ticks(mostX).filter((t) => t >= leastX).map((t) => svg("text", { x: x(t), y: high - 14, "text-anchor": "middle" }, `${t}`)),
      ...ticks(mostY).map((t) => svg("text", { x: LEFT - 6, y: y(t) + 4, "text-anchor": "end" }, `${t}`)),
      svg("text", { x: wide, y: high - 1, "text-anchor": "end" }, "tokens per step, τ"), svg("text", { x: 0, y: 8 }, compared ? `speedup over ${reference.label}` : "ms per token, reading the prompt included"),
    ];
    const marks = dots.map((p) => svg("use", { href: `#sy-${m.symbol}`, x: x(m.tau[p]), y: y(value(p)), fill: `var(--${m.css})`, role: "option",
      id: `dot-${p}`, "data-p": p, "aria-label": told(p), "aria-selected": p === Explorer.state.sample,
      class: [p === Explorer.state.sample ? "now" : "", Explorer.noisy(m, p) ? "noisy" : ""].join(" ").trim() }));
    box.replaceChildren(svg("svg", { role: "none" }, svg("g", { "aria-hidden": "true" }, ...ticks(mostY).map((t) => across(t, "grid")), ...texts,
      ...(plain ? [across(plain, "median")] : [])), ...marks));
    now = dots.indexOf(Explorer.state.sample);
    note.textContent = now < 0 ? `${dots.length} prompts of ${m.label}.` : told(dots[now]);
    if (now < 0) box.removeAttribute("aria-activedescendant"); else box.setAttribute("aria-activedescendant", `dot-${dots[now]}`);
  };
  const told = (p) => {
    const m = Explorer.method(), speed = Explorer.speedup(m, p);
    const noise = Explorer.noisy(m, p) ? ", disturbed" : "";
    return `${Explorer.name(p)}: τ ${m.tau[p].toFixed(2)}, ${m.ms[p].toFixed(2)} ms per token${speed === null ? "" : `, ${speed.toFixed(2)}×`}${noise}`;
  };
  const point = (i) => {
    box.querySelector(".now")?.classList.remove("now");
    now = Math.min(Math.max(i, 0), dots.length - 1);
    const dot = document.getElementById(`dot-${dots[now]}`);
    dot.classList.add("now");
    box.setAttribute("aria-activedescendant", dot.id);
    note.textContent = told(dots[now]);
  };
  const open = (p) => {
    Explorer.change({ sample: p });
    document.getElementById("detail").scrollIntoView({ block: "nearest" });
  };
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by && dots.length) { event.preventDefault(); point(now + by); }
    if (event.key === "Enter" && now >= 0) open(dots[now]);
  });
  box.addEventListener("mouseover", (event) => { const p = event.target.dataset?.p; if (p !== undefined) point(dots.indexOf(Number(p))); });
  box.addEventListener("click", (event) => { const p = event.target.dataset?.p; if (p !== undefined) open(Number(p)); });
  if (data.methods.length) Explorer.listen(draw);
})();
