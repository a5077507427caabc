"use strict";
// Both listings side by side. A block is drawn when it is opened.

const data = JSON.parse(document.getElementById("data").textContent);
const panel = new Panel(data);
const $ = (id) => document.getElementById(id);
const ROW = 20, GUTTER = 48, CHUNK = 64, BAR = 55;
const state = { filter: null, only: false, selected: -1, side: 0 };
const moved = new Set(data.blocks.flatMap((b) => b.moved));
const longest = Math.max(1, ...data.sides.flatMap((s) => s.cycles.map((c) => (c ? sum(c) : 0))));
const drawn = new Map(); // block number -> { body, rows: visible positions, lines: position -> line }

function controlHtml(side, i) {
  const word = data.sides[side].control[i], otherWord = data.sides[1 - side].control[i];
  if (word === otherWord) return word;
  const otherFields = otherWord.split(":");
  return word.split(":").map((field, at) => (field === otherFields[at] ? field : `<span class=ch>${field}</span>`)).join(":");
}

function reuseHtml(side, i) {
  const flags = data.sides[side].reuse[i];
  const changed = flags !== data.sides[1 - side].reuse[i];
  if (!flags && !changed) return "";
  const text = flags ? `reuse ${[..."abc"].filter((_, s) => (flags >> s) & 1).join("")}` : "no reuse";
  return ` <u class="${changed ? "ch" : ""}">${text}</u>`;
}

function highlightOpcode(text) {
  const parts = /^(@\S+ )?(\S+)(.*)$/.exec(text);
  return parts ? `${parts[1] ? `<u>${esc(parts[1])}</u>` : ""}<b>${esc(parts[2])}</b>${esc(parts[3])}` : esc(text);
}

function barHtml(cycles) {
  if (!cycles) return "";
  const total = sum(cycles), scale = (BAR * Math.sqrt(total / longest)) / total;
  return cycles.map((c, r) => (c ? `<i class=r${r} style="width:${(c * scale).toFixed(1)}px" title="${data.reasons[r]} ${c}"></i>` : "")).join("");
}

function rowHtml(side, at) {
  const i = data.sides[side].order[at];
  const cycles = data.sides[side].cycles[i];
  const stalled = cycles ? sum(cycles.slice(1)) : 0;
  const name = `row${moved.has(i) ? " moved" : ""}${state.filter && !state.filter(i) ? " dim" : ""}`;
  return `<div class="${name}" role="option" tabindex="-1" data-i="${i}" data-at="${at}" data-side="${side}">`
    + `<span class=off>${hex(i)}</span><span class=ctl>${controlHtml(side, i)}</span>`
    + `<span class=txt title="${esc(data.text[i])}">${highlightOpcode(data.text[i])}${reuseHtml(side, i)}</span>`
    + `<span class=cyc>${stalled ? stalled.toLocaleString("en") : ""}</span><span class=bar>${barHtml(cycles)}</span></div>`;
}

function columnHtml(side, rows) {
  const chunks = [];
  for (let k = 0; k < rows.length; k += CHUNK) {
    const part = rows.slice(k, k + CHUNK);
    chunks.push(`<div class=chunk style="contain-intrinsic-size:auto ${part.length * ROW}px">${part.map((at) => rowHtml(side, at)).join("")}</div>`);
  }
  return `<div role="listbox" aria-label="${esc(data.names[side])}">${chunks.join("")}</div>`;
}

function connectorPath(lines, i, name) {
  const y1 = lines.get(panel.sides[0].at[i]), y2 = lines.get(panel.sides[1].at[i]);
  if (y1 === undefined || y2 === undefined) return "";
  const a = y1 * ROW + ROW / 2, b = y2 * ROW + ROW / 2, m = GUTTER / 2;
  return `<path class="${name}" d="M0 ${a}C${m} ${a} ${m} ${b} ${GUTTER} ${b}"/>`;
}

// ---- filtering

