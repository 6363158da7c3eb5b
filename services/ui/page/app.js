// The page: an address after # names what is shown, and one stream of events keeps it fresh.
import { h, only, fault, tones, words } from "./dom.js";
import { ask, api, may, setBanner, setLink, stored } from "./server.js";
import { runsView } from "./runs.js";
import { runView } from "./run.js";
import { groupView, sampleView } from "./samples.js";
import { compareView } from "./compare.js";
import { systemView, laneView, deadView, letterView, doctorView } from "./system.js";
import { judgeView } from "./judge.js";

const main = document.getElementById("main");
let view = null; // what is shown: {title, body, start, stop, keys}; start follows events, and may call show to draw all anew
const places = new Map(); // how far each entry of the history was scrolled
let place = null; // the entry that is shown
let turn = 0; // counts what was shown: answers for an earlier view are late

const routes = [
  [/^\/?(?:runs)?$/, (_, q) => runsView(q), "runs"],
  [/^\/runs\/([^/]+)$/, (m, q) => runView(m[1], q), "runs"],
  [/^\/runs\/([^/]+)\/([^/]+)$/, (m, q) => groupView(m[1], m[2], q), "runs"],
  [/^\/runs\/([^/]+)\/([^/]+)\/(\d+(?:\.[\w-]+)?)$/, (m) => sampleView(m[1], m[2], m[3]), "runs"],
  [/^\/judge\/([^/]+)$/, (m) => judgeView(m[1]), "runs"],
  [/^\/compare$/, (_, q) => compareView(q), "runs"],
  [/^\/system$/, () => systemView(), "system"],
  [/^\/system\/([^/]+)(?:\/([^/]+))?$/, (m) => laneView(m[1], m[2]), "system"],
  [/^\/doctor$/, () => doctorView(), "doctor"],
  [/^\/dead$/, (_, q) => deadView(q), "dead"],
  [/^\/dead\/(\d+)$/, (m) => letterView(m[1]), "dead"],
];

async function show() {
  const mine = ++turn;
  const [path, query] = location.hash.slice(1).split("?");
  if (path === "main") return;
  if (view && view.stop) view.stop();
  view = null;
  for (const c of main.querySelectorAll(".chart")) if (c.stop) c.stop();
  setBanner("");
  const loading = setTimeout(
    () =>
      mine === turn &&
      only(
        main,
        h("div", { class: "skeleton", role: "status", "aria-label": "loading" }),
        h("div", { class: "skeleton" }),
      ),
    150,
  );
  let found = null;
  for (const [pattern, make, section] of routes) {
    const m = pattern.exec(path);
    if (!m) continue;
    for (const a of document.querySelectorAll("#nav a")) {
      if (a.dataset.section === section) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
    let parts;
    try {
      parts = m.map((part) => part && decodeURIComponent(part)); // what an address leaves out is undefined
    } catch {
      break;
    }
    found = () => make(parts, new URLSearchParams(query || ""));
    break;
  }
  try {
    const next = found
      ? await found()
      : { title: "Not found", body: fault("There is nothing at this address", h("a", { href: "#/runs" }, "All runs")) };
    clearTimeout(loading);
    if (mine !== turn) {
      if (next.stop) next.stop();
      return;
    }
    view = next;
    document.title = next.title + " · meander";
    only(main, next.body);
    place = history.state && history.state.place;
    scrollTo(0, places.get(place) || 0);
    main.dataset.shown = location.hash;
    if (next.start) next.stop = next.start(show);
    else setLink("", "");
  } catch (err) {
    clearTimeout(loading);
    if (mine !== turn) return;
    document.title = "meander";
    main.dataset.shown = location.hash;
    only(
      main,
      fault(
        err.status === 404 ? "Not stored" : "This cannot be shown",
        h("p", {}, words(err.message)),
        h(
          "div",
          { class: "tools" },
          h("button", { onclick: show }, "Try again"),
          h("a", { href: "#/runs" }, "All runs"),
        ),
      ),
    );
    const away = !err.status || err.status > 500; // it may come back, and then this goes on by itself
    setLink(away ? "lost" : "", away ? "retrying" : "");
    if (away) setTimeout(() => mine === turn && show(), 2000);
  }
}

function showKeys() {
  const d = document.getElementById("keys");
  only(
    d,
    h("h2", { id: "keystitle" }, "Keys"),
    h(
      "dl",
      {},
      [
        ["g r", "runs"],
        ["g s", "system"],
        ["g d", "dead letters"],
        ...(may.doctor ? [["g o", "doctor"]] : []),
        ["j  k", "next and previous row or sample"],
        ["Enter", "open it"],
        ["u", "up, to what it is part of"],
        ["/", "search"],
        ["?", "this list"],
      ].flatMap(([k, says]) => [h("dt", {}, h("kbd", {}, k)), h("dd", {}, says)]),
    ),
    h("button", { onclick: () => d.close() }, "Close"),
  );
  d.showModal();
}

let before = "";
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const pair = before + e.key;
  before = e.key === "g" ? "g" : "";
  const go = { gr: "#/runs", gs: "#/system", gd: "#/dead", go: "#/doctor" }[pair];
  if (go) {
    location.hash = go;
    return;
  }
  if (view && view.keys && view.keys[e.key]) {
    e.preventDefault();
    view.keys[e.key]();
    return;
  }
  const items = [...main.querySelectorAll("[data-item]")];
  const at = items.indexOf(document.activeElement);
  switch (e.key) {
    case "?":
      showKeys();
      break;
    case "/": {
      const s = main.querySelector("input[type=search]");
      if (s) {
        e.preventDefault();
        s.focus();
      }
      break;
    }
    case "j":
    case "k":
      if (items.length) items[Math.max(0, Math.min(items.length - 1, at + (e.key === "j" ? 1 : -1)))].focus();
      break;
    case "u": {
      const up = [...main.querySelectorAll(".crumbs a")].pop();
      if (up) location.hash = up.getAttribute("href");
      break;
    }
  }
});
// Each entry of the history has a place, so that Back finds the page as it was left. A new entry has none yet.
history.scrollRestoration = "manual";
const enter = () => history.state || history.replaceState({ place: Math.random() }, "");
enter();
addEventListener("scroll", () => place && places.set(place, scrollY));
addEventListener("hashchange", () => {
  if (location.hash !== "#main") {
    if (place) places.set(place, scrollY); // the event of the last scroll may come later
    view && view.stop && view.stop();
    view = place = null; // where its successor is scrolled to is not its place
    enter();
    show();
  }
});
try {
  const said = await ask("page");
  Object.assign(tones, said.tones);
  Object.assign(may, said);
} catch {
  /* show says it */
}
document.getElementById("doctor").hidden = !may.doctor;
document.getElementById("rights").textContent = may.admin ? "People may judge, tag, delete and replay here." : "Read-only.";
if (stored) {
  setLink("", "");
  for (const a of document.querySelectorAll("#nav a:not([data-section=runs])")) a.hidden = true;
  if (!location.hash) history.replaceState(history.state, "", "#/" + api("runs", stored.run));
}
show();
