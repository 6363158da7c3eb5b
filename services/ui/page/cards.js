// Cards: samples of a group, the stages of samples, and the files that a network was given.
import { h, link, fixed, signed, plural, badge, todo, words } from "./dom.js";
import { condition, media } from "./server.js";
import { player } from "./sound.js";

// scores lists what each function said; the value of the only one is not said again if it is the reward.
export const scores = (list, reward) =>
  list &&
  list.length > 0 &&
  h(
    "ul",
    { class: "scores" },
    list.map((s) =>
      h(
        "li",
        {},
        h(
          "span",
          {},
          s.name,
          s.members && h("div", { class: "read" }, `among ${plural(s.members, "sample")} of the group`),
          s.detail && h("div", { class: "read" }, "read: ", h("q", {}, s.detail)),
        ),
        h(
          "span",
          { class: "num" },
          s.value === null ? s.status : list.length > 1 || s.value !== reward ? fixed(s.value) : "",
          s.exact === true && h("span", { title: "exact" }, " ✓"),
        ),
      ),
    ),
  );

// faults say why a sample, or a function, has no reward: each reason once.
export const faults = (s) => {
  const said = [s.error, ...(s.scores || []).map((x) => x.error)].filter(Boolean);
  return said
    .filter((e, i) => !said.some((other, k) => k !== i && other.includes(e) && (other !== e || k < i)))
    .map((e) => h("p", { class: "small fault" }, words(e)));
};

export const advantage = (v) =>
  v !== null &&
  v !== undefined &&
  h("span", { class: "adv " + (v > 0 ? "up" : v < 0 ? "down" : "") }, `advantage ${signed(v)}`);

// framed is a card with what a sample or a stage made, and its body below.
function framed(run, uid, s, wide, body, more) {
  const text = s.kind ? s.kind !== "image" : s.answer !== undefined || s.finish_reason,
    src = s.media.includes("image") && media(run, uid, s.place, "image"),
    sound = s.media.includes("audio") && media(run, uid, s.place, "audio"),
    alt = s.stage ? `${s.stage} of sample ${s.sample_index}` : `sample ${s.sample_index}`;
  const picture = src
    ? h("img", { src, alt, loading: "lazy", decoding: "async", width: s.width, height: s.height })
    : s.stored
      ? !sound && `no image${s.media.length > 0 ? " in this file" : ""}`
      : s.status === "awaited"
        ? "not made yet"
        : "";
  const shown = h(
    "a",
    { class: "sample", "data-item": true, ...more },
    wide && !text && picture && h("div", { class: "pic" }, picture),
    h("div", { class: "body" }, body(text && h("div", { class: "answer" }, s.answer || "(empty)"))),
  );
  return wide && sound ? h("div", {}, shown, player(sound, alt, true)) : shown;
}

// card is a sample with its result; made says whether also with what stands for it.
export const card = (run, g, s, made = true) =>
  framed(
    run,
    g.uid,
    s,
    made,
    (answer) => [
      h(
        "div",
        { class: "line" },
        h("span", { class: "reward" }, s.reward === null ? badge(s.status) : fixed(s.reward)),
        advantage(s.advantage),
      ),
      made && answer,
      scores(s.scores, s.reward),
      faults(s),
      todo(s.fix),
      h(
        "div",
        { class: "line small muted" },
        h("span", {}, `#${s.sample_index}`),
        h(
          "span",
          {},
          s.reward !== null && s.status !== "scored"
            ? s.status
            : made && answer
              ? plural(s.tokens || 0, "token")
              : s.parent !== undefined
                ? `from #${s.parent} at ${s.parent_step}`
                : "",
        ),
      ),
    ],
    { href: link("runs", run, g.uid, s.sample_index) },
  );

// stageCard is a stage of a sample, with what it made; stands: it stands for its sample, shown: the page is about it.
const stageCard = (run, g, t, stands, shown) =>
  framed(
    run,
    g.uid,
    t,
    true,
    (answer) => [
      h("div", { class: "line" }, h("b", {}, t.stage), h("span", { class: "small muted" }, t.kind)),
      answer,
      faults(t),
      todo(t.fix),
      t.judgement !== undefined && h("div", { class: "small" }, `score ${fixed(t.judgement)}`),
      t.ends && h("div", { class: "small" }, "ends the sample"),
      t.trained
        ? (t.advantages || []).map((a) => h("div", { class: "small" }, a.track && `${a.track}: `, advantage(a.value)))
        : t.kind !== "interaction" && h("div", { class: "small muted" }, "not trained"),
      stands && h("div", { class: "small stands" }, "stands for the sample"),
      h(
        "div",
        { class: "small muted" },
        t.kind === "interaction" ? t.lane : `${t.lane}, version ${t.policy_version}`,
        t.samples > 1 && `, ${plural(t.samples, "sample")}`,
      ),
    ],
    { href: link("runs", run, g.uid, t.place), "aria-current": t.place === shown && "true" },
  );

// stageRows draws samples with stages: a row of cards for each, in the order in which they ran, and its result. What
// several samples share stands once, and the row parts behind it.
export function stageRows(run, g, shown) {
  const path = (s) =>
    g.stages.filter((t) => t.sample_index <= s.sample_index && s.sample_index < t.sample_index + t.samples);
  const branch = (samples, depth) => {
    const heads = new Map();
    for (const s of samples) {
      const t = path(s)[depth],
        key = t ? t.place : s.place + s.sample_index;
      heads.set(key, [...(heads.get(key) || []), s]);
    }
    return [...heads.values()].map((of) => {
      const row = [];
      let t = null,
        at = depth;
      const shared = (t) => of.every((s) => path(s)[at] === t);
      while ((t = path(of[0])[at]) && shared(t)) {
        row.push(stageCard(run, g, t, of.some((s) => s.place === t.place), shown));
        at++;
      }
      if (of.length === 1) row.push(card(run, g, of[0], false));
      return h(
        "div",
        { class: "branch" },
        h("div", { class: "chain" }, row),
        of.length > 1 && h("div", { class: "twigs" }, branch(of, at)),
      );
    });
  };
  return h("div", { class: "rows" }, branch(g.samples, 0));
}

// givenFiles shows the files that the network was given beside the prompt of a sample.
export const givenFiles = (run, uid, s) =>
  ((s && s.conditions) || []).map((name, i) => {
    const src = condition(run, uid, s.place, i);
    return h(
      "figure",
      { class: "sample given" },
      h("div", { class: "pic" }, src ? h("img", { src, alt: `condition ${name}`, loading: "lazy" }) : "not in this file"),
      h("figcaption", { class: "body small muted" }, `condition ${name}`),
    );
  });

export const conditions = (run, uid, s) => s.conditions && h("div", { class: "samples" }, givenFiles(run, uid, s));
