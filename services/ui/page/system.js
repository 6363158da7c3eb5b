// What runs, with which weights, how full the streams are, and the dead letters.
import {
  h,
  link,
  bytes,
  seconds,
  ago,
  when,
  words,
  whole,
  plural,
  badge,
  meter,
  waits,
  crumbs,
  empty,
  only,
} from "./dom.js";
import { ask, api, listen, change, may } from "./server.js";

const states = { ok: "good", "nearly full": "warn", full: "bad", rolling: "info" };
const short = (digest) => h("span", { class: "mono", title: digest || "" }, (digest || "–").slice(0, 12));
const table = (heads, rows) =>
  h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": "table" },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map(([t, c]) => h("th", { class: c || "" }, t)),
        ),
      ),
      rows.tagName ? rows : h("tbody", {}, rows),
    ),
  );

export async function systemView() {
  const first = await ask("system");
  const body = h("div", { class: "waits" }),
    running = h("div", { class: "card flush" }),
    lanes = h("div", { class: "card flush" }),
    streams = h("div", { class: "card flush" }),
    consumers = h("details", { class: "card flush" });
  const draw = (x) => {
    only(body, waits(x.waits));
    body.hidden = x.waits.length === 0;
    only(
      running,
      h("div", { class: "cardhead" }, h("h2", {}, "Samplers and reward services")),
      x.present.length === 0
        ? empty("None runs", h("p", {}, "Start a pipeline on this store:"), h("pre", { tabindex: 0 }, "meander up"))
        : table(
            [
              ["Service"],
              ["Lane"],
              ["Weights"],
              ["Computes on"],
              ["Batch"],
              ["State"],
              ["Functions", "hide-s"],
              ["Seen", "n hide-s"],
            ],
            x.present.map((p) =>
              h(
                "tr",
                {},
                h("td", {}, h("b", {}, p.service), h("div", { class: "small muted mono" }, p.instance)),
                h("td", {}, p.lane || "–"),
                h(
                  "td",
                  {},
                  p.policy_version === undefined
                    ? "–"
                    : h("span", {}, `version ${p.policy_version} `, short(p.weights_digest)),
                ),
                h("td", {}, p.backend || "–"),
                h(
                  "td",
                  { class: "batch" },
                  p.evaluation
                    ? [
                        h(
                          "div",
                          { class: "small num" },
                          `${p.evaluation.samples} of ${p.evaluation.places} places, ${seconds(p.evaluation.took_ns / 1e9)}`,
                        ),
                        meter(p.evaluation.samples, 0, p.evaluation.places, "places of the newest batch"),
                        h("div", { class: "small muted" }, ago(p.evaluation.at / 1e6)),
                      ]
                    : "–",
                ),
                h(
                  "td",
                  {},
                  p.waiting
                    ? [
                        badge(p.service === "starting" ? "starting" : "away", "warn"),
                        h("div", { class: "small" }, p.waiting),
                      ]
                    : p.draining
                      ? badge("drains", "warn")
                      : p.loading !== undefined
                        ? badge(`loads version ${p.loading}`, "info")
                        : p.room && p.room.waiting
                          ? badge(`${p.room.waiting} wait for ${p.room.disk ? "disk" : "space"}`, "warn")
                          : badge("at work", "good"),
                ),
                h(
                  "td",
                  { class: "small hide-s" },
                  (p.reward || []).join(", "),
                  (p.missing || []).map((m) => h("div", {}, badge(m.name, "bad"), " ", m.reason)),
                ),
                h("td", { class: "n hide-s" }, ago(p.at / 1e6)),
              ),
            ),
          ),
    );
    only(
      lanes,
      h("div", { class: "cardhead" }, h("h2", {}, "Policies")),
      x.lanes.length === 0
        ? empty("No lane is known yet", h("p", {}, "A sampler announces its model and weights when it starts."))
        : table(
            [
              ["Lane"],
              ["Model"],
              ["Served", "n"],
              ["Newest", "n"],
              ["Weights"],
              ["Samplers", "n"],
              ["Requests", "n"],
              ["Announced", "n hide-s"],
            ],
            x.lanes.map((l) =>
              h(
                "tr",
                {},
                h(
                  "td",
                  {},
                  h(
                    "a",
                    {
                      class: "row",
                      href: l.tenant ? link("system", l.lane, l.tenant) : link("system", l.lane),
                      "data-item": true,
                    },
                    l.lane,
                  ),
                  l.tenant && h("div", { class: "small muted" }, `tenant ${l.tenant}`),
                ),
                h("td", {}, l.current.model, l.text && " (text)"),
                h("td", { class: "n" }, l.served_version),
                h(
                  "td",
                  { class: "n" },
                  l.current.version,
                  l.current.version !== l.served_version &&
                    l.samplers > 0 &&
                    h("div", {}, badge("not taken over", "warn")),
                ),
                h("td", {}, l.current.kind, " ", short(l.current.weights_digest)),
                h("td", { class: "n" }, l.samplers === 0 ? badge("none", "bad") : l.samplers),
                h("td", { class: "n" }, x.mirror ? "–" : whole(l.backlog)),
                h("td", { class: "n hide-s" }, ago(l.current.announced)),
              ),
            ),
          ),
    );
    only(
      streams,
      h("div", { class: "cardhead" }, h("h2", {}, "Streams")),
      table(
        [
          ["Stream"],
          ["State"],
          ["Full"],
          ["Messages", "n hide-s"],
          ["Size", "n"],
          ["Limit", "n hide-s"],
          ["Newest", "n hide-s"],
        ],
        x.streams.map((s) =>
          h(
            "tr",
            {},
            h("td", { class: "mono" }, s.name),
            h("td", {}, badge(s.state, states[s.state])),
            h(
              "td",
              {},
              s.max_bytes > 0
                ? meter(
                    s.state === "full" ? 0 : s.bytes + (s.held_bytes || 0),
                    s.state === "full" ? s.max_bytes : 0,
                    s.max_bytes,
                    `${s.name}: ${Math.round((100 * s.bytes) / s.max_bytes)} % full`,
                  )
                : h("span", { class: "small muted" }, "no limit"),
            ),
            h("td", { class: "n hide-s" }, whole(s.messages)),
            h("td", { class: "n" }, bytes(s.bytes)),
            h("td", { class: "n hide-s" }, s.max_bytes > 0 ? bytes(s.max_bytes) : "–"),
            h("td", { class: "n hide-s" }, ago(s.newest)),
          ),
        ),
      ),
    );
    const open = consumers.open;
    const list = x.streams.flatMap((s) => s.consumers.map((c) => [s, c]));
    only(
      consumers,
      h("summary", { class: "cardhead" }, h("h2", {}, `Consumers (${list.length})`)),
      table(
        [["Consumer"], ["Stream"], ["Waiting", "n"], ["In flight", "n"], ["Redelivered", "n"], ["At work", ""]],
        list.map(([s, c]) =>
          h(
            "tr",
            {},
            h("td", { class: "mono" }, c.name),
            h("td", { class: "mono small" }, s.name),
            h("td", { class: "n" }, whole(c.pending)),
            h("td", { class: "n" }, whole(c.ack_pending)),
            h("td", { class: "n" }, whole(c.redelivered)),
            h("td", {}, c.pulls > 0 ? "yes" : "no"),
          ),
        ),
      ),
    );
    consumers.open = open;
  };
  draw(first);
  return {
    title: "System",
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          h("h1", {}, "System"),
          h("p", { class: "muted" }, "Who is at work, with which weights, and how full the streams are."),
        ),
      ),
      body,
      running,
      lanes,
      streams,
      consumers,
    ],
    start: () => listen({ topic: "system" }, { system: draw }),
  };
}

