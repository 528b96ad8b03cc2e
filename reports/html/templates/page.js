"use strict";
// The page's theme, its sections, and what is shared by its scripts.
const Page = (() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const words = { "": "as the system", light: "light", dark: "dark" }, names = Object.keys(words);
  const kept = () => { try { return localStorage.getItem("ssbench-theme") || ""; } catch { return ""; } };
  const keep = (name) => { try { localStorage.setItem("ssbench-theme", name); } catch { /* not kept */ } };
  const use = (name) => {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    button.textContent = `Theme: ${words[name]}`;
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

  // What the address says: every part of the page has words of its own, and leaves the others' alone.
  const parameters = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const address = (given) => {
    const all = parameters();
    for (const [name, value] of Object.entries(given)) if (value) all.set(name, value); else all.delete(name);
    history.replaceState(null, "", `#${all}`);
  };
  return { make, swatch, parameters, address };
})();
