"use strict";
// Tables: sorting by raw values, folded rows and columns, the task map by keyboard, CSV files, copying.
(() => {
  const value = (row, i) => {
    const cell = row.cells[i], raw = cell.dataset.sort ?? cell.textContent;
    return raw === "" || raw === "–" ? null : Number.isNaN(Number(raw)) ? raw : Number(raw);
  };
  const compare = (a, b) => (typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b);
  const order = (th, down) => {
    const table = th.closest("table"), i = th.cellIndex, body = table.tBodies[0];
    table.querySelectorAll("th[aria-sort]").forEach((h) => h.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].map((row) => ({ row, v: value(row, i) }));
    rows.sort((a, b) => {
      if (a.v === null || b.v === null) return (a.v === null) - (b.v === null);
      return down ? -compare(a.v, b.v) : compare(a.v, b.v);
    });
    body.append(...rows.map(({ row }) => row));
  };
  const titled = (th) => th.querySelector("bdi").textContent;
  const sort = (th) => {
    const down = th.getAttribute("aria-sort") ? th.getAttribute("aria-sort") === "ascending" : th.classList.contains("num");
    order(th, down);
    if (th.closest("#matrix-table")) Page.address({ by: titled(th), order: down ? "" : "up" });
  };

  const fold = (button) => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", open);
    if (button.dataset.unfold) document.getElementById(button.dataset.unfold).classList.toggle("open", open);
    else document.querySelectorAll(`[data-under="${button.dataset.fold}"]`).forEach((row) => { row.hidden = !open; });
  };

  const save = (button) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([button.dataset.content], { type: "text/csv" }));
    link.download = `${button.dataset.csv}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const copy = async (button) => {
    const text = document.getElementById(button.dataset.copy).innerText;
    try { await navigator.clipboard.writeText(text); } catch {
      const area = Object.assign(document.createElement("textarea"), { value: text });
      document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
    }
    const label = button.firstChild, was = label.textContent;
    label.textContent = "Copied";
    setTimeout(() => { label.textContent = was; }, 1200);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("fold")) fold(button);
    else if (button.closest("thead th")) sort(button.closest("th"));
    else if (button.dataset.csv) save(button);
    else if (button.dataset.copy) copy(button);
  });

  const matrix = document.getElementById("matrix-table"), note = document.getElementById("matrix-note");
  if (!matrix) return;
  const cells = () => [...matrix.tBodies[0].rows].map((row) => [...row.cells].slice(1));
  const readOut = (cell) => { if (cell?.dataset?.note) note.textContent = cell.dataset.note; };
  // One cell takes part in the tab order; the arrow keys go on from it.
  const enter = (cell, focus = true) => {
    matrix.querySelectorAll("td[tabindex='0']").forEach((td) => { td.tabIndex = -1; });
    cell.tabIndex = 0;
    if (focus) cell.focus();
  };
  cells().flat().forEach((td) => { td.tabIndex = -1; });
  if (cells()[0]?.[0]) enter(cells()[0][0], false);
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  matrix.addEventListener("keydown", (event) => {
    const td = event.target.closest("td"), move = moves[event.key];
    if (!td || !move) return;
    const all = cells(), y = all.findIndex((row) => row.includes(td)), x = all[y].indexOf(td);
    const next = all[y + move[0]]?.[x + move[1]];
    if (next) enter(next);
    event.preventDefault();
  });
  matrix.addEventListener("focusin", (event) => readOut(event.target));
  matrix.addEventListener("click", (event) => { const td = event.target.closest("td"); if (td) enter(td); });
  matrix.addEventListener("mouseover", (event) => readOut(event.target.closest("td")));

  const select = document.getElementById("task-of-matrix"), heads = [...matrix.tHead.rows[0].cells].slice(1);
  select.append(...heads.map((th, i) => Object.assign(document.createElement("option"), { value: i, textContent: titled(th) })));
  const only = () => {
    for (const row of matrix.rows) [...row.cells].slice(1).forEach((c, i) => c.classList.toggle("off", i !== Number(select.value)));
  };
  select.addEventListener("change", () => { note.textContent = ""; only(); heads[select.value].querySelector("button").click(); });
  const read = () => {
    const words = Page.parameters(), th = [...matrix.tHead.rows[0].cells].find((one) => titled(one) === words.get("by"));
    if (!th) return;
    if (heads.includes(th)) select.value = heads.indexOf(th);
    order(th, words.get("order") !== "up");
    only();
  };
  document.getElementById("measure").addEventListener("change", (event) => {
    if (event.target.name !== "measure") return;
    matrix.classList.toggle("plain", event.target.value !== "0");
    cells().flat().forEach((td) => {
      const text = td.dataset.measures.split("|")[event.target.value];
      (td.firstElementChild ?? td).textContent = text;
      td.dataset.sort = text.replace(/[^\d.]/g, "");
    });
  });
  addEventListener("hashchange", read);
  only();
  read();
})();
