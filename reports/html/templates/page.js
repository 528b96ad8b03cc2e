"use strict";
// The page's theme, its sections, and what is shared by its scripts.
const Page = (() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const names = ["", "light", "dark"];
  const kept = () => { try { return localStorage.getItem("ssbench-theme") || ""; } catch { return ""; } };
  const keep = (name) => { try { localStorage.setItem("ssbench-theme", name); } catch { /* not kept */ } };
  const use = (name) => {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    button.title = `Theme: ${name || "system"}`;
    button.setAttribute("aria-label", button.title);
  };
  use(names.includes(kept()) ? kept() : "");
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(root.dataset.theme || "") + 1) % names.length];
    use(next);
    keep(next);
  });

  const links = new Map([...document.querySelectorAll(".bar a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => entries.forEach((e) => {
    if (!e.isIntersecting) return;
    links.forEach((a) => a.classList.remove("current"));
    const link = links.get(e.target.id), bar = link?.parentElement;
    link?.classList.add("current");
    // the bar moves by itself: scrollIntoView would move the page as well
    if (link && bar.scrollWidth > bar.clientWidth) bar.scrollLeft = link.offsetLeft - (bar.clientWidth - link.offsetWidth) / 2;
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("section[id]").forEach((s) => seen.observe(s));

  // An element with text alone: whatever a model wrote stays text.
  const make = (tag, options = {}, ...children) => {
    const { svg, ...rest } = options;
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(rest)) if (value !== undefined) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const swatch = (css, symbol) => make("svg", { svg: 1, class: `swatch ${css}`, "aria-hidden": "true" },
    make("use", { svg: 1, href: `#sy-${symbol}` }));

  const named = (m) => [swatch(m.css, m.symbol), make("bdi", m.label === m.name ? {} : { title: m.label }, m.name)];

  // On paper: the parts that are folded on the screen but belong to the printed page.
  const folded = () => document.querySelectorAll("details.paper:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...folded()]; opened.forEach((one) => { one.open = true; }); });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));

  // Parameters of the address: each part of the page changes its own alone.
  const parameters = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const address = (given) => {
    const all = parameters();
    for (const [name, value] of Object.entries(given)) if (value) all.set(name, value); else all.delete(name);
    history.replaceState(null, "", `#${all}`);
  };
  return { make, named, parameters, address };
})();
