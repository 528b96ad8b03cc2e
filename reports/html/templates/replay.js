"use strict";
// Recorded outputs of two methods on one time axis, every step with its draft.
const Replay = (() => {
  const { make, named } = Page, holder = document.getElementById("replay-data");
  if (!holder) return null;
  const data = JSON.parse(holder.textContent), { texts, methods } = data;
  const form = document.getElementById("replay-form"), stage = document.getElementById("replay-stage");
  const clock = document.getElementById("replay-clock"), STEP_MS = 100, DRAWN = 64;
  const of = new Map(data.answers.map((one) => [`${one.prompt} ${one.method}`, one]));
  const state = { prompt: 0, lanes: [0, 0], time: Infinity, playing: 0 };
  const answer = (lane) => of.get(`${state.prompt} ${state.lanes[lane]}`);
  // An answer whose timed twin has other tokens is shown with steps of equal length.
  const ends = (one) => one.ends ?? one.steps.map((_, i) => STEP_MS * (i + 1));
  const last = () => Math.max(...[0, 1].map((lane) => answer(lane)).filter(Boolean).map((one) => ends(one).at(-1) ?? 0), 1);
  const done = (one) => ends(one).filter((end) => end <= state.time + 1e-6).length;

  const shownText = (text) => text.replaceAll("\n", "⏎\n");
  const word = (text, kind, step, kept) => make("span", { class: `word ${kind}`, style: `--k:${Math.min(kept / 6, 1).toFixed(2)}`,
    title: `step ${step + 1}: ${kept} token${kept === 1 ? "" : "s"}` }, shownText(texts[text]));
  const wordsOf = (one, count) => {
    const words = count || one.steps.length ? [word(one.steps[0][0][0], "own", 0, 1)] : [];
    one.steps.slice(0, count).forEach(([nodes, , path, next], i) => {
      path.slice(1).forEach((node) => words.push(word(nodes[node], "drafted", i, path.length)));
      words.push(word(next, "own", i, path.length));
    });
    return one.tokens ? words.slice(0, one.tokens) : words;
  };

  const chance = (value) => (value === null || value === undefined ? "" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`);
  const tree = ([nodes, parents, path, , pruned, p, q]) => {
    const children = nodes.map(() => []), accepted = new Set(path), left = new Set(pruned);
    parents.forEach((parent, node) => { if (parent >= 0) children[parent].push(node); });
    const seen = new Set(path);
    for (const node of nodes.keys()) if (seen.size < DRAWN) seen.add(node);
    const branch = (node) => {
      const kind = node === 0 ? "root" : accepted.has(node) ? "accepted" : left.has(node) ? "pruned" : "rejected";
      const word = make("li", {}, make("span", { class: `node ${kind}` }, make("bdi", {}, shownText(texts[nodes[node]]))),
        make("small", {}, ` ${node === 0 ? "root" : `${kind}${p[node] === null || p[node] === undefined ? "" : `, p ${chance(p[node])}`}${q ? `, q ${chance(q[node])}` : ""}`}`));
      const below = children[node].filter((child) => seen.has(child));
      if (below.length) word.append(make("ul", {}, ...below.map(branch)));
      return word;
    };
    const rest = nodes.length - seen.size;
    return [make("ul", { class: "tree" }, branch(0)), ...(rest > 0 ? [make("p", { class: "readout" }, `and ${rest} more nodes`)] : [])];
  };

  const lane = (i) => {
    const one = answer(i), m = methods[state.lanes[i]];
    const head = make("h3", {}, ...named(m));
    if (!one) return make("div", { class: "lane" }, head, make("p", { class: "nothing" }, "No drafts of this output were recorded."));
    const count = done(one), step = one.steps[Math.min(count, one.steps.length - 1)];
    const tokens = 1 + one.steps.slice(0, count).reduce((sum, [, , path]) => sum + path.length, 0);
    const kept = Math.min(tokens, one.tokens ?? tokens);
    const ended = count === one.steps.length;
    const progress = `${kept} token${kept === 1 ? "" : "s"} after ${count} of ${one.steps.length} steps${one.ends ? "" : "; without times"}`;
    return make("div", { class: "lane" }, head, make("p", { class: "readout" }, progress),
      make("pre", { tabindex: 0, dir: "auto" }, ...wordsOf(one, count)),
      make("h4", {}, ended ? "Last draft" : "Draft of this step"), ...tree(step));
  };
  const draw = () => {
    const end = last();
    form.time.max = end; form.time.value = state.time;
    clock.textContent = `${state.time.toFixed(0)} of ${end.toFixed(0)} ms`;
    form.play.textContent = state.playing ? "Pause" : "Play";
    stage.replaceChildren(lane(0), lane(1));
  };

  const address = () => {
    const one = answer(0), given = { replay: data.prompts[state.prompt][0], of: methods[state.lanes[0]].label,
      against: methods[state.lanes[1]].label, step: one ? String(done(one)) : "" };
    Page.address(given);
  };
  const to = (time) => { state.time = Math.min(Math.max(time, 0), last()); draw(); };
  const pause = () => { cancelAnimationFrame(state.playing); state.playing = 0; };
  const stop = () => { pause(); draw(); address(); };
  const play = () => {
    if (state.time >= last()) state.time = 0;
    let before = performance.now(), drawn = -1;
    const tick = (now) => {
      state.time = Math.min(state.time + (now - before) * Number(form.pace.value), last());
      before = now;
      const counts = [0, 1].map((i) => (answer(i) ? done(answer(i)) : 0)).join();
      if (counts !== drawn) { drawn = counts; draw(); } else { form.time.value = state.time; clock.textContent = `${state.time.toFixed(0)} of ${last().toFixed(0)} ms`; }
      if (state.time >= last()) stop(); else state.playing = requestAnimationFrame(tick);
    };
    state.playing = requestAnimationFrame(tick);
    draw();
  };
  const step = (by) => {
    const one = answer(0) ?? answer(1), all = ends(one), next = done(one) + by;
    to(next <= 0 ? 0 : all[Math.min(next, all.length) - 1]);
    address();
  };

  const recorded = (prompt) => methods.map((_, i) => i).filter((i) => of.has(`${prompt} ${i}`));
  const filled = (select, options) => select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  const choose = (given) => {
    pause();
    Object.assign(state, given);
    const there = recorded(state.prompt);
    state.lanes = state.lanes.map((m, i) => (there.includes(m) ? m : there[Math.min(i, there.length - 1)]));
    [form.first, form.second].forEach((select, i) => { filled(select, there.map((m) => [m, methods[m].name])); select.value = state.lanes[i]; });
    form.prompt.value = state.prompt;
    state.time = Math.min(state.time, last());
    draw();
  };
  const read = () => {
    const words = Page.parameters(), prompt = data.prompts.findIndex(([name]) => name === words.get("replay"));
    if (prompt < 0) return false;
    const index = (key, other) => { const m = methods.findIndex((one) => one.label === words.get(key)); return m < 0 ? other : m; };
    choose({ prompt, lanes: [index("of", state.lanes[0]), index("against", state.lanes[1])], time: words.has("step") ? 0 : Infinity });
    const one = answer(0), count = Math.min(Number(words.get("step")) || 0, one?.steps.length ?? 0);
    if (one && count) to(ends(one)[count - 1]);
    return true;
  };

  filled(form.prompt, data.prompts.map(([name, task], i) => [i, `${task}: ${name}`]));
  form.addEventListener("change", (event) => {
    if (event.target === form.time) { pause(); to(Number(form.time.value)); }
    else if (event.target !== form.pace) choose({ prompt: Number(form.prompt.value), lanes: [Number(form.first.value), Number(form.second.value)],
      time: event.target === form.prompt ? Infinity : state.time });
    address();
  });
  form.time.addEventListener("input", () => { pause(); to(Number(form.time.value)); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.play.addEventListener("click", () => (state.playing ? stop() : play()));
  form.back.addEventListener("click", () => { pause(); step(-1); });
  form.forward.addEventListener("click", () => { pause(); step(1); });
  const KEYS = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => to(0), End: () => to(Infinity),
    " ": () => (state.playing ? stop() : play()) };
  stage.addEventListener("keydown", (event) => {
    if (event.target !== stage || !KEYS[event.key]) return;
    event.preventDefault();
    if (event.key !== " ") pause();
    KEYS[event.key]();
  });
  addEventListener("hashchange", read);
  const there = recorded(0), rivals = there.filter((m) => m !== data.baseline);
  if (!read()) choose({ lanes: [rivals[0] ?? there[0], data.baseline >= 0 && there.includes(data.baseline) ? data.baseline : rivals[1] ?? there[0]] });
  else document.getElementById("replay").scrollIntoView();
  return { data, state, to, done: (i) => (answer(i) ? done(answer(i)) : 0) };
})();