export async function laneView(lane, tenant) {
  const x = await ask(api("lanes", lane) + (tenant ? `?tenant=${encodeURIComponent(tenant)}` : ""));
  return {
    title: lane,
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          crumbs(h("a", { href: "#/system" }, "System")),
          h("h1", {}, lane),
          h(
            "p",
            { class: "muted" },
            `${plural(x.total, "version")} of the weights${tenant ? ` of tenant ${tenant}` : ""}, the newest first`,
          ),
        ),
      ),
      h(
        "div",
        { class: "card flush" },
        x.versions.length === 0
          ? empty("No version", h("p", {}, "No sampler has announced this lane."))
          : table(
              [["Version", "n"], ["Weights"], ["What"], ["Rule"], ["By"], ["Note"], ["When", "n"]],
              x.versions.map((v) =>
                h(
                  "tr",
                  {},
                  h("td", { class: "n" }, v.version),
                  h("td", {}, short(v.weights_digest)),
                  h(
                    "td",
                    {},
                    v.rollback !== undefined ? `again version ${v.rollback}` : v.kind,
                    v.refused && h("div", {}, badge("refused", "bad"), " ", v.refused),
                  ),
                  h("td", {}, v.rule || "finish"),
                  h("td", {}, v.by || "the sampler"),
                  h("td", {}, v.note || ""),
                  h("td", { class: "n" }, ago(v.announced)),
                ),
              ),
            ),
      ),
    ],
  };
}

