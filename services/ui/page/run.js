// One run: its stages, what it waits for, its rewards and its groups.
import { h, link, fixed, whole, plural, ago, rate, badge, tag, tones, meter } from "./dom.js";
import { waits, crumbs, empty, factList, only, words } from "./dom.js";
import { ask, api, change, listen, may, stored } from "./server.js";
import { chart } from "./chart.js";
import { updatesCard } from "./updates.js";
import { settingsCard } from "./settings.js";

// lineTones tell the lines of a chart apart, with their dashes.
const lineTones = ["--accent", "--warn", "--info", "--bad", "--good", "--muted"];

// otherBadges say how many groups have which outcome.
const otherBadges = (statuses) =>
  Object.entries(statuses)
    .filter(([s]) => s !== "open" && s !== "complete")
    .map(([s, n]) => badge(`${n} ${s}`, tones[s]));

// notesCard shows the tags and the note of a run; people with the right to may change them, and remove the run.
function notesCard(r) {
  if (!r || stored) return null;
  const box = h("div", { class: "card" }),
    says = h("p", { class: "small", role: "status" });
  const show = () =>
    only(
      box,
      h(
        "div",
        { class: "cardhead" },
        h("h2", {}, "Tags and note"),
        may.admin && h("button", { onclick: edit }, "Edit"),
        may.admin && h("button", { class: "bad", onclick: remove }, "Delete run"),
      ),
      r.tags.length > 0 && h("p", { class: "tags" }, r.tags.map(tag)),
      r.note && h("p", { class: "promptbox" }, r.note),
      r.noted_at > 0 && h("p", { class: "small muted" }, `${r.noted_by || "someone"}, ${ago(r.noted_at)}`),
      r.tags.length === 0 &&
        !r.note &&
        h("p", { class: "muted" }, words(`None: 'meander runs tag ${r.run} TAG' and 'meander runs note ${r.run} TEXT' write some.`)),
      says,
    );
  const form = (title, submit, ...parts) => {
    says.textContent = "";
    only(box, h("form", { class: "stack", onsubmit: submit }, h("h2", {}, title), parts, says));
    box.querySelector("input, textarea").focus();
  };
  const edit = () => {
    const tags = h("input", { value: r.tags.join(", "), id: "runtags" }),
      note = h("textarea", { rows: 4, id: "runnote", value: r.note || "" });
    form(
      "Tags and note",
      async (e) => {
        e.preventDefault();
        try {
          Object.assign(r, { note: "" }, await change(api("runs", r.run, "notes"), {
            tags: tags.value.split(",").map((t) => t.trim()).filter(Boolean),
            note: note.value,
          }));
          show();
        } catch (err) {
          says.textContent = err.message;
        }
      },
      h("label", { for: "runtags" }, "Tags, with commas between them"),
      tags,
      h("label", { for: "runnote" }, "Note"),
      note,
      h(
        "div",
        { class: "tools" },
        h("button", { class: "primary" }, "Save"),
        h("button", { type: "button", onclick: show }, "Cancel"),
      ),
    );
  };
  const remove = () => {
    const name = h("input", {
        id: "runname",
        autocomplete: "off",
        oninput: () => (go.disabled = name.value !== r.run),
      }),
      open = h("input", { type: "checkbox" }),
      go = h("button", { class: "bad", disabled: true }, "Delete it for ever");
    form(
      "Delete this run?",
      async (e) => {
        e.preventDefault();
        try {
          const x = await change(api("runs", r.run, "remove"), { name: name.value, open: open.checked });
          only(box, h("p", { role: "status" }, `${plural(x.events, "event")} removed. `, h("a", { href: "#/runs" }, "The other runs")));
        } catch (err) {
          says.textContent = err.message;
        }
      },
      h("p", {}, "Its groups, samples, rewards and notes do not come back. Do not use its name again."),
      r.open_groups > 0 && h("label", {}, open, ` with its ${plural(r.open_groups, "open group")}`),
      h("label", { for: "runname" }, `Type its name, ${r.run}, to confirm`),
      name,
      h("div", { class: "tools" }, go, h("button", { type: "button", onclick: show }, "Keep it")),
    );
  };
  show();
  return box;
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
  const [progress, page, curve, all, settings, named] = await Promise.all([
    ask(api("runs", run)),
    ask(api("runs", run, "groups"), want),
    ask(api("runs", run, "curve")),
    ask("runs", { limit: 100 }),
    ask(api("runs", run, "settings")).catch(() => null), // a run of refused prompts alone has none
    ask("runs", { name: run }),
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
      notesCard(named.runs[0]),
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
