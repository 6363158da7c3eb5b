// The list of runs.
import { h, link, fixed, whole, plural, bytes, ago, badge, tag, tones, meter, waits, empty, only } from "./dom.js";
import { ask, listen } from "./server.js";

const hello = (up) =>
  empty(
    "No run is stored yet",
    !up && [h("p", {}, "Start a pipeline, which goes on until Ctrl-C:"), h("pre", { tabindex: 0 }, "meander up")],
    h("p", {}, up ? "Publish a prompt:" : "In another terminal, publish a prompt:"),
    h("pre", { tabindex: 0 }, "meander publish --run demo 'a red sign that says \"OPEN\"'"),
    h("p", { class: "small" }, "The run then shows up here by itself."),
  );

// stateOf is the badge of a run: what became of it, or what holds it up; and how many of its prompts were refused.
const stateOf = (r) => [
  (r.state !== "refused" || !r.refused) && (r.held ? badge(r.held, "warn") : badge(r.state)),
  r.refused > 0 && badge(`${whole(r.refused)} refused`, tones.refused),
];

// columns of the list: name of the order, title, class, cell. Those after the first two may be hidden.
const columns = [
  [
    "run",
    "Run",
    "runcell",
    (r) => [
      h("a", { class: "row", href: link("runs", r.run), "data-item": true }, r.run),
      r.tags.length > 0 && h("span", { class: "tags" }, r.tags.map(tag)),
      r.note && h("span", { class: "small muted clamp" }, r.note),
    ],
  ],
  ["state", "State", "", (r) => h("span", { class: "states" }, stateOf(r))],
  ["model", "Model", "", (r) => r.model || "–"],
  ["mean", "Mean reward", "n", (r) => fixed(r.mean_reward)],
  [
    "groups",
    "Groups closed",
    "",
    (r) => [
      h("div", { class: "num small line" }, `${whole(r.groups - r.open_groups)} / ${whole(r.groups)}`),
      meter(r.counted, r.groups - r.open_groups - r.counted, r.groups, "groups with advantages"),
    ],
  ],
  ["samples", "Samples", "n", (r) => whole(r.samples)],
  ["scored", "Scored", "n", (r) => whole(r.scored)],
  ["steps", "Steps", "n", (r) => whole(r.steps)],
  ["bytes", "Size", "n", (r) => bytes(r.bytes)],
  ["newest", "Newest", "n", (r) => ago(r.newest)],
];
const runsPage = 100;

// remembered is what this browser keeps of the list.
const remembered = {
  get hidden() {
    try {
      return JSON.parse(localStorage.getItem("meander.hidden")) || ["scored"];
    } catch {
      return ["scored"]; // no storage, or something else in it
    }
  },
  set hidden(list) {
    try {
      localStorage.setItem("meander.hidden", JSON.stringify(list));
    } catch {
      /* the page works without */
    }
  },
};

