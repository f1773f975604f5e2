"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const pad = (n) => String(n).padStart(2, "0");
  const stamp = (s) => {
    const d = new Date(s * 1000);
    return `${d.getUTCFullYear()}-${pad(d.getUTCMonth() + 1)}-${pad(d.getUTCDate())} ${pad(d.getUTCHours())}:${pad(d.getUTCMinutes())} UTC`;
  };
  const lasted = (s) => {
    if (s < 10) return `${Math.round(s * 10) / 10}s`;
    let left = Math.round(s);
    const said = [];
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
      const n = Math.floor(left / size);
      left -= n * size;
      if (n) said.push(`${n}${unit}`);
      else if (said.length) break;
      if (said.length === 2) break;
    }
    return said.join(" ");
  };
  const number = (v) => (Math.abs(v) >= 10000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(5))));
  const pace = (v) => (v >= 0.5 ? `${Number(v.toPrecision(3))} steps/s` : v > 0 ? `${Number((1 / v).toPrecision(3))} s a step` : "no step");

  /* What a place of a picture says; a place is a share of its width, 0 to 1. */
  const nearest = (rows, at) => {
    let low = 0, high = rows.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rows[middle][0] < at) low = middle + 1; else high = middle;
    }
    return low > 0 && at - rows[low - 1][0] < rows[low][0] - at ? low - 1 : low;
  };
  const curve = (words) => (plot, share) => {
    const rows = data[plot], span = data.end - data.begin, at = share * span;
    const within = ([begin, end]) => begin < at && at < end;
    if (plot === "loss" && data.bad.some(within)) return [share, `${stamp(data.begin + at)}\nthe loss is not a number`];
    if (data.holes[plot].some(within)) return [share, `${stamp(data.begin + at)}\nno step was made`];
    const row = rows[nearest(rows, at)];
    return [row[0] / span, `${stamp(data.begin + row[0])}\n${words(row[1])}`];
  };
  const readers = {
    step: curve((v) => `step ${Math.round(v).toLocaleString("en")}`),
    loss: curve((v) => `loss ${number(v)}`),
    rate: curve(pace),
    strip: (_, share) => {
      const at = share * (data.end - data.begin);
      const found = data.stretches.find((one) => one[1] <= at && at < one[2]);
      if (!found) return [share, stamp(data.begin + at)];
      const of = found[3] ? `, attempt ${found[3]}` : "";
      const end = data.ends[found[3]];
      return [share, `${stamp(data.begin + found[1])}\n${data.kinds[found[0]]} for ${lasted(found[2] - found[1])}${of}${end ? `\nended: ${end}` : ""}`];
    },
    bars: (_, share) => {
      const index = Math.min(data.buckets.length - 1, Math.max(0, Math.floor(share * data.buckets.length)));
      const [name, ...seconds] = data.buckets[index];
      const said = seconds.map((s, kind) => [s, data.kinds[kind]]).filter(([s]) => s >= 1).sort((a, b) => b[0] - a[0]);
      return [(index + 0.5) / data.buckets.length, `${name}\n${said.map(([s, kind]) => `${kind} ${lasted(s)}`).join("\n")}`];
    },
  };

  const tip = document.getElementById("tip"), heard = document.getElementById("heard");
  for (const area of document.querySelectorAll("[data-plot]")) {
    const plot = area.dataset.plot, cross = document.createElement("div");
    let share = 1;
    cross.className = "cross";
    cross.hidden = true;
    area.append(cross);
    const hide = () => { tip.hidden = cross.hidden = true; };
    const show = (aloud) => {
      const [at, text] = readers[plot](plot, share), box = area.getBoundingClientRect();
      cross.hidden = tip.hidden = false;
      cross.style.left = `${100 * at}%`;
      tip.textContent = text;
      const x = box.left + at * box.width, wide = tip.offsetWidth;
      tip.style.left = `${Math.max(6, x + 12 + wide > innerWidth ? x - 12 - wide : x + 12)}px`;
      tip.style.top = `${Math.max(6, Math.min(innerHeight - tip.offsetHeight - 6, box.top + 4))}px`;
      if (aloud) heard.textContent = text;
    };
    const point = (event) => {
      const box = area.getBoundingClientRect();
      share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      show(false);
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
    area.addEventListener("pointerleave", hide);
    area.addEventListener("blur", hide);
    area.addEventListener("focus", () => { if (area.matches(":focus-visible")) show(true); });
    area.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -0.01, ArrowRight: 0.01, PageUp: -0.1, PageDown: 0.1 }[event.key];
      if (event.key === "Escape") return hide();
      if (event.key === "Home") share = 0;
      else if (event.key === "End") share = 1;
      else if (by === undefined) return;
      else share = Math.min(1, Math.max(0, share + by));
      event.preventDefault();
      show(true);
    });
  }

  /* Tables: sort by a column, filter, and show some rows of many at first. */
  const MANY = 60;
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0], rows = [...body.rows], tools = table.closest("section").querySelector(".tools");
    const words = rows.map((row) => row.textContent.toLowerCase());
    const button = document.createElement("button");
    const times = (row) => Number(row.dataset.times ?? 1);  // equal ones are one row
    const all = rows.reduce((sum, row) => sum + times(row), 0);
    let whole = false;
    button.className = "more";
    button.type = "button";
    table.parentElement.after(button);
    const apply = () => {
      const wanted = tools ? tools.querySelector("input[type=search]").value.toLowerCase().split(/\s+/).filter(Boolean) : [];
      const kind = tools ? tools.querySelector("select").value : "", planned = !tools || tools.querySelector("input[type=checkbox]").checked;
      let found = 0, shown = 0, said = 0;
      rows.forEach((row, index) => {
        const fits = (!kind || row.dataset.kind === kind) && (planned || row.dataset.planned !== "1") && wanted.every((word) => words[index].includes(word));
        found += fits;
        said += fits ? times(row) : 0;
        row.hidden = !fits || (!whole && shown >= MANY);
        shown += !row.hidden;
      });
      button.hidden = shown >= found;
      button.textContent = `Show all ${found.toLocaleString("en")}`;
      if (tools) tools.querySelector("output").textContent = said === all ? `${all.toLocaleString("en")} in all` : `${said.toLocaleString("en")} of ${all.toLocaleString("en")}`;
    };
    button.addEventListener("click", () => { whole = true; apply(); });
    if (tools) tools.addEventListener("input", apply);
    table.querySelectorAll("thead th button").forEach((head) => head.addEventListener("click", () => {
      const cell = head.parentElement, column = cell.cellIndex;
      const up = cell.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("thead th").forEach((one) => one.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => { const of = row.cells[column]; return of.dataset.value === undefined ? of.textContent : Number(of.dataset.value); };
      const order = rows.map((row, index) => [key(row), index]);
      order.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * (up ? 1 : -1));
      const [oldRows, oldWords] = [[...rows], [...words]];
      order.forEach(([, from], to) => { rows[to] = oldRows[from]; words[to] = oldWords[from]; });
      body.append(...rows);
      apply();
    }));
    addEventListener("beforeprint", () => { whole = true; apply(); });
    apply();
  }
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = one.open || one.dataset.print === "1"; }));
  document.documentElement.dataset.ready = "1";
})();
