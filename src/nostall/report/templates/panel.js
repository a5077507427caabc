"use strict";
// The panel of one instruction: what it needs, what needs it, and what protects each pair.

const hex = (i) => (i * 16).toString(16).padStart(4, "0");
const esc = (s) => s.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const boards = (mask) => [0, 1, 2, 3, 4, 5].filter((b) => (mask >> b) & 1).map((b) => `SB${b}`).join(", ");
const sum = (list) => list.reduce((a, b) => a + b, 0);
const MOST_LINES = 40;

class Panel {
  constructor(data) {
    this.data = data;
    this.block = new Int32Array(data.text.length);
    data.blocks.forEach((b, n) => this.block.fill(n, b.start, b.end));
    const [before, after] = data.sides;
    for (const name of ["links", "waits"]) after[name] = this.patched(before[name], after[name]);
    this.sides = data.sides.map((side) => this.indexed(side));
  }

  // The second schedule's lists are given as differences from the first one's.
  patched(before, { without, added }) {
    const gone = new Set(without);
    return before.filter((_, at) => !gone.has(at)).concat(added);
  }

  // Links by their first and second instruction, waits by their waiter, positions by index.
  indexed(side) {
    const size = this.data.text.length;
    const index = { from: new Map(), to: new Map(), waits: new Map(), at: new Int32Array(size), cycle: new Int32Array(size) };
    const add = (map, key, item) => (map.has(key) ? map.get(key).push(item) : map.set(key, [item]));
    for (const link of side.links) { add(index.from, link[0], link); add(index.to, link[1], link); }
    for (const wait of side.waits) add(index.waits, wait[0], wait);
    side.order.forEach((i, at) => { index.at[i] = at; });
    return { ...side, ...index };
  }

  ref(i) {
    return `<a href="#i=${i}" title="#${i}: ${esc(this.data.text[i])}">${hex(i)}</a>`;
  }

  named(i) {
    return `${this.ref(i)} ${esc(this.data.text[i])}`;
  }

  protection(link) {
    const [first, , , , how, a, b, c] = link;
    if (how === "distance") {
      const slack = a - b;
      return `<span class="${slack < 0 ? "open" : slack === 0 ? "tight" : ""}">${a} cycles apart</span> (floor ${b}, usual ${c}`
        + (slack < 0 ? "; <b class=open>too close</b>)" : `; slack ${slack})`);
    }
    if (how === "arrived") return `arrived: more than ${a} cycles apart`;
    if (how === "board") {
      const setter = b === link[1] ? "it waits itself for" : `${this.ref(b)} waits for`;
      const cover = c === first ? "" : c >= 0 ? `, released by ${this.ref(c)} of the same queue` : ", released by a later one of its queue";
      return `${setter} <b>${boards(a)}</b>${cover}`;
    }
    if (how === "earlier") return `waited for in another block: ${link.slice(5).map((i) => this.ref(i)).join(" ")}`;
    if (how === "queue") return "both go through one in-order queue";
    return "<b class=open>no protection found</b>";
  }

  table(title, links, other) {
    if (!links || !links.length) return "";
    const rows = links.slice(0, MOST_LINES).map((link) =>
      `<tr><td class=code>${this.named(link[other])}</td><td>${link[3]} <span class=kind>${link[2]}</span></td><td>${this.protection(link)}</td></tr>`);
    const rest = links.length > MOST_LINES ? `<p>… and ${links.length - MOST_LINES} more</p>` : "";
    return `<h4>${title}</h4><table>${rows.join("")}</table>${rest}`;
  }

  waiting(cycles) {
    if (!cycles) return this.data.reasons.length ? "<p>does not issue on the modelled path</p>" : "";
    const whole = sum(cycles) || 1;
    const parts = cycles.map((c, r) => [c, r]).filter(([c]) => c > 0);
    return `<div class=stack>${parts.map(([c, r]) => `<i class=r${r} style="width:${(100 * c) / whole}%"></i>`).join("")}</div>`
      + `<p class=parts>modelled warp cycles: ${parts.map(([c, r]) => `<span><i class="chip r${r}"></i>${this.data.reasons[r]} ${c.toLocaleString("en")}</span>`).join("")}</p>`;
  }

  half(n, i) {
    const side = this.sides[n];
    const raw = (links) => (links || []).filter((l) => l[2] === "RAW");
    const over = (links) => (links || []).filter((l) => l[2] !== "RAW");
    const to = side.to.get(i), from = side.from.get(i);
    const ends = (side.waits.get(i) || []).map((w) => `<li>${boards(w[3])}: ${w[2]} of ${this.named(w[1])}</li>`);
    const body = [
      this.table("needs (its sources come from)", raw(to), 0),
      this.table("feeds (its results go to)", raw(from), 1),
      this.table("overwrites registers of", over(to), 0),
      this.table("its registers are overwritten by", over(from), 1),
      ends.length ? `<h4>its wait bits end</h4><ul>${ends.slice(0, MOST_LINES).join("")}</ul>` : "",
    ].join("");
    const place = n ? this.moveText(i) : `position ${side.at[i]} of the kernel, block B${this.block[side.at[i]]}`;
    return `<div><h3>${esc(this.data.names[n])}</h3><p><code>${side.control[i]}</code>${this.reuse(side, i)} · ${place}</p>`
      + this.waiting(side.cycles[i]) + (body || "<p>no register hazards</p>") + "</div>";
  }

  reuse(side, i) {
    return side.reuse[i] ? ` · reuse ${[..."abc"].filter((_, s) => (side.reuse[i] >> s) & 1).join(", ")}` : "";
  }

  moveText(i) {
    const by = this.sides[1].at[i] - this.sides[0].at[i];
    return by ? `now at ${hex(this.sides[1].at[i])}, ${Math.abs(by)} ${by > 0 ? "later" : "earlier"}` : "same place";
  }

  html(i) {
    const latency = this.data.fixed[i] ? "fixed latency" : "variable latency";
    const pinned = this.pinned(i) ? " · pinned" : "";
    return `<div class=top><b>${esc(this.data.text[i])}</b><span class=muted>#${i} · originally at ${hex(i)} · ${this.data.pipe[i]} pipe, ${latency}${pinned}</span>`
      + `<button type=button data-close>close (Esc)</button></div>`
      + `<div class=halves>${this.half(0, i)}${this.half(1, i)}</div>`;
  }

  pinned(i) {
    this.pins ||= new Set(this.data.pinned);
    return this.pins.has(i);
  }

  // Instructions on the other end of a link, on either side of the page.
  producers(i) { return new Set(this.sides.flatMap((s) => (s.to.get(i) || []).map((l) => l[0]))); }
  consumers(i) { return new Set(this.sides.flatMap((s) => (s.from.get(i) || []).map((l) => l[1]))); }
}