export async function runsView(query) {
  const want = { order: query.get("order") || "-newest", offset: Number(query.get("offset")) || 0, limit: runsPage };
  for (const name of ["text", "state", "model", "tag"]) want[name] = query.get(name) || "";
  let hidden = remembered.hidden.filter((n) => n !== "run"),
    last = await ask("runs", want);
  const body = h("div"),
    state = h("div"),
    filters = h("span", { class: "tools" });
  let follow = () => {};
  const load = async (change) => {
    Object.assign(want, change);
    const q = new URLSearchParams(
      Object.entries(want).filter(([k, v]) => v && k !== "limit" && !(k === "order" && v === "-newest")),
    ).toString();
    history.replaceState(history.state, "", "#/runs" + (q ? "?" + q : ""));
    document.getElementById("main").dataset.shown = location.hash;
    draw(await ask("runs", want));
    follow();
  };

  const head = ([name, title, kind]) => {
    const sorted = want.order.replace("-", "") === name,
      down = want.order.startsWith("-");
    return h(
      "th",
      { class: kind, "aria-sort": sorted ? (down ? "descending" : "ascending") : null },
      h(
        "button",
        {
          class: "sort",
          "data-order": name,
          onclick: () =>
            load({ order: sorted && down ? name : "-" + name, offset: 0 }).then(() => {
              const b = body.querySelector(`[data-order=${name}]`);
              if (b) b.focus();
            }),
        },
        title,
        h("span", { "aria-hidden": "true" }, sorted ? (down ? " ↓" : " ↑") : ""),
      ),
    );
  };

  const choose = (name, title, all, list) =>
    list.length > (name === "state" ? 1 : 0) &&
    h(
      "select",
      { "aria-label": title, onchange: (e) => load({ [name]: e.target.value, offset: 0 }) },
      h("option", { value: "" }, all),
      list.map((v) => h("option", { value: v, selected: v === want[name] }, v)),
    );
  const menu = h(
    "details",
    { class: "menu" },
    h("summary", { class: "button" }, "Columns"),
    h(
      "div",
      { class: "card" },
      columns.slice(1).map(([name, title]) =>
        h(
          "label",
          {},
          h("input", {
            type: "checkbox",
            checked: !hidden.includes(name),
            onchange: (e) => {
              hidden = hidden.filter((n) => n !== name).concat(e.target.checked ? [] : [name]);
              remembered.hidden = hidden;
              draw(last);
            },
          }),
          " ",
          title,
        ),
      ),
    ),
  );
  let offered = "";
  const drawFilters = (x) => {
    const now = JSON.stringify([x.states, x.models, x.tags, want.state, want.model, want.tag]);
    if (now === offered) return;
    offered = now;
    only(
      filters,
      choose("state", "State", "all states", x.states),
      choose("model", "Model", "all models", x.models),
      choose("tag", "Tag", "all tags", x.tags),
    );
  };

  const draw = (x) => {
    last = x;
    const refused = x.runs.filter((r) => r.refused > 0).map((r) => r.run);
    const list =
      x.dead > 0
        ? [
            ...x.waits,
            {
              says: `${plural(x.dead, "dead letter")}: ${refused.length > 0 ? `prompts of ${refused.slice(0, 3).join(", ")}${refused.length > 3 ? " and others" : ""} were refused` : "events that no service could use"}`,
              fix: h("a", { href: "#/dead" }, "Read why, and what to do"),
            },
          ]
        : x.waits;
    const first = x.total === 0 && !list.some((w) => w.grave) && x.dead === 0; // then one box says all
    only(state, !first && waits(list));
    state.hidden = first || list.length === 0;
    tools.hidden = x.total === 0;
    drawFilters(x);
    if (x.runs.length === 0) {
      only(
        body,
        x.total > 0
          ? empty(
              "No run is like that",
              h("p", {}, "Change what you search for."),
              h("button", { onclick: () => clear() }, "Show all runs"),
            )
          : x.dead > 0
            ? empty(
                "No prompt was accepted",
                h("p", {}, `${plural(x.dead, "message")} could not be used; the reason of each is kept.`),
                h("a", { href: "#/dead" }, "See the dead letters"),
              )
            : hello(list.length === 0),
      );
      return;
    }
    const at = document.activeElement,
      focused = at && body.contains(at) && (at.getAttribute("href") || at.dataset.order),
      shown = columns.filter(([name]) => !hidden.includes(name)),
      old = body.querySelector(".scroll"),
      left = old ? old.scrollLeft : 0,
      to = want.offset + x.runs.length;
    only(
      body,
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "list" },
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, shown.map(head))),
          h(
            "tbody",
            {},
            x.runs.map((r) =>
              h(
                "tr",
                {},
                shown.map(([, , kind, cell]) => h("td", { class: kind }, cell(r))),
              ),
            ),
          ),
        ),
      ),
      h(
        "div",
        { class: "pager" },
        h(
          "span",
          { class: "small muted num" },
          `${whole(want.offset + 1)} to ${whole(to)} of ${plural(x.matched, "run")}`,
          x.matched < x.total && ` that match, of ${whole(x.total)}`,
        ),
        x.matched > runsPage && [
          h(
            "button",
            { disabled: want.offset === 0, onclick: () => load({ offset: Math.max(0, want.offset - runsPage) }) },
            "Previous",
          ),
          h("button", { disabled: to >= x.matched, onclick: () => load({ offset: want.offset + runsPage }) }, "Next"),
        ],
      ),
    );
    if (left) body.querySelector(".scroll").scrollLeft = left;
    if (focused) {
      const f = [...body.querySelectorAll("a, button")].find(
        (a) => a.getAttribute("href") === focused || a.dataset.order === focused,
      );
      if (f) f.focus();
    }
  };
  let typing = 0;
  const search = h("input", {
    type: "search",
    placeholder: "Search names, models, tags, notes",
    "aria-label": "Search runs",
    value: want.text,
    oninput: (e) => {
      clearTimeout(typing);
      typing = setTimeout(() => load({ text: e.target.value, offset: 0 }), 250);
    },
  });
  const clear = () => {
    search.value = "";
    return load({ text: "", state: "", model: "", tag: "", offset: 0 });
  };
  const tools = h("div", { class: "cardhead" }, search, filters, menu);
  draw(last);
  return {
    title: "Runs",
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          h("h1", {}, "Runs"),
          h("p", { class: "muted" }, "What is stored. The list follows the pipeline by itself."),
        ),
      ),
      state,
      h("div", { class: "card flush runs" }, tools, body),
    ],
    start: () => {
      let stop = listen(want, { runs: draw });
      follow = () => {
        stop();
        stop = listen(want, { runs: draw });
      };
      return () => {
        follow = () => {};
        clearTimeout(typing);
        stop();
      };
    },
  };
}