// The filter of a search text: a function of an original index, or null.
function makeFilter(text) {
  const query = text.trim().toLowerCase();
  if (!query) return null;
  if (/^#\d+$/.test(query)) return (i) => i === Number(query.slice(1));
  if (/^0x[0-9a-f]+$/.test(query)) {
    const offset = parseInt(query, 16);
    return (i) => i * 16 === offset || data.text[i].toLowerCase().includes(query);
  }
  if (/^u?[rp]\d+$/.test(query)) {
    const name = new RegExp(`\\b${query}\\b`, "i");
    return (i) => name.test(data.text[i]);
  }
  return (i) => data.text[i].toLowerCase().includes(query)
    || data.sides.some((s) => s.control[i].toLowerCase().includes(query));
}

const isChanged = (i) => moved.has(i) || data.sides[0].control[i] !== data.sides[1].control[i]
  || data.sides[0].reuse[i] !== data.sides[1].reuse[i];

function visibleRows(block) {
  const rows = [];
  for (let at = block.start; at < block.end; at++) {
    const pair = data.sides.map((s) => s.order[at]);
    if (state.filter && !pair.some(state.filter)) continue;
    if (state.only && !pair.some(isChanged)) continue;
    rows.push(at);
  }
  return rows;
}

// ---- drawing

function draw(number) {
  const block = data.blocks[number], body = $(`b${number}`);
  const rows = visibleRows(block), lines = new Map(rows.map((at, k) => [at, k]));
  const paths = block.moved.map((i) => connectorPath(lines, i, "")).join("");
  body.innerHTML = columnHtml(0, rows)
    + `<svg class="gutter" height="${rows.length * ROW}" aria-hidden="true">${paths}<g></g></svg>` + columnHtml(1, rows);
  body.querySelector(".row")?.setAttribute("tabindex", "0");
  drawn.set(number, { body, lines });
  markSelection(body);
}

function blockSummary(block, n) {
  const diff = [];
  if (block.moved.length) diff.push(`${block.moved.length} moved`);
  if (block.retimed) diff.push(`${block.retimed} control words changed`);
  const loops = block.loops.length ? `<span>in loop ${block.loops.join(", ")}</span>` : "";
  const to = block.succ.length ? `<span>→ ${block.succ.map((s) => `B${s}`).join(" ")}</span>` : "<span>exit</span>";
  const sums = block.cycles
    ? `<span class=sum>modelled warp cycles ${block.cycles[0].toLocaleString("en")} → ${block.cycles[1].toLocaleString("en")}</span>` : "";
  return `<b>B${n}</b><span>${hex(block.start)}–${hex(block.end - 1)}</span><span>${block.end - block.start} instructions</span>${loops}${to}`
    + `<span class=${diff.length ? "diff" : "same"}>${diff.join(", ") || (block.shifted ? "reordered" : "unchanged")}</span>${sums}`;
}

function buildListing() {
  $("listing").innerHTML = data.blocks.map((b, n) =>
    `<details class="block" data-n="${n}"><summary>${blockSummary(b, n)}</summary><div class="body" id="b${n}"></div></details>`).join("");
  for (const details of blocks()) {
    details.addEventListener("toggle", () => { if (details.open && !drawn.has(Number(details.dataset.n))) draw(Number(details.dataset.n)); });
  }
  const changed = data.blocks.map((b, n) => n).filter((n) => data.blocks[n].shifted || data.blocks[n].retimed);
  const weight = (n) => (data.blocks[n].cycles ? data.blocks[n].cycles[0] : data.blocks[n].end - data.blocks[n].start);
  const heaviest = data.blocks.map((b, n) => n).sort((a, b) => weight(b) - weight(a))[0];
  for (const n of changed.length ? changed : [heaviest]) open(n);
}

const blocks = () => document.querySelectorAll("details.block");

function open(n) {
  if (!drawn.has(n)) draw(n);
  document.querySelector(`details.block[data-n="${n}"]`).open = true;
}

function redraw() {
  let count = 0;
  drawn.clear();
  for (const details of blocks()) {
    const n = Number(details.dataset.n);
    const rows = visibleRows(data.blocks[n]).length;
    const filtered = Boolean(state.filter || state.only);
    count += rows;
    details.hidden = filtered && !rows;
    if (filtered && rows && !details.open) { details.open = true; details.dataset.forced = "1"; }
    if (!filtered && details.dataset.forced) { details.open = false; delete details.dataset.forced; }
    if (details.open && !details.hidden) draw(n);
  }
  $("matches").textContent = state.filter || state.only ? `${count} of ${data.text.length} rows` : "";
}

// ---- selection

function markSelection(root) {
  const selected = state.selected;
  for (const r of root.querySelectorAll(".sel,.prod,.cons")) r.classList.remove("sel", "prod", "cons");
  for (const g of root.querySelectorAll("svg.gutter g")) g.innerHTML = "";
  if (selected < 0) return;
  const paint = (i, name) => root.querySelectorAll(`.row[data-i="${i}"]`).forEach((r) => { r.classList.add(name); if (name === "sel") r.setAttribute("aria-selected", "true"); });
  root.querySelectorAll("[aria-selected]").forEach((r) => r.removeAttribute("aria-selected"));
  paint(selected, "sel");
  panel.producers(selected).forEach((i) => paint(i, "prod"));
  panel.consumers(selected).forEach((i) => paint(i, "cons"));
}

function select(i, { scroll = false, focus = false } = {}) {
  if (!(i >= 0 && i < data.text.length)) return;
  state.selected = i;
  const n = panel.block[panel.sides[0].at[i]];
  open(n);
  if (!drawn.get(n).lines.has(panel.sides[state.side].at[i])) { clearFilter(); open(n); }
  markSelection($("listing"));
  $("panel").innerHTML = panel.html(i);
  $("panel").hidden = false;
  $("panel").scrollTop = 0;
  document.body.classList.add("panelled");
  const selected = drawn.get(n).body.querySelector(`.row[data-i="${i}"][data-side="${state.side}"]`);
  if (scroll) selected.scrollIntoView({ block: "nearest" });
  if (scroll) reveal(selected);
  if (focus) selected.focus({ preventScroll: true });
  try { history.replaceState(null, "", `#i=${i}`); } catch { /* not allowed for a page opened from a file */ }
}

// Scroll an element out of the part of the window that the panel or the column heads cover.
function reveal(element) {
  const box = element.getBoundingClientRect(), low = innerHeight * 0.56;
  if (box.bottom > low || box.top < 40) scrollBy(0, box.top - low / 2);
}

function deselect() {
  state.selected = -1;
  $("panel").hidden = true;
  document.body.classList.remove("panelled");
  markSelection($("listing"));
}

function clearFilter() {
  $("filter").value = "";
  $("only").checked = false;
  state.filter = null;
  state.only = false;
  redraw();
}

function moveSelection(by) {
  const n = panel.block[panel.sides[state.side].at[state.selected]];
  const rows = [...document.querySelectorAll(`details.block[open]:not([hidden]) .row[data-side="${state.side}"]`)];
  const current = rows.findIndex((r) => Number(r.dataset.i) === state.selected);
  const next = rows[current + by];
  if (n >= 0 && next) select(Number(next.dataset.i), { scroll: true, focus: true });
}

function onHover(event) {
  const r = event.target.closest?.(".row[data-i]");
  for (const old of document.querySelectorAll(".row.hot")) old.classList.remove("hot");
  for (const g of document.querySelectorAll("svg.gutter g:not(:empty)")) g.innerHTML = "";
  if (!r) return;
  const i = Number(r.dataset.i), block = drawn.get(Number(r.closest("details").dataset.n));
  block.body.querySelectorAll(`.row[data-i="${i}"]`).forEach((row) => row.classList.add("hot"));
  block.body.querySelector("svg.gutter g").innerHTML = connectorPath(block.lines, i, "hot");
}

// ---- events

function selectFromFragment() {
  const match = /^#i=(\d+)$/.exec(location.hash);
  if (match) select(Number(match[1]), { scroll: true });
}

function onKey(event) {
  const isTyping = /^(INPUT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") { if (isTyping) event.target.blur(); else deselect(); return; }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  const focused = event.target.closest?.(".row[data-i]");
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
  else if ((event.key === "Enter" || event.key === " ") && focused) { event.preventDefault(); selectRow(focused); }
  else if (/^Arrow(Up|Down)$/.test(event.key) && focused && state.selected >= 0) { event.preventDefault(); moveSelection(event.key === "ArrowDown" ? 1 : -1); }
  else if (/^Arrow(Left|Right)$/.test(event.key) && focused) { state.side = event.key === "ArrowRight" ? 1 : 0; select(Number(focused.dataset.i), { scroll: true, focus: true }); }
}

function selectRow(r) {
  state.side = Number(r.dataset.side);
  select(Number(r.dataset.i), { focus: true });
  reveal(r);
}

buildListing();
let timer = 0;
$("filter").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => { state.filter = makeFilter($("filter").value); redraw(); }, 120);
});
$("only").addEventListener("change", () => { state.only = $("only").checked; redraw(); });
$("open").addEventListener("click", () => blocks().forEach((d) => { d.open = true; }));
$("close").addEventListener("click", () => blocks().forEach((d) => { d.open = false; }));
$("listing").addEventListener("click", (event) => { const r = event.target.closest(".row[data-i]"); if (r) selectRow(r); });
$("listing").addEventListener("mouseover", onHover);
$("panel").addEventListener("click", (event) => { if (event.target.closest("[data-close]")) deselect(); });
document.querySelectorAll(".move").forEach((cell) => { cell.innerHTML = esc(cell.textContent).replace(/#(\d+)(?!;)/, (all, i) => `<a href="#i=${i}">${all}</a>`); });
addEventListener("keydown", onKey);
addEventListener("hashchange", selectFromFragment);
selectFromFragment();
document.body.dataset.ready = "1";