export async function deadView(query) {
  const run = query.get("run") || "",
    rows = h("tbody"),
    more = h("div", { class: "pager" });
  let shown = 0;
  // Letters that differ in their number and time alone share a line.
  const same = new Map();
  const line = (d) => {
    const key = JSON.stringify([d.reason, d.code, d.stage, d.run, d.uid]),
      first = same.get(key);
    if (!first) {
      const one = { tr: row(d), more: h("div", { class: "small muted" }), n: 1 };
      one.tr.children[1].append(one.more);
      same.set(key, one);
      return one.tr;
    }
    if (++first.n === 2) first.more.append("also");
    if (first.n <= 10) first.more.append(" ", h("a", { href: link("dead", d.id) }, `#${d.id}`));
    else {
      first.rest = first.rest || first.more.appendChild(h("span"));
      first.rest.textContent = ` and ${whole(first.n - 10)} more`;
    }
    return null;
  };
  const row = (d) =>
    h(
      "tr",
      {},
      h("td", { class: "n" }, d.id),
      h(
        "td",
        { class: "reason" },
        h("a", { class: "row", href: link("dead", d.id), "data-item": true }, h("span", { class: "clamp" }, d.reason)),
        h("div", { class: "small" }, d.fix, d.deliveries > 1 && `. It was tried ${d.deliveries} times.`),
      ),
      h("td", {}, badge(d.code, "bad")),
      h("td", {}, d.stage || "–"),
      h("td", {}, d.run ? h("a", { href: link("runs", d.run) }, d.run) : "–"),
      h("td", { class: "small mono hide-s" }, d.uid || "–"),
      h("td", { class: "n" }, ago(d.at)),
    );
  const load = async (before) => {
    const x = await ask("dead", { run, before });
    rows.append(...x.letters.map(line).filter(Boolean));
    shown += x.letters.length;
    only(
      more,
      h(
        "span",
        { class: "small muted" },
        run ? `${plural(shown, "letter")} of run ${run}` : `${whole(shown)} of ${plural(x.total, "letter")}`,
      ),
      x.before && h("button", { onclick: () => load(x.before) }, "Older ones"),
    );
    return x;
  };
  await load();
  const none = shown === 0 && more.children.length < 2;
  return {
    title: "Dead letters",
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          h("h1", {}, "Dead letters"),
          h(
            "p",
            { class: "muted" },
            "Input that no service could use, kept with the reason.",
            run && h("span", {}, " Only run ", h("b", {}, run), "; ", h("a", { href: "#/dead" }, "show all")),
          ),
          !none &&
            h(
              "p",
              {},
              h("b", {}, "What to do: "),
              "correct a prompt that was refused, and publish it again with another uid. For other letters end the cause, then ",
              h("code", {}, "meander dead replay ID"),
              ". A letter may stay; ",
              h("code", {}, "meander dead drop ID"),
              " removes it.",
            ),
        ),
      ),
      h(
        "div",
        { class: "card flush" },
        none
          ? empty("No dead letters", h("p", {}, "Nothing was refused."))
          : [
              table([["ID", "n"], ["Reason"], ["Code"], ["Stage"], ["Run"], ["Uid", "hide-s"], ["When", "n"]], rows),
              more,
            ],
      ),
    ],
    start: () => listen({ topic: "system" }, {}),
  };
}

