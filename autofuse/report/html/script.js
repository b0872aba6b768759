"use strict";
(() => {
  const table = document.getElementById("table");
  if (!table) return;
  // As page.py writes a row: anchor, operations, name, bucket, share, calls, eager, fused, speedup, interval, decision, why, source.
  const rows = JSON.parse(document.getElementById("data").textContent);
  const KEYS = [1, 4, 5, 6, 7, 8, 10];
  const PAGE = 200, FIRST = 25;  // rows that a press adds, and those shown before
  const body = table.tBodies[0];
  const more = document.getElementById("more");
  const filter = document.getElementById("filter");
  const decision = document.getElementById("decision");
  let sorted = rows.slice(), shown = FIRST;

  const time = (us) => us === null ? "–" : us < 1e3 ? us.toFixed(1) + " µs" : us < 1e6 ? (us / 1e3).toFixed(2) + " ms" : (us / 1e6).toFixed(2) + " s";
  const cell = (row, kind, text, below) => {
    const td = row.insertCell();
    if (kind) td.className = kind;
    td.append(text);
    if (below) {
      const span = document.createElement("span");
      span.className = "quiet";
      span.textContent = below;
      td.append(document.createElement("br"), span);
    }
  };
  const link = (anchor, text) => {
    if (!document.getElementById(anchor)) return text;
    const a = document.createElement("a");
    a.href = "#" + anchor;
    a.textContent = text;
    return a;
  };
  const bold = (kind) => {
    const b = document.createElement("b");
    b.className = kind;
    b.textContent = kind;
    return b;
  };
  const matches = (row) => {
    const kind = decision.value;
    if (kind === "other" ? row[10] === "fused" || row[10] === "eager" : kind && row[10] !== kind) return false;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = [row[1], row[2], row[3], row[10], row[11], row[12]].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const draw = () => {
    const found = sorted.filter(matches);
    body.replaceChildren();
    for (const r of found.slice(0, shown)) {
      const row = body.insertRow();
      cell(row, "", link(r[0], r[1]), r[2] + " · " + r[3]);
      cell(row, "n", (100 * r[4]).toFixed(1) + " %");
      cell(row, "n", r[5].toLocaleString("en"));
      cell(row, "n", time(r[6]));
      cell(row, "n", time(r[7]));
      cell(row, "n", r[8] === null ? "–" : r[8].toFixed(2) + "x", r[9]);
      cell(row, "", bold(r[10]), r[11]);
    }
    more.hidden = found.length <= shown;
    document.getElementById("count").textContent =
      found.length === rows.length ? rows.length + " nodes" : found.length + " of " + rows.length + " nodes";
  };
  const again = () => { shown = FIRST; draw(); };
  filter.addEventListener("input", again);
  filter.form.addEventListener("submit", (event) => event.preventDefault());
  decision.addEventListener("change", again);
  more.addEventListener("click", () => { shown += PAGE; draw(); });
  addEventListener("beforeprint", () => { shown = Math.max(shown, PAGE); draw(); });
  [...table.tHead.rows[0].cells].forEach((head, number) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = KEYS[number], sign = down ? -1 : 1;
      sorted = rows.slice().sort((a, b) => {
        if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
        return sign * (a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0);
      });
      again();
    });
  });
  const open = () => {
    const part = location.hash && document.getElementById(location.hash.slice(1));
    if (part && part.tagName === "DETAILS") part.open = true;
  };
  addEventListener("hashchange", open);
  draw();
  open();
})();
