// Verdicts: the samples of a run that wait for a person, one after the other, by keyboard.
import { h, link, plural, crumbs, empty, only } from "./dom.js";
import { ask, api, change, listen, may } from "./server.js";
import { conditions } from "./cards.js";
import { conversation } from "./samples.js";
import { player } from "./sound.js";

const values = [0, 0.25, 0.5, 0.75, 1];

export async function judgeView(run) {
  let list = (await ask(api("runs", run, "verdicts"))).waiting,
    skipped = new Set(),
    value = null,
    busy = false,
    timer = 0,
    shown = "";
  const given = new Set(); // a list that was asked for before has them still
  const says = h("p", { class: "small", role: "status" }),
    left = h("p", { class: "muted" }),
    body = h("div");
  const key = (w) => [w.uid, w.sample_index, w.name].join(" ");
  const next = () => list.find((w) => key(w) === shown) || list.find((w) => !skipped.has(key(w))) || list[0]; // what is shown stays

  const load = async () => {
    const { waiting } = await ask(api("runs", run, "verdicts"));
    list = waiting.filter((w) => !given.has(key(w)));
    draw();
  };
  const give = async () => {
    const w = next(),
      v = value;
    if (!w || v === null || busy) return;
    busy = true;
    try {
      await change(api("runs", run, "groups", w.uid, w.sample_index, "verdict"), { name: w.name, value: v });
      given.add(key(w));
      says.textContent = `${v} given to sample ${w.sample_index} of ${w.uid}.`;
      list = list.filter((x) => key(x) !== key(w));
      if (list.length === 0) await load();
    } catch (err) {
      says.textContent = err.message;
      if (err.status === 409) await load().catch(() => {});
    }
    busy = false;
    draw();
  };
  const skip = () => {
    const w = next();
    if (!w) return;
    if (skipped.size + 1 >= list.length)
      skipped = new Set(); // all are skipped: from the first again
    else skipped.add(key(w));
    shown = "";
    says.textContent = `Sample ${w.sample_index} of ${w.uid} is left for later.`;
    draw();
  };

  const draw = () => {
    const w = next();
    left.textContent =
      list.length >= 50
        ? "50 samples wait, and perhaps more."
        : `${plural(list.length, "sample")} ${list.length === 1 ? "waits" : "wait"}.`;
    if (!w) {
      shown = "";
      only(
        body,
        h(
          "div",
          { class: "card" },
          empty(
            "No sample waits for a verdict",
            h("p", {}, "New ones show up here by themselves."),
            h("a", { href: link("runs", run) }, `Run ${run}`),
          ),
        ),
      );
      return;
    }
    if (shown === key(w)) return; // what a person has chosen stays
    shown = key(w);
    value = null;
    const l = w.line,
      submit = h("button", { class: "primary", disabled: true }, "Give it"),
      kbd = (k) => h("kbd", { "aria-hidden": "true" }, k);
    const other = h("input", {
      type: "number",
      step: "any",
      "aria-label": "another value",
      placeholder: "another",
      oninput: () => choose(other.value === "" || !isFinite(other.value) ? null : Number(other.value), false),
    });
    const choices = values.map((v, i) =>
      h("button", { type: "button", "aria-pressed": "false", onclick: () => choose(v, true) }, kbd(i + 1), ` ${v}`),
    );
    const choose = (v, move) => {
      value = v;
      values.forEach((x, i) => choices[i].setAttribute("aria-pressed", String(x === v)));
      submit.disabled = v === null;
      submit.textContent = v === null ? "Give it" : `Give ${v}`;
      if (move) {
        other.value = "";
        submit.focus();
      }
    };
    keys.choose = choose;
    only(
      body,
      h(
        "div",
        { class: "shot" },
        l.media.length > 0
          ? h(
              "div",
              { class: "stack" },
              h(
                "div",
                { class: "pic" },
                l.media.includes("image") &&
                  h("img", {
                    src: "/media/" + api(run, w.uid, l.place, l.media.includes("video") ? "video" : "image"),
                    alt: `sample ${w.sample_index}`,
                    class: Math.max(l.width, l.height) < 256 ? "smallpic" : "",
                  }),
                l.media.includes("audio") &&
                  player("/media/" + api(run, w.uid, l.place, "audio"), `sample ${w.sample_index}`),
              ),
              conditions(run, w.uid, l),
            )
          : conversation(w) || h("div", { class: "card" }, h("p", { class: "promptbox" }, l.answer || "(empty)")),
        h(
          "div",
          { class: "card stack" },
          h(
            "div",
            {},
            h("h2", {}, w.prompt),
            w.ground_truth && h("p", { class: "muted small" }, `Ground truth: ${w.ground_truth}`),
            h(
              "p",
              { class: "small" },
              h("a", { href: link("runs", run, w.uid, w.sample_index) }, `Sample ${w.sample_index} of ${w.uid}`),
              ` waits for the verdict ${w.name}`,
            ),
          ),
          may.admin
            ? h(
                "form",
                {
                  class: "stack",
                  onsubmit: (e) => {
                    e.preventDefault();
                    give();
                  },
                },
                h("div", { class: "tools", role: "group", "aria-label": "value" }, choices, other),
                h(
                  "div",
                  { class: "tools" },
                  submit,
                  h("button", { type: "button", onclick: skip }, kbd("s"), " Later"),
                ),
                h(
                  "p",
                  { class: "small muted" },
                  "A key chooses, Enter gives. The first verdict counts: it cannot be changed.",
                ),
              )
            : h(
                "div",
                {},
                h(
                  "p",
                  { class: "small" },
                  "This page only reads. Start it with --admin to judge here, or give it by a command:",
                ),
                h(
                  "pre",
                  { class: "json", tabindex: 0 },
                  `meander ui --admin\nmeander verdict --run ${run} ${w.uid} ${w.sample_index}=0.8`,
                ),
              ),
        ),
      ),
    );
  };
  const keys = {};
  if (may.admin) {
    values.forEach((v, i) => {
      keys[i + 1] = () => next() && keys.choose(v, true);
    });
    keys.s = skip;
  }
  draw();
  return {
    title: `Verdicts of ${run}`,
    keys,
    body: [
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          crumbs(h("a", { href: "#/runs" }, "Runs"), h("a", { href: link("runs", run) }, run)),
          h("h1", {}, "Verdicts"),
          left,
        ),
      ),
      says,
      body,
    ],
    start: () => {
      const stop = listen(
        { run },
        {
          groups: () => {
            timer =
              timer ||
              setTimeout(() => {
                timer = 0;
                if (!busy) load().catch(() => {});
              }, 700);
          },
        },
      );
      return () => {
        clearTimeout(timer);
        stop();
      };
    },
  };
}
