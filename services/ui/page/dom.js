// Elements and numbers. Text reaches the page as text nodes alone: nothing here, or above, reads text as HTML.

const svgTags = new Set(["svg", "rect", "path", "line", "circle", "text", "g"]);

// h makes an element: attributes, listeners (onclick ...) and children, of which null and false are left out.
export function h(tag, attributes, ...children) {
  const e = svgTags.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "disabled" || name === "open" || name === "checked") e[name] = value;
    else e.setAttribute(name, value === true ? "" : value);
  }
  e.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return e;
}

// link returns the address of a part of the page, from names that may have any characters.
export const link = (...parts) => "#/" + parts.map((p) => encodeURIComponent(p)).join("/");

export const fixed = (v, digits = 3) => (v === null || v === undefined ? "–" : Number(v).toFixed(digits));
export const signed = (v, digits = 3) =>
  v === null || v === undefined ? "–" : (v >= 0 ? "+" : "−") + Math.abs(v).toFixed(digits);
export const whole = (v) => Number(v || 0).toLocaleString("en-US");
export const plural = (n, thing) => `${whole(n)} ${thing}${n === 1 ? "" : "s"}`;

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return `${i && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[i]}`;
}

export function seconds(s) {
  if (s < 0.001) return "<1 ms";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 0)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

export function ago(at) {
  const t = typeof at === "string" ? Date.parse(at) : at;
  if (!t || t < 0) return "–";
  const s = Math.max(0, (Date.now() - t) / 1000);
  if (s < 60) return `${Math.floor(s)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86400)} days ago`;
}

export const rate = (n) => (n >= 10 ? whole(Math.round(n)) : n > 0 ? n.toFixed(1) : "0") + " /min";

// when is a moment in words that do not break over lines.
export const when = (at) =>
  h("span", { class: "when" }, new Date(at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }));

// words shows the commands of a text, which are in quotes, as code.
export const words = (text) =>
  text instanceof Node
    ? text
    : text.split(/'(meander[^']*)'/).map((part, i) => (i % 2 === 1 ? h("code", {}, part) : part));

// tones tell outcomes apart; the pipeline says which has which (see server.js).
export const tones = {};
export const badge = (status, tone) => h("span", { class: "badge " + (tone || tones[status] || "") }, status);
export const tag = (t) => h("span", { class: "badge" }, t);

// meter shows how much of something there is, and of the rest what is lost: it will not come.
export const meter = (done, lost, of, label) => {
  const share = (n) => (100 * n) / Math.max(1, of),
    full = Math.min(100, share(done)),
    rest = Math.min(100 - full, share(lost));
  return h(
    "svg",
    {
      class: "meter",
      viewBox: "0 0 100 6",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": lost > 0 ? `${label}, ${lost} lost` : label,
    },
    h("rect", { class: "full", width: full, height: 6 }),
    rest > 0 && h("rect", { class: "lost", x: full, width: rest, height: 6 }),
  );
};

// todo shows what to do about something.
export const todo = (fix) => fix && h("p", { class: "small todo" }, h("b", {}, "What to do: "), words(fix));

export const waits = (list) =>
  list.length === 0
    ? null
    : h(
        "div",
        { class: "waits", role: "status" },
        list.map((w) =>
          h(
            "div",
            { class: "wait" + (w.grave ? " grave" : "") },
            h("div", {}, h("b", {}, words(w.says)), w.fix && h("div", { class: "small" }, words(w.fix))),
          ),
        ),
      );

// factList is a table of facts, as models have them.
export const factList = (facts, ...more) =>
  h(
    "dl",
    { class: "facts" },
    facts.map((f) => [h("dt", {}, f.name), h("dd", { class: f.mono ? "mono" : "" }, f.value)]),
    more,
  );

export const crumbs = (...parts) =>
  h(
    "nav",
    { class: "crumbs", "aria-label": "Path" },
    parts.flatMap((p, i) => [i > 0 && h("span", { "aria-hidden": true }, "/"), p]),
  );

export const empty = (title, ...rest) => h("div", { class: "empty" }, h("h2", {}, title), ...rest);

// fault is empty for a whole page.
export const fault = (title, ...rest) =>
  h("div", { class: "card" }, h("div", { class: "empty" }, h("h1", {}, title), ...rest));

// only is put in place of all children, if it differs from what is there.
export const only = (parent, ...children) => parent.replaceChildren(...children.flat(Infinity).filter(Boolean));