export async function letterView(id) {
  const d = await ask(api("dead", id));
  return {
    title: `Dead letter ${id}`,
    body: [
      h(
        "div",
        { class: "head" },
        h("div", {}, crumbs(h("a", { href: "#/dead" }, "Dead letters")), h("h1", {}, `Dead letter ${id}`)),
        badge(d.code, "bad"),
      ),
      h("div", { class: "card" }, h("h2", {}, "Why"), h("p", { class: "promptbox" }, d.reason)),
      h(
        "div",
        { class: "card" },
        h("h2", {}, "What to do"),
        h("p", { class: "todo" }, d.fix),
        may.admin
          ? actions(id)
          : [
              h(
                "p",
                { class: "small" },
                "Replay it as it is, or remove it, by a command; a page that was started with --admin has buttons for both:",
              ),
              h("pre", { class: "json", tabindex: 0 }, `meander dead replay ${id}\nmeander dead drop ${id}`),
            ],
      ),
      h(
        "div",
        { class: "card" },
        h("h2", {}, "What"),
        h(
          "dl",
          { class: "facts" },
          [
            ["Stage", d.stage],
            ["Run", d.run],
            ["Uid", d.uid],
            ["Subject", d.subject],
            ["Stream", d.stream],
            ["Deliveries", d.deliveries],
            ["When", when(d.at)],
            ["Bytes", d.bytes],
          ]
            .filter(([, v]) => v)
            .flatMap(([k, v]) => [h("dt", {}, k), h("dd", { class: "mono" }, v)]),
        ),
        d.original
          ? h("pre", { class: "json", tabindex: 0, "aria-label": "original" }, JSON.stringify(d.original, null, 2))
          : h(
              "p",
              { class: "small muted" },
              "The original is no msgpack, is too large to show, or is no longer stored.",
            ),
      ),
    ],
    start: () => listen({ topic: "system" }, {}),
  };
}

// actions are the buttons of a dead letter. What is dropped does not come back, so that button is pressed twice.
function actions(id) {
  const says = h("p", { role: "status" }),
    buttons = h("div", { class: "tools" });
  const act = async (what, done) => {
    try {
      only(buttons);
      const x = await change(`dead/${id}/${what}`);
      only(says, done(x), " ", h("a", { href: "#/dead" }, "The other dead letters"));
    } catch (err) {
      only(says, err.message);
      draw();
    }
  };
  const drop = () =>
    only(
      buttons,
      h("span", {}, "It does not come back."),
      h("button", { class: "bad", onclick: () => act("drop", () => "Dropped.") }, "Drop it for ever"),
      h("button", { onclick: draw }, "Keep it"),
    );
  const draw = () =>
    only(
      buttons,
      h(
        "button",
        { onclick: () => act("replay", (x) => `Published again on ${x.subject}; the letter is gone.`) },
        "Replay: publish it again",
      ),
      h("button", { onclick: drop }, "Drop"),
    );
  draw();
  return [buttons, says];
}

const found = { ok: "good", warning: "warn", fault: "bad", "not checked": "" };

export async function doctorView() {
  const list = h("div", { class: "stack" }),
    sub = h("p", { class: "muted", role: "status" }, "The checks take a few seconds."),
    button = h("button", { onclick: () => check() }, "Check again");
  const check = async () => {
    button.disabled = true;
    try {
      const { findings, at } = await ask("doctor");
      const counts = Object.keys(found)
        .map((s) => [s, findings.filter((f) => f.state === s).length])
        .filter(([, n]) => n > 0);
      sub.textContent =
        counts.map(([s, n]) => `${n} ${s}`).join(", ") +
        ". Disk, model, device and reward functions of a machine are checked there, by 'meander doctor'." +
        ` Made at ${new Date(at).toLocaleTimeString()}.`;
      const grave = findings.filter((f) => f.state === "fault" || f.state === "warning");
      only(
        list,
        grave.length > 0 && waits(grave.map((f) => ({ grave: true, says: `${f.area}: ${f.says}`, fix: f.fix }))),
        h(
          "div",
          { class: "card flush" },
          table(
            [["Area"], ["State"], ["Found"]],
            findings.map((f) =>
              h(
                "tr",
                {},
                h("td", {}, f.area),
                h("td", {}, badge(f.state, found[f.state])),
                h("td", {}, words(f.says), f.fix && h("div", { class: "small muted" }, words(f.fix))),
              ),
            ),
          ),
        ),
      );
    } catch (err) {
      sub.textContent = err.message;
    }
    button.disabled = false;
  };
  return {
    title: "Doctor",
    body: [h("div", { class: "head" }, h("div", {}, h("h1", {}, "Doctor"), sub), button), list],
    start: () => {
      check();
      return listen({ topic: "system" }, {});
    },
  };
}
