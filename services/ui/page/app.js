// The page: an address after # names what is shown, and one stream of events keeps it fresh.
import { h, only, fault, words } from "./dom.js";
import { runsView, runView } from "./runs.js";
import { groupView, sampleView } from "./samples.js";
import { compareView } from "./compare.js";
import { systemView, laneView, deadView, letterView, doctorView } from "./system.js";
import { judgeView } from "./judge.js";

const main = document.getElementById("main");
let view = null; // what is shown: {stop, keys}
let turn = 0; // counts what was shown: answers for an earlier view are late

// may is what this page may do: admin changes something, doctor makes checks.
export const may = { admin: false, doctor: false };

// ask gets an answer of the API; an error has the server's words.
export const ask = (path, query) => call("GET", path + (query ? "?" + new URLSearchParams(Object.entries(query).filter(([, v]) => v !== "" && v !== null && v !== undefined)) : ""));

// change asks the API to change something.
export const change = (path, what = {}) => call("POST", path, JSON.stringify(what));

async function call(method, path, body) {
  let answer;
  try {
    answer = await fetch("/api/" + path, { method, body, headers: { Accept: "application/json", ...(body && { "Content-Type": "application/json" }) } });
  } catch {
    throw new Error("This page cannot reach 'meander ui', which serves it. Start it again, then try again.");
  }
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(said.error || `the server answered ${answer.status}`), { status: answer.status });
  return said;
}

// api makes a path of the API of names that may have any characters.
export const api = (...parts) => parts.map((p) => encodeURIComponent(p)).join("/");

function setLink(state, says) {
  const link = document.getElementById("link");
  link.className = "link " + state;
  link.hidden = !says;
  document.getElementById("linksays").textContent = says;
}

// setBanner says what is lost, and since when nothing has come; empty: nothing is lost.
let lostAt = null;
function setBanner(says) {
  const b = document.getElementById("banner");
  lostAt = says ? lostAt || new Date() : null;
  b.hidden = !says;
  only(b, says && h("span", {}, words(says), ` Figures are from ${lostAt.toLocaleTimeString(undefined, { timeStyle: "short" })}.`));
}

function setWhere(text) { document.getElementById("where").textContent = text || ""; }

function setDead(n) {
  const count = document.getElementById("deadcount");
  count.hidden = !n;
  count.textContent = n > 999 ? "999+" : String(n);
}

// While a button is pressed nothing is drawn anew: a click needs the same element below the pointer at both its ends.
// Menus and lists of the browser take the second end for themselves, so it is not awaited for longer than a second.
let pressed = 0, waiting = [];
const release = () => { clearTimeout(pressed); pressed = 0; for (const f of waiting.splice(0)) f(); };
addEventListener("pointerdown", (e) => {
  if (!e.isPrimary || e.button !== 0) return;
  clearTimeout(pressed);
  pressed = setTimeout(release, 1000);
});
for (const name of ["pointerup", "pointercancel", "contextmenu", "blur", "change"]) addEventListener(name, () => setTimeout(release));

// listen follows events until stop. It follows nothing while the page is hidden, and then catches up by its last id.
export function listen(query, handlers) {
  let source = null, last = query.since || "", retry = 0;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/events?" + new URLSearchParams({ ...query, since: last }));
    source.onopen = () => setLink("live", "connected");
    source.onerror = () => {
      setLink("lost", "reconnecting");
      setBanner("This page cannot reach 'meander ui', which serves it. Start it again; the page reconnects itself.");
      if (source.readyState === EventSource.CLOSED) { // the server refused: try later
        close();
        retry = setTimeout(open, 3000);
      }
    };
    source.addEventListener("health", (e) => {
      const x = JSON.parse(e.data);
      setBanner(x.fault);
      setLink(x.fault ? "lost" : "live", x.fault ? "no server" : "connected");
      setWhere(x.where);
      setDead(x.dead);
    });
    for (const [name, f] of Object.entries(handlers)) {
      source.addEventListener(name, (e) => {
        if (e.lastEventId) last = e.lastEventId;
        const take = () => source && f(JSON.parse(e.data));
        if (pressed) waiting.push(take);
        else take();
      });
    }
  };
  const close = () => { if (source) source.close(); source = null; };
  const shown = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", shown);
  open();
  return () => { clearTimeout(retry); close(); document.removeEventListener("visibilitychange", shown); };
}

