// What the page asks of meander ui, the events that it follows, and the line and banner that say whether they come.
import { h, only, words } from "./dom.js";

// may is what this page may do: admin changes something, doctor makes checks. outcomes are those of groups.
export const may = { admin: false, doctor: false, outcomes: [] };

// stored is what a file of 'meander report' has instead of a server: answers and images by their paths.
const data = document.getElementById("data");
export const stored = data && JSON.parse(data.textContent);

// ask gets an answer of the API; an error has the server's words.
export const ask = async (path, query) =>
  stored
    ? fromFile(path, query || {})
    : call(
        "GET",
        path +
          (query
            ? "?" +
              new URLSearchParams(Object.entries(query).filter(([, v]) => v !== "" && v !== null && v !== undefined))
            : ""),
      );

// by are the orders of groups; those without a value come last.
const falling = (value) => (a, b) => (value(b) ?? -Infinity) - (value(a) ?? -Infinity);
const by = {
  newest: falling((r) => r.number),
  oldest: falling((r) => -r.number),
  best: falling((r) => r.mean),
  worst: falling((r) => (r.mean === null ? null : -r.mean)),
  spread: falling((r) => r.std),
};

function fromFile(path, { order, status, text = "", offset = 0, limit }) {
  let x = stored.answers[path];
  if (typeof x === "string") x = stored.answers[x]; // a sample by what stands for it
  if (!x) throw Object.assign(new Error("This is not in the file. 'meander ui' shows it."), { status: 404 });
  if (!order || !x.rows) return { ...x, samples: x.samples && limit ? x.samples.slice(offset, offset + limit) : x.samples };
  const has = (t) => t.toLowerCase().includes(text.toLowerCase());
  const rows = x.rows.filter((r) => (!status || r.status === status) && (has(r.prompt) || has(r.uid))).sort(by[order]);
  return { ...x, rows: rows.slice(offset, offset + limit), total: rows.length };
}

// change asks the API to change something.
export const change = (path, what = {}) => call("POST", path, JSON.stringify(what));

// signInAgain shows the page that asks for the token: the command has started again, with another one.
const signInAgain = (answer) => answer.status === 401 && location.reload();

async function call(method, path, body) {
  let answer;
  try {
    answer = await fetch("/api/" + path, {
      method,
      body,
      headers: { Accept: "application/json", ...(body && { "Content-Type": "application/json" }) },
    });
  } catch {
    throw new Error("This page cannot reach 'meander ui', which serves it. Start it again, then try again.");
  }
  signInAgain(answer);
  const said = await answer.json().catch(() => ({}));
  if (!answer.ok)
    throw Object.assign(new Error(said.error || `the server answered ${answer.status}`), { status: answer.status });
  return said;
}

// api makes a path of the API of names that may have any characters.
export const api = (...parts) => parts.map((p) => encodeURIComponent(p)).join("/");

// media is the address of an image, a video or a state of a sample; a file may lack it.
export const media = (...parts) => {
  const at = api(...parts);
  if (!stored) return "/media/" + at;
  return stored.media[stored.media[at]] ?? stored.media[at]; // a file that is there twice is stored once
};

// condition is the address of a file that a network was given: in a file one for all samples of a group, or a stage's.
export const condition = (run, uid, place, i) =>
  stored && !String(place).includes(".") ? media(run, uid, "condition-" + i) : media(run, uid, place, "condition-" + i);

export function setLink(state, says) {
  const link = document.getElementById("link");
  link.className = "link " + state;
  link.hidden = !says;
  document.getElementById("linksays").textContent = says;
}

// setBanner says what is lost, and since when nothing has come; empty: nothing is lost.
let lostAt = null;
export function setBanner(says) {
  const b = document.getElementById("banner");
  lostAt = says ? lostAt || new Date() : null;
  b.hidden = !says;
  only(
    b,
    says &&
      h("span", {}, words(says), ` Figures are from ${lostAt.toLocaleTimeString(undefined, { timeStyle: "short" })}.`),
  );
}

function setWhere(text) {
  document.getElementById("where").textContent = text || "";
}

function setDead(n) {
  const count = document.getElementById("deadcount");
  count.hidden = !n;
  count.textContent = n > 999 ? "999+" : String(n);
}

// While a button is pressed nothing is drawn anew: a click needs the same element below the pointer at both its ends.
// Menus and lists of the browser take the second end for themselves, so it is not awaited for longer than a second.
let pressed = 0,
  waiting = [];
const release = () => {
  clearTimeout(pressed);
  pressed = 0;
  for (const f of waiting.splice(0)) f();
};
addEventListener("pointerdown", (e) => {
  if (!e.isPrimary || e.button !== 0) return;
  clearTimeout(pressed);
  pressed = setTimeout(release, 1000);
});
for (const name of ["pointerup", "pointercancel", "contextmenu", "blur", "change"])
  addEventListener(name, () => setTimeout(release));

// listen follows events until stop. It follows nothing while the page is hidden, and then catches up by its last id.
export function listen(query, handlers) {
  if (stored) return () => {};
  let source = null,
    last = query.since || "",
    retry = 0;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/events?" + new URLSearchParams({ ...query, since: last }));
    source.onopen = () => setLink("live", "connected");
    source.onerror = () => {
      setLink("lost", "reconnecting");
      setBanner("This page cannot reach 'meander ui', which serves it. Start it again; the page reconnects itself.");
      if (source.readyState === EventSource.CLOSED) {
        // the server refused: try later, or sign in again
        fetch("/api/page").then(signInAgain, () => {});
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
    for (const [name, f] of Object.entries(handlers || {})) {
      source.addEventListener(name, (e) => {
        if (e.lastEventId) last = e.lastEventId;
        const take = () => source && f(JSON.parse(e.data));
        if (pressed) waiting.push(take);
        else take();
      });
    }
  };
  const close = () => {
    if (source) source.close();
    source = null;
  };
  const shown = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", shown);
  open();
  return () => {
    clearTimeout(retry);
    close();
    document.removeEventListener("visibilitychange", shown);
  };
}
