"use strict";
// Values of points: shown where one points, taps, or steps with the arrow keys.
(() => {
  const tip = document.getElementById("tip");
  let lit = null;
  const show = (circle) => {
    if (lit) lit.classList.remove("on");
    lit = circle;
    tip.hidden = !circle;
    if (!circle) return;
    circle.classList.add("on");
    tip.textContent = circle.dataset.value;
    const box = circle.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const circles = [...plot.querySelectorAll(".values circle")];
    for (const circle of circles) {
      const title = circle.querySelector("title");
      circle.dataset.value = title.textContent;
      title.remove(); // or the browser would show it too
    }
    const meet = (event) => show(event.target.closest(".values circle"));
    plot.addEventListener("pointerover", meet);
    plot.addEventListener("click", meet);
    plot.addEventListener("pointerleave", () => show(null));
    plot.addEventListener("blur", () => show(null));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") show(null);
      if (!step || !circles.length) return;
      event.preventDefault();
      const at = circles.indexOf(lit);
      const next = at < 0 ? (step > 0 ? 0 : circles.length - 1) : (at + step + circles.length) % circles.length;
      circles[next].scrollIntoView({ block: "nearest", inline: "nearest" });
      show(circles[next]);
    });
  }
  addEventListener("scroll", () => show(null), { passive: true });
})();

// The table: one metric at a time, rows that pass every filter, in the order of a column.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const form = document.querySelector(".filters");
  const area = document.getElementById("table");
  const more = document.getElementById("more");
  const table = area.querySelector("table");
  const PAGE = 100;
  const MOST_CHOICES = 60;
  if (!data.rows) return;
  const word = (text, row) => text.words[text.codes[row]];
  const element = (name, content, properties = {}) => Object.assign(document.createElement(name), { textContent: content }, properties);
  const option = (value, content) => element("option", content, { value });
  const state = { column: null, down: false, shown: PAGE };

  data.metrics.forEach((metric, i) => form.metric.append(option(i, metric.unit ? `${metric.name} (${metric.unit})` : metric.name)));
  const chosen = [];
  data.texts.forEach((text, place) => {
    if (text.words.length < 2 || text.words.length > MOST_CHOICES) return;
    const select = document.createElement("select");
    select.append(option("", "all"), ...text.words.map((each, i) => option(i, each || "none")));
    const label = element("label", `${text.name} `);
    label.append(select);
    form.insertBefore(label, form.querySelector(".wide"));
    chosen.push({ place, select });
  });

  const searched = Array.from({ length: data.rows }, (_, row) => data.texts.map((text) => word(text, row)).join(" ").toLowerCase());
  const passing = () => {
    const wanted = form.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [];
    for (let row = 0; row < data.rows; row++) {
      const kept = chosen.every(({ place, select }) => select.value === "" || data.texts[place].codes[row] === Number(select.value));
      if (kept && wanted.every((each) => searched[row].includes(each))) rows.push(row);
    }
    return rows;
  };
  const columns = () => {
    const metric = data.metrics[form.metric.value];
    // What is the same in every row says nothing; what names a row stands before its numbers, the rest behind them.
    const named = data.texts.filter((text) => text.words.length > 1 || data.texts.length === 1);
    const texts = named.map((text) => ({ name: text.name, value: (row) => word(text, row), number: false }));
    const first = texts.filter(({ name }) => ["point", "subject", "output", "compared with", "step", "tensor"].includes(name));
    const counted = { name: "replicates", value: (row) => data.replicates[row], number: true };
    const parts = [["mean", metric.name], ["low", "low"], ["high", "high"]];
    const numbers = parts.map(([part, name]) => ({ name, value: (row) => metric[part][row], number: true }));
    return [...first, ...numbers, counted, ...texts.filter((text) => !first.includes(text))];
  };
  const compare = (column) => (a, b) => {
    const [left, right] = [column.value(a), column.value(b)];
    if (left === null || right === null) return (left === null) - (right === null); // what is unknown stands last
    const order = column.number ? left - right : left.localeCompare(right, "en", { numeric: true });
    return state.down ? -order : order;
  };
  const draw = () => {
    const shown = columns();
    const rows = passing();
    if (state.column !== null) rows.sort(compare(shown[state.column]));
    const head = document.createElement("tr");
    shown.forEach((column, i) => {
      const cell = element("th", "", { scope: "col" });
      const sorted = state.column === i;
      if (sorted) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      const button = element("button", column.name + (sorted ? (state.down ? " ▼" : " ▲") : ""), { type: "button" });
      button.addEventListener("click", () => {
        state.down = sorted && !state.down;
        state.column = i;
        draw();
        table.querySelectorAll("thead button")[i].focus();
      });
      cell.append(button);
      head.append(cell);
    });
    const body = document.createElement("tbody");
    for (const row of rows.slice(0, state.shown)) {
      const line = document.createElement("tr");
      for (const column of shown) {
        const value = column.value(row);
        line.append(element("td", value === null ? "—" : value, { className: column.number ? "number" : "" }));
      }
      body.append(line);
    }
    const top = document.createElement("thead");
    top.append(head);
    table.replaceChildren(top, body);
    const count = Math.min(state.shown, rows.length);
    document.getElementById("found").textContent = `${count} of ${rows.length} matching rows shown, ${data.rows} in all`;
    document.getElementById("meaning").textContent = data.metrics[form.metric.value].meaning;
    more.hidden = count === rows.length;
  };
  form.addEventListener("input", () => { state.shown = PAGE; draw(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { state.shown += PAGE; draw(); });
  form.hidden = area.hidden = false;
  draw();
})();
