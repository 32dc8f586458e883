"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
document.documentElement.classList.add("js");

// ---- light or dark ----
const remembered = { get: () => { try { return localStorage.getItem("graft-theme"); } catch { return null; } },
                     set: (value) => { try { localStorage.setItem("graft-theme", value); } catch { /* not from disk */ } } };
const root = document.documentElement;
if (remembered.get()) root.dataset.theme = remembered.get();
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  remembered.set(root.dataset.theme);
});

// ---- tabs ----
for (const group of all(".tab-group")) {
  const tabs = all(":scope > .tabs > button", group);
  const choose = (chosen) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", tab === chosen);
      tab.tabIndex = tab === chosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).classList.toggle("away", tab !== chosen);
    }
  };
  tabs.forEach((tab, place) => {
    tab.tabIndex = place ? -1 : 0;
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(place + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
}

// ---- navigation: a link opens its section, and where the reader is stands out ----
const links = new Map(all("nav a[href^='#']").map((link) => [link.hash.slice(1), link]));
const openTarget = () => {
  const details = document.querySelector(`#${CSS.escape(location.hash.slice(1) || "top")} > details`);
  if (details) details.open = true;
};
addEventListener("hashchange", openTarget);
openTarget();
const visible = new Set();
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) visible[entry.isIntersecting ? "add" : "delete"](entry.target.id);
  const here = all("main > section").find((section) => visible.has(section.id));
  for (const [identity, link] of links) link.classList.toggle("here", Boolean(here) && identity === here.id);
}, { rootMargin: "-10% 0px -70% 0px" });
all("main > section").forEach((section) => watch.observe(section));

// ---- tables: filter and sort ----
for (const data of all(".data")) {
  const body = data.querySelector("tbody"), rows = [...body.rows], box = data.querySelector(".find input");
  if (box) box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  const heads = all("th", data);
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.classList.contains("n") ? -Infinity : cell.textContent;
  };
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
    body.append(...rows.toSorted((a, b) => down * compare(valueOf(a, column), valueOf(b, column))));
  }));
}

// ---- the tree of modules ----
for (const tree of all(".tree")) {
  const rows = [...tree.tBodies[0].rows], depth = (row) => Number(row.dataset.depth), twist = (row) => row.querySelector("button.twist");
  const show = () => {
    let closed = Infinity;
    for (const row of rows) {
      if (depth(row) <= closed) closed = Infinity;
      row.hidden = depth(row) > closed;
      if (closed === Infinity && twist(row) && twist(row).getAttribute("aria-expanded") === "false") closed = depth(row);
    }
  };
  const setAll = (test) => { rows.filter(twist).forEach((row) => twist(row).setAttribute("aria-expanded", test(row))); show(); };
  tree.addEventListener("click", (event) => {
    if (!event.target.matches("button.twist")) return;
    event.target.setAttribute("aria-expanded", event.target.getAttribute("aria-expanded") !== "true");
    show();
  });
  for (const button of all("[data-tree]", tree.closest("details")))
    button.addEventListener("click", () => setAll((row) => button.dataset.tree === "open" || depth(row) === 0));
  setAll((row) => rows.length <= 40 || depth(row) === 0);
}

