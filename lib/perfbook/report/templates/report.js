"use strict";
// Comforts only: without this script the page still says everything.
const root = document.documentElement;
const every = (selector, within = document) => [...within.querySelectorAll(selector)];

// Light or dark: the reader's choice over the system's, remembered where the browser allows it.
const remembered = (value) => {
  try {
    if (value) localStorage.setItem("perfbook-theme", value);
    return localStorage.getItem("perfbook-theme");
  } catch {
    return value;
  }
};
const chosen = remembered();
if (chosen) root.dataset.theme = chosen;
every("[data-do=theme]").forEach((button) => button.addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remembered(root.dataset.theme);
}));

// All code at once.
every("[data-do=code]").forEach((button) => button.addEventListener("click", () => {
  const open = button.getAttribute("aria-pressed") !== "true";
  button.setAttribute("aria-pressed", String(open));
  button.textContent = open ? "Hide code" : "Show code";
  every("details.source").forEach((details) => { details.open = open; });
}));

// A link to something folded opens it.
const reveal = () => {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let part = target; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  target.scrollIntoView();
};
addEventListener("hashchange", reveal);
reveal();

// The contents follow the reader; on a narrow page they start folded and fold again once used.
const contents = document.querySelector("nav.toc > details");
if (contents) {
  const narrow = matchMedia("(max-width: 69.99rem)");
  const fit = () => { contents.open = !narrow.matches; };
  narrow.addEventListener("change", fit);
  fit();
  const links = every("a", contents);
  links.forEach((link) => link.addEventListener("click", fit));
  const places = links.map((link) => [document.getElementById(link.getAttribute("href").slice(1)), link]).filter(([place]) => place);
  let waiting = false;
  const follow = () => {
    waiting = false;
    const passed = places.filter(([place]) => place.getBoundingClientRect().top < innerHeight / 4);
    const atEnd = innerHeight + scrollY >= root.scrollHeight - 2;
    const current = (atEnd ? places : passed.length ? passed : places.slice(0, 1)).at(-1)?.[1];
    links.forEach((link) => {
      if (link !== current) link.removeAttribute("aria-current");
      else if (!link.hasAttribute("aria-current")) {
        link.setAttribute("aria-current", "location");
        if (!narrow.matches) {
          const { top, bottom } = link.getBoundingClientRect();
          if (top < 0 || bottom > innerHeight) contents.scrollTop += top - innerHeight / 2;
        }
      }
    });
  };
  addEventListener("scroll", () => { if (!waiting) { waiting = true; requestAnimationFrame(follow); } }, { passive: true });
  follow();
}

// Tables: sort by a column, copy as CSV. Cells carry the exact number in data-value.
const text = (cell) => (cell.dataset.value ?? cell.textContent).trim();
const number = (value) => (/^[+−-]?[\d,]*\.?\d+(e[+-]?\d+)?\s*%?$/i.test(value)
  ? Number(value.replace(/[,%\s]/g, "").replace("−", "-")) : NaN);
const compare = (a, b) => {
  const [x, y] = [number(a), number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return a.localeCompare(b);
};
const sortBy = (table, header, index) => {
  const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  every("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
  header.setAttribute("aria-sort", direction);
  const sign = direction === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort((a, b) => sign * compare(text(a.cells[index]), text(b.cells[index]))));
};
const quoted = (value) => {
  const plain = Number.isNaN(number(value)) && /^[=+\-@\t]/.test(value) ? `'${value}` : value; // no formulas from a server's text
  return /[",\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
};
const asCsv = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => quoted(text(cell))).join(",")).join("\n");
const copy = async (value) => {
  try {
    await navigator.clipboard.writeText(value);
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
};
every("main table").forEach((table) => {
  const frame = Object.assign(document.createElement("div"), { className: "table" });
  const scroll = Object.assign(document.createElement("div"), { className: "scroll" });
  table.replaceWith(frame);
  scroll.append(table);
  frame.append(scroll);
  const last = table.tHead?.rows[table.tHead.rows.length - 1];
  const flat = table.tBodies.length === 1 && !table.querySelector("tbody [rowspan], tbody [colspan], thead [colspan]");
  if (last && flat && table.tBodies[0].rows.length > 1) {
    [...last.cells].forEach((header, index) => {
      if (!header.textContent.trim()) return;
      const button = Object.assign(document.createElement("button"), { type: "button" });
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => sortBy(table, header, index));
    });
  }
  const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy as CSV" });
  button.addEventListener("click", async () => {
    await copy(asCsv(table));
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy as CSV"; }, 1500);
  });
  frame.append(button);
});

// Only what really scrolls takes a keyboard stop.
const stops = () => every("pre, .pb-figure").forEach((part) => {
  const scrolls = part.scrollHeight > part.clientHeight + 1 || part.scrollWidth > part.clientWidth + 1;
  if (scrolls) part.tabIndex = 0;
  else part.removeAttribute("tabindex");
});
addEventListener("load", stops);
addEventListener("resize", stops);
addEventListener("toggle", stops, true); // what was folded had no size
