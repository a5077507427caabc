"use strict";
// Panel of one instruction: its dependences in both schedules and what protects each of them.

const hex = (i) => (i * 16).toString(16).padStart(4, "0");
const esc = (s) => s.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const boards = (mask) => [0, 1, 2, 3, 4, 5].filter((b) => (mask >> b) & 1).map((b) => `SB${b}`).join(", ");
const sum = (list) => list.reduce((a, b) => a + b, 0);
const MAX_LINES = 40;

class Panel {
  constructor(data) {
    this.data = data;
    this.block = new Int32Array(data.text.length);
    data.blocks.forEach((b, n) => this.block.fill(n, b.start, b.end));
    const [before, after] = data.sides;
    for (const name of ["dependences", "waits"]) after[name] = this.applyDifference(before[name], after[name]);
    this.sides = data.sides.map((side) => this.addIndexes(side));
  }

  // The lists of the second schedule are stored as differences from those of the first.
  applyDifference(before, { removed, added }) {
    const isRemoved = new Set(removed);
    return before.filter((_, at) => !isRemoved.has(at)).concat(added);
  }

  // Dependences by first and by second instruction, waits by waiter, positions by index.
  addIndexes(side) {
    const size = this.data.text.length;
    const index = { from: new Map(), to: new Map(), waits: new Map(), at: new Int32Array(size), cycle: new Int32Array(size) };
    const add = (map, key, item) => (map.has(key) ? map.get(key).push(item) : map.set(key, [item]));
    for (const d of side.dependences) { add(index.from, d[0], d); add(index.to, d[1], d); }
    for (const wait of side.waits) add(index.waits, wait[0], wait);
    side.order.forEach((i, at) => { index.at[i] = at; });
    return { ...side, ...index };
  }

  linkTo(i) {
    return `<a href="#i=${i}" title="#${i}: ${esc(this.data.text[i])}">${hex(i)}</a>`;
  }

  linkWithText(i) {
    return `${this.linkTo(i)} ${esc(this.data.text[i])}`;
  }

  // The protection of a dependence as text; the kinds are those of protections.py.
  protectionText(dependence) {
    const [first, second, , , kind, a, b, c] = dependence;
    if (kind === "distance") {
      const slack = a - b;
      return `<span class="${slack < 0 ? "open" : slack === 0 ? "tight" : ""}">${a} cycles apart</span> (minimum ${b}, minimum after a change ${c}`
        + (slack < 0 ? "; <b class=open>too close</b>)" : `; slack ${slack})`);
    }
    if (kind === "complete") return `complete: more than ${a} cycles apart`;
    if (kind === "scoreboard") {
      const waiter = b === second ? "waits for" : `${this.linkTo(b)} waits for`;
      const setter = c === first ? "" : c >= 0 ? `, released by ${this.linkTo(c)} of the same queue` : ", released by a later instruction of its queue";
      return `${waiter} <b>${boards(a)}</b>${setter}`;
    }
    if (kind === "other_block") return `waited for in another block: ${dependence.slice(5).map((i) => this.linkTo(i)).join(" ")}`;
    if (kind === "queue") return "both use the same in-order queue";
    return "<b class=open>no protection found</b>";
  }

  // A table of dependences; ``end`` (0 or 1) selects the instruction that is named.
  tableHtml(title, dependences, end) {
    if (!dependences || !dependences.length) return "";
    const rows = dependences.slice(0, MAX_LINES).map((d) =>
      `<tr><td class=code>${this.linkWithText(d[end])}</td><td>${d[3]} <span class=kind>${d[2]}</span></td><td>${this.protectionText(d)}</td></tr>`);
    const rest = dependences.length > MAX_LINES ? `<p>… and ${dependences.length - MAX_LINES} more</p>` : "";
    return `<h4>${title}</h4><table>${rows.join("")}</table>${rest}`;
  }

  stallsHtml(cycles) {
    if (!cycles) return this.data.reasons.length ? "<p>not issued on the modelled path</p>" : "";
    const total = sum(cycles) || 1;
    const parts = cycles.map((c, r) => [c, r]).filter(([c]) => c > 0);
    return `<div class=stack>${parts.map(([c, r]) => `<i class=r${r} style="width:${(100 * c) / total}%"></i>`).join("")}</div>`
      + `<p class=parts>modelled warp cycles: ${parts.map(([c, r]) => `<span><i class="chip r${r}"></i>${this.data.reasons[r]} ${c.toLocaleString("en")}</span>`).join("")}</p>`;
  }

  sideHtml(n, i) {
    const side = this.sides[n];
    const raw = (dependences) => (dependences || []).filter((d) => d[2] === "RAW");
    const overwriting = (dependences) => (dependences || []).filter((d) => d[2] !== "RAW");
    const to = side.to.get(i), from = side.from.get(i);
    const waits = (side.waits.get(i) || []).map((w) => `<li>${boards(w[3])}: ${w[2]} of ${this.linkWithText(w[1])}</li>`);
    const body = [
      this.tableHtml("reads the results of", raw(to), 0),
      this.tableHtml("its results are read by", raw(from), 1),
      this.tableHtml("overwrites registers of", overwriting(to), 0),
      this.tableHtml("its registers are overwritten by", overwriting(from), 1),
      waits.length ? `<h4>waits for</h4><ul>${waits.slice(0, MAX_LINES).join("")}</ul>` : "",
    ].join("");
    const place = n ? this.moveText(i) : `position ${side.at[i]} in the kernel, block B${this.block[side.at[i]]}`;
    return `<div><h3>${esc(this.data.names[n])}</h3><p><code>${side.control[i]}</code>${this.reuseText(side, i)} · ${place}</p>`
      + this.stallsHtml(side.cycles[i]) + (body || "<p>no register dependences</p>") + "</div>";
  }

  reuseText(side, i) {
    return side.reuse[i] ? ` · reuse ${[..."abc"].filter((_, s) => (side.reuse[i] >> s) & 1).join(", ")}` : "";
  }

  moveText(i) {
    const by = this.sides[1].at[i] - this.sides[0].at[i];
    return by ? `at ${hex(this.sides[1].at[i])}, ${Math.abs(by)} positions ${by > 0 ? "later" : "earlier"}` : "same position";
  }

  html(i) {
    const latency = this.data.fixed[i] ? "fixed latency" : "variable latency";
    const pinned = this.pinned(i) ? " · pinned" : "";
    return `<div class=top><b>${esc(this.data.text[i])}</b><span class=muted>#${i} · offset in the original ${hex(i)} · ${this.data.pipe[i]} pipe, ${latency}${pinned}</span>`
      + `<button type=button data-close>close (Esc)</button></div>`
      + `<div class=halves>${this.sideHtml(0, i)}${this.sideHtml(1, i)}</div>`;
  }

  pinned(i) {
    this.pins ||= new Set(this.data.pinned);
    return this.pins.has(i);
  }

  // Instructions at the other end of a dependence, in either schedule.
  producers(i) { return new Set(this.sides.flatMap((s) => (s.to.get(i) || []).map((d) => d[0]))); }
  consumers(i) { return new Set(this.sides.flatMap((s) => (s.from.get(i) || []).map((d) => d[1]))); }
}