// ---- code ----
for (const button of all("button.copy")) button.addEventListener("click", async () => {
  const code = button.closest(".code").querySelector("code");
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(code); button.textContent = "Selected"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
for (const pane of all(".pane")) {
  const select = pane.querySelector("select"), code = pane.querySelector("code");
  const show = () => { code.innerHTML = document.getElementById(select.value).innerHTML; pane.querySelector("pre").scrollTo(0, 0); };
  select.addEventListener("change", show);
  show();
}

// ---- drawings: the view box is what is seen of the drawing ----
class Viewer {
  constructor(element) {
    this.stage = element.querySelector(".stage");
    this.select = element.querySelector("select");
    this.file = element.querySelector(".bar > a");
    this.box = element.querySelector(".find input");
    this.count = element.querySelector("output");
    this.first = element.dataset.drawing;
    if (this.select) this.select.addEventListener("change", () => this.load());
    for (const button of all("[data-do]", element)) button.addEventListener("click", () => this.act(button.dataset.do));
    this.box.addEventListener("input", () => this.find());
    this.box.addEventListener("keydown", (event) => { if (event.key === "Enter") this.next(); });
    this.listen();
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      this.load();
    }, { rootMargin: "600px" }).observe(this.stage);
    new ResizeObserver(() => this.svg && this.update()).observe(this.stage);
  }

  load() {
    const identity = this.select ? this.select.value : this.first;
    if (this.select) this.file.href = this.select.selectedOptions[0].dataset.file;
    this.svg = document.getElementById(identity).content.firstElementChild.cloneNode(true);
    const box = this.svg.viewBox.baseVal;
    this.size = { width: box.width, height: box.height };
    this.svg.removeAttribute("width");
    this.svg.removeAttribute("height");
    this.stage.replaceChildren(this.svg);
    this.stage.style.height = "";
    this.stage.style.height = `${Math.min(this.stage.offsetHeight, this.size.height + 2)}px`;
    this.start();
    this.find();
  }

  start() {
    this.scale = Math.min(1, this.stage.clientWidth / this.size.width);
    this.x = (this.size.width - this.stage.clientWidth / this.scale) / 2;
    this.y = 0;
    this.update();
    // A drawing that is too wide to be read begins where the program does: at its input.
    const input = this.scale < 0.12 && this.svg.querySelector("g.b.input[id]");
    if (!input) return;
    this.scale = 0.5;
    this.centre(input);
    this.y += this.stage.clientHeight / this.scale / 3;
    this.update();
  }

  fit() {
    this.scale = Math.min(1, this.stage.clientWidth / this.size.width, this.stage.clientHeight / this.size.height);
    this.x = (this.size.width - this.stage.clientWidth / this.scale) / 2;
    this.y = (this.size.height - this.stage.clientHeight / this.scale) / 2;
    this.update();
  }

  update() {
    this.svg.setAttribute("viewBox", [this.x, this.y, this.stage.clientWidth / this.scale, this.stage.clientHeight / this.scale].join(" "));
  }

  zoom(factor, left = this.stage.clientWidth / 2, top = this.stage.clientHeight / 2) {
    const scale = Math.min(4, Math.max(0.02, this.scale * factor));
    this.x += left / this.scale - left / scale;
    this.y += top / this.scale - top / scale;
    this.scale = scale;
    this.update();
  }

  move(right, down) {
    this.x += right / this.scale;
    this.y += down / this.scale;
    this.update();
  }

  act(what) {
    if (!this.svg) return;
    if (what === "in") this.zoom(1.3);
    else if (what === "out") this.zoom(1 / 1.3);
    else if (what === "fit") this.fit();
    else if (what === "one") { this.scale = 1; this.x = (this.size.width - this.stage.clientWidth) / 2; this.y = 0; this.update(); }
    else if (document.fullscreenElement) document.exitFullscreen();
    else this.stage.requestFullscreen();
  }

  listen() {
    const stage = this.stage;
    let held = null;
    stage.addEventListener("pointerdown", (event) => { if (event.button === 0) held = [event.clientX, event.clientY, false]; });
    stage.addEventListener("pointermove", (event) => {
      if (!held || !this.svg) return;
      if (!held[2] && Math.hypot(event.clientX - held[0], event.clientY - held[1]) < 4) return;
      if (!held[2]) { stage.setPointerCapture(event.pointerId); stage.classList.add("held"); }
      this.move(held[0] - event.clientX, held[1] - event.clientY);
      held = [event.clientX, event.clientY, true];
    });
    for (const name of ["pointerup", "pointercancel"]) stage.addEventListener(name, () => { held = null; stage.classList.remove("held"); });
    stage.addEventListener("wheel", (event) => {
      if (!this.svg || !(event.ctrlKey || event.metaKey || document.fullscreenElement === stage)) return;
      event.preventDefault();
      const place = stage.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 400), event.clientX - place.left, event.clientY - place.top);
    }, { passive: false });
    stage.addEventListener("dblclick", (event) => {
      const place = stage.getBoundingClientRect();
      this.zoom(event.shiftKey ? 1 / 1.6 : 1.6, event.clientX - place.left, event.clientY - place.top);
    });
    stage.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-80, 0], ArrowRight: [80, 0], ArrowUp: [0, -80], ArrowDown: [0, 80] };
      if (moves[event.key]) this.move(...moves[event.key]);
      else if (event.key === "+" || event.key === "=") this.zoom(1.3);
      else if (event.key === "-") this.zoom(1 / 1.3);
      else if (event.key === "0") this.fit();
      else return;
      event.preventDefault();
    });
    stage.addEventListener("click", (event) => {
      const link = event.target.closest("a");
      if (!link) return;
      event.preventDefault();
      const target = this.svg.querySelector(`#${CSS.escape(link.getAttribute("href").slice(1))}`);
      if (target) { this.mark([target]); this.centre(target); }
    });
  }

  mark(boxes) {
    for (const box of all(".found", this.svg)) box.classList.remove("found");
    for (const box of boxes) box.classList.add("found");
  }

  find() {
    if (!this.svg) return;
    const word = this.box.value.trim().toLowerCase();
    this.found = word ? all("g.b[id]", this.svg).filter((box) => box.textContent.toLowerCase().includes(word)) : [];
    this.place = -1;
    this.count.textContent = word ? `${this.found.length} found` : "";
    this.mark(this.found);
    if (this.found.length) this.next();
  }

  next() {
    if (!this.found || !this.found.length) return;
    this.place = (this.place + 1) % this.found.length;
    this.count.textContent = `${this.place + 1} of ${this.found.length}`;
    this.scale = Math.max(this.scale, 0.7);
    this.centre(this.found[this.place]);
  }

  centre(box) {
    const place = box.getBBox();
    this.x = place.x + place.width / 2 - this.stage.clientWidth / this.scale / 2;
    this.y = place.y + place.height / 2 - this.stage.clientHeight / this.scale / 2;
    this.update();
  }
}
all(".viewer").forEach((element) => new Viewer(element));
