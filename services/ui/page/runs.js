// The list of runs, and one run: its stages, what it waits for, its rewards and its groups.
import { h, link, fixed, whole, plural, bytes, ago, rate, badge, tones, meter, waits, crumbs, empty, factList, only } from "./dom.js";
import { ask, api, listen, may, stored } from "./server.js";
import { chart } from "./chart.js";
import { updatesCard } from "./updates.js";
import { settingsCard } from "./settings.js";

// lineTones tell the lines of a chart apart, with their dashes.
const lineTones = ["--accent", "--warn", "--info", "--bad", "--good", "--muted"];

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

// otherBadges say how many groups have which outcome.
const otherBadges = (statuses) =>
  Object.entries(statuses)
    .filter(([s]) => s !== "open" && s !== "complete")
    .map(([s, n]) => badge(`${n} ${s}`, tones[s]));

export async function runsView() {
  const first = await ask("runs");
  const body = h("div", { class: "card flush" }),
    state = h("div");
  const draw = (x) => {
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
    const first = x.runs.length === 0 && !list.some((w) => w.grave) && x.dead === 0; // then one box says all
    only(state, !first && waits(list));
    state.hidden = first || list.length === 0;
    if (x.runs.length === 0) {
      only(
        body,
        x.dead > 0
          ? empty(
              "No prompt was accepted",
              h("p", {}, `${plural(x.dead, "message")} could not be used; the reason of each is kept.`),
              h("a", { href: "#/dead" }, "See the dead letters"),
            )
          : hello(list.length === 0),
      );
      return;
    }
    const focused = document.activeElement && document.activeElement.getAttribute("href");
    only(
      body,
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "list" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Run", "State", "Groups closed", "Samples", "Scored", "Steps", "Size", "Newest"].map((t, i) =>
                h("th", { class: i > 2 ? "n" + (i > 4 ? " hide-s" : "") : "" }, t),
              ),
            ),
          ),
          h(
            "tbody",
            {},
            x.runs.map((r) =>
              h(
                "tr",
                {},
                h("td", {}, h("a", { class: "row", href: link("runs", r.run), "data-item": true }, r.run)),
                h("td", {}, h("span", { class: "states" }, stateOf(r))),
                h(
                  "td",
                  {},
                  h("div", { class: "num small line" }, `${whole(r.groups - r.open_groups)} / ${whole(r.groups)}`),
                  meter(r.counted, r.groups - r.open_groups - r.counted, r.groups, "groups with advantages"),
                ),
                h("td", { class: "n" }, whole(r.samples)),
                h("td", { class: "n" }, whole(r.scored)),
                h("td", { class: "n hide-s" }, whole(r.steps)),
                h("td", { class: "n hide-s" }, bytes(r.bytes)),
                h("td", { class: "n hide-s" }, ago(r.newest)),
              ),
            ),
          ),
        ),
      ),
      x.total > x.runs.length &&
        h("p", { class: "pager small" }, `${whole(x.total - x.runs.length)} older runs are not shown`),
    );
    if (focused) {
      const f = [...body.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused);
      if (f) f.focus();
    }
  };
  draw(first);
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
          h("p", { class: "muted" }, "What is stored, the newest first. It follows the pipeline by itself."),
        ),
      ),
      state,
      body,
    ],
    start: () => listen({}, { runs: draw }),
  };
}

// about is what a file says of its run, and of what it leaves out.
const about = () =>
  h(
    "div",
    { class: "card" },
    h("h2", {}, "About this file"),
    [`Report of meander, made ${new Date(stored.made).toUTCString()}. It needs no server.`, ...stored.notes].map((n) =>
      h("p", { class: "small muted" }, n),
    ),
    factList(stored.facts),
    h("details", {}, h("summary", {}, "Metrics, by the names of verl"), factList(stored.metrics)),
  );

const pageSize = 50;
const orders = [
  ["newest", "newest first"],
  ["oldest", "oldest first"],
  ["best", "best mean reward"],
  ["worst", "worst mean reward"],
  ["spread", "largest spread"],
];

