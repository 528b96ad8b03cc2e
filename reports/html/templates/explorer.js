"use strict";
// Samples: search and filters, a list that draws only its visible rows, the outputs of one prompt, and the address.
const Explorer = (() => {
  const { make, named } = Page;
  const data = JSON.parse(document.getElementById("samples-data").textContent);
  const { prompts, methods, texts } = data, baseline = methods[data.baseline];
  const form = document.getElementById("filters"), list = document.getElementById("list"), rows = document.getElementById("rows");
  const detail = document.getElementById("detail"), shown = document.getElementById("shown");
  const HEIGHT = 32, NONE = "–";
  const number = (value, digits = 2) => (value === null || value === undefined ? NONE : value.toFixed(digits));
  const speedup = (method, p) => (method.invalid || !baseline?.ms[p] || !method.ms[p] ? null : baseline.ms[p] / method.ms[p]);
  const verdict = (method, p) => data.verdicts[method.verdict[p]] ?? null;
  const key = (p) => `${prompts.id[p]}.${prompts.turn[p]}`; // in links
  const name = (p) => `${prompts.id[p]}, turn ${prompts.turn[p] + 1}`;
  const places = new Map(prompts.id.map((_, p) => [key(p), p]));
  const all = prompts.id.map((_, p) => p);
  const spread = (p) => {
    const ms = methods.filter((m) => m !== baseline && !m.invalid && m.ms[p]).map((m) => m.ms[p]);
    return Math.max(...ms) / Math.min(...ms) || 0;
  };
  const textOf = (p) => [prompts.asked[p], ...methods.map((m) => m.text[p])].map((i) => texts[i] ?? "").join("\n").toLowerCase();
  const SORTS = {
    suite: ["order of the suite", (p) => p],
    differ: ["methods differ most", (p) => -spread(p)],
    slowest: ["slowest first", (p) => speedup(method(), p) ?? Infinity],
    fastest: ["fastest first", (p) => -(speedup(method(), p) ?? -Infinity)],
    accepted: ["tokens per step", (p) => -(method().tau[p] ?? -Infinity)],
  };
  const contestant = methods.findIndex((m) => m !== baseline && !m.invalid && m.ms.some((ms) => ms !== null));
  const state = { method: Math.max(contestant, 0), task: "", verdict: "", sort: "suite", search: "", sample: null };
  const method = () => methods[state.method];
  let found = [], onChange = () => {};
  methods.forEach((m) => { m.off = new Set(m.noisy); });
  // Whether the times of the method or of the baseline were noisy.
  const noisy = (m, p) => m.off.has(p) || (baseline ? baseline.off.has(p) : false);

  const choose = () => {
    const mine = all.filter((p) => method().text[p] >= 0
      && (!state.task || prompts.task[p] === state.task)
      && (!state.verdict || verdict(method(), p)?.[0] === state.verdict)
      && (!state.search || name(p).includes(state.search) || key(p) === state.search || textOf(p).includes(state.search.toLowerCase())));
    const order = SORTS[state.sort][1];
    found = mine.sort((a, b) => order(a) - order(b) || a - b);
  };

  const pill = (given) => (given ? [make("span", { class: `pill ${given[1]}` }, given[0])] : []);
  const noisyPill = (m, p) => (m.off.has(p) ? pill(["noisy", "note"]) : []);
  const row = (p, i) => {
    const made = make("div", { class: "row", role: "option", id: `row-${p}`, "aria-selected": p === state.sample,
      "aria-setsize": found.length, "aria-posinset": i + 1, style: `top:${i * HEIGHT}px`, "data-p": p });
    const speed = speedup(method(), p);
    made.append(make("b", {}, make("bdi", {}, name(p))), make("span", { class: "what task" }, prompts.task[p]),
      make("bdi", { class: "what" }, texts[prompts.asked[p]].slice(0, 160)),
      make("span", { class: "end" }, ...noisyPill(method(), p), ...pill(verdict(method(), p)),
        make("span", {}, `${method().invalid ? "invalid" : speed === null ? NONE : `${number(speed)}×`} · τ ${number(method().tau[p])}`)));
    return made;
  };
  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 4);
    const last = Math.min(found.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 4);
    rows.style.height = `${Math.max(found.length, 1) * HEIGHT}px`;
    rows.replaceChildren(...found.slice(first, last).map((p, i) => row(p, first + i)));
    if (!found.length) rows.append(make("div", { class: "row", role: "option" }, "No sample matches."));
    const at = found.indexOf(state.sample);
    if (at >= first && at < last) list.setAttribute("aria-activedescendant", `row-${state.sample}`);
    else list.removeAttribute("aria-activedescendant");
  };
  const reveal = () => {
    const top = found.indexOf(state.sample) * HEIGHT;
    if (top < 0) return;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
  };

  // Equal outputs are shown once. An output that differs from the baseline's is marked from the first difference.
  const answer = (text, whole) => {
    let at = 0;
    if (whole !== null && whole !== text) while (at < text.length && text[at] === whole[at]) at += 1;
    else at = text.length;
    return make("pre", { tabindex: 0, dir: "auto" }, text.slice(0, at), ...(at < text.length ? [make("mark", {}, text.slice(at))] : []));
  };
  const answers = (p) => {
    const groups = new Map();
    methods.forEach((m) => { if (m.text[p] >= 0) groups.set(m.text[p], [...(groups.get(m.text[p]) ?? []), m]); });
    const whole = baseline && baseline.text[p] >= 0 ? baseline.text[p] : null;
    const order = [...groups].sort(([a], [b]) => (b === whole) - (a === whole));
    return order.flatMap(([text, own]) => [
      make("div", { class: "who" }, ...own.map((m) => make("span", {}, ...named(m)))),
      answer(texts[text], whole === null ? null : texts[whole]),
    ]);
  };
  const table = (p) => {
    const head = ["method", "speedup", "τ", "ms/token", "tokens", "quality", "finish", "output"];
    const body = methods.filter((m) => m.text[p] >= 0).map((m) => {
      const speed = speedup(m, p), cells = [m.invalid ? "invalid" : speed === null ? NONE : `${number(speed)}×`, number(m.tau[p]),
        number(m.ms[p]), m.tokens[p] ?? NONE, number(m.quality[p])];
      return make("tr", m === method() ? { class: "now" } : {}, make("th", { scope: "row" }, ...named(m)),
        ...cells.map((c) => make("td", { class: "num" }, String(c))),
        make("td", {}, data.finishes[m.finish[p]] ?? NONE), make("td", {}, ...pill(verdict(m, p)), ...noisyPill(m, p)));
    });
    return make("div", { class: "table", tabindex: 0, role: "region", "aria-label": "This prompt by method" }, make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((text, i) => make("th", { scope: "col", class: i > 0 && i < 6 ? "num" : "" }, text)))),
      make("tbody", {}, ...body)));
  };
  const open = (p) => {
    if (p === null) { detail.replaceChildren(make("p", { class: "nothing" }, "Choose a sample.")); return; }
    const expected = texts[prompts.expected[p]], repeats = data.repeats > 1 ? ` Numbers: means over ${data.repeats} repeats; outputs: the first.` : "";
    detail.replaceChildren(
      make("h3", {}, make("bdi", {}, name(p))), make("p", { class: "lead" }, `${prompts.task[p]}.${repeats}`),
      make("h4", {}, "Prompt"), answer(texts[prompts.asked[p]], null),
      ...(expected ? [make("h4", {}, "Expected"), answer(expected, null)] : []),
      make("h4", {}, "Measured"), table(p), make("h4", {}, "Outputs"), ...answers(p));
  };

  const address = () => {
    const given = { sample: state.sample === null ? "" : key(state.sample), method: method()?.label ?? "", task: state.task,
      verdict: state.verdict, sort: state.sort === "suite" ? "" : state.sort, search: state.search };
    Page.address(given);
  };
  const show = (linked = false) => {
    fillVerdicts();
    form.method.value = state.method; form.task.value = state.task; form.verdict.value = state.verdict; form.sort.value = state.sort; form.search.value = state.search;
    choose();
    if (found.length && (state.sample === null || !(linked || found.includes(state.sample)))) state.sample = found[0];
    shown.textContent = `${found.length.toLocaleString("en")} of ${all.length.toLocaleString("en")} prompts`;
    reveal(); draw(); open(state.sample); onChange();
  };
  const change = (given) => { Object.assign(state, given); show(); address(); };
  const read = () => {
    const words = Page.parameters();
    if (!["sample", "method", "task", "verdict", "sort", "search"].some((name) => words.has(name))) return false;
    const m = methods.findIndex((one) => one.label === words.get("method"));
    const valid = (name, all) => (all.includes(words.get(name)) ? words.get(name) : "");
    Object.assign(state, { method: m < 0 ? state.method : m, task: valid("task", prompts.task), verdict: valid("verdict", data.verdicts.map(([text]) => text)),
      sort: SORTS[words.get("sort")] ? words.get("sort") : "suite", search: words.get("search") ?? "",
      sample: places.get(words.get("sample")) ?? null });
    return true;
  };

  const option = (value, text) => make("option", { value }, text);
  const filled = (select, options) => select.replaceChildren(...options.map(([value, text]) => option(value, text)));
  const fillVerdicts = () => {
    const own = [...new Set(all.filter((p) => method().text[p] >= 0).map((p) => verdict(method(), p)?.[0]).filter((v) => v))];
    if (state.verdict && !own.includes(state.verdict)) state.verdict = "";
    filled(form.verdict, [["", "all"], ...own.map((v) => [v, v])]);
  };
  filled(form.method, methods.map((m, i) => [i, m.name]));
  filled(form.task, [["", "all"], ...[...new Set(prompts.task)].map((t) => [t, t])]);
  filled(form.sort, Object.entries(SORTS).map(([key, [text]]) => [key, text]));
  form.addEventListener("change", () => {
    const first = form.sort.value !== state.sort ? { sample: null } : {};
    if (first.sample === null) list.scrollTop = 0;
    change({ method: Number(form.method.value), task: form.task.value, verdict: form.verdict.value, sort: form.sort.value, search: form.search.value, ...first });
  });
  form.search.addEventListener("input", () => change({ search: form.search.value }));
  form.addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("scroll", () => requestAnimationFrame(draw));
  list.addEventListener("click", (event) => {
    const p = event.target.closest("[data-p]")?.dataset.p;
    if (p !== undefined) change({ sample: Number(p) });
  });
  const page = () => Math.max(1, Math.floor(list.clientHeight / HEIGHT) - 1);
  const STEPS = { ArrowDown: () => 1, ArrowUp: () => -1, PageDown: page, PageUp: () => -page(), Home: () => -Infinity, End: () => Infinity };
  list.addEventListener("keydown", (event) => {
    if (!STEPS[event.key] || !found.length) return;
    event.preventDefault();
    const next = found.indexOf(state.sample) + STEPS[event.key]();
    change({ sample: found[Math.min(Math.max(next, 0), found.length - 1)] });
  });
  addEventListener("hashchange", () => { if (read()) show(true); });
  addEventListener("resize", () => { draw(); onChange(); });
  const given = methods.length && read();
  if (methods.length) show(given);
  if (given) document.getElementById("samples").scrollIntoView();
  return { data, state, method, speedup, noisy, name, found: () => found, change, listen: (then) => { onChange = then; then(); } };
})();