const routes = [
  [/^\/?(?:runs)?$/, () => runsView(), "runs"],
  [/^\/runs\/([^/]+)$/, (m, q) => runView(m[1], q), "runs"],
  [/^\/runs\/([^/]+)\/([^/]+)$/, (m, q) => groupView(m[1], m[2], q), "runs"],
  [/^\/runs\/([^/]+)\/([^/]+)\/(\d+)$/, (m) => sampleView(m[1], m[2], m[3]), "runs"],
  [/^\/judge\/([^/]+)$/, (m) => judgeView(m[1]), "runs"],
  [/^\/compare$/, (_, q) => compareView(q), "runs"],
  [/^\/system$/, () => systemView(), "system"],
  [/^\/system\/([^/]+)$/, (m) => laneView(m[1]), "system"],
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
  const loading = setTimeout(() => mine === turn && only(main, h("div", { class: "skeleton", role: "status", "aria-label": "loading" }), h("div", { class: "skeleton" })), 150);
  let found = null;
  for (const [pattern, make, section] of routes) {
    const m = pattern.exec(path);
    if (!m) continue;
    for (const a of document.querySelectorAll("#nav a")) {
      if (a.dataset.section === section) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
    let parts;
    try { parts = m.map(decodeURIComponent); } catch { break; }
    found = () => make(parts, new URLSearchParams(query || ""));
    break;
  }
  try {
    const next = found ? await found() : { title: "Not found", body: fault("There is nothing at this address", h("a", { href: "#/runs" }, "All runs")) };
    clearTimeout(loading);
    if (mine !== turn) { if (next.stop) next.stop(); return; }
    view = next;
    document.title = next.title + " · meander";
    only(main, next.body);
    main.dataset.shown = location.hash;
    if (next.start) next.stop = next.start();
    else setLink("", "");
  } catch (err) {
    clearTimeout(loading);
    if (mine !== turn) return;
    document.title = "meander";
    main.dataset.shown = location.hash;
    only(main, fault(err.status === 404 ? "Not stored" : "This cannot be shown", h("p", {}, words(err.message)),
      h("div", { class: "tools" }, h("button", { onclick: show }, "Try again"), h("a", { href: "#/runs" }, "All runs"))));
    setLink(err.status ? "" : "lost", err.status ? "" : "no answer");
  }
}

// again shows the present address anew.
export const again = show;

function showKeys() {
  const d = document.getElementById("keys");
  only(d, h("h2", { id: "keystitle" }, "Keys"), h("dl", {},
    [["g r", "runs"], ["g s", "system"], ["g d", "dead letters"], ...(may.doctor ? [["g o", "doctor"]] : []), ["j  k", "next and previous row or sample"], ["Enter", "open it"], ["u", "up, to what it is part of"], ["/", "search"], ["?", "this list"]]
      .flatMap(([k, says]) => [h("dt", {}, h("kbd", {}, k)), h("dd", {}, says)])),
    h("button", { onclick: () => d.close() }, "Close"));
  d.showModal();
}

let before = "";
document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(e.target.tagName)) { if (e.key === "Escape") e.target.blur(); return; }
  const pair = before + e.key;
  before = e.key === "g" ? "g" : "";
  const go = { gr: "#/runs", gs: "#/system", gd: "#/dead", go: "#/doctor" }[pair];
  if (go) { location.hash = go; return; }
  if (view && view.keys && view.keys[e.key]) { e.preventDefault(); view.keys[e.key](); return; }
  const items = [...main.querySelectorAll("[data-item]")];
  const at = items.indexOf(document.activeElement);
  switch (e.key) {
    case "?": showKeys(); break;
    case "/": { const s = main.querySelector("input[type=search]"); if (s) { e.preventDefault(); s.focus(); } break; }
    case "j": case "k":
      if (items.length) items[Math.max(0, Math.min(items.length - 1, at + (e.key === "j" ? 1 : -1)))].focus();
      break;
    case "u": { const up = [...main.querySelectorAll(".crumbs a")].pop(); if (up) location.hash = up.getAttribute("href"); break; }
  }
});
addEventListener("hashchange", () => { if (location.hash !== "#main") { show(); scrollTo(0, 0); } });
try { Object.assign(may, await ask("page")); } catch { /* show says it */ }
document.getElementById("doctor").hidden = !may.doctor;
document.getElementById("rights").textContent = may.admin ? "People may judge and replay here." : "Read-only.";
show();