export async function runView(run, query) {
  const want = {
    order: query.get("order") || "newest",
    status: query.get("status") || "",
    text: query.get("text") || "",
    offset: Number(query.get("offset")) || 0,
    limit: pageSize,
  };
  const [progress, page, curve, all, settings] = await Promise.all([
    ask(api("runs", run)),
    ask(api("runs", run, "groups"), want),
    ask(api("runs", run, "curve")),
    ask("runs"),
    ask(api("runs", run, "settings")).catch(() => null), // a run of refused prompts alone has none
  ]);
  const others = all.runs.map((r) => r.run).filter((r) => r !== run);
  const compare =
    others.length > 0 &&
    h(
      "select",
      {
        "aria-label": "Compare with another run",
        onchange: (e) => {
          if (e.target.value) location.hash = "#/compare?" + new URLSearchParams({ a: run, b: e.target.value });
        },
      },
      h("option", { value: "" }, "Compare with …"),
      others.map((r) => h("option", { value: r }, r)),
    );
  const stages = h("div", { class: "stages" }),
    state = h("div"),
    status = h("span", { class: "tools" }),
    sub = h("p", { class: "muted" });
  const rewards = h("div", { class: "card" }),
    groups = h("div", { class: "card flush" }),
    updates = updatesCard(run);
  const lines = new Map(); // uid -> tr
  let fresh = 0,
    current = page,
    drawn = "";

  const drawProgress = (p) => {
    updates.draw(p.updates);
    only(
      status,
      p.held ? badge(p.held, "warn") : badge(p.state),
      otherBadges(p.statuses),
      p.judged > 0 && h("a", { class: "button", href: link("judge", run) }, `Judge ${plural(p.judged, "sample")}`),
    );
    only(
      stages,
      p.stages.map((s) =>
        h(
          "div",
          { class: "stage" },
          h("span", { class: "name" }, s.name),
          h(
            "span",
            { class: "big" },
            whole(s.done),
            s.name !== "intake" && h("small", {}, ` of ${whole(s.of)}`),
            h("small", {}, ` ${(s.name === "intake" ? s.done : s.of) === 1 ? s.counts.slice(0, -1) : s.counts}`),
          ),
          meter(s.done, s.lost, s.of, `${s.name}: ${s.done} of ${s.of} ${s.counts}`),
          h(
            "span",
            { class: "small muted num" },
            s.lost > 0 && `${whole(s.lost)} ${s.name === "intake" ? "refused" : "without"} · `,
            rate(s.per_minute) +
              (s.name === "sampler" && p.steps_per_minute >= 0.5
                ? ` · ${whole(Math.round(p.steps_per_minute))} steps/min`
                : ""),
          ),
        ),
      ),
    );
    const list = p.fault ? [{ grave: true, says: p.fault }, ...p.waits] : p.waits;
    only(state, waits(list));
    state.hidden = list.length === 0;
    sub.textContent =
      p.mean_reward === null
        ? "No reward yet."
        : `Mean reward of the last ${plural(Math.min(50, p.stages[3].done), "group")}: ${fixed(p.mean_reward)}`;
  };

  const drawCurve = (c, source) => {
    for (const old of rewards.querySelectorAll(".chart")) old.stop();
    const select =
      !stored &&
      c.data_sources &&
      c.data_sources.length > 1 &&
      h(
        "select",
        {
          "aria-label": "Data source",
          onchange: async (e) =>
            drawCurve(await ask(api("runs", run, "curve"), { data_source: e.target.value }), e.target.value),
        },
        h("option", { value: "" }, "all data sources"),
        c.data_sources.map((s) => h("option", { value: s, selected: s === source }, s)),
      );
    only(
      rewards,
      h("div", { class: "cardhead" }, h("h2", {}, "Reward over time"), select),
      c.points.length === 0
        ? h("p", { class: "muted" }, "The curve begins with the first group that closes with a reward.")
        : chart({
            title: `mean reward of ${plural(c.points.length, "point")}, from ${fixed(c.points[0].mean)} to ${fixed(c.points.at(-1).mean)}`,
            x: { label: "groups closed", values: c.points.map((p) => p.number) },
            series: [
              { label: "best", values: c.points.map((p) => p.max), tone: "--muted", width: 1, points: false },
              { label: "worst", values: c.points.map((p) => p.min), tone: "--muted", width: 1, points: false },
              { label: "mean", values: c.points.map((p) => p.mean) },
            ], // the mean is drawn above the band
            bands: [[1, 2]],
          }),
      !source && bySource(c),
    );
  };

  const bySource = (c) => {
    const names = (c.data_sources || []).slice(0, lineTones.length);
    return (
      names.length > 1 && [
        h(
          "h3",
          {},
          "By data source" +
            (c.data_sources.length > names.length ? `, the first ${names.length} of ${c.data_sources.length}` : ""),
        ),
        chart({
          title: `mean rewards of ${names.join(", ")}`,
          x: { label: "groups closed", values: c.points.map((p) => p.number) },
          height: 200,
          series: names.map((s, i) => ({
            label: s,
            values: c.points.map((p) => (p.sources || {})[s] ?? undefined),
            tone: lineTones[i],
            dashed: i % 2 === 1,
            gaps: true,
          })),
        }),
      ]
    );
  };

  const line = (r, isFresh) =>
    h(
      "tr",
      { class: isFresh ? "fresh" : "" },
      h("td", { class: "n hide-s" }, r.number),
      h(
        "td",
        { class: "prompt" },
        h(
          "a",
          { class: "row", href: link("runs", run, r.uid), "data-item": true },
          h("span", { class: "clamp" }, r.prompt || r.uid),
        ),
        h(
          "span",
          { class: "small muted hide-s" },
          r.prompt ? r.uid : "",
          r.batch && ` · batch ${r.batch}`,
          r.data_source && ` · ${r.data_source}`,
          r.validation && " · validation",
        ),
        r.error && h("span", { class: "small clamp" }, r.error),
      ),
      h(
        "td",
        {},
        badge(r.status),
        r.status === "open" && h("span", { class: "small num only-s" }, ` ${Math.min(r.scored, r.size)}/${r.size}`),
      ),
      h(
        "td",
        { class: "hide-s" },
        h("span", { class: "small num" }, `${Math.min(r.scored, r.size)} / ${r.size}`),
        meter(r.scored, r.lost || 0, r.size, `${r.made} made, ${r.scored} scored of ${r.size}`),
      ),
      h("td", { class: "n" }, fixed(r.mean)),
      h("td", { class: "n hide-s" }, fixed(r.std)),
      h("td", { class: "n hide-s" }, r.min === null ? "–" : `${fixed(r.min)} … ${fixed(r.max)}`),
      h("td", { class: "n hide-s" }, ago(r.closed || r.opened)),
    );

  const tbody = h("tbody"),
    pager = h("div", { class: "pager" }),
    table = h("div");
  const drawPage = (x) => {
    current = x;
    fresh = 0;
    lines.clear();
    if (x.rows.length === 0) {
      drawn = "empty";
      only(
        table,
        x.all === 0
          ? empty(
              "No group yet",
              h("p", {}, "Intake opens a group for each prompt that it accepts. Refused prompts are dead letters."),
              h("a", { href: "#/dead?run=" + encodeURIComponent(run) }, "Dead letters of this run"),
            )
          : empty("No group is like that", h("p", {}, "Change what you search for.")),
      );
    } else {
      if (drawn !== "table")
        only(
          table,
          h(
            "div",
            { class: "scroll", tabindex: 0, role: "region", "aria-label": "list" },
            h(
              "table",
              {},
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  [
                    ["#", "n hide-s"],
                    ["Prompt", ""],
                    ["Result", ""],
                    ["Scored", "hide-s"],
                    ["Mean", "n"],
                    ["Std", "n hide-s"],
                    ["Range", "n hide-s"],
                    ["When", "n hide-s"],
                  ].map(([t, c]) => h("th", { class: c }, t)),
                ),
              ),
              tbody,
            ),
          ),
        );
      drawn = "table";
      only(
        tbody,
        x.rows.map((r) => {
          const tr = line(r);
          lines.set(r.uid, tr);
          return tr;
        }),
      );
    }
    drawPager();
  };
  const load = async (change) => {
    Object.assign(want, change);
    const q = new URLSearchParams(
      Object.entries({ order: want.order, status: want.status, text: want.text, offset: want.offset }).filter(
        ([k, v]) => v && !(k === "order" && v === "newest"),
      ),
    ).toString();
    history.replaceState(history.state, "", link("runs", run) + (q ? "?" + q : ""));
    drawPage(await ask(api("runs", run, "groups"), want));
  };
  const drawPager = () => {
    const from = current.total === 0 ? 0 : want.offset + 1,
      to = want.offset + current.rows.length;
    only(
      pager,
      h(
        "span",
        { class: "small muted num" },
        `${whole(from)} to ${whole(to)} of ${plural(current.total, "group")}`,
        current.left_out && `; ${whole(current.left_out)} older ones are not listed`,
      ),
      fresh > 0 && h("button", { onclick: () => load({ offset: 0 }) }, `${plural(fresh, "new group")}: show`),
      h(
        "button",
        { disabled: want.offset === 0, onclick: () => load({ offset: Math.max(0, want.offset - pageSize) }) },
        "Previous",
      ),
      h("button", { disabled: to >= current.total, onclick: () => load({ offset: want.offset + pageSize }) }, "Next"),
    );
  };
  const take = ({ rows }) => {
    for (const r of rows) {
      const old = lines.get(r.uid);
      if (old) {
        const focus = old.contains(document.activeElement),
          tr = line(r, true);
        old.replaceWith(tr);
        lines.set(r.uid, tr);
        if (focus) tr.querySelector("a").focus();
      } else if (
        want.order === "newest" &&
        want.offset === 0 &&
        !want.status &&
        !want.text &&
        r.number > (current.all || 0)
      ) {
        if (drawn !== "table") {
          load({});
          return;
        }
        current.all = r.number;
        current.total++;
        current.rows.unshift(r);
        const tr = line(r, true);
        lines.set(r.uid, tr);
        tbody.prepend(tr);
        while (tbody.children.length > pageSize) {
          const gone = tbody.lastElementChild;
          gone.remove();
          for (const [k, v] of lines) if (v === gone) lines.delete(k);
          current.rows.pop();
        }
      } else if (r.number > (current.all || 0)) {
        current.all = r.number;
        current.total++;
        fresh++;
      }
    }
    drawPager();
    later();
  };
  let timer = 0;
  const later = () => {
    timer =
      timer ||
      setTimeout(async () => {
        timer = 0;
        if (rewards.isConnected) {
          try {
            const s = rewards.querySelector("select");
            drawCurve(await ask(api("runs", run, "curve"), { data_source: s ? s.value : "" }), s ? s.value : "");
          } catch {
            /* the stream says it */
          }
        }
      }, 2500);
  };

  let typing = 0;
  only(
    groups,
    h(
      "div",
      { class: "cardhead" },
      h("h2", {}, "Groups"),
      h(
        "div",
        { class: "tools" },
        h("input", {
          type: "search",
          placeholder: "Search prompts",
          "aria-label": "Search prompts",
          value: want.text,
          oninput: (e) => {
            clearTimeout(typing);
            typing = setTimeout(() => load({ text: e.target.value, offset: 0 }), 250);
          },
        }),
        h(
          "select",
          { "aria-label": "Result", onchange: (e) => load({ status: e.target.value, offset: 0 }) },
          ["", ...may.outcomes].map((s) =>
            h("option", { value: s, selected: s === want.status }, s || "all results"),
          ),
        ),
        h(
          "select",
          { "aria-label": "Order", onchange: (e) => load({ order: e.target.value, offset: 0 }) },
          orders.map(([v, t]) => h("option", { value: v, selected: v === want.order }, t)),
        ),
      ),
    ),
    table,
    pager,
  );
  drawProgress(progress);
  drawPage(page);
  drawCurve(curve);
  return {
    title: run,
    body: [
      h(
        "div",
        { class: "head" },
        h("div", {}, crumbs(h("a", { href: "#/runs" }, "Runs")), h("h1", {}, run), sub),
        h("div", { class: "tools" }, status, compare),
      ),
      state,
      stages,
      stored && about(),
      rewards,
      updates.card,
      settingsCard(settings),
      groups,
    ].filter(Boolean),
    start: () => {
      const stop = listen(
        { run, since: `${page.epoch}-${page.revision}` },
        { run: drawProgress, groups: take, reset: () => load({}) },
      );
      return () => {
        clearTimeout(timer);
        clearTimeout(typing);
        stop();
      };
    },
  };
}
